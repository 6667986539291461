# SPDX-License-Identifier: Apache-2.0
"""The laws, held over the real ledger by a machine that does everything to it in every order.

Besides what the database says the machine keeps only the truth that no party of ours sees: what the provider accepted
(`state_machine_truth`). What each party may do stands in a module of its own. The orders are other ones in each run;
STATE_MACHINE_EXAMPLES=1000 tries many (`make laws-proof`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import asyncpg
import kit
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from state_machine_application import Application
from state_machine_base import SENDS
from state_machine_crowds import Crowds
from state_machine_daemon import Daemon
from state_machine_feed import Feed
from state_machine_operators import Operators
from state_machine_passes import Passes
from state_machine_senders import FEW
from state_machine_truth import WINDOW
from state_machine_world import FEEDS, World, hasty_api, opened_world
from structlog.testing import capture_logs

from reconciler.database.postgres import EmbeddedPostgres
from reconciler.passes import reconcile, second_witness
from reconciler.passes.feeds import ALL_FEEDS, resume
from reconciler.rule.policy import OnUnknown
from reconciler.upkeep import forgetting

EXAMPLES: Final = int(os.environ.get("STATE_MACHINE_EXAMPLES", "40"))
STEPS: Final = 30 if EXAMPLES < 1000 else 60
"""Whoever tries many orders tries longer ones."""

UNTOLD: Final = "SELECT what FROM release_outbox WHERE num_nonnulls(delivered_at, cancelled_at) = 0"
ALL_DUE: Final = "UPDATE send_log SET next_check_at = clock_timestamp() WHERE next_check_at IS NOT NULL"


class Ledger(Crowds, Feed, Passes, Daemon, Application, Operators):
    """Senders, providers, receivers, passes, operators and an application over four sends, backups, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.wish: OnUnknown = "hold"

    @initialize(wish=st.sampled_from(["hold", "fail"]))
    def what_becomes_of_the_undecidable_is_chosen(self, wish: OnUnknown) -> None:
        self.wish = wish

    async def end(self) -> None:
        """Whatever happened: what was testified of is sent, and the rest ends in a verdict or is visibly held."""
        await self.end_slow_event()
        await self.end_frozen_pass()
        await self.observe()
        for feed in (*FEEDS, ALL_FEEDS):
            await self.on_one_connection(resume, feed)
        await self.observe()
        await self.let_time_pass(SENDS, timedelta(days=2))
        await self.world.clock.execute(ALL_DUE)
        await self.passed(self.wish)
        await self.observe()
        await self.check_the_application_knows()
        for key, row in self.seen.rows.items():
            if row["state"] == "claimed":
                assert row["held_reason"], f"{key} is neither decided nor held: {row}"
                assert self.wish == "hold", f"{key} can't be decided: {row}"
            if row["released_at"] and not row["held_reason"]:
                answer = await kit.claim(self.db, key, row["feed"], fingerprint="f")
                may_be = {"claimed", *(["capped"] if self.truth.cap == FEW else [])}
                assert answer["outcome"] in may_be, f"{key} was released, and is not given out: {answer}"


@pytest.fixture(scope="session")
def machine_dsn(pg: EmbeddedPostgres, template: str) -> str:
    """A database of the machine's own."""
    name = "state_machine"
    asyncio.run(_create(pg.dsn(), name, template))
    return pg.dsn(name)


async def _create(dsn: str, name: str, template: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
    await connection.close()


@pytest.fixture
def world(machine_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The connections to it, on a loop that goes on only while a step is made. Nobody pauses out of politeness."""
    monkeypatch.setattr(forgetting, "PAUSE", 0.0)
    monkeypatch.setattr(second_witness, "open_api", hasty_api)
    monkeypatch.setattr(reconcile, "AT_ONCE", 1)  # or what a pass does before it stands still is another each time
    loop = asyncio.new_event_loop()
    opened = opened_world(machine_dsn)
    yield loop.run_until_complete(opened.__aenter__())
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()


@pytest.mark.timeout(0)  # each step has its own limit, and to find the shortest order that fails takes minutes
def test_the_laws_hold_in_every_order_of_things(world: World) -> None:
    machine = type("LedgerHere", (Ledger,), {"world": world})
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    with capture_logs():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=health
            ),
        )


# What it found


async def test_a_hold_that_outlasts_a_same_key_release_is_told(db: asyncpg.Pool) -> None:
    """The window of the key is over while the application can't be reached: it is still to hear of the hold."""
    await db.execute("UPDATE installation SET tell = '{held}'")
    await kit.old_claim(db, "order:1", timedelta(minutes=5), fingerprint="f")
    await kit.reconcile(db, key_window=WINDOW)
    await kit.event(db, "order:1", "none", kind="unknown")
    for age in (timedelta(minutes=2), timedelta(days=2)):
        await kit.make_older(db, "order:1", age)
        await kit.reconcile(db, key_window=WINDOW)
        assert (await kit.row(db, "order:1"))["held_reason"] == "unknown_event"
        assert len(await db.fetch(UNTOLD)) == 1
    assert await kit.state(db, "order:1") == "claimed"
