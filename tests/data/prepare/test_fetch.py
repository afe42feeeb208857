"""Images by URL: allowed hosts and public addresses only, limited, concurrent, in order."""

import json
from functools import partial
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest

from mmray.config import Prepare
from mmray.data.formats.source import RawRow
from mmray.data.prepare import fetch as fetch_module
from mmray.data.prepare.fetch import CONNECTIONS, Fetcher
from mmray.data.prepare.pack import PREFETCH_ROWS, prefetch_rows
from mmray.data.prepare.pipeline import prepare
from mmray.data.rows import BadRow, parse_row
from mmray.data.store.prepared_set import PreparedSet
from mmray.errors import DataError, UsageError
from mmray.storage.address import is_public_ip, parse_host, redact_url, rejection_reason
from tests.data.prepare.https_server import Server, dns_table
from tests.data.prepare.test_pipeline import color_image, quarantine

TCPConnector = aiohttp.TCPConnector
LOOPBACK = {"allowed_test": ["127.0.0.1"], "other_test": ["127.0.0.1"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("https"), color_image) as server:
        yield server


@pytest.fixture
def fetching(server, monkeypatch):
    """Factory of fetchers with a DNS table, which treat loopback as public by default."""

    def make(hosts=None, seconds=30.0, names=LOOPBACK, public=lambda _: True, tls=server.trusted):
        monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", dns_table(**names))
        monkeypatch.setattr(aiohttp, "TCPConnector", partial(TCPConnector, ssl=tls))
        monkeypatch.setattr(fetch_module, "is_public_ip", public)
        for name, value in (("MAX_BYTES", 300_000), ("TIMEOUT_S", seconds), ("PAUSE_S", 0.01)):
            monkeypatch.setattr(fetch_module, name, value)
        return Fetcher(hosts or (f"allowed.test:{server.port}",))

    return make


def fault(fetcher, address):
    """(stage reason, detail) of a URL that cannot be fetched."""
    with pytest.raises(BadRow) as caught:
        fetcher.fetch(address).result(timeout=60)
    return f"{caught.value.stage} {caught.value.reason}", caught.value.detail


PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
NOT_PUBLIC = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1",
    "fe80::1%eth0", "fd00:ec2::254", "ff02::1", "ff0e::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::8.8.8.8",
    "2002:7f00:1::", "2002:808:808::", "2001:0:1:2::3", "2001:db8::1", "localhost", "",
    "2130706433", "127.1",
]  # fmt: skip


def test_only_public_addresses_are_public():
    assert [address for address in PUBLIC + NOT_PUBLIC if is_public_ip(address)] == PUBLIC


def test_host_names_are_normalized():
    for name, host in (
        ("Images.Example.ORG", "images.example.org"),
        ("a.b:443", "a.b"),
        ("a.b:8443", "a.b:8443"),
    ):
        assert parse_host(name) == host
    assert Prepare(allow_urls=("z.org", "A.b:443", "a.b")).allow_urls == ("a.b", "z.org")


@pytest.mark.parametrize(
    "name",
    [
        "https://a.b", "a.b/c", "me@a.b", "127.0.0.1", "0x7f.1", "2130706433", "[::1]", "a.b:0",
        "a.b:99999", "*.a.b", "a..b", ".a", "a.", "-a.b", "bücher.de", "a b", "", "a.b:",
        "a" * 64, ".".join(["abcdefg"] * 40),
    ],
)  # fmt: skip
def test_invalid_host_names_are_refused(name):
    with pytest.raises(UsageError, match=r"prepare\.allow_urls: must be a host name, such as"):
        Prepare(allow_urls=(name,))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("https://a.b/x.jpg", ""), ("HTTPS://A.b:443/x", ""), ("https://a.b", ""),
        ("https://a.b?x", ""),
        ("https://c.d:8443/x", ""),
        ("http://a.b/x", "only https"), ("https://me:pass@a.b/x", "login"),
        ("https://a.b@evil.org/x", "login"),
        ("https://a.b\\@evil.org/x", "login"), ("https://127.0.0.1/x", "numeric"),
        ("https://[::1]/x", "numeric"),
        ("https://2130706433/", "numeric"), ("https://0x7f000001/", "numeric"),
        ("https:///x", "no valid host"),
        ("https://a.b:8443/x", "--allow-urls a.b:8443"), ("https://c.d/x", "--allow-urls c.d"),
        ("https://a.b./x", "no valid host"),
        ("https://evil.org/https://a.b/", "prepare.allow_urls"),
        ("https://a.b.evil.org/", "--allow-urls a.b.evil.org"), ("https://a.b\tx/", "numeric"),
        ("ftp://a.b/", "only https"), ("//a.b/", "only https"),
    ],
)  # fmt: skip
def test_rejection_reason_of_urls(address, why):
    found = rejection_reason(address, ("a.b", "c.d:8443"))
    assert why in found if why else not found


