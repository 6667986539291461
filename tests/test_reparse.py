# SPDX-License-Identifier: Apache-2.0
"""An event of a kind that nobody knew is read anew by a release that knows it, and its send is decided."""

from __future__ import annotations

import asyncpg
import pytest
from kit import old_claim, reconcile, row, state
from msgspec.structs import replace
from program import Program
from serving import FEEDS, sample

from reconciler.filling.reparse import Reparsed, reparse
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import Inbox
from webhooks.registry import PROVIDERS

KEY = "order-1"


def event_of(feed: str, kind: str, key: str = KEY) -> Event:
    """The event of a sample, as a release reads it that knows its kind."""
    (event,) = PROVIDERS[FEEDS[feed].provider].parse(sample(feed, kind, key)).events
    return event


def as_before(event: Event, **more: object) -> Event:
    """The same, as a release read it that did not know its kind."""
    return replace(event, kind=Kind.UNKNOWN, testimony=Testimony.NONE, reason=None, **more)


async def keep(db: asyncpg.Pool, feed: str, *events: Event, source: str = "http") -> None:
    inbox = Inbox()
    await inbox.open(db)
    assert (await inbox.store(feed, events, source)).stored == len(events)
    await inbox.close()


async def stored(db: asyncpg.Pool) -> list[tuple[str, ...]]:
    rows = await db.fetch("SELECT wire_key, kind, testimony FROM provider_event ORDER BY kind, wire_key")
    return [tuple(row) for row in rows]


async def test_a_send_that_is_held_for_an_unknown_event_is_decided_by_what_it_says(
    db: asyncpg.Pool, dsn: str, program: Program
) -> None:
    await old_claim(db, KEY)
    await keep(db, "mg", as_before(event_of("mg", "delivered")))
    await reconcile(db)
    assert (await row(db, KEY))["held_reason"] == "unknown_event"
    done = await program("replay", "--reparse", "--feed", "mg")
    assert (done.exit_code, done.stdout) == (0, "mg: 1 event of unknown kinds; delivered 1\n")
    await reconcile(db)
    assert await state(db, KEY) == "sent"
    assert (await program("replay", "--reparse", "--feed", "mg")).stdout.startswith("mg: 0 events")


@pytest.mark.parametrize("feed", ["mg", "sg", "re"])
async def test_a_row_is_corrected_in_its_place_though_its_id_was_a_header(db: asyncpg.Pool, feed: str) -> None:
    known = event_of(feed, "bounced")
    await keep(db, feed, as_before(known, event_id="as-the-header-said"))
    assert await reparse(db, FEEDS[feed], dry_run=True) == Reparsed(1, {"bounced": 1})
    assert await stored(db) == [(KEY, "unknown", "none")]
    assert await reparse(db, FEEDS[feed]) == Reparsed(1, {"bounced": 1})
    assert await stored(db) == [(KEY, "bounced", "accepted")]
    assert await db.fetchval("SELECT reason FROM provider_event") == known.reason
    assert await reparse(db, FEEDS[feed]) == Reparsed()


async def test_one_that_shows_our_key_only_now_is_stored_besides(db: asyncpg.Pool) -> None:
    await keep(db, "mg", as_before(event_of("mg", "delivered"), send_key=None))
    assert (await reparse(db, FEEDS["mg"])).known == {"delivered": 1}
    (told, before) = await stored(db)
    assert told == (KEY, "delivered", "accepted")
    assert before[1:] == ("unknown", "none")
    await reparse(db, FEEDS["mg"])
    assert len(await stored(db)) == 2


async def test_what_is_still_unknown_or_damaged_stays_as_it_is_and_stops_nothing(db: asyncpg.Pool) -> None:
    others = [
        replace(as_before(event_of("mg", "delivered", f"k-{n}")), raw=raw)
        for n, raw in enumerate((b"\xff", b"[]", b'{"event-data": {"event": "brand-new", "id": "x"}}'))
    ]
    await keep(db, "mg", *others, as_before(event_of("mg", "delivered")))
    found = await reparse(db, FEEDS["mg"])
    assert (found.unknown, found.known) == (4, {"delivered": 1})


async def test_pages_of_many_and_of_long_ago_are_read_to_the_end(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.filling.reparse.BATCH", 2)
    await keep(db, "mg", *[as_before(event_of("mg", "delivered", f"k-{n}")) for n in range(5)])
    await db.execute("UPDATE provider_event SET received_at = received_at - interval '3 days' WHERE wire_key < 'k-2'")
    assert (await reparse(db, FEEDS["mg"])).known == {"delivered": 5}


async def test_other_feeds_and_what_an_api_listed_are_left_alone(db: asyncpg.Pool) -> None:
    await keep(db, "other", as_before(event_of("mg", "delivered", "k-1")))
    await keep(db, "mg", as_before(event_of("mg", "delivered", "k-2")), source="back-fill")
    assert await reparse(db, FEEDS["mg"]) == Reparsed()


async def test_a_wrong_call_is_refused_in_one_line(program: Program) -> None:
    for words in (("--reparse", "file.json"), ("--reparse", "--verify"), ("--reparse", "--region", "eu-west-1"), ()):
        refused = await program("replay", *words)
        assert refused.exit_code == 2
        assert "Traceback" not in refused.stderr
