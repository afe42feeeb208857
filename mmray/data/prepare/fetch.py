"""Images named by URL, fetched in the background from allowed hosts with public addresses only.

URLs are untrusted. Only https to the hosts of `prepare.allow_urls` is fetched, and each redirect is
checked again. The resolver drops private addresses before a connection is made, so DNS rebinding
has no effect. Size, time, retries and connections are bounded. Proxies and credentials of the
environment are not used.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import threading
from concurrent.futures import Future
from typing import Self
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import ResolveResult
from yarl import URL

from mmray.data.rows import BadRow
from mmray.storage.address import is_public_ip, redact_url, rejection_reason

MAX_REDIRECTS = 5
MAX_ATTEMPTS = 3
MAX_BYTES = 32 * 1024 * 1024  # size of an image
TIMEOUT_S = 30.0  # for an image, with all attempts and redirects
CONNECT_TIMEOUT_S = 10.0
PAUSE_S = 0.5
CONNECTIONS = 8  # connections of one task
_REDIRECT_STATUS = (301, 302, 303, 307, 308)
_MISSING_STATUS = (401, 403, 404, 410)
_RETRY_STATUS = (408, 425, 429)
_ENCODED = re.compile(r"[!-~]+")  # encoding such a URL again would break its signature


class Fetcher:
    """Fetches images in a background thread while its `with` block is open.

    `fetch(url)` returns a concurrent.futures.Future of the encoded bytes, which raises BadRow if
    they cannot be fetched. The end of the block cancels requests that are not complete.

    Args:
        hosts: Hosts that may be contacted, in lower case and without wildcards, such as
            `images.example.org`, or `images.example.org:8443` for a port other than 443.
    """

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self.hosts = hosts
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="fetch", daemon=True
        )

    async def _serve(self) -> None:
        """Keep a session open until `__exit__`; then `asyncio.run` cancels the pending requests."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=_PublicResolver()),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "mmray", "Accept": "image/*", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            trust_env=False,
        ) as self._session:
            self._stop = asyncio.Event()
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop = self._started.result(CONNECT_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def fetch(self, url: str) -> Future[bytes]:
        """Start to fetch an image by URL.

        Args:
            url: An https URL at one of the hosts.

        Returns:
            Future of the bytes. It raises BadRow with stage `read` and reason `url` (not allowed),
            `redirect` (too many, or to a URL that is not allowed), `private-address`, `refused`,
            `missing-image`, `too-large` (over 32 MiB) or `unreadable` (after 3 attempts, or 30 s).
        """
        return asyncio.run_coroutine_threadsafe(self._fetch(url), self._loop)

    async def _fetch(self, url: str) -> bytes:
        name = redact_url(url)
        reason = ""
        async with self._slots:  # waiting for a slot does not count against the time limit
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    for attempt in range(MAX_ATTEMPTS):
                        try:
                            return await self._follow_redirects(url, name)
                        except _TransientError as error:
                            reason = str(error)
                        if attempt + 1 < MAX_ATTEMPTS:
                            await asyncio.sleep(random.uniform(0, PAUSE_S * 2**attempt))
            except TimeoutError:
                reason = f"not complete within {TIMEOUT_S:g} s"
        raise BadRow("read", "unreadable", f"{name}: {reason}")

    async def _follow_redirects(self, url: str, name: str) -> bytes:
        """Return the bytes at a URL, after redirects. Raises BadRow, or _TransientError."""
        location = ""
        try:
            for _ in range(MAX_REDIRECTS + 1):
                hop = self._validate(url, location, name)
                async with self._session.get(hop, allow_redirects=False) as response:
                    if (
                        response.status not in _REDIRECT_STATUS
                        or "Location" not in response.headers
                    ):
                        return await self._body(response, name)
                    url = str(hop)
                    location = response.headers["Location"]
        except _PrivateAddressError as error:
            raise BadRow("read", "private-address", f"{name}: {error}") from None
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            detail = f"{name}: untrusted connection ({type(error).__name__})"
            raise BadRow("read", "refused", detail) from None
        except BadRow:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: a malformed response
            # The text of an error may contain the URL, and so a secret.
            cause = (isinstance(error, OSError) and error.strerror) or type(error).__name__
            raise _TransientError(f"connection failed ({cause})") from None
        raise BadRow("read", "redirect", f"{name}: more than {MAX_REDIRECTS} redirects")

    def _validate(self, base: str, location: str, name: str) -> URL:
        """Return the URL of a hop, checked as written and as the client parses it."""
        url = location
        try:
            url = urljoin(base, location)
            parsed = URL(url, encoded=_ENCODED.fullmatch(url) is not None)
            as_parsed = f"{parsed.scheme}://{parsed.raw_authority}"
            why = rejection_reason(url, self.hosts) or rejection_reason(as_parsed, self.hosts)
        except ValueError:
            why = "it is not a valid URL"
        if why:
            detail = f"{name} leads to {redact_url(url)}" if location else name
            raise BadRow("read", "redirect" if location else "url", f"{detail}: {why}")
        return parsed

    async def _body(self, response: aiohttp.ClientResponse, name: str) -> bytes:
        status = response.status
        if status in _RETRY_STATUS or status >= 500:
            raise _TransientError(f"the host returned HTTP status {status}")
        if status != 200:
            reason = "missing-image" if status in _MISSING_STATUS else "refused"
            raise BadRow("read", reason, f"{name}: HTTP status {status}")
        data = bytearray()
        if (response.content_length or 0) <= MAX_BYTES:
            async for piece in response.content.iter_chunked(64 * 1024):
                data += piece
                if len(data) > MAX_BYTES:
                    break
            else:
                return bytes(data)
        raise BadRow("read", "too-large", f"{name} has over {MAX_BYTES} bytes")


class _TransientError(Exception):
    """A failure that a retry may fix."""


class _PrivateAddressError(Exception):
    """Not an OSError, which aiohttp would report as an unknown host."""


class _PublicResolver(aiohttp.ThreadedResolver):
    """Resolves names to their public addresses only."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await super().resolve(host, port, family)
        public = [each for each in addresses if is_public_ip(each["host"])]
        if addresses and not public:
            raise _PrivateAddressError(
                f"{host} is at {addresses[0]['host']}, which is not a public address"
            )
        return public
