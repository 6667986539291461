# SPDX-License-Identifier: Apache-2.0
"""A small simulation: the laws under faults of every kind. All of it: `python -m tests.simulation`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import uuid
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
from simulation.audit import ALWAYS, IN_THE_END, Got, Risk, broken, cause, losses, untrue
from simulation.course import FROZE, INSIDE, course, fates, tell
from simulation.life import connected, parties, prepare
from simulation.report import lines
from simulation.world import BEGIN, GRACE, PLACES, World

from webhooks.event import Testimony

ROOT = Path(__file__).parent.parent
SENDS, SEED = 2_000, 5


async def live(dsn, world, *ticks):
    """Live on, each time with new connections and parties, for so many ticks; None: to the end."""
    for n in ticks:
        async with parties(dsn, world) as life:
            over = await life.run(n)
    return over


@pytest.fixture(scope="module")
def lived(pg):
    """The URL of a database in which a small world was lived through to its end, interrupted once."""
    name = f"t_{uuid.uuid4().hex[:16]}"

    async def all_of_it():
        async with connected(pg.dsn()) as connection:
            await connection.execute(f"CREATE DATABASE {name}")
        await prepare(pg.dsn(name), SENDS, SEED)
        assert await live(pg.dsn(name), World(SENDS, SEED), 20, None)

    asyncio.run(all_of_it())
    yield pg.dsn(name)
    asyncio.run(drop(pg.dsn(), name))


async def drop(dsn, name):
    async with connected(dsn) as connection:
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def after(lived):
    """A connection to that database; what is done over it is undone."""
    async with connected(lived) as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield connection
        await transaction.rollback()


async def test_all_promises_are_kept_in_a_small_world_that_was_interrupted_once(after):
    assert await broken(after, over=True) == []
    assert await losses(after) == 0
    made = await after.fetchval("SELECT count(*) FROM send_log WHERE state = 'sent'")
    assert 0.9 * SENDS < made < SENDS


async def test_the_report_tells_what_befell_the_sends_and_what_became_of_them(after):
    text = "\n".join(await lines(after, World(SENDS, SEED), 0))
    assert text.startswith(f"{SENDS:,} sends, seed {SEED}: ")
    for name in (
        *("answered", "429", "refused", "timed out, taken", "timed out, not taken", "sent (sender)", "sent (feed)"),
        *("passes", "pauses", "connections cut", "pass released:same_key_retry", "claim: in_flight", "confirm: sent"),
    ):
        assert re.search(rf"^  {re.escape(name)} +[1-9]", text, re.MULTILINE), f"{name} is missing in\n{text}"
    assert "losses: 0" in text


BROKEN_BY = {
    "no send is given out twice without a release between": "DELETE FROM verdict WHERE action = 'released'",
    "no send is given out over evidence that it was accepted": """
        UPDATE provider_event SET received_at = '2026-01-31 18:00+00' WHERE source = 'sender'
    """,
    "no pass releases a send of which anything was heard": """
        INSERT INTO verdict (wire_key, attempt, action, reason, source, who, decided_at)
        SELECT wire_key, 1, 'released', 'absent', 'inferred', 'pass 0', '2026-03-01' FROM send_log WHERE state = 'sent'
        ORDER BY wire_key LIMIT 1
    """,
    "nothing is released once `pause` has returned": """
        UPDATE verdict v SET decided_at = p.since + interval '1 s', reason = 'same_key_retry' FROM truth.paused p
        WHERE v.feed = p.feed AND v.action = 'released'
    """,
    "nothing that a pass released is given out while its feed is paused": """
        INSERT INTO truth.paused VALUES ('keyed', '-infinity', 'infinity')
    """,
    "the silence of a feed that never speaks releases nothing": """
        UPDATE verdict SET feed = 'deaf' , reason = 'absent' WHERE action = 'released'
    """,
    "no more is released within an hour than the budget allows": """
        INSERT INTO verdict (wire_key, attempt, action, reason, source, who, feed, risk)
        SELECT 'x', 1, 'released', 'absent', 'inferred', 'pass 0', 'plain', 0 FROM generate_series(1, 61)
    """,
    "every duplicate has a cause that is named": """
        INSERT INTO truth.message
        SELECT wire_key, fence, 1, 'again', taken_at, true FROM truth.message WHERE wire_key =
            (SELECT min(wire_key) FROM truth.granted WHERE how = 'answered')
    """,
    "a release states how likely it duplicates": """
        WITH released AS (
            UPDATE verdict SET reason = 'absent', risk = 0.001 WHERE reason = 'same_key_retry' RETURNING *)
        INSERT INTO truth.message SELECT wire_key, fence, 9, 'm', claimed_at, true FROM released
    """,
    "nothing is called sent that no provider took": """
        DELETE FROM truth.message WHERE wire_key = (SELECT min(wire_key) FROM send_log WHERE state = 'sent')
    """,
    "whatever is proved accepted becomes sent": """
        UPDATE send_log SET state = 'failed', sent_at = NULL, failed_at = sent_at
        WHERE wire_key = (SELECT min(wire_key) FROM send_log WHERE state = 'sent')
    """,
    "every send ends in a verdict, or is held and says why": """
        DELETE FROM send_log WHERE wire_key = (SELECT min(wire_key) FROM send_log WHERE state = 'sent')
    """,
    "what was acknowledged is stored, and once": """
        DELETE FROM provider_event WHERE (wire_key, event_id) =
            (SELECT wire_key, event_id FROM provider_event WHERE source = 'http' ORDER BY 1, 2 LIMIT 1)
    """,
}


@pytest.mark.parametrize("promise", BROKEN_BY)
async def test_a_promise_that_is_broken_is_found(after, promise):
    await after.execute(BROKEN_BY[promise])
    assert any(sentence.startswith(f"BROKEN: {promise}") for sentence in await broken(after, over=True))


async def test_a_claim_that_gives_out_what_another_has_makes_the_simulation_fail(empty_dsn):
    world = World(400, SEED)
    await prepare(empty_dsn, world.sends, world.seed)
    async with connected(empty_dsn) as connection:
        await replace_in(connection, "send_standing", "r.state <> 'pending'", "r.state IN ('sent', 'failed')")
        await live(empty_dsn, world, 10)
        (first, *_) = await broken(connection, over=False)
    assert first.startswith("BROKEN: no send is given out twice without a release between")
    assert re.search(r"attempts: 1 .*, 2 ", first), "it names a send and its attempts"


async def replace_in(connection: asyncpg.Connection, function: str, old: str, new: str) -> None:
    definition = await connection.fetchval("SELECT pg_get_functiondef($1::text::regproc)", function)
    assert old in definition
    await connection.execute(definition.replace(old, new))


def test_the_command_prints_its_seed_and_ends_with_the_number_of_broken_promises(tmp_path):
    command = [sys.executable, "-m", "tests.simulation", "--sends", "40", "--seed", "7"]
    where = ["--data-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, *where], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("40 sends, seed 7, from tick 0\n")
    assert done.stdout.endswith("0 promises broken (seed 7)\n")
    again = subprocess.run([*command, *where, "--resume"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    assert "holds no run to go on with" in again.stderr


def test_the_page_about_it_names_every_feed_and_promises_what_is_looked_at():
    page = (ROOT / "docs" / "simulation.md").read_text("utf-8")
    rows = set(re.findall(r"^\| ([a-z]+) +\|", page, re.MULTILINE))
    assert {place.name for place in PLACES} <= rows
    assert [promise for promise in BROKEN_BY if f"* {promise}" not in page] == []
    laws = {law.promise for law in (*ALWAYS, *IN_THE_END)}
    assert laws <= BROKEN_BY.keys(), "each is broken on purpose here"


# The world, and what is concluded


def test_the_same_seed_makes_the_same_world():
    one, same, other = World(5_000, 1), World(5_000, 1), World(5_000, 2)
    assert one.spells == same.spells != other.spells
    assert one.wishes(3) == same.wishes(3) != other.wishes(3)
    assert sum(len(one.wishes(minute)) for minute in range(one.minutes)) == 5_000
    assert one.wishes(one.minutes) == []
    assert course(one.dice("a"), fates(None), 60, 900) == course(same.dice("a"), fates(None), 60, 900)


def test_every_spell_that_a_feed_has_comes_and_ends_before_the_last_send():
    world = World(2_000, 3)
    wanted = {(weather, place.name) for place in PLACES for weather in place.spells} | {("no passes", "*")}
    assert {(spell.weather, spell.where) for spell in world.spells} == wanted
    assert all(0 <= spell.begin < spell.end <= world.minutes for spell in world.spells)


def test_as_many_ambiguous_attempts_are_taken_as_not():
    world = World(2_000, 1)
    drawn = [course(world.dice(n), fates(None), 60, 900) for n in range(20_000)]
    reported = [one for one in drawn if one.says == "open"]
    assert 0.02 < len(reported) / len(drawn) < 0.05
    assert 0.4 < sum(one.taken is not None for one in reported) / len(reported) < 0.6


def test_of_a_message_that_is_suppressed_only_the_rejection_is_told():
    dice = World(1, 1).dice("telling")
    assert [one.testimony for one in tell(dice, suppressed=True)] == [Testimony.REJECTED]
    assert any(one.again for _ in range(200) for one in tell(dice, suppressed=False))


def got(fence=1, how="timed out, taken", taken=timedelta(0), released="absent", released_at=timedelta(hours=1)):
    at = BEGIN + released_at if released else None
    return Got("key", fence, BEGIN + taken, how, "plain", BEGIN + timedelta(minutes=1), released, at)


def test_a_duplicate_is_due_to_what_released_the_earlier_attempt_or_to_what_befell_it():
    late = timedelta(minutes=1) + GRACE + timedelta(hours=2)
    second = got(fence=2)
    assert cause(got(), second) == "absent"
    assert cause(got(released="operator"), second) == "operator"
    assert cause(got(how=FROZE, taken=late), second) == FROZE
    assert cause(got(how=FROZE, taken=timedelta(minutes=5)), second) == "absent", "it was in time, and not heard of"
    assert cause(got(released=None), second) == "no release"
    assert cause(got(how=INSIDE), got(how=INSIDE)) == INSIDE


def test_a_stated_risk_is_untrue_only_far_beyond_chance():
    assert untrue(Risk("plain", "absent", 1_000, 3.0, 7)) == []
    (sentence,) = untrue(Risk("plain", "absent", 1_000, 3.0, 20))
    assert "of 1,000 releases (absent) on plain 20 were wrong, 3.00 were stated" in sentence
    assert untrue(Risk("plain", "gave_up", 10, 5.0, 10)) == []
    assert untrue(Risk("plain", "gave_up", 2_092, 1452.45, 479)) == []
    assert untrue(Risk("plain", "absent", 5, 0.0, 1))
