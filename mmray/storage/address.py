"""Checks of addresses (paths or URIs of storages) for credentials, and which URLs of images may be
fetched.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

_CREDENTIALS = re.compile(r"://[^/?]*@|[?&](access_key|secret_key|session_token)=", re.IGNORECASE)
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label must start with a letter, because 127.0.0.1, 0x7f.1 and 2130706433 are all numeric
# addresses.
_HOST = re.compile(rf"((?:{_LABEL}\.)*(?=[a-z]){_LABEL})(?::([0-9]{{1,5}}))?")
_HTTPS_PORT = 443
_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def has_credentials(address: str) -> bool:
    """Return whether an address contains a login or a key.

    Examples are `https://user:password@host/x` and `s3://bucket/x?secret_key=...`.
    """
    return _CREDENTIALS.search(address) is not None


CREDENTIALS_REFUSED = (
    "an address must not contain credentials, because it is written to config.yaml, manifests and "
    "logs. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment."
)


def is_url(name: str) -> bool:
    """Return whether a name starts with `http://` or `https://`, in any letter case."""
    return name[:8].lower().startswith(("https://", "http://"))


def redact_url(url: str) -> str:
    """Return a URL for logs: without login, query and fragment, and with at most 200 characters.

    A signed URL has a secret in its query.
    """
    redacted = re.split(r"[?#]", re.sub(r"//[^/]*@", "//", url), maxsplit=1)[0][:200]
    # The URL of a redirect may be invalid UTF-8.
    return redacted.encode(errors="backslashreplace").decode()


def parse_host(name: str) -> str:
    """Normalize `host` or `host:port`: in lower case, without the port 443.

    Args:
        name: For example `Images.example.org:443`, which becomes `images.example.org`.

    Raises:
        ValueError: It is a numeric address, or has a scheme, a path or a login.
    """
    match = _HOST.fullmatch(name.lower())
    port = int(match[2] or _HTTPS_PORT) if match else 0
    if not match or len(match[1]) > 253 or not 1 <= port <= 65535:
        raise ValueError(
            f"must be a host name, such as images.example.org or host:8443 (got {name[:100]!r})"
        )
    return match[1] if port == _HTTPS_PORT else f"{match[1]}:{port}"


def rejection_reason(url: str, hosts: Collection[str]) -> str:
    """Return why a URL must not be fetched, and which setting would allow it.

    Args:
        url: Address of an image.
        hosts: Allowed hosts in lower case, as `host` or `host:port` without the port 443, such as
            `images.example.org`.

    Returns:
        The reason; an empty string if the URL may be fetched.
    """
    scheme, _, rest = url.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme.lower() != "https":
        return "only https is fetched"
    if "@" in authority:
        return "it contains a login"
    try:
        host = parse_host(authority)
    except ValueError:
        return "it has no valid host name (numeric addresses are never fetched)"
    if host in hosts:
        return ""
    return f"its host is not allowed; prepare.allow_urls (--allow-urls {host}) would allow it"


def is_public_ip(text: str) -> bool:
    """Return whether an IP address is on the public internet.

    Of an IPv6 address that contains an IPv4 address, the IPv4 address is checked. Tunnels (6to4,
    Teredo) and texts that are no address are not public.

    Args:
        text: For example `93.184.216.34`.
    """
    try:
        ip = ip_address(text)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip)
    # 6to4 and Teredo tunnels route to an IPv4 address chosen by the sender.
    if isinstance(ip, IPv6Address) and (ip not in _UNICAST or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast
