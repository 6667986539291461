# SPDX-License-Identifier: Apache-2.0
"""Tells what becomes of verified deliveries to whoever makes traces of it. Only in use where somebody does.

What is refused is not told: strangers could cause it as often as they like.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Final, NamedTuple

from aiohttp import web

from webhooks.event import Event
from webhooks.inbox import Inbox, InboxBusy, InboxUnavailable, Stored
from webhooks.provider import Feed
from webhooks.receiver import Take


class Heard(NamedTuple):
    """Events that were given to the inbox, and what became of them. Times are nanoseconds since the epoch."""

    feed: str
    source: str
    events: Sequence[tuple[str | None, Event]]
    """Each with its wire key; None: it bears no key of ours."""
    began: int
    ended: int
    stored: Stored | None
    """None: it is not known to be stored, see `error`."""
    error: str | None


class Answered(NamedTuple):
    """A request that delivered them, and its answer."""

    feed: Feed
    method: str
    scheme: str
    status: int
    began: int
    ended: int


Tell = Callable[[Answered | None, Heard], None]
"""Is told of each delivery: over HTTP, or by another road (None). Must not wait."""

_HEARD: Final[ContextVar[list[Heard] | None]] = ContextVar("_HEARD", default=None)
"""What the inbox was given while this request is being taken."""


class WatchedInbox(Inbox):
    """An inbox that tells what it was given."""

    def __init__(self, tell: Tell, *, queue_events: int, queue_bytes: int) -> None:
        super().__init__(queue_events=queue_events, queue_bytes=queue_bytes)
        self._tell = tell

    async def store(self, feed: str, events: Sequence[Event], source: str = "http") -> Stored:
        """Store events as every inbox does."""
        began = time.time_ns()
        try:
            stored = await super().store(feed, events, source)
        except (InboxBusy, InboxUnavailable) as failure:
            error = "busy" if isinstance(failure, InboxBusy) else "database"
            self._note(feed, source, events, began, None, error)
            raise
        self._note(feed, source, events, began, stored, None)
        return stored

    def _note(
        self, feed: str, source: str, events: Sequence[Event], began: int, stored: Stored | None, error: str | None
    ) -> None:
        with suppress(Exception):  # whatever it is: nothing may fail for its trace
            keyed = [(self._rows.key_of(event), event) for event in events]
            heard = Heard(feed, source, keyed, began, time.time_ns(), stored, error)
            if (during := _HEARD.get()) is None:
                self._tell(None, heard)
            else:
                during.append(heard)


def watched(tell: Tell, feed: Feed, take: Take) -> Take:
    """Return what takes deliveries of a feed as `take` does, and tells of those that were verified."""

    async def telling(request: web.BaseRequest) -> web.StreamResponse:
        began, during = time.time_ns(), list[Heard]()
        token = _HEARD.set(during)
        try:
            answer = await take(request)
        finally:
            _HEARD.reset(token)
        answered = Answered(feed, request.method, request.scheme, answer.status, began, time.time_ns())
        for heard in during:
            with suppress(Exception):  # as above
                tell(answered, heard)
        return answer

    return telling
