"""Addresses of folders and files: what may stand in one, what may be told of one, and which are fetched."""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_CREDENTIALS = re.compile(r"://[^/?]*@|[?&](access_key|secret_key|session_token)=", re.IGNORECASE)
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label begins with a letter: 127.0.0.1, 0x7f.1 and 2130706433 are numbers to whoever connects.
_HOST = re.compile(rf"((?:{_LABEL}\.)*(?=[a-z]){_LABEL})(?::([0-9]{{1,5}}))?")
_HTTPS_PORT = 443
_UNICAST, _NAT64 = IPv6Network("2000::/3"), IPv6Network("64:ff9b::/96")


def has_credentials(address: str) -> bool:
    """Whether a login or a key stands in it, which would end up in config.yaml, manifests and logs."""
    return _CREDENTIALS.search(address) is not None


CREDENTIALS_REFUSED = (
    "an address may not hold credentials, for it is written into config.yaml, manifests and logs: set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
)


def is_url(name: str) -> bool:
    """Whether an image is named by an address of the web and not by a path."""
    return name[:8].lower().startswith(("https://", "http://"))


def redact_url(address: str) -> str:
    """An address as it may be told: without login, query and fragment (a signed address is a secret)."""
    told = re.split(r"[?#]", re.sub(r"//[^/]*@", "//", address), maxsplit=1)[0][:200]
    return told.encode(errors="backslashreplace").decode()  # a redirect may hold what is no UTF-8


def parse_host(name: str) -> str:
    """`host` or `host:port` in the one form that is compared: lower case, without https's own port.

    Raises ValueError for what is not the name of a host: an address by numbers, a scheme, a path, a login.
    """
    found = _HOST.fullmatch(name.lower())
    port = int(found[2] or _HTTPS_PORT) if found else 0
    if not found or len(found[1]) > 253 or not 1 <= port <= 65535:
        raise ValueError(f"must be the name of a host, such as images.example.org or host:8443 (got {name[:100]!r})")
    return found[1] if port == _HTTPS_PORT else f"{found[1]}:{port}"


def rejection_reason(address: str, hosts: Collection[str]) -> str:
    """Why an address is not fetched, and which setting would have it fetched; empty where it is."""
    scheme, _, rest = address.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme.lower() != "https":
        return "only https is fetched"
    if "@" in authority:
        return "a login stands in it"
    try:
        host = parse_host(authority)
    except ValueError:
        return "its host is not a name (numbers are not fetched)"
    return "" if host in hosts else f"its host is not allowed; prepare.allow_urls (--allow-urls {host}) would allow it"


def is_public_ip(address: str) -> bool:
    """Whether a numeric address is one of the open internet, whatever form it is wrapped in.

    Not public: this machine, private and link-local networks (metadata services of clouds), multicast, and the
    tunnels 6to4 and Teredo, which lead to an IPv4 address of the sender's choice.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip)
    if isinstance(ip, IPv6Address) and (ip not in _UNICAST or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast
