# SPDX-License-Identifier: Apache-2.0
"""What a statement reads follows from what it is asked about, never from the size of the log.

The hot statements run over a hundred thousand sends and their events of three months, and over an eighth of that:
through the indexes that are meant for it, whether the server plans them for their arguments or once for all, never from
end to end. To hold one more, let a job of `plans_jobs` run it, and say here what it may read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import asyncpg
import pytest
from plans_fill import FEEDS, HELD_BACK, OF_CAMPAIGN, UNDECIDED, fill
from plans_jobs import JOBS, OWN, PAGE, Job
from plans_kit import CUSTOM, GENERIC, ROOT, Reading, constants, watched

from reconciler.database.postgres import EmbeddedPostgres
from reconciler.insight import duplicates
from reconciler.passes import histories, outcomes

SMALL, LARGE = 4500, 92_000
"""Sends beside the recent ones; the large log has eight times the sends of the small one in all."""

MORE: Final = 3.0
"""How many times the pages the large log may cost: its indexes are deeper, and more of its months hold something."""

SAMPLE: Final = histories.SAMPLE
SETTLED: Final = 5000
MONTHS: Final = 6
A_RANGE: Final = 128 * 50
"""Events of one range of the index by the time of storing. Of each month the last range is read, whatever is asked."""
WATCHED: Final = UNDECIDED + 10  # the server rounds
MINUTES: Final = 24 * 60
QUESTIONS: Final = 60
MANY: Final = 50


@dataclass(frozen=True, slots=True)
class Hold:
    """What a statement may read."""

    rows: int
    """At most so many of large tables, each time that it runs."""
    through: str = ""
    """The indexes of large tables that it goes through, and no others."""
    steady: bool = True
    """Whether the size of the log makes no difference here. False: in the small one there is less to be found."""


BY_ID: Final = "send_log_known_message send_log_provider_message"
HEARD: Final = f"provider_event_pkey send_log_pkey verdict_pkey {BY_ID}"
"""Looks for what was said of sends: by key, or where an event has none by its message id."""
TOLD: Final = "release_outbox_pkey"
"""Looks for what was to be told of a row that moves."""
MOVED: Final = f"send_log_pkey provider_event_pkey {TOLD}"
STORED: Final = "provider_event_received"
ASKED: Final = "asked_again_pkey"

HOLDS: Final = {
    # A pass: its pages, what they are judged by, and what becomes of them.
    "passes.evidence.SETTLE_WATCHED": Hold(2 * SETTLED, f"send_log_due {HEARD} {TOLD}"),
    "passes.evidence.SETTLE_FAILED": Hold(2 * SETTLED, f"send_log_failed {HEARD} {TOLD}"),
    "passes.ledger.TAKE_BACK": Hold(2 * UNDECIDED, f"send_log_due send_log_pkey {TOLD}"),
    "passes.ledger.WATCHED_KEYS": Hold(PAGE, "send_log_due"),
    "passes.ledger.TAKE_DUE": Hold(2 * PAGE, "send_log_due"),
    "passes.ledger.READ_ROWS": Hold(3 * PAGE, HEARD),
    "passes.ledger.UNJUDGED_ATTEMPTS": Hold(2 * PAGE, "verdict_pkey"),
    "passes.feeds.FEED_HEALTH": Hold(len(FEEDS) * MINUTES, "feed_delivery_pkey"),
    "passes.histories.CLASSES": Hold(10, "send_log_controls"),
    "passes.histories.DAYS_CONTROLS": Hold(SAMPLE + 1, "send_log_controls"),
    "passes.histories.NEWEST_CONTROLS": Hold(4 * SAMPLE, "send_log_controls provider_event_pkey"),
    "passes.histories.SPREAD_CONTROLS": Hold(4 * SAMPLE, "send_log_controls provider_event_pkey"),
    "passes.histories.PROVED": Hold(
        5 * SAMPLE, "send_log_proved send_log_pkey provider_event_pkey verdict_pkey", steady=False
    ),
    "passes.histories.SHARES": Hold(96 * 300, "send_log_claims send_log_ambiguous"),
    "passes.histories.CAUSES": Hold(3 * SAMPLE, "send_log_ambiguous verdict_pkey", steady=False),
    "passes.neighbours.NEIGHBOURS": Hold(75 * PAGE, "send_log_controls"),
    "passes.neighbours.HEARD": Hold(50 * PAGE, "provider_event_pkey"),
    "passes.neighbours.DENSITY": Hold(500 * PAGE, "send_log_claims"),
    "passes.neighbours.AMBIGUOUS": Hold(2 * UNDECIDED, "send_log_ambiguous"),
    "passes.ledger.POSTPONE": Hold(2 * PAGE, f"send_log_pkey {TOLD}"),
    "passes.ledger.FAIL": Hold(2 * PAGE, f"{HEARD} {TOLD}"),
    "passes.shadow.SHADOW": Hold(2 * PAGE, "send_log_pkey shadow_verdict_pkey"),
    "passes.releasing.USAGE": Hold(3 * PAGE * len(FEEDS), "send_log_claims send_log_pkey verdict_released"),
    "passes.releasing.RELEASE": Hold(2 * PAGE, f"{HEARD} {TOLD}"),
    "passes.outcomes.STORED": Hold(MONTHS * A_RANGE, STORED, steady=False),
    "passes.outcomes.FOLLOW": Hold(
        MONTHS * A_RANGE, f"{STORED} provider_event_pkey send_log_pkey {BY_ID}", steady=False
    ),
    "passes.lookup.QUESTIONS": Hold(4 * QUESTIONS, "send_log_pkey verdict_pkey look_up_pkey"),
    "passes.lookup.CONTROLS": Hold(200 * QUESTIONS, "send_log_controls send_log_pkey"),
    "passes.second_witness.READ_RESTS": Hold(10 * QUESTIONS * len(FEEDS), "look_up_asked"),
    "passes.second_witness.RESERVE": Hold(20 * QUESTIONS, "look_up_asked look_up_pkey"),
    "passes.lookup.NOTE_ANSWERS": Hold(QUESTIONS, "look_up_pkey"),
    # The daemon's watch, its figures, and whoever asks how it stands.
    "passes.feeds.REFUSED_TOO_OFTEN": Hold(len(FEEDS) * 30, "feed_delivery_pkey"),
    "insight.duplicates.SPOKEN_OF": Hold(MONTHS * A_RANGE, f"{STORED} send_log_pkey", steady=False),
    "insight.duplicates.GIVEN_OUT_AGAIN": Hold(PAGE, "send_log_given_out_again"),
    "insight.duplicates.ACCEPTANCES": Hold(8 * PAGE, "send_log_pkey provider_event_pkey verdict_pkey"),
    "insight.reports.VANISHED": Hold(4 * 24 * 100 * len(FEEDS), "send_log_claims provider_event_pkey"),
    "metrics.UNDECIDED": Hold(WATCHED, "send_log_due"),
    "metrics.DELIVERED": Hold(2 * len(FEEDS) * MINUTES, "feed_delivery_pkey", steady=False),
    "serving.works.NEWLY_HELD": Hold(WATCHED, "send_log_due pass_started"),
    "insight.status.UNDECIDED": Hold(WATCHED, "send_log_due"),
    "insight.status.FEEDS": Hold(
        2 * len(FEEDS) * MINUTES, "feed_delivery_pkey send_log_claims send_log_proved verdict_released", steady=False
    ),
    "insight.status.REFUSED": Hold(2 * len(FEEDS) * MINUTES, "feed_delivery_pkey", steady=False),
    "insight.status.FOREIGN": Hold(2 * 20_000 + MONTHS * A_RANGE, f"{STORED} send_log_pkey"),
    "insight.status.LAST_PASS": Hold(10, "pass_started"),
    "outbox.delivery.STATUS": Hold(WATCHED, "release_outbox_due release_outbox_dead send_log_pkey"),
    "cli.operate.HELD_KEYS": Hold(WATCHED, "send_log_due"),
    "cli.root.SENDS_NAME_FEED": Hold(WATCHED, "send_log_due"),
    "ui.claims.UNDECIDED": Hold(PAGE, "send_log_due"),
    "ui.claims.FAILED": Hold(200, "send_log_failed"),
    "ui.claims.OF_A_SEND": Hold(1, "send_log_pkey"),
    "ui.actions.SEEN": Hold(1, "send_log_pkey"),
    "insight.why.ROW": Hold(5, "send_log_pkey send_log_campaign"),
    "insight.why.EVENTS": Hold(10, "provider_event_pkey"),
    "insight.why.VERDICTS": Hold(10, "verdict_pkey"),
    "insight.why.SHADOW_VERDICTS": Hold(10, "shadow_verdict_pkey"),
    "insight.why.LOOK_UPS": Hold(10, "look_up_pkey"),
    "insight.why.TELLINGS": Hold(10, TOLD),
    "cli.reconcile.SEND_STATE": Hold(1, "send_log_pkey"),
    "cli.reconcile.SEND_KEYS": Hold(1, "send_log_pkey"),
    # Telling the application.
    "outbox.delivery.LEASE_DUE": Hold(200, "release_outbox_due release_outbox_pkey send_log_pkey verdict_pkey"),
    "outbox.delivery.DELIVERED": Hold(2, TOLD),
    "outbox.delivery.CANCEL": Hold(2, TOLD),
    "outbox.delivery.NOT_DELIVERED": Hold(2, TOLD),
    "outbox.delivery.CLEAN": Hold(4 * PAGE, f"release_outbox_ended release_outbox_dead {TOLD}", steady=False),
    "outbox.delivery.UNDELIVERED": Hold(WATCHED, "release_outbox_due release_outbox_dead send_log_pkey"),
    "outbox.delivery.RETRY": Hold(2 * PAGE, "release_outbox_dead"),
    # What is done with is taken away.
    "sending.idempotency_store.DELETE_OLD": Hold(3 * PAGE, "idempotency_ended send_log_pkey"),
    "campaigns.caps.LIFT": Hold(4 * HELD_BACK, "send_log_capped"),
    "upkeep.retention.FEEDS": Hold(2 * len(FEEDS), "send_log_claims"),
    "upkeep.retention.CLAIMED_PAGE": Hold(PAGE, "send_log_claims", steady=False),
    "upkeep.retention.FAILED_PAGE": Hold(PAGE, "send_log_failed", steady=False),
    "upkeep.retention.UNCLAIMED_PAGE": Hold(2 * A_RANGE, "verdict_decided send_log_pkey", steady=False),
    "upkeep.retention.DELETE_SENDS": Hold(
        3 * PAGE, "send_log_pkey asked_again_pkey verdict_pkey shadow_verdict_pkey look_up_pkey", steady=False
    ),
    "upkeep.retention.DELETE_CANCELLED": Hold(2 * PAGE, f"send_log_campaign send_log_pkey provider_event_pkey {ASKED}"),
    "upkeep.retention.DELETE_UNDATED": Hold(PAGE, f"send_log_pkey {BY_ID}", steady=False),
    "upkeep.retention.DELETE_PASSES": Hold(PAGE, "pass_started pass_pkey", steady=False),
    "upkeep.retention.DELETE_DELIVERIES": Hold(PAGE, "feed_delivery_pkey"),
    "upkeep.retention.DELETE_DUPLICATES": Hold(PAGE, "send_log_pkey", steady=False),
    "upkeep.retention.DELETE_LOOK_UPS": Hold(PAGE, "look_up_asked look_up_pkey"),
    "upkeep.retention.DELETE_PLACES": Hold(PAGE, "cap_taken_last cap_taken_pkey"),
    # A sender's calls, with all that their functions look at.
    "api.routes.CLAIM": Hold(10, "send_log_pkey send_log_campaign provider_event_pkey verdict_pkey"),
    "api.routes.PEEK": Hold(5, "send_log_pkey provider_event_pkey idempotency_pkey"),
    "api.routes.STANDING": Hold(1, "send_log_pkey"),
    "api.routes.HURRY": Hold(1, "send_log_pkey"),
    "sending.idempotency_store.FIND": Hold(2, "idempotency_pkey send_log_pkey"),
    "sending.idempotency_store.TAKE_OVER": Hold(2, "idempotency_pkey send_log_pkey"),
    "guard_many.CLAIM": Hold(10 * MANY, HEARD),
    "guard.ENQUEUE": Hold(2),
    "api.routes.ENQUEUE": Hold(2, "send_log_pkey"),
    "filling.importing.ADOPT": Hold(5, "send_log_pkey provider_event_pkey"),
    "guard.CONFIRM": Hold(10, "send_log_pkey provider_event_pkey verdict_pkey"),
    "guard.FAIL": Hold(10, MOVED),
    "guard_many.CONFIRM": Hold(10 * MANY, "send_log_pkey provider_event_pkey"),
    "guard_many.FAIL": Hold(10 * MANY, MOVED),
    "passes.by_hand.RELEASE": Hold(10, MOVED),
    "passes.by_hand.DECIDE": Hold(10, MOVED),
    "send_claim_released": Hold(10 * MANY, f"send_log_released {MOVED}"),
    "send_claim_campaign": Hold(10 * MANY, "send_log_campaign send_log_pkey provider_event_pkey"),
    # Campaigns: at most all that is theirs.
    "campaign.STANDING": Hold(5, "send_log_campaign"),
    "campaign.STATUS": Hold(2 * OF_CAMPAIGN + UNDECIDED, "send_log_campaign send_log_capped send_log_controls"),
    "campaign.END_RELEASED": Hold(OF_CAMPAIGN, "send_log_campaign send_log_pkey"),
    "campaigns.load.ADD": Hold(0),
    # What the receiver stores reads nothing.
    "webhooks.writer.STORE_EVENTS": Hold(0),
}


EXCEPTIONS: Final = {
    "campaign.CLAIM": "commits; what it calls is held as send_claim_campaign",
    "guard.CLAIM": "commits; what it calls is held as api.routes.CLAIM",
    "guard.CLAIM_RELEASED": "commits; what it calls is held as send_claim_released",
    "serving.daemon.MAKE_PARTITIONS": "looks at the catalog",
    "insight.status.HASHED_RECIPIENTS": "looks at the catalog",
    "upkeep.retention_look.MONTHS": "looks at the catalog",
    "insight.status.MISSING_MONTHS": "looks at the catalog",
    "webhooks.writer.MONTHS": "looks at the catalog",
    "database.citus.*": "of distributed tables, whose plans are in docs/citus.md; others are asked whether they are",
    "demo.*": "over a database of its own, of some thousand sends",
    "trial.*": "over a schema of its own, of some sends",
    "insight.drift.*": "a report that a person asks for; at most 50,000 claims a feed",
    "insight.inventory.*": "a report that a person asks for; it goes through the index of claims (test_inventory)",
    "upkeep.forgetting.*": "a person's order; addresses have no index, so it reads everything",
    "database.migrate.SET_NAMESPACE": "once, before the first send",
    "insight.reports.DUPLICATES": "a report that a person asks for; at most a thousand",
    "insight.reports.UNKNOWN": "a report that a person asks for; at most 100,000 events",
    "filling.reparse.*": "a person's order; reads the time of storing from end to end, six hours at a time",
    "insight.reports.COUNT_EVENTS": "a report that a person asks for; at most 100,000 events",
    "passes.restore.*": "once, when a person resumes after a restore",
    "upkeep.retention.DROP_MONTH": "once a month; whether anybody needs a month of events is asked of all of them",
    "upkeep.retention_look.COUNT": "a dry run, which counts all that is old",
    "upkeep.retention_look.COUNT_MONTH": "a dry run, which counts all that is old",
    "database.grants.*": "what roles may do, said once by whoever migrates",
    "selftest.correlation.EVENTS": "a person waits for one message's events",
    "insight.what_if.*": "a person asks for it; reads the ambiguous sends of a span",
}
"""By name, or for a whole module or package."""

OF_THE_LOG: Final = re.compile(
    r"\b(send_log|provider_event|feed_event)\b|\b(FROM|JOIN) (control|ambiguous)\b"
    r"|\b(send|operator|campaign|provider_event)_\w+\("
)


UNORDERED: Final = {
    "database.citus.COUNTS": "whether there is anything at all",
    "passes.outcomes.FOLLOW": "whether more than one row fits",
}


@pytest.fixture(scope="module")
def logs(pg: EmbeddedPostgres, template: str) -> Iterator[dict[int, str]]:
    """The URLs of both logs, by their sizes."""
    if int((pg.data / "PG_VERSION").read_text()) < 18:
        pytest.skip("the plans are those of PostgreSQL 18")
    names = {size: f"log_of_{size}" for size in (SMALL, LARGE)}
    asyncio.run(_execute(pg, *(f"CREATE DATABASE {name} TEMPLATE {template}" for name in names.values())))
    for size, name in names.items():
        asyncio.run(fill(pg.dsn(name), size))
    yield {size: pg.dsn(name) for size, name in names.items()}
    asyncio.run(_execute(pg, *(f"DROP DATABASE {name} WITH (FORCE)" for name in names.values())))


async def _execute(pg: EmbeddedPostgres, *statements: str) -> None:
    connection = await asyncpg.connect(pg.dsn())
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def readings(dsn: str, job: Job, mode: str) -> dict[str, Reading]:
    """Run a job and return what each of its statements read: when it read most, through the indexes of all its runs."""
    async with watched(dsn, mode, OWN) as desk:
        await job(desk.connection, await desk.connection.fetchval("SELECT clock_timestamp()"))
    found = {}
    for name, runs in desk.readings.items():
        found[name] = max(runs, key=lambda run: run.rows)
        for run in runs:
            found[name].indexes |= run.indexes
            found[name].whole |= run.whole
    return found


def complaints(reading: Reading, hold: Hold | None, *, exactly: bool) -> Iterator[str]:
    """Yield what is wrong with what a statement read; the small log has smaller indexes, others may serve as well."""
    if hold is None:
        if reading.scans:
            yield "reads large tables, and HOLDS does not say how much of them"
        return
    if reading.rows > hold.rows:
        yield f"read {reading.rows:.0f} rows where {hold.rows} are enough"
    if reading.whole:
        yield f"reads all of {', '.join(sorted(reading.whole))}"
    if exactly and reading.indexes != set(hold.through.split()):
        yield f"goes through {' '.join(sorted(reading.indexes)) or 'no index'}, not through {hold.through or 'none'}"


async def test_a_hot_statement_reads_what_its_page_needs_whatever_the_log_holds(
    logs: dict[int, str], subtests: pytest.Subtests
) -> None:
    held = set()
    for job in JOBS:
        small, generic, custom = [
            await readings(logs[size], job, mode)
            for size, mode in ((SMALL, GENERIC), (LARGE, GENERIC), (LARGE, CUSTOM))
        ]
        wrong = [
            f"{name}, {what}: {one}\n    " + "\n    ".join(reading.scans)
            for what, runs in (("small log", small), ("planned once for all", generic), ("for its arguments", custom))
            for name, reading in runs.items()
            for one in complaints(reading, HOLDS.get(name), exactly=runs is not small)
        ]
        wrong += [
            f"{name}: {generic[name].pages} pages, and {small[name].pages} of a log of an eighth"
            for name in generic.keys() & HOLDS.keys()
            if HOLDS[name].steady and generic[name].pages > MORE * small[name].pages + 100
        ]
        held |= generic.keys()
        with subtests.test(msg=job.__name__):
            assert "\n".join(wrong) == ""
    assert HOLDS.keys() - held == set(), "no job runs these"


def test_every_statement_over_the_log_is_held_or_has_a_reason_not_to_be() -> None:
    texts = constants()
    assert HOLDS.keys() - texts.keys() - OWN.keys() == set(), "there is no such statement any more"
    held = {texts[name] for name in HOLDS.keys() & texts.keys()}
    of_the_log = {name for name, text in texts.items() if OF_THE_LOG.search(text) and text not in held}
    excepted = {name: _exception(name) for name in of_the_log}
    assert [name for name, key in excepted.items() if key is None] == []
    assert EXCEPTIONS.keys() - set(excepted.values()) == set(), "nothing needs these exceptions"


def _exception(name: str) -> str | None:
    package, module = name.split(".", maxsplit=1)[0], name.rpartition(".")[0]
    return next((key for key in (name, f"{module}.*", f"{package}.*") if key in EXCEPTIONS), None)


A_SCAN: Final = "SELECT count(*) FROM send_log WHERE recipient = 'ada@example.com'"
INSIDE: Final = "SELECT pg_temp.scan()"


async def test_a_scan_of_the_log_is_found_out_inside_of_a_function_as_well(logs: dict[int, str]) -> None:
    more = {"a scan": A_SCAN, "inside": INSIDE}
    async with watched(logs[LARGE], GENERIC, more) as desk:
        await desk.connection.fetch(A_SCAN)
        create = f"CREATE FUNCTION pg_temp.scan() RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RETURN ({A_SCAN}); END $$"
        await desk.connection.execute(create)
        await desk.connection.fetch(INSIDE)
    for name in more:
        (reading,) = desk.readings[name]
        assert reading.whole == {"send_log"}
        assert len(list(complaints(reading, Hold(PAGE, "send_log_pkey"), exactly=True))) == 3


EVENTS_OF_ALL_SIZES: Final = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, received_at, wire_key, kind, testimony, source,
    raw)
SELECT 'mg', 'm-' || n, 'd-' || n, now, now - (20000 - n) * interval '30 s', md5('e' || n), 'delivered', 'accepted',
    'http', convert_to(repeat('x', 300 + n * 37 % 600), 'UTF8')
FROM clock_timestamp() AS now, generate_series(1, 20000) AS n
"""
ANSWERS: Final = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, wire_key, kind, testimony, source, attempt, fence)
SELECT 'mg', 'a-' || n, 'answer:' || n, clock_timestamp(), md5('a' || n), 'sent', 'accepted', 'sender', 1, n
FROM generate_series(1, 1000) AS n
"""


async def test_new_events_are_found_without_the_old_ones_whose_gaps_they_fill(dsn: str, db: asyncpg.Pool) -> None:
    await db.execute(EVENTS_OF_ALL_SIZES)
    await db.execute("VACUUM ANALYZE")  # as autovacuum does; from then on small rows fill the gaps of old pages
    await db.execute(ANSWERS)
    async with watched(dsn, CUSTOM, {}) as desk:
        now = await desk.connection.fetchval("SELECT clock_timestamp()")
        await desk.connection.execute(outcomes.FOLLOW, now - outcomes.SLICE, now)
        await duplicates.spoken_of(desk.connection, now - timedelta(minutes=2), now)
    for name in ("passes.outcomes.FOLLOW", "insight.duplicates.SPOKEN_OF"):
        (reading,) = desk.readings[name]
        assert reading.rows < 2000 + 4 * 128 * 12, "a thousand answers, and four ranges"


def select_before(text: str, end: int) -> str:
    """Return the SELECT that a LIMIT at `end` belongs to, without what stands in parentheses inside of it."""
    level, depth = "", 0
    for char in reversed(text[:end]):
        depth += (char == ")") - (char == "(")
        if depth < 0 or (char == ";" and depth == 0):
            break
        level = char * (depth == 0) + level
    return level.rpartition("UNION ALL")[2]


def test_whoever_takes_a_part_of_the_log_says_which() -> None:
    """Without an order the server may well read from the oldest row on until it has found as many of the newest day."""
    functions = {file.name: file.read_text() for file in (ROOT / "migrations").glob("**/*.sql")}
    unordered = {
        name
        for name, text in {**constants(), **functions}.items()
        for limit in re.finditer(r"\bLIMIT\b", text)
        if OF_THE_LOG.search(taken := select_before(text, limit.start())) and "ORDER BY" not in taken
    }
    assert unordered == UNORDERED.keys()
