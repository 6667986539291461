# SPDX-License-Identifier: Apache-2.0
"""What an operator decides on the page, through the functions that the commands and `/v1` use.

Each form names the attempt that its page showed: what was meant for one attempt never decides about the next one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import structlog
from aiohttp import web
from multidict import MultiDict

from reconciler.database.connection import Connection
from reconciler.passes import by_hand, feeds, restore
from reconciler.ui.claims import Wanted, read_claims, wire_key_of
from reconciler.ui.data import Data
from reconciler.ui.forms import FORM, key_of, reason_of
from reconciler.ui.pages import MOST_AT_ONCE, Pages, wanted_of
from reconciler.ui.render import SEND, VIEWER, Renderer, Sends, table
from webhooks.database import FAILURES

NOT_DONE: Final[Mapping[str, int]] = {"unknown_key": 404, "refused": 409, "unknown": 503}
"""What became of a send about which nothing was decided, as far as is known, and the status that says so."""
ROW_STATES: Final = ("pending", "claimed", "sent", "failed")
HELD_ONLY: Final = "the filter names sends that are not held: show held ones, or choose some: nothing was done"

_log: Final = structlog.get_logger()


class Seen(NamedTuple):
    """A send as a page showed it."""

    wire_key: str
    attempt: int
    state: str


class Done(NamedTuple):
    """What became of one send."""

    wire_key: str
    outcome: str
    reason: str | None


class Wish(NamedTuple):
    """What is to be done with sends, why, and who wants it."""

    verb: str
    reason: str
    who: str


class Actions:
    """The handlers that change something, and `find`, whose key should be in no address."""

    def __init__(self, data: Data, renderer: Renderer, pages: Pages) -> None:
        self._data, self._renderer, self._pages = data, renderer, pages
        self.acting = (self.decide, self.decide_many, self.hold)

    async def find(self, request: web.Request) -> web.Response:
        """Lead to the page of a send key or wire key."""
        async with self._data.connection() as connection:
            wire_key = await wire_key_of(connection, key_of(str(request[FORM].get("key", ""))))
        raise web.HTTPSeeOther(SEND.format(wire_key))

    async def decide(self, request: web.Request) -> web.Response:
        """Release, confirm or fail one send."""
        form, key, wish = request[FORM], key_of(request.match_info["key"]), _wish(request)
        done = (await self._decided(wish, [_as_seen(key, form.get("attempt", ""), form.get("state", ""))]))[0]
        if (status := NOT_DONE.get(done.outcome)) is not None:
            alert = f"{wish.verb}{' refused' if done.outcome != 'unknown' else ''}: {done.reason}"
            return await self._pages.send_page(request, key, alert=alert, reason=wish.reason, status=status)
        raise web.HTTPSeeOther(f"{SEND.format(quote(key, safe=''))}?did={done.outcome}")

    async def decide_many(self, request: web.Request) -> web.Response:
        """Release, confirm or fail the chosen sends, or all held ones that a filter names."""
        form, wish = request[FORM], _wish(request)
        if form.get("which") == "all":
            sends = await self._held(wanted_of({**form, "reason": form.get("held_for", "")}))
        else:
            sends = [_seen(str(text)) for text in form.getall("send", [])]
        if not 0 < len(sends) <= MOST_AT_ONCE:
            raise web.HTTPUnprocessableEntity(text=f"choose 1 to {MOST_AT_ONCE} sends: nothing was done")
        done = await self._decided(wish, sends)
        counts = Counter(one.outcome for one in done)
        rows = [(Sends([one.wire_key]), one.outcome, one.reason) for one in done]
        found = table("What became of each", ("Send", "Outcome", "Because"), rows, "none")
        return self._renderer.page(request, "done.html", verb=wish.verb, counts=counts, table=found, now=None)

    async def _held(self, wanted: Wanted) -> list[Seen]:
        if wanted.state not in (None, "held"):
            raise web.HTTPUnprocessableEntity(text=HELD_ONLY)
        of_state = Wanted("held", wanted.feed, wanted.reason, wanted.message_class)
        async with self._data.connection() as connection:
            page = await read_claims(connection, of_state, None, MOST_AT_ONCE)
        return [Seen(send.wire_key, send.attempt, send.row_state) for send in page.sends]

    async def _decided(self, wish: Wish, sends: Sequence[Seen]) -> list[Done]:
        """Decide one after the other. Where the database goes away the rest is left alone, and said so."""
        done: list[Done] = []
        for send in sorted(set(sends)):
            try:
                async with self._data.connection() as connection:
                    done.append(await decide(connection, wish, send))
            except FAILURES:
                why = "the database did not answer: whether it was done is not known, those after it were not touched"
                done.append(Done(send.wire_key, "unknown", why))
                break
        counts = Counter(one.outcome for one in done)
        _log.info("ui_decided", verb=wish.verb, who=wish.who, counts=dict(counts))
        return done

    async def hold(self, request: web.Request) -> web.Response:
        """Pause or resume a feed, or all."""
        form, who = request[FORM], request[VIEWER].who
        feed, verb, reason = str(form.get("feed", "")), str(form.get("verb", "")), reason_of(form)
        if feed != feeds.ALL_FEEDS and feed not in self._data.settings.feeds:
            raise web.HTTPNotFound(text="no such feed is configured")
        if verb not in HOLDS:
            raise web.HTTPUnprocessableEntity(text="say pause or resume")
        wish, seen = Wish(verb, reason, who), str(form.get("holds", "")).split()
        async with self._data.connection(restore.SCAN_SECONDS if verb == "resume" else None) as connection:
            did = await HOLDS[verb](connection, feed, wish, seen)
        _log.info("ui_feed_held", verb=verb, feed=feed, who=who)
        raise web.HTTPSeeOther(f"/ui/feeds?{urlencode({'did': did, 'feed': feed})}")


# Before the function of the verb locks and looks, in its transaction: what a person saw must be what he decides about.
SEEN: Final = "SELECT attempt, state FROM send_log WHERE wire_key = wire_key($1) FOR UPDATE"


def _changed(wish: Wish, seen: Seen, attempt: int, state: str) -> str | None:
    """Say why a wish is not about a send as it stands now. That an attempt was sent is true in whatever state it is."""
    if attempt != seen.attempt:
        return f"attempt {attempt} has begun since you looked: look again"
    if state != seen.state and wish.verb != "confirm":
        return f"it is {state} since you looked: look again"
    return None


async def decide(connection: Connection, wish: Wish, send: Seen) -> Done:
    """Perform a verb on a send, unless another attempt or verdict has come since it was seen."""
    async with connection.transaction(isolation="read_committed"):
        now = await connection.fetchrow(SEEN, send.wire_key)
        if now is not None and (changed := _changed(wish, send, *now)):
            return Done(send.wire_key, "refused", changed)
        return Done(send.wire_key, *await by_hand.decide(connection, wish.verb, send.wire_key, wish.reason, wish.who))


async def _pause(connection: Connection, feed: str, wish: Wish, _: Collection[str]) -> str:
    await feeds.pause(connection, feed, wish.reason, wish.who)
    return "paused"


async def _resume(connection: Connection, feed: str, wish: Wish, seen: Collection[str]) -> str:
    try:
        return "resumed" if await feeds.resume(connection, feed, wish.reason, wish.who, seen) else "nothing"
    except feeds.UnseenHold as unseen:
        raise web.HTTPConflict(text=f"{unseen} came since you looked, so nothing was lifted: look again") from None


HOLDS: Final[dict[str, Callable[[Connection, str, Wish, Collection[str]], Awaitable[str]]]] = {
    "pause": _pause,
    "resume": _resume,
}


def _wish(request: web.Request) -> Wish:
    form: MultiDict[Any] = request[FORM]
    verb = str(form.get("verb", ""))
    if verb not in by_hand.VERBS:
        raise web.HTTPUnprocessableEntity(text=f"say what to do: {', '.join(by_hand.VERBS)}")
    return Wish(verb, reason_of(form), request[VIEWER].who)


def _seen(text: str) -> Seen:
    rest, _, state = text.rpartition(":")
    wire_key, _, attempt = rest.rpartition(":")
    return _as_seen(key_of(wire_key), attempt, state)


def _as_seen(key: str, attempt: str, state: str) -> Seen:
    if not re.fullmatch("[0-9]{1,9}", attempt) or state not in ROW_STATES:
        raise web.HTTPUnprocessableEntity(text="the form does not name the attempt that it is about: load it again")
    return Seen(key, int(attempt), state)
