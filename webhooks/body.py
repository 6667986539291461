# SPDX-License-Identifier: Apache-2.0
"""Reads a request's body within limits: bounded in size and time, inflated in bounded pieces and off the event loop.

The server must hand out raw bytes (`AppRunner(app, auto_decompress=False)`). The content type never decides anything.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from typing import Final

from aiohttp import StreamReader, web

MAX_RATIO: Final = 100
"""How many times its own size a compressed body may inflate to, once it exceeds SMALL."""

SMALL: Final = 1_000_000
"""Bytes that any compressed body may inflate to (a batch of nearly equal events does compress well)."""

ON_LOOP: Final = 65_536
"""Bytes up to which a body is inflated on the event loop; above, a thread does it."""

AT_ONCE: Final = 2
"""How many bodies are inflated in threads at a time."""

BODIES_AT_ONCE: Final = 4
"""How many bodies of the greatest size may be on their way at a time: nobody has proved yet who sends them."""

BODIES_OF_ONE_FEED: Final = 3
"""How many of them may be one feed's, so that a flood at one address leaves room at the others."""

MAX_MEMBERS: Final = 100
"""Gzip members that one body may be made of; each costs a copy of what follows it."""

_PIECE: Final = 65_536
_GZIP, _ZLIB, _RAW_DEFLATE = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS
_PLAIN: Final = ("", "identity")
ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
"""Content encodings that are inflated."""


class BodyRefusedError(Exception):
    """The body can't be taken. `status` is the HTTP status, `reason` a short stable word, the text one line."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class BodiesBusyError(Exception):
    """Too many large bodies are on their way: this one has to be sent again."""


class BodyReader:
    """Reads bodies of at most `max_body` bytes, before and after inflation, that arrive within `seconds`.

    What has arrived of all unfinished bodies together is bounded, too, and of one feed's.
    """

    def __init__(self, max_body: int, seconds: float = 30.0) -> None:
        self._max = max_body
        self._seconds = seconds
        self._threads = asyncio.Semaphore(AT_ONCE)
        self._arriving = 0
        self._arriving_of: Counter[str] = Counter()

    async def read(self, request: web.BaseRequest, feed: str) -> bytes:
        """Return the whole body, inflated. Raises BodyRefusedError or BodiesBusyError."""
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in _PLAIN and encoding not in ENCODINGS:
            raise BodyRefusedError(415, "encoding", "content encodings that can be read: gzip, deflate")
        if (request.content_length or 0) > self._max:
            raise self._too_large()
        data = await self._arrived(request.content, feed)
        return await self._inflated(data, encoding) if data and encoding not in _PLAIN else data

    async def _arrived(self, content: StreamReader, feed: str) -> bytes:
        if content.is_eof():  # small bodies have arrived with their headers
            data = content.read_nowait()
        else:
            data = await self._collected(content, feed)
        if len(data) > self._max:
            raise self._too_large()
        return data

    async def _collected(self, content: StreamReader, feed: str) -> bytes:
        pieces = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                while piece := await content.readany():
                    self._arriving += len(piece)
                    self._arriving_of[feed] += len(piece)
                    pieces += piece
                    self._check_size(len(pieces), feed)
        except TimeoutError:
            raise BodyRefusedError(408, "slow", f"the body did not arrive within {self._seconds:g} s") from None
        except web.RequestPayloadError:
            raise BodyRefusedError(400, "body", "the body's transfer encoding is broken") from None
        except ConnectionError:  # its sender hung up, and will hear no answer
            raise BodyRefusedError(400, "cut_off", "the connection ended before the body did") from None
        finally:
            self._arriving -= len(pieces)
            self._arriving_of[feed] -= len(pieces)
        return bytes(pieces)

    def _check_size(self, size: int, feed: str) -> None:
        if size > self._max:
            raise self._too_large()
        too_many = self._arriving > BODIES_AT_ONCE * self._max
        if too_many or self._arriving_of[feed] > BODIES_OF_ONE_FEED * self._max:
            raise BodiesBusyError

    async def _inflated(self, data: bytes, encoding: str) -> bytes:
        limit = min(self._max, max(SMALL, MAX_RATIO * len(data)))
        if len(data) <= ON_LOOP and (small := inflate(data, encoding, min(limit, ON_LOOP))) is not None:
            return small
        async with self._threads:
            inflated = await asyncio.to_thread(inflate, data, encoding, limit)
        if inflated is None:
            raise self._too_large()
        return inflated

    def _too_large(self) -> BodyRefusedError:
        text = f"at most {self._max} bytes, and {MAX_RATIO} times the compressed size"
        return BodyRefusedError(413, "too_large", text)


def inflate(data: bytes, encoding: str, limit: int) -> bytes | None:
    """Return inflated bytes, or None where they would be more than `limit`. Raises BodyRefusedError if damaged."""
    inflated = bytearray()
    view, end = memoryview(data), 0
    for _ in range(MAX_MEMBERS):
        try:
            end = _one_member(view, end, encoding, inflated, limit)
        except zlib.error:
            raise BodyRefusedError(400, "body", "the compressed body is damaged") from None
        if len(inflated) > limit:
            return None
        if end == len(view):
            return bytes(inflated)
    raise BodyRefusedError(400, "body", f"more than {MAX_MEMBERS} compressed parts")


def _one_member(view: memoryview, start: int, encoding: str, inflated: bytearray, limit: int) -> int:
    """Append what the member at `start` holds, until it ends or the limit is exceeded; return where it ends."""
    member = zlib.decompressobj(_window(view[start:], encoding))
    while not member.eof and len(inflated) <= limit:
        given: bytes | memoryview = member.unconsumed_tail
        if not given:  # never the whole rest: zlib copies what it leaves over
            given = view[start : start + _PIECE]
            start += len(given)
        piece = member.decompress(given, _PIECE)
        inflated += piece
        if not piece and not given:
            raise BodyRefusedError(400, "body", "the compressed body is cut off")
    return start - len(member.unused_data)


def _window(data: memoryview, encoding: str) -> int:
    if encoding != "deflate":
        return _GZIP
    # By RFC 9110 deflate means the zlib format, but raw deflate is sent under its name, too.
    is_zlib = len(data) > 1 and data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0
    return _ZLIB if is_zlib else _RAW_DEFLATE
