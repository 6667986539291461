# SPDX-License-Identifier: Apache-2.0
"""Every pair of state and event, on a real PostgreSQL, against the tables of docs/states.md."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from kit import (
    RULES,
    call,
    claim,
    confirm,
    event,
    fail,
    make_older,
    old_claim,
    reconcile,
    release_by_pass,
    row,
    state,
)

DOCS = Path(__file__).parents[1] / "docs/states.md"
KEY = "order:1"
KNOWN = "known-1"
NO_CLAIM = 1_000_000
"""What stands for a claim where the row has none."""

HELD_BECAUSE_NOBODY_CAN_TELL = {"silent", "few_controls", "no_controls", "no_history", "risk", "no_echo", "burst"}


# The states


async def claimed(db: asyncpg.Pool) -> None:
    assert (await claim(db, KEY, known_message_id=KNOWN, fingerprint="f"))["outcome"] == "claimed"


async def no_row(db: asyncpg.Pool) -> None:
    pass


async def new(db: asyncpg.Pool) -> None:
    await db.fetch("SELECT * FROM send_enqueue($1, 'mg', $2)", KEY, f'{{"known_message_id": "{KNOWN}"}}')


async def released_not_sent(db: asyncpg.Pool) -> None:
    await claimed(db)
    assert await fail(db, KEY, await fence(db), "refused", not_sent=True) == "released"


async def released_same_key(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=5), known_message_id=KNOWN, fingerprint="f")
    await reconcile(db, key_window=timedelta(days=1))


async def released_absent(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    await db.execute("UPDATE send_log SET known_message_id = $1 WHERE wire_key = wire_key($2)", KNOWN, KEY)


async def released_gave_up(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(hours=30), known_message_id=KNOWN)
    await reconcile(db, replace(RULES, on_unknown="release"))


async def released_operator(db: asyncpg.Pool) -> None:
    await silent(db)
    assert await operator("operator_release")(db) == "released"


async def silent(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=5), known_message_id=KNOWN, fingerprint="f")


async def held(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, known_message_id=KNOWN)
    await reconcile(db)


async def again(db: asyncpg.Pool) -> None:
    await released_operator(db)
    assert (await claim(db, KEY))["attempt"] == 2


async def silent_again(db: asyncpg.Pool) -> None:
    await again(db)
    await make_older(db, KEY, timedelta(minutes=6))


async def held_again(db: asyncpg.Pool) -> None:
    await again(db)
    await make_older(db, KEY, timedelta(hours=2))
    await reconcile(db)


async def sent_by_its_answer(db: asyncpg.Pool) -> None:
    await claimed(db)
    assert await confirm(db, KEY, await fence(db)) == "sent"


async def sent_by_an_event(db: asyncpg.Pool) -> None:
    await claimed(db)
    await event(db, KEY, message_id="m-0")
    await reconcile(db)


async def failed_rejected(db: asyncpg.Pool) -> None:
    await claimed(db)
    await event(db, KEY, "rejected", kind="rejected", message_id="m-0")
    await reconcile(db)


async def failed_attempts(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(hours=30), known_message_id=KNOWN)
    await reconcile(db, replace(RULES, max_attempts=1))


async def failed_by_an_operator(db: asyncpg.Pool) -> None:
    await silent(db)
    assert await operator("operator_decide", "failed")(db) == "failed"


async def failed_by_its_sender(db: asyncpg.Pool) -> None:
    await claimed(db)
    assert await fail(db, KEY, await fence(db), "422", not_sent=False) == "failed"


async def failed_by_its_sender_long_ago(db: asyncpg.Pool) -> None:
    await failed_by_its_sender(db)
    await make_older(db, KEY, timedelta(minutes=5))


STATES: dict[str, tuple[Callable[[asyncpg.Pool], Awaitable[None]], str]] = {
    "no row": (no_row, "none"),
    "new": (new, "pending"),
    "released not_sent": (released_not_sent, "pending (not_sent)"),
    "released same_key": (released_same_key, "pending (same_key_retry)"),
    "released absent": (released_absent, "pending (absent)"),
    "released gave_up": (released_gave_up, "pending (gave_up)"),
    "released operator": (released_operator, "pending (operator)"),
    "running": (claimed, "claimed"),
    "silent": (silent, "claimed"),
    "held": (held, "claimed (held)"),
    "again": (again, "claimed"),
    "silent again": (silent_again, "claimed"),
    "held again": (held_again, "claimed (held)"),
    "sent by its answer": (sent_by_its_answer, "sent"),
    "sent by an event": (sent_by_an_event, "sent"),
    "failed: rejected": (failed_rejected, "failed (rejected)"),
    "failed: attempts": (failed_attempts, "failed (attempts)"),
    "failed by an operator": (failed_by_an_operator, "failed (operator)"),
    "failed by its sender": (failed_by_its_sender, "failed (422)"),
    "failed by its sender, long ago": (failed_by_its_sender_long_ago, "failed (422)"),
}
"""How a send comes into each state, and what it looks like there."""


# The events


async def fence(db: asyncpg.Pool) -> int:
    found = await row(db, KEY)
    return (found and found["fence"]) or NO_CLAIM


def said(testimony: str, kind: str, key: str | None = KEY, source: str = "http") -> Callable[[asyncpg.Pool], Any]:
    async def happen(db: asyncpg.Pool) -> None:
        await event(db, key, testimony, kind=kind, message_id="m-9" if key else KNOWN, event_id="said")
        await db.execute("UPDATE provider_event SET source = $1 WHERE event_id = 'said'", source)
        await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE next_check_at IS NOT NULL")
        await reconcile(db)

    return happen


def confirmed(*, older: bool = False) -> Callable[[asyncpg.Pool], Awaitable[str]]:
    async def happen(db: asyncpg.Pool) -> str:
        first = await db.fetchval("SELECT fence FROM verdict WHERE wire_key = wire_key($1) AND attempt = 1", KEY)
        current = await fence(db)
        an_older = first if first and first != current else current - 1
        return await confirm(db, KEY, an_older if older else current, "m-older" if older else "m-1")

    return happen


def failed(*, not_sent: bool | None) -> Callable[[asyncpg.Pool], Awaitable[str]]:
    async def happen(db: asyncpg.Pool) -> str:
        return await fail(db, KEY, await fence(db), "422", not_sent=not_sent)

    return happen


async def claimed_by_another(db: asyncpg.Pool) -> str:
    return (await claim(db, KEY, fingerprint="f"))["outcome"]


def operator(function: str, *args: str) -> Callable[[asyncpg.Pool], Awaitable[str]]:
    async def happen(db: asyncpg.Pool) -> str:
        return (await call(db, function, KEY, *args, "note", "ann"))["outcome"]

    return happen


EVENTS: dict[str, Callable[[asyncpg.Pool], Awaitable[str | None]]] = {
    "accepted": said("accepted", "delivered"),
    "accepted, by id": said("accepted", "delivered", key=None),
    "rejected": said("rejected", "rejected"),
    "unknown event": said("none", "unknown"),
    "look-up: accepted": said("accepted", "delivered", source="look-up"),
    "look-up: rejected": said("rejected", "rejected", source="look-up"),
    "confirm": confirmed(),
    "confirm, older claim": confirmed(older=True),
    "fail: not sent": failed(not_sent=True),
    "fail: refused": failed(not_sent=False),
    "fail: can't tell": failed(not_sent=None),
    "claim": claimed_by_another,
}
OPERATOR: dict[str, Callable[[asyncpg.Pool], Awaitable[str | None]]] = {
    "release": operator("operator_release"),
    "confirm": operator("operator_decide", "sent"),
    "fail": operator("operator_decide", "failed"),
}


# The tables


def tables() -> dict[str, dict[tuple[str, str], str]]:
    """What docs/states.md says: by heading, the cell of each state and event."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for section in DOCS.read_text("utf-8").split("\n## ")[1:]:
        heading, _, rest = section.partition("\n")
        lines = [line.strip("| ").split(" | ") for line in rest.splitlines() if line.startswith("| ")]
        events = lines[0][1:]
        found[heading] = {
            (name, happened): cell for name, *cells in lines[1:] for happened, cell in zip(events, cells, strict=True)
        }
    return found


