# SPDX-License-Identifier: Apache-2.0
"""Calls providers' APIs: within a time limit and a rate, patiently where they are busy, with a clear reason if not."""

from __future__ import annotations

import asyncio
import json as jsons
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from webhooks.asking import ApiError, ApiReply
from webhooks.payload import load
from webhooks.provider import BadPayload, Clock

CALL_SECONDS: Final = 30.0
"""How long one call may take, its answer's body included."""

TRIES: Final = 4
"""How often a call is made while the API says that it is busy, or fails."""

FIRST_PAUSE: Final = 1.0
"""Seconds to wait before the second try; twice as long before each further one."""

LONGEST_PAUSE: Final = 60.0
"""The longest such wait; a longer Retry-After ends the call."""

MAX_BYTES: Final = 20_000_000
"""Greatest body of an answer."""

_REASONS: Final[Mapping[int, str]] = {401: "unauthorized", 403: "forbidden", 404: "not_found", 429: "rate_limited"}
_HINTS: Final[Mapping[str, str]] = {
    "unauthorized": "the API refused the credential: check the feed's api_key, and its region in api_url",
    "forbidden": "the API key may not do this: give it the right, or use another one",
    "not_found": "the API knows no such place: check the feed's api_url and api_scope",
    "rate_limited": "the API asked to slow down, several times in a row: try again later",
}
_BUSY: Final = (429, 503)


class HttpApi:
    """One feed's client. `pause` is the least time between the beginnings of two calls, in seconds."""

    def __init__(
        self, session: ClientSession, clock: Clock, *, pause: float = 0.1, first_pause: float = FIRST_PAUSE
    ) -> None:
        self._session, self._clock = session, clock
        self._pause, self._first_pause = pause, first_pause
        self._turn = asyncio.Lock()
        self._next = 0.0

    async def call(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        json: object = None,
        form: Mapping[str, str] | None = None,
        expect: tuple[int, ...] = (),
    ) -> ApiReply:
        """Return the answer: of status 2xx, or one of `expect`. See `asking.Api`."""
        body = jsons.dumps(json).encode() if json is not None else None
        sent = {**({"Content-Type": "application/json"} if body else {}), **(headers or {})}
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                await self._wait_turn()
                async with self._session.request(
                    method, url, headers=sent, params=params, data=form or body, allow_redirects=False
                ) as response:
                    if not _is_busy(response, method) or last:
                        return await _reply(response, expect)
                    wait = self._asked_pause(response, attempt)
            except (TimeoutError, ClientError, ValueError) as error:
                failure = _failure(error)
                if last or method != "GET":
                    raise failure from None
                wait = self._first_pause * 2**attempt
            await asyncio.sleep(wait)
        raise AssertionError("the last try answers or raises")

    async def _wait_turn(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._turn:
            if (wait := self._next - loop.time()) > 0:
                await asyncio.sleep(wait)
            self._next = loop.time() + self._pause

    def _asked_pause(self, response: ClientResponse, attempt: int) -> float:
        """Return how long to wait before the next try. Raises ApiError where that is too long."""
        wait: float = self._first_pause * 2**attempt
        asked = response.headers.get("Retry-After", "")
        if asked.isdecimal():
            wait = float(asked)
        elif asked:
            with suppress(ValueError, TypeError):
                wait = (parsedate_to_datetime(asked) - self._clock()).total_seconds()
        if wait > LONGEST_PAUSE:
            raise ApiError("rate_limited", f"the API asked to come back in {wait:.0f} s: try again later")
        return max(0.0, wait)


def _is_busy(response: ClientResponse, method: str) -> bool:
    return response.status in _BUSY or (response.status >= 500 and method == "GET")  # noqa: PLR2004


async def _reply(response: ClientResponse, expect: tuple[int, ...]) -> ApiReply:
    status = response.status
    body = await _body(response)
    if not 200 <= status < 300 and status not in expect:  # noqa: PLR2004
        reason = _REASONS.get(status) or ("server_error" if status >= 500 else "refused")  # noqa: PLR2004
        raise ApiError(reason, _HINTS.get(reason, f"the API answered {status}"))
    try:
        return ApiReply(status, load(body) if body.strip() else None)
    except BadPayload:
        raise ApiError("garbage", f"the API answered {status} and no JSON: is api_url right?") from None


async def _body(response: ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_chunked(65_536):
        body += piece
        if len(body) > MAX_BYTES:
            raise ApiError("garbage", f"the API's answer is longer than {MAX_BYTES} bytes")
    return bytes(body)


def _failure(error: Exception) -> ApiError:
    if isinstance(error, TimeoutError):
        return ApiError("timeout", f"the API did not answer within {CALL_SECONDS:g} s")
    # The error's text may hold the URL, and that our key or a recipient.
    return ApiError("unreachable", f"no connection to the API ({type(error).__name__}): check api_url and the network")


@asynccontextmanager
async def open_session(seconds: float = CALL_SECONDS) -> AsyncIterator[ClientSession]:
    """Yield a session with our limits."""
    async with ClientSession(
        connector=TCPConnector(limit=8),
        timeout=ClientTimeout(total=seconds),
        headers={"User-Agent": "esp-reconciler", "Accept": "application/json"},
        trust_env=True,
    ) as session:
        yield session


@asynccontextmanager
async def open_api() -> AsyncIterator[HttpApi]:
    """Yield a client for one feed's API, timed by this host's clock."""
    async with open_session() as session:
        yield HttpApi(session, lambda: datetime.now(UTC))