def test_messages_contain_no_secret_of_a_url():
    for address in (
        "https://a.b/x.png?sig=hush",
        "https://a.b/x.png#hush",
        "https://me:hush@a.b/x.png?hush",
    ):
        assert redact_url(address) == "https://a.b/x.png"
        for hosts in ((), ("other.org",), ("a.b",)):
            row = {"image": address, "text": "x"}
            try:
                found = parse_row(row, "o", hosts).images[0]
                assert (found.name, found.url, found.file) == (redact_url(address), address, None)
            except BadRow as bad:
                assert "hush" not in bad.detail
                assert bad.reason == ("url" if hosts else "path")
                assert "--allow-urls" in bad.detail or "login" in bad.detail


def test_redirects_stay_on_allowed_hosts(server, fetching):
    def to(address):
        return server.address(f"to?at={quote(address, safe='')}")

    with fetching((f"allowed.test:{server.port}", f"other.test:{server.port}")) as fetcher:
        assert fetcher.fetch(server.address("1?sig=a%2Fb")).result() == color_image(1)
        assert server.requests["/1?sig=a%2Fb"] == 1, "the query goes out as it was signed"
        assert fetcher.fetch(to(server.address("2", "other.test"))).result() == color_image(2)
        assert fetcher.fetch(to("/3")).result() == color_image(3)
    with fetching() as fetcher:
        for address, message in (
            (server.address("4?hush", "other.test"), f"--allow-urls other.test:{server.port})"),
            (server.address("4").replace("https", "http"), "only https"),
            (f"https://127.0.0.1:{server.port}/4", "numeric"),
            (server.address("4").replace("//", "//me:hush@"), "login"),
            ("https://[bad/4", "not a valid URL"),
            (f"https://allowed.test:{server.port}\\@other.test/4", "not a valid URL"),
        ):
            kind, detail = fault(fetcher, to(address))
            assert (kind, message in detail, "hush" in detail) == ("read redirect", True, False), (
                detail
            )
        # a lone surrogate can be printed
        fault(fetcher, server.address("to?at=https://allowed.test/%FF"))[1].encode()
        assert fault(fetcher, f"https://127.0.0.1:{server.port}/4")[0] == "read url"
        assert not any(path.startswith("/4") for path in server.requests)
        assert fault(fetcher, to(to(to(to(to(to("/5")))))))[1].endswith("more than 5 redirects")


@pytest.mark.parametrize("address", ["10.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1"])
def test_name_that_resolves_to_private_address_is_refused(server, fetching, address):
    with fetching(
        (f"inner.test:{server.port}",), names={"inner_test": [address]}, public=is_public_ip
    ) as fetcher:
        kind, detail = fault(fetcher, server.address("6?hush", "inner.test"))
    assert kind == "read private-address"
    assert "inner.test is at" in detail and "hush" not in detail
    assert not server.requests["/6?hush"]


def test_localhost_is_refused(server):
    with Fetcher((f"localhost:{server.port}",)) as fetcher:
        futures = [fetcher.fetch(server.address("7", "localhost")) for _ in range(9)]
        assert {future.exception().reason for future in futures} == {"private-address"}
    assert not server.requests["/7"]


def test_public_address_is_chosen_among_several(server, fetching):
    names = {"allowed_test": ["10.255.255.1", "127.0.0.1"]}
    with fetching(names=names, public=lambda address: address == "127.0.0.1") as fetcher:
        assert fetcher.fetch(server.address("8")).result() == color_image(8)


def test_size_and_time_are_limited(server, fetching):
    with fetching() as fetcher:
        for path in ("large", "endless"):
            assert fault(fetcher, server.address(path))[0] == "read too-large"
    with fetching(seconds=0.6) as fetcher:
        kind, detail = fault(fetcher, server.address("drip"))  # would take hours
        assert (kind, "not complete within 0.6 s" in detail) == ("read unreadable", True)


