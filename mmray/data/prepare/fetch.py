"""Images at addresses: fetched in the background, from hosts that are allowed and lie on the open internet only.

A row is data of somebody else's, so what it may reach is fenced: https and the hosts that the setting names, at each
redirect anew; a connection goes to an address that was found public when its name was looked up, so that a name cannot
lead elsewhere a moment later; size and time are capped. Proxies and logins of the environment are left alone.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)
from yarl import URL

from mmray.data.formats.rows import BadRow, SourceRow, parse_row
from mmray.data.formats.source import SourceItem
from mmray.storage.address import is_public_ip, redact_url, rejection_reason

# Rows of a chunk in their order, with the images that lie at addresses: asked for before their row's turn comes.
WINDOW = 32  # images on their way, and rows that wait for them
Fetch = Callable[[str], Future[bytes]]
_Pending = tuple[SourceItem, SourceRow | BadRow, Future[bytes] | None]


def prefetch_rows(
    items: Iterable[SourceItem], hosts: tuple[str, ...], fetch: Fetch | None
) -> Iterator[tuple[SourceItem, SourceRow | BadRow]]:
    """Each item with its row, or what is wrong with it; without `fetch` an address stays one.

    Memory holds WINDOW fetched images: a row has one at most.
    """
    waiting: deque[_Pending] = deque()
    for item in items:
        raw = _parsed(item, hosts)
        url = raw.image.url if fetch and isinstance(raw, SourceRow) else None
        waiting.append((item, raw, fetch(url) if fetch and url else None))
        while waiting and (len(waiting) > WINDOW or waiting[0][2] is None):
            yield _fetched(*waiting.popleft())
    while waiting:
        yield _fetched(*waiting.popleft())


def _parsed(item: SourceItem, hosts: tuple[str, ...]) -> SourceRow | BadRow:
    if isinstance(item.values, BadRow):
        return item.values
    try:
        return parse_row(item.values, item.origin, hosts)
    except BadRow as bad:
        return bad


def _fetched(
    item: SourceItem, raw: SourceRow | BadRow, image: Future[bytes] | None
) -> tuple[SourceItem, SourceRow | BadRow]:
    """The row with the bytes of its images in it, once they are all there."""
    if isinstance(raw, BadRow) or image is None:
        return item, raw
    try:
        found = replace(raw.image, data=image.result())
    except BadRow as bad:
        return item, BadRow(bad.stage, bad.reason, bad.detail, raw.key)
    return item, replace(raw, image=found)


REDIRECTS, TRIES = 5, 3
_MOVED = (301, 302, 303, 307, 308)
_GONE = (401, 403, 404, 410)
_BUSY = (408, 425, 429)
_AS_IT_IS = re.compile(r"[!-~]+")  # already encoded: to encode it again would break its signature
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True)
class FetchLimits:
    """What one image may cost, and how many are fetched from a host at once (by each task)."""

    num_bytes: int = 32 * 1024 * 1024
    seconds: float = 30.0  # all its tries and redirects
    connect_s: float = 10.0
    connections: int = 8
    pause_s: float = 0.5


class Fetcher:
    """Fetches images in a thread of its own while it is open; `with Fetcher(hosts) as fetcher`.

    The certificates, the look-up of names and what counts as public are arguments for tests.
    """

    def __init__(
        self,
        hosts: tuple[str, ...],
        limits: FetchLimits | None = None,
        tls: ssl.SSLContext | bool = True,
        resolver: Callable[[], AbstractResolver] = aiohttp.ThreadedResolver,
        public: Callable[[str], bool] = is_public_ip,
    ) -> None:
        self.hosts, self.limits = hosts, limits or FetchLimits()
        self._tls, self._resolver, self._public = tls, resolver, public
        self._slots: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(self.limits.connections))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._session = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fetch(self, address: str) -> Future[bytes]:
        """The bytes at an address, some time; its exception is a BadRow (stage `read`)."""
        return asyncio.run_coroutine_threadsafe(self._fetch(address), self._loop)

    async def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=_PublicOnly(self._resolver(), self._public),
            ssl=self._tls,
            limit=WINDOW,
            limit_per_host=self.limits.connections,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "mmray", "Accept": "image/*", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_s),
            auto_decompress=False,
            trust_env=False,
        )

    async def _close(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._session.close()
        await asyncio.get_running_loop().shutdown_default_executor()

    async def _fetch(self, address: str) -> bytes:
        url = self._checked(address, "", redact_url(address))
        async with self._slots[url.raw_authority]:  # to wait for a turn costs an image none of its seconds
            try:
                async with asyncio.timeout(self.limits.seconds):
                    return await self._tries()(self._follow, address)
            except TimeoutError:
                told = f"was not whole within {self.limits.seconds:g} s"
            except _TransientError as error:
                told = str(error)
        raise BadRow("read", "unreadable", f"{redact_url(address)}: {told}")

    def _tries(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(_TransientError),
            stop=stop_after_attempt(TRIES) | stop_before_delay(self.limits.seconds),
            wait=_Pause(self.limits.pause_s),
            reraise=True,
        )

    async def _follow(self, address: str) -> bytes:
        """The bytes at an address, or where it leads to. Raises BadRow, or _Passing."""
        name, location, at = redact_url(address), "", address
        try:
            for _ in range(REDIRECTS + 1):
                url = self._checked(at, location, name)
                async with self._session.get(url, allow_redirects=False) as answer:
                    if answer.status not in _MOVED or "Location" not in answer.headers:
                        return await self._body(answer, name)
                    at, location = str(url), answer.headers["Location"]
        except _PrivateAddressError as error:
            raise BadRow("read", "private-address", f"{name}: {error}") from None
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            raise BadRow("read", "refused", f"{name}: no connection that can be trusted ({_told(error)})") from None
        except BadRow:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: an answer that cannot be understood
            raise _TransientError(f"the connection failed ({_told(error)})") from None
        raise BadRow("read", "redirect", f"{name}: more than {REDIRECTS} redirects")

    def _checked(self, base: str, location: str, name: str) -> URL:
        """The address of a hop, as the client understands it: the rule has to hold of that reading too."""
        at = location
        try:
            at = urljoin(base, location)
            url = URL(at, encoded=_AS_IT_IS.fullmatch(at) is not None)
            why = rejection_reason(at, self.hosts) or rejection_reason(
                f"{url.scheme}://{url.raw_authority}", self.hosts
            )
        except ValueError:
            why = "it cannot be read as an address"
        if why:
            raise BadRow("read", "redirect", f"{name} leads to {redact_url(at)}: {why}")
        return url

    async def _body(self, answer: aiohttp.ClientResponse, name: str) -> bytes:
        status, most = answer.status, self.limits.num_bytes
        if status in _GONE:
            raise BadRow("read", "missing-image", f"{name}: the host answers {status}")
        if status in _BUSY or status >= 500:
            raise _TransientError(f"the host answers {status}", answer.headers.get("Retry-After", ""))
        if status != 200:
            raise BadRow("read", "refused", f"{name}: the host answers {status}")
        data = bytearray()
        if (answer.content_length or 0) <= most:
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                data += piece
                if len(data) > most:
                    break
            else:
                return bytes(data)
        raise BadRow("read", "too-large", f"{name} has over {most} bytes")


class _TransientError(Exception):
    """A fault that another try may not have; `after` is the host's Retry-After."""

    def __init__(self, told: str, after: str = "") -> None:
        super().__init__(told)
        self.after_s = int(after) if re.fullmatch("[0-9]{1,6}", after) else 0


class _Pause(wait_random_exponential):
    """Growing pauses, and no shorter than the host asks for."""

    def __init__(self, first_s: float) -> None:
        super().__init__(multiplier=first_s)

    def __call__(self, retry_state: RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        return max(super().__call__(retry_state), error.after_s if isinstance(error, _TransientError) else 0)


class _PrivateAddressError(Exception):
    """No OSError, which the client would take for a name that is not known."""


class _PublicOnly(AbstractResolver):
    """Looks names up, and gives the addresses that are public: no others are ever connected to."""

    def __init__(self, inner: AbstractResolver, public: Callable[[str], bool]) -> None:
        self.inner, self.public = inner, public

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self.inner.resolve(host, port, family)
        public = [each for each in found if self.public(each["host"])]
        if found and not public:
            raise _PrivateAddressError(f"{host} is at {found[0]['host']}, which is not an address of the open internet")
        return public

    async def close(self) -> None:
        await self.inner.close()


def _told(error: Exception) -> str:
    """A fault of the connection, without addresses that may hold secrets."""
    cause: Any = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    reason = getattr(cause, "verify_message", None) or getattr(cause, "strerror", None)
    return f"{type(cause).__name__}: {reason}"[:200] if reason else type(cause).__name__