TABLES = tables()
LEDGER = ("send_log", "provider_event", "verdict", "pass", "feed_delivery", "release_outbox")


def test_the_tables_hold_the_full_product() -> None:
    said_by = {name: [happened for state, happened in cells if state == "no row"] for name, cells in TABLES.items()}
    assert said_by == {
        "What providers say": list(EVENTS)[:6],
        "What the sender says": list(EVENTS)[6:],
        "What an operator says": list(OPERATOR),
    }
    for heading, cells in TABLES.items():
        assert list(cells) == [(name, happened) for name in STATES for happened in said_by[heading]]


async def shown(db: asyncpg.Pool) -> str:
    """How the send looks, as the tables write it."""
    found = await row(db, KEY)
    if found is None:
        return "none"
    held_reason = found["held_reason"]
    if held_reason in HELD_BECAUSE_NOBODY_CAN_TELL:
        held_reason = "held"
    why = [found["release_basis"], held_reason, found["verdict_reason"] if found["state"] == "failed" else None]
    words = ", ".join(word for word in why if word)
    return f"{found['state']} ({words})" if words else found["state"]


async def became(db: asyncpg.Pool, name: str, happen: Callable[[asyncpg.Pool], Awaitable[str | None]]) -> str:
    """Bring a send into a state, let something happen to it, and return what the tables should say of that."""
    for table in LEDGER:  # many times as quick as a database of its own for each pair
        await db.execute(f"DELETE FROM {table}")  # noqa: S608 - own names
    bring_about, looks = STATES[name]
    await bring_about(db)
    assert await shown(db) == looks
    answer = await happen(db)
    after = await shown(db)
    return f"{answer}: {after}" if answer else after


@pytest.mark.parametrize("heading", TABLES)
@pytest.mark.parametrize("name", STATES)
async def test_what_becomes_of_a_send_in_each_state_whatever_happens(db: asyncpg.Pool, name: str, heading: str) -> None:
    happenings = OPERATOR if heading == "What an operator says" else EVENTS
    wanted = {happened: cell for (of, happened), cell in TABLES[heading].items() if of == name}
    assert wanted
    assert {happened: await became(db, name, happenings[happened]) for happened in wanted} == wanted


@pytest.mark.parametrize("testimony", ["accepted", "rejected", "none"])
async def test_what_was_said_of_a_send_that_was_never_claimed_decides_when_it_is_claimed(
    db: asyncpg.Pool, testimony: str
) -> None:
    await new(db)
    await event(db, KEY, testimony)
    assert (await claim(db, KEY))["outcome"] == {"accepted": "already_sent"}.get(testimony, "held")
    await reconcile(db)
    assert await state(db, KEY) == {"accepted": "sent", "rejected": "failed", "none": "pending"}[testimony]
