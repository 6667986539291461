# SPDX-License-Identifier: Apache-2.0
"""What the page shows: each handler looks and changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from aiohttp import web

from reconciler.database.connection import database_clock
from reconciler.insight.findings import judge
from reconciler.insight.lag import read_lags
from reconciler.insight.reports import (
    MOST_EVENTS,
    VANISHED_SINCE,
    RecordedDuplicate,
    Unknown,
    Vanished,
    old_enough,
    recorded_duplicates,
    unknown_events,
    vanished_sends,
)
from reconciler.insight.status import Status, Undecided
from reconciler.insight.why import Story
from reconciler.passes.feeds import ALL_FEEDS
from reconciler.rule.in_words import WAITS_FOR
from reconciler.rule.outlook import Outlook
from reconciler.ui.claims import STATES, Place, Wanted, read_claims, read_passes
from reconciler.ui.curves import curves
from reconciler.ui.data import Data
from reconciler.ui.forms import key_of
from reconciler.ui.render import SEND, Code, Link, Renderer, Sends, Table, percent_of, redacted, table, whole
from reconciler.units import roughly

PAGE: Final = 50
"""Rows of a list."""
MOST_AT_ONCE: Final = 500
"""Sends that one form decides about."""
_NUMBER: Final = re.compile("[0-9]{1,18}")
DUPLICATES_SINCE: Final = timedelta(days=30)
UNKNOWN_SINCE: Final = timedelta(hours=24)

FACTS: Final = (
    *("send_key", "recipient", "feed", "message_class", "campaign", "source", "attempt", "cause"),
    *("provider_message_id", "delivery", "claimed_by", "submit_by", "expires_at", "not_before", "next_check_at"),
)
"""What the row of a send says on its page, where it says anything."""

ABOUT: Final[Mapping[str, str]] = {
    "duplicates": "Sends of which more than one acceptance is known, found within 30 days. A duplicate opens the "
    "breaker of its feed once; ids_differ proves nothing.",
    "vanished": "Answered sends of a day of which nothing was ever heard, though their neighbours were heard of. Feeds "
    "lose single events; many of one class have no stamp, or were dropped by the provider.",
    "unknown": f"Events of a day that belong to no send here, of at most {MOST_EVENTS:,} looked at: those of another "
    "installation on the same account, of a sender that doesn't stamp, or the database is the wrong one.",
}
"""What each report is about."""

DID: Final[Mapping[str, str]] = {
    "released": "Released: it is free for another attempt.",
    "sent": "It is sent.",
    "failed": "It is failed.",
    "paused": "Paused: nothing is released while it lasts.",
    "resumed": "Resumed.",
    "nothing": "Nothing was on hold there.",
}
"""What has been done, by the word that the way here names."""


class Pages:
    """The handlers that look."""

    def __init__(self, data: Data, renderer: Renderer) -> None:
        self._data, self._renderer = data, renderer

    async def overview(self, request: web.Request) -> web.Response:
        """Show what needs a person, and what is undecided."""
        status = await self._data.status()
        findings = list(judge(status, self._data.settings))
        return self._renderer.page(
            request,
            "overview.html",
            now=status.now,
            alarms=[found for found in findings if found.needs_person],
            notes=[found for found in findings if not found.needs_person],
            undecided=_undecided(status),
            last_pass=status.last_pass,
        )

    async def claims(self, request: web.Request) -> web.Response:
        """List sends."""
        wanted, after = wanted_of(request.query), _place_of(request.query.get("after", ""))
        async with self._data.connection() as connection:
            page = await read_claims(connection, wanted, after, PAGE)
        chosen = {name: value for name, value in _asked(wanted).items() if value}
        return self._renderer.page(
            request,
            "claims.html",
            now=page.now,
            sends=page.sends,
            links={send.wire_key: SEND.format(send.wire_key) for send in page.sends},
            wanted=wanted,
            chosen=chosen,
            states=STATES,
            most=MOST_AT_ONCE,
            feeds=sorted(self._data.settings.feeds),
            reasons=sorted(WAITS_FOR),
            first=f"/ui/sends?{urlencode(chosen)}" if after else None,
            then=f"/ui/sends?{urlencode({**chosen, 'after': page.then})}" if page.then else None,
        )

    async def send(self, request: web.Request) -> web.Response:
        """Show one send: how it stands, what happened, what happens next."""
        return await self.send_page(request, key_of(request.match_info["key"]))

    async def send_page(
        self, request: web.Request, key: str, *, alert: str | None = None, reason: str = "", status: int = 200
    ) -> web.Response:
        """Return a send's page, with what was refused and the reason that had been written."""
        story = await self._data.story(key)
        return self._renderer.page(
            request,
            "send.html",
            status=404 if story.state is None and status == 200 else status,  # noqa: PLR2004 - the usual one
            now=story.now,
            story=story,
            facts=_facts(story),
            verbs=_verbs(story),
            alert=alert,
            reason=reason,
            did=_did(request, _stands(story)),
        )

    async def feeds(self, request: web.Request) -> web.Response:
        """Show how each feed stands."""
        status, settings = await self._data.status(), self._data.settings
        findings = list(judge(status, settings))
        async with self._data.connection() as connection:
            lags = await read_lags(connection, settings, sorted(settings.feeds), status.now)
        return self._renderer.page(
            request,
            "feeds.html",
            now=status.now,
            all_feeds=ALL_FEEDS,
            all_holds=next((feed for feed in status.feeds if feed.feed == ALL_FEEDS), None),
            feeds=[feed for feed in status.feeds if feed.feed != ALL_FEEDS],
            findings=findings,
            coverage={feed.feed: _coverage(status, feed.feed) for feed in status.feeds},
            curves=curves(lags),
            refused=_refused(status),
            did=_feed_did(request, status),
        )

    async def report(self, request: web.Request) -> web.Response:
        """Show duplicates, sends that vanished, or events that belong to no send."""
        name = request.match_info["name"]
        reports = {"duplicates": self._duplicates, "vanished": self._vanished, "unknown": self._unknown}
        if name not in reports:
            raise web.HTTPNotFound
        now, found = await reports[name]()
        return self._renderer.page(request, "report.html", now=now, name=name, table=found, about=ABOUT[name])

    async def _duplicates(self) -> tuple[datetime, Table]:
        async with self._data.connection() as connection:
            now = await database_clock(connection)
            found = await recorded_duplicates(connection, now - DUPLICATES_SINCE, None)
        rows = map(_duplicate_row, found)
        columns = ("Send", "Key", "What", "Feed", "Found", "Because")
        return now, table("Duplicates", columns, rows, "none was found")

    async def _vanished(self) -> tuple[datetime, Table]:
        settings = self._data.settings
        async with self._data.connection() as connection:
            now = await database_clock(connection)
            until = old_enough(settings, settings.feeds, now)
            found = await vanished_sends(connection, until, now - VANISHED_SINCE)
        columns = ("Feed", "Class", "Looked at", "Unheard", "Vanished", "Newest", "Some of them")
        return now, table("Vanished sends", columns, map(_vanished_row, found), "no send was looked at")

    async def _unknown(self) -> tuple[datetime, Table]:
        async with self._data.connection() as connection:
            now = await database_clock(connection)
            found = await unknown_events(connection, now - UNKNOWN_SINCE, None)
        columns = ("Feed", "Key", "Kind", "Events", "Newest", "Some of them")
        return now, table("Unknown events", columns, map(_unknown_row, found.groups), "every event has its send")

    async def passes(self, request: web.Request) -> web.Response:
        """List passes, the newest first."""
        before = request.query.get("before", "")
        if before and not _NUMBER.fullmatch(before):
            raise web.HTTPBadRequest(text="the link names no pass")
        async with self._data.connection() as connection:
            now = await database_clock(connection)
            rows = await read_passes(connection, int(before) if before else None, PAGE + 1)
        columns = ("Began", "Took", "By", "Of", "Verdicts")
        found = table("Passes", columns, map(_pass_row, rows[:PAGE]), "there never was a pass")
        then = f"/ui/passes?before={rows[PAGE - 1]['id']}" if len(rows) > PAGE else None
        first = "/ui/passes" if before else None
        return self._renderer.page(request, "passes.html", now=now, table=found, first=first, then=then)


