# SPDX-License-Identifier: Apache-2.0
"""The laws, held over the real ledger by a machine that does everything to it in every order.

Besides what the database says the machine keeps only the truth that no party of ours sees: what the provider accepted.
The orders are other ones in each run; STATE_MACHINE_EXAMPLES=1000 tries many (`make laws-proof`).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import asyncpg
import kit
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reconciler.feeds import pause, resume
from reconciler.postgres import EmbeddedPostgres

T = TypeVar("T")
EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "40"))
WINDOWS = st.sampled_from([None, timedelta(days=1)])
KEYS = st.sampled_from(["order:1", "order:2", "order:3"])
TABLES = ("verdict", "shadow_verdict", "pass", "release_outbox", "duplicate", "look_up")


class Ledger(RuleBasedStateMachine):
    """Senders, a provider, a receiver, passes and operators over three sends."""

    dsn: str
    attempts = Bundle("attempts")
    """(key, fence) of granted claims whose sender has not submitted yet."""
    answers = Bundle("answers")
    """(key, fence, message id) of submissions that the provider accepted."""
    in_flight = Bundle("in_flight")
    """Attempts that were submitted, and how that ended is not reported yet."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.db, self.slow = self.do(self.connect())
        self.open_event: asyncpg.transaction.Transaction | None = None
        self.granted: Counter[str] = Counter()
        self.confirmed: set[str] = set()
        self.was_sent: set[str] = set()
        self.paused = False
        self.released_before_pause = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def connect(self) -> tuple[asyncpg.Pool, asyncpg.Connection]:
        pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=2)
        for table in TABLES:
            await pool.execute(f"DELETE FROM {table}")  # noqa: S608 - own names; TRUNCATE takes 100 times as long
        await pool.execute("DELETE FROM send_log WHERE send_key NOT LIKE 'neighbour:%'")
        await pool.execute("DELETE FROM provider_event WHERE message_id NOT LIKE 'n-%'")
        await pool.execute("DELETE FROM feed_state WHERE feed <> '*'")
        await pool.execute("UPDATE feed_state SET paused_at = NULL, outcomes_until = NULL")
        return pool, await asyncpg.connect(self.dsn)

    def teardown(self) -> None:
        self.commit_slow_event()
        self.do(self.end())
        self.do(self.db.close())
        self.do(self.slow.close())
        self.loop.close()

    async def end(self) -> None:
        """Whatever happened, two passes later everything that was testified of is sent."""
        await kit.reconcile(self.db)
        await self.check_evidence_has_moved_rows()

    # Senders

    @rule(target=attempts, key=KEYS)
    def claim(self, key: str) -> Any:
        said_before = self.do(self.testimonies(key))
        answer = self.do(kit.claim(self.db, key, recipient="ada@example.org"))
        if answer["outcome"] != "claimed":
            return (key, None)
        assert not said_before, "a claim was given out over committed evidence"
        self.granted[key] += 1
        return (key, answer["fence"])

    @rule(target=in_flight, attempt=consumes(attempts))
    def submit(self, attempt: tuple[str, int | None]) -> Any:
        return attempt

    @rule(target=answers, attempt=consumes(in_flight))
    def the_provider_accepts(self, attempt: tuple[str, int | None]) -> Any:
        key, fence = attempt
        return (key, fence, f"m-{fence}")

    @rule(answer=answers)
    def the_answer_arrives_perhaps_late_perhaps_again(self, answer: tuple[str, int | None, str]) -> None:
        key, fence, message_id = answer
        if fence is not None:
            assert self.do(kit.confirm(self.db, key, fence, message_id)) in {"sent", "sent_late", "duplicate"}
            assert self.do(kit.state(self.db, key)) == "sent", "what a sender knows was lost"

    @rule(attempt=consumes(in_flight), not_sent=st.sampled_from([True, False, None]))
    def the_submission_fails(self, attempt: tuple[str, int | None], not_sent: bool | None) -> None:
        key, fence = attempt
        if fence is not None:
            self.do(kit.fail(self.db, key, fence, not_sent=not_sent))

    # The feed

    @rule(answer=answers, kind=st.sampled_from(["queued", "delivered", "bounced"]))
    def an_event_arrives_perhaps_again(self, answer: tuple[str, int | None, str], kind: str) -> None:
        key, fence, message_id = answer
        if fence is not None:
            self.do(kit.event(self.db, key, "accepted", kind=kind, message_id=message_id))

    @rule(key=KEYS, testimony=st.sampled_from(["rejected", "none"]))
    def a_contradictory_or_unknown_event_arrives(self, key: str, testimony: str) -> None:
        self.do(kit.event(self.db, key, testimony, kind="failed", message_id="m-x", event_id=testimony))

    @precondition(lambda self: self.open_event is None)
    @rule(answer=answers)
    def an_event_is_stored_but_not_committed(self, answer: tuple[str, int | None, str]) -> None:
        key, fence, message_id = answer
        if fence is not None:
            self.open_event = self.slow.transaction()
            self.do(self.open_event.start())
            self.do(kit.event(self.slow, key, message_id=message_id, event_id="slow"))

    @precondition(lambda self: self.open_event is not None)
    @rule()
    def the_slow_event_commits(self) -> None:
        self.commit_slow_event()

    def commit_slow_event(self) -> None:
        if self.open_event is not None:
            self.do(self.open_event.commit())
            self.open_event = None

    # Time, passes, operators

    @rule(key=KEYS, age=st.sampled_from([timedelta(minutes=2), timedelta(hours=2), timedelta(days=2)]))
    def time_passes(self, key: str, age: timedelta) -> None:
        self.do(kit.make_older(self.db, key, age))

    @rule(
        key_window=st.sampled_from([None, timedelta(days=1)]), on_unknown=st.sampled_from(["hold", "fail", "release"])
    )
    def a_pass_runs(self, key_window: timedelta | None, on_unknown: Any) -> None:
        rules = replace(kit.RULES, on_unknown=on_unknown)
        self.do(kit.reconcile(self.db, rules, key_window=key_window))
        self.do(self.check_evidence_has_moved_rows())

    @rule(key=KEYS, verb=st.sampled_from(["released", "sent", "failed"]))
    def an_operator_acts(self, key: str, verb: str) -> None:
        said = self.do(self.testimonies(key))
        if verb == "released":
            outcome = self.do(kit.call(self.db, "operator_release", key, "note", "me"))["outcome"]
            assert outcome != "released" or not said, "an operator's release went over evidence"
        else:
            self.do(kit.call(self.db, "operator_decide", key, verb, "note", "me"))

    @rule()
    def pause(self) -> None:
        self.do(self.on_one_connection(pause))
        self.released_before_pause = self.do(self.releases())
        self.paused = True

    @rule()
    def resume(self) -> None:
        self.do(self.on_one_connection(resume))
        self.paused = False

    async def on_one_connection(self, verb: Any) -> None:
        async with self.db.acquire() as connection:
            await verb(connection, kit.FEED, "incident", "me")

    # Invariants

    @invariant()
    def sent_is_never_left(self) -> None:
        sent = {r["wire_key"] for r in self.do(self.db.fetch("SELECT wire_key FROM send_log WHERE state = 'sent'"))}
        assert self.was_sent <= sent
        self.was_sent = sent

    @invariant()
    def nothing_is_released_while_paused(self) -> None:
        if self.paused:
            assert self.do(self.releases()) == self.released_before_pause

    @invariant()
    def every_further_claim_was_released_first(self) -> None:
        for key, claims in self.granted.items():
            released = sum(said.startswith("released:") for said in self.do(kit.reasons(self.db, key)))
            assert claims <= 1 + released

    @invariant()
    def every_open_row_is_looked_at_again(self) -> None:
        forgotten = self.do(
            self.db.fetchval(
                "SELECT count(*) FROM send_log"
                " WHERE (state = 'claimed' OR released_at IS NOT NULL) AND next_check_at IS NULL"
            )
        )
        assert forgotten == 0

    async def testimonies(self, key: str) -> list[str]:
        rows = await self.db.fetch("SELECT testimony FROM provider_event WHERE wire_key = wire_key($1)", key)
        return [r["testimony"] for r in rows]

    async def releases(self) -> int:
        return await self.db.fetchval("SELECT count(*) FROM verdict WHERE action = 'released' AND who = 'test'")

    async def check_evidence_has_moved_rows(self) -> None:
        left = await self.db.fetch("""
            SELECT l.wire_key, l.state FROM send_log l
            WHERE l.state <> 'sent'
              AND (l.next_check_at IS NOT NULL OR l.state = 'failed' AND l.failed_at > now() - interval '6 days')
              AND EXISTS (SELECT FROM provider_event e WHERE e.wire_key = l.wire_key AND e.testimony = 'accepted')
        """)
        assert not left, f"evidence was ignored: {left}"


@pytest.fixture(scope="session")
def machine_dsn(pg: EmbeddedPostgres, template: str) -> str:
    """A database of the machine's own: its examples delete rows, which is a hundred times as quick as a new one.

    Its feed can speak of absence.
    """
    name = "state_machine"
    asyncio.run(_create(pg.dsn(), name, template))
    asyncio.run(_fill(pg.dsn(name)))
    return pg.dsn(name)


async def _create(dsn: str, name: str, template: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    await connection.close()


async def _fill(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await kit.heard_neighbours(connection)
    await connection.close()


def test_the_laws_hold_in_every_order_of_things(machine_dsn: str) -> None:
    machine = type("LedgerHere", (Ledger,), {"dsn": machine_dsn})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