def test_transient_failures_are_retried(server, fetching):
    with fetching((f"allowed.test:{server.port}", "nowhere.test")) as fetcher:
        assert fetcher.fetch(server.address("busy/2/9")).result() == color_image(9)
        for path, kind, tries in (
            ("busy/99/9", "unreadable", 3), ("429", "unreadable", 3), ("cut", "unreadable", 3),
            ("404", "missing-image", 1), ("403", "missing-image", 1), ("418", "refused", 1),
        ):  # fmt: skip
            assert fault(fetcher, server.address(path))[0] == f"read {kind}"
            assert server.requests[f"/{path}"] == tries
        assert fault(fetcher, "https://nowhere.test/x")[0] == "read unreadable"


def test_untrusted_certificate_is_refused(server, fetching):
    with fetching(tls=True) as fetcher:
        kind, detail = fault(fetcher, server.address("10"))
    assert (kind, "certificate" in detail.lower()) == ("read refused", True)


def test_downloads_overlap_and_rows_keep_their_order(server, fetching):
    server.max_active = 0
    rows = [{"id": n, "image": server.address(f"slow/{n}"), "text": "x"} for n in range(40)]
    items = [RawRow(n, f"made:{n}", row) for n, row in enumerate(rows)]
    items[5], items[7] = (
        RawRow(5, "made:5", {"text": "x"}),
        RawRow(7, "made:7", BadRow("parse", "json", "x")),
    )
    items[9] = RawRow(9, "made:9", {"image": "a.png", "text": "x"})
    seen, most = [], 0

    def fetch(image):
        if image.url:
            seen.append(image.url)
            return fetcher.fetch(image.url)
        return None

    with fetching() as fetcher:
        for number, (item, raw, images) in enumerate(prefetch_rows(items, fetcher.hosts, fetch)):
            most = max(most, len(seen) - number)
            assert item.line == number
            if number in (5, 7):
                assert isinstance(raw, BadRow)
            elif number != 9:
                assert images[0].result() == color_image(number)
    assert number == 39
    assert 4 < server.max_active <= CONNECTIONS
    assert most <= PREFETCH_ROWS + 1


def test_prepare_from_urls(server, fetching, tmp_path, monkeypatch, in_process):
    port, messages = server.port, []
    urls = [server.address(f"{n}?sig=hush") for n in (20, 21, 22)]
    urls += [server.address("404?sig=hush"), server.address("23?sig=hush", "other.test")]
    urls += [
        server.address("busy/3/5?hush"),
        f"https://allowed.test:{port}/to?at=https://other.test/a?hush",
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"url": url, "caption": "x"}) + "\n" for url in urls))
    monkeypatch.setattr(fetch_module, "Fetcher", fetching)
    settings = Prepare(
        max_bad_fraction=1.0, rows_per_shard=64, vocab_size=0,
        columns=("image=url", "text=caption"),
        allow_urls=(f"ALLOWED.test:{port}",),
    )  # fmt: skip
    out = tmp_path / "out"
    manifest = prepare(
        str(source), str(out), settings, log=lambda text, label: messages.append((label, text))
    )
    assert (manifest.num_rows, manifest.num_read) == (3, len(urls))
    rows = PreparedSet.open(str(out)).read(np.arange(3))
    assert [row.image for row in rows] == [color_image(n) for n in (20, 21, 22)]
    faults = quarantine(out)
    assert [(each["source"], each["stage"], each["reason"]) for each in faults] == [
        ("rows.jsonl:4", "read", "missing-image"),
        ("rows.jsonl:5", "columns", "url"),
        ("rows.jsonl:6", "read", "unreadable"),
        ("rows.jsonl:7", "read", "redirect"),
    ]
    assert ("download", f"images by URL, only from allowed.test:{port}") in messages
    for file in out.rglob("*"):
        assert not file.is_file() or b"hush" not in file.read_bytes(), file

    manifest = prepare(str(source), str(out), settings)  # the refused requests are retried
    assert (manifest.num_rows, in_process) == (4, [0, 0])
    prepare(str(source), str(out), settings)
    assert in_process == [0, 0], "what is fetched stays"
    with pytest.raises(DataError, match=r"7 path, .* \(--allow-urls names the hosts"):
        prepare(str(source), str(out), settings.model_copy(update={"allow_urls": ()}))
    assert len(in_process) == 3, "other hosts: packed again"
