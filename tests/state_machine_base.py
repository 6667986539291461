# SPDX-License-Identifier: Apache-2.0
"""What all parties of the state machine share: the connections, the truth, and the laws that hold after every step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeVar

import asyncpg
import kit
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant
from state_machine_truth import Release, Truth
from state_machine_world import FEEDS, World

from reconciler.passes.feeds import ALL_FEEDS
from webhooks.event import wire_key

T = TypeVar("T")
SENDS: Final = ("order:1", "order:2", "order:3", "order:4")
KEYS: Final = st.sampled_from(SENDS)
KEY_OF: Final = {wire_key(key): key for key in SENDS}
FEED: Final = st.sampled_from([*3 * [kit.FEED], *FEEDS])
FOREIGN: Final = "foreign:1"
"""A send of another installation on the same account."""

RECIPIENT: Final = "ada@example.org"
RULES: Final = replace(kit.RULES, max_risk=0.03)
"""With so much risk two hundred neighbours are enough for an absence; a pass reads them each time."""

STEP_SECONDS: Final = 60
"""Then a step waits for something that never comes."""

ROWS = """
SELECT *, clock_timestamp() AS seen_at FROM send_log WHERE send_key NOT LIKE 'neighbour:%'
"""
RELEASES = """
SELECT id, wire_key, fence, feed, reason, risk, who, pass FROM verdict WHERE action = 'released' AND id > $1 ORDER BY id
"""
HOLDS = """
SELECT feed, suspect_at IS NOT NULL AS suspect FROM feed_state
WHERE num_nonnulls(paused_at, breaker_at, suspect_at) > 0
"""
# By the id that we chose events are known on each feed that an attempt went to.
SAID = """
SELECT testimony FROM provider_event
WHERE wire_key = $1 OR $3 AND wire_key IN (
    SELECT stand_in_key(via.feed, 'known-' || $4)
    FROM (SELECT coalesce((SELECT feed FROM send_log WHERE wire_key = $1), $2) AS feed UNION
          SELECT feed FROM verdict WHERE wire_key = $1 AND action = 'released') AS via)
"""
IGNORED = """
SELECT l.wire_key, l.state FROM send_log l
WHERE l.state <> 'sent'
  AND (l.next_check_at IS NOT NULL OR l.state = 'failed' AND l.failed_at > now() - interval '6 days')
  AND EXISTS (SELECT FROM provider_event e WHERE e.wire_key = l.wire_key AND e.testimony = 'accepted')
"""


@dataclass(slots=True)
class Seen:
    """How the ledger stood after the last step."""

    rows: dict[str, asyncpg.Record] = field(default_factory=dict)
    """By send key."""
    holds: frozenset[str] = frozenset()
    """The feeds that are on hold."""
    suspect: bool = False
    """Whether the database has gone back, and nobody has resumed."""
    last_release: int = 0
    """The newest verdict that releases."""

    def held(self, feed: str) -> bool:
        return bool(self.holds & {feed, ALL_FEEDS})


class Base(RuleBasedStateMachine):
    """The ledger, the truth, and what must hold between them."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.truth = Truth(RULES.grace, RULES.give_up_after, RULES.max_risk, askable=kit.FEED)
        self.seen = Seen()
        self.sound = True
        self.do(self.world.begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        self.sound = False  # until the laws were looked at
        return self.world.loop.run_until_complete(asyncio.wait_for(work, STEP_SECONDS))

    @property
    def db(self) -> asyncpg.Pool:
        return self.world.db

    def teardown(self) -> None:
        try:
            if self.sound:
                self.do(self.end())
        finally:
            self.do(self.clean_up())

    async def end(self) -> None:
        """Bring the example to its end, and look at what it came to."""

    @property
    def passing(self) -> bool:
        """Whether a pass stands still."""
        return False

    async def all_die(self) -> None:
        """End what was begun on the connections, uncommitted."""

    async def clean_up(self) -> None:
        """End what was begun on the connections, which the next example uses."""
        await self.all_die()
        self.world.seen.update([f"taken twice: {cause}" for cause in self.truth.causes])
        self.world.seen.update([f"released: {reason}" for reason in self.truth.reasons])
        self.world.seen.update([f"ended {row['state']}" for row in self.seen.rows.values()])

    # The laws

    @invariant()
    def the_laws_hold(self) -> None:
        self.do(self.observe())
        self.sound = True

    async def observe(self) -> None:
        before, clock = self.seen, self.world.clock
        found = await clock.fetch(ROWS)
        rows = {KEY_OF[row["wire_key"]]: row for row in found if row["wire_key"] in KEY_OF}
        assert len(rows) == len(found), "a row came from nowhere"
        releases = await clock.fetch(RELEASES, before.last_release)
        last = releases[-1]["id"] if releases else before.last_release
        holds = await clock.fetch(HOLDS)
        self.seen = Seen(rows, frozenset(hold["feed"] for hold in holds), any(hold["suspect"] for hold in holds), last)
        for release in releases:
            await self.check_release(release, held=before.held(release["feed"]))
        for key, row in rows.items():
            self.check_row(key, row)
        for key, row in before.rows.items():
            self.check_change(row, rows.get(key))

    async def check_release(self, release: asyncpg.Record, *, held: bool) -> None:
        key = KEY_OF[release["wire_key"]]
        assert not (held and release["pass"]), f"a pass released {key} over a hold"
        assert release["reason"] == "not_sent" or not await self.said(key), f"{key} was released over evidence"
        if release["fence"] is None:
            assert release["reason"] == "operator", f"{key} was released, and nobody had claimed it"
            return  # a person had failed it before
        self.truth.released(key, release["fence"], Release(release["reason"], release["risk"], release["who"]))

    def check_row(self, key: str, row: asyncpg.Record) -> None:
        if row["state"] == "claimed":
            self.truth.runs(key, row["fence"])
        if row["state"] == "claimed" or row["released_at"]:
            assert row["next_check_at"], f"nobody looks at {key} again"
        if row["state"] == "sent":
            assert self.truth.of(key) or key in self.truth.said_sent, f"{key} is sent, and nobody took it"

    def check_change(self, before: asyncpg.Record, after: asyncpg.Record | None) -> None:
        assert after, f"the row of {before['send_key']} is gone"
        assert before["state"] != "sent" or after["state"] == "sent", f"{before['send_key']} was sent, and no longer is"

    async def said(self, key: str, feed: str = kit.FEED) -> list[str]:
        """What was heard of a send, as far as it is committed. `feed`: to which it goes, where it has no row."""
        rows = await self.world.clock.fetch(SAID, wire_key(key), feed, self.truth.known_ids, key)
        return [row["testimony"] for row in rows]

    async def check_evidence_has_moved_rows(self) -> None:
        left = await self.world.clock.fetch(IGNORED)
        assert not left, f"evidence was ignored: {left}"