def wanted_of(query: Mapping[str, Any]) -> Wanted:
    """Return which sends a link or a form asks for. Raises HTTPBadRequest."""
    # As they are stored: a class may begin with a space, and all sends that a filter names can be decided at once.
    state, feed, reason, of_class = (str(query.get(name, "")) or None for name in _FILTER)
    if state and state not in STATES:
        raise web.HTTPBadRequest(text=f"there is no such state: there is {', '.join(STATES)}")
    return Wanted(state, feed, reason, of_class)


_FILTER: Final = ("state", "feed", "reason", "class")


def _asked(wanted: Wanted) -> dict[str, str | None]:
    return dict(zip(_FILTER, (wanted.state, wanted.feed, wanted.reason, wanted.message_class), strict=True))


def _place_of(text: str) -> Place | None:
    try:
        return Place.parse(text) if text else None
    except ValueError:
        raise web.HTTPBadRequest(text="the link names no place in the list") from None


def _undecided(status: Status) -> Table:
    columns = ("Sends", "State", "Reason", "Feed", "Class", "Oldest")
    return table("Undecided sends", columns, map(_group_row, status.undecided), "every send is decided")


def _group_row(group: Undecided) -> tuple[object, ...]:
    asked = {"state": group.state, "feed": group.feed, "reason": group.reason, "class": group.message_class}
    link = Link(f"{group.n:,}", f"/ui/sends?{urlencode(asked)}")
    return link, group.state, group.reason, group.feed, group.message_class, group.since


def _coverage(status: Status, feed: str) -> Table:
    columns = ("Class", "Answered", "Missing", "Heard of in the last hour", "98 % heard by", "Silent one released at")
    rows = [_outlook_row(found) for found in status.outlooks if found.feed == feed]
    return table(f"What the silence of {feed} is worth", columns, rows, "it has no answered sends yet")


def _outlook_row(found: Outlook) -> tuple[object, ...]:
    heard = "never any" if found.no_echo else percent_of(found.heard, found.asked)
    ages = (_age(found.late_after), _age(found.released_at))
    return found.message_class, found.controls, found.missing, heard, *ages


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else roughly(timedelta(seconds=seconds))


def _refused(status: Status) -> Table:
    rows = [(found.feed, found.reason, found.last_hour, found.last_day, found.last_at) for found in status.refused]
    columns = ("Feed", "Reason", "Last hour", "Last day", "Newest")
    return table("Refused deliveries of a day", columns, rows, "none was refused")


def _facts(story: Story) -> list[tuple[str, object]]:
    named = [(name, story.row.get(name)) for name in FACTS]
    known = [(name.replace("_", " "), whole(v) if name == "send_key" else v) for name, v in named if v is not None]
    return [("wire key", Code(story.wire_key)), *known]


def _stands(story: Story) -> str | None:
    return "released" if story.state == "pending" and story.row["release_basis"] == "operator" else story.state


def _did(request: web.Request, *true: str | None) -> str | None:
    """Say what the way here names as done, if it is still so: by a bookmark or the history one comes here later."""
    did = request.query.get("did", "")
    return DID.get(did) if did in true else None


def _feed_did(request: web.Request, status: Status) -> str | None:
    name = request.query.get("feed", "")
    paused = any("paused" in feed.holds for feed in status.feeds if feed.feed == name)
    held = any(feed.holds for feed in status.feeds if feed.feed == name)
    said = _did(request, "paused" if paused else None, *(() if held else ("resumed", "nothing")))
    return f"{'All feeds' if name == ALL_FEEDS else name}: {said}" if said and name else None


def _verbs(story: Story) -> dict[str, str]:
    """Return what a person may decide of a send as it stands, and what that means."""
    verbs = {}
    if story.state in ("claimed", "failed"):
        verbs["release"] = "free for another attempt: the message is duplicated if it was accepted after all"
    if story.state in ("claimed", "failed", "pending"):
        verbs["confirm"] = "it was sent: it is never given out again"
    if story.state in ("claimed", "pending"):
        verbs["fail"] = "it will never be sent, unless a provider says that it was accepted"
    return verbs


def _duplicate_row(found: RecordedDuplicate) -> tuple[object, ...]:
    key = redacted(found.send_key) if found.send_key else None
    return Sends([found.wire_key]), key, found.sort, found.feed, found.found_at, found.because


def _vanished_row(found: Vanished) -> tuple[object, ...]:
    share = percent_of(found.vanished, found.sends)
    return found.feed, found.message_class, found.sends, found.unheard, share, found.newest, Sends(found.wire_keys)


def _unknown_row(found: Unknown) -> tuple[object, ...]:
    examples: object = Sends(found.examples) if found.key == "unknown" else Code(" ".join(found.examples))
    return found.feed, found.key, found.kind, found.events, found.newest, examples


def _pass_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    took = f"{(row['ended_at'] - row['started_at']).total_seconds():.1f} s" if row["ended_at"] else "not ended"
    of: object = Sends([row["wire_key"]]) if row["wire_key"] else row["feed"] or "everything"
    return row["started_at"], took, row["who"], of, ", ".join(_moved(json.loads(row["counts"])))


def _moved(counts: Mapping[str, int]) -> Iterator[str]:
    for name, n in sorted(counts.items()):
        if n:
            yield f"{name} {n}"
