# SPDX-License-Identifier: Apache-2.0
"""The main road on tables that Citus distributes over two workers; skipped where there is no PostgreSQL with Citus."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from unittest import mock
from uuid import uuid4

import asyncpg
import citus_kit
import pytest
from campaign_kit import batch, loaded, people, states
from kit import claim, confirm, event, fail, make_month, policies, reconcile, unlimited
from places import let_die

from reconciler.campaigns.caps import Cap, keep_caps
from reconciler.composition import open_pool
from reconciler.database import citus
from reconciler.database.grants import grant
from reconciler.database.migrate import default_folder, migrate, pending
from reconciler.distributed import statements as distributed
from reconciler.errors import UserError
from reconciler.insight.why import tell
from reconciler.passes import feeds, ledger, releasing
from reconciler.passes.ledger import Decided
from reconciler.passes.reconcile import Scope
from reconciler.rule.limits import Limit
from reconciler.rule.policy import Action, Verdict
from reconciler.upkeep import retention
from reconciler.upkeep.retention_look import Ages
from webhooks.event import Event, Kind, Testimony, wire_key
from webhooks.inbox import Inbox


@pytest.fixture(scope="module")
def nodes():
    if (folder := citus_kit.binaries()) is None:
        pytest.skip("no PostgreSQL with Citus: see CONTRIBUTING.md")
    with citus_kit.cluster(folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dsn(nodes) -> str:
    url = asyncio.run(nodes.make("mail"))
    asyncio.run(migrate(url, shards=8))
    return url


@pytest.fixture
async def db(dsn):
    pool = await open_pool(dsn, size=20, application="tests")
    yield pool
    await asyncio.wait_for(pool.close(), 10)


ADOPT = "SELECT outcome FROM send_adopt($1, $2, $3::jsonb)"


async def known_feed(db, feed: str, n: int = 600) -> None:
    """Let a feed have controls: answered sends, one each 20 s, that it spoke of within five seconds."""
    await db.execute(
        """
        SELECT count(*) FROM send_adopt_all(
            ARRAY(SELECT $1 || ':past:' || n FROM generate_series(1, $2::int) AS n),
            ARRAY(SELECT $1 FROM generate_series(1, $2::int)),
            ARRAY(SELECT jsonb_build_object('claimed_at', t, 'answered_at', t, 'heard_at', t + n % 5 * interval '1 s')
                  FROM generate_series(1, $2::int) AS n,
                       LATERAL (SELECT clock_timestamp() - n * interval '20 s' AS t) AS past))
        """,
        feed,
        n,
    )
    await db.execute(
        "INSERT INTO feed_delivery (feed, minute, outcome, n, last_at) VALUES ($1, now(), 'stored', 1, now())", feed
    )


async def adopted(db, key: str, feed: str, age: timedelta, **options) -> None:
    at = datetime.now(UTC) - age
    said = {"claimed_at": at.isoformat(), "stamped": "true", **options}
    assert await db.fetchval(ADOPT, key, feed, json.dumps(said)) == "adopted"


async def timed_out(db, key: str, feed: str, age: timedelta = timedelta(hours=1), **options) -> None:
    """Record a send whose call timed out that long ago, as its sender said."""
    await adopted(db, key, feed, age, **options)
    assert await fail(db, key, await fence_of(db, key), "timed out") == "waiting"


async def fence_of(db, key: str) -> int:
    return await db.fetchval("SELECT fence FROM send_log WHERE wire_key = $1", wire_key(key))


async def state(db, key: str) -> str:
    return await db.fetchval("SELECT state FROM send_log WHERE wire_key = $1", wire_key(key))


async def test_it_is_said_how_the_schema_lies(dsn, db):
    async with db.acquire() as connection:
        layout = await citus.read_layout(connection)
    assert layout is not None
    assert (layout.workers, layout.shards) == (2, 8)
    assert await pending(dsn) == []
    assert await migrate(dsn, shards=8) == [], "a second time changes nothing"
    tables = dict(await db.fetch("SELECT table_name::text, distribution_column FROM citus_tables"))
    assert {name for name in tables if not name.startswith("provider_event_")} == {*citus.BY_WIRE_KEY, "cap_taken"}
    assert {column for name, column in tables.items() if name != "cap_taken"} == {"wire_key"}


async def test_what_cannot_be_distributed_is_refused_in_one_line(nodes):
    for number, (told, statements, made) in enumerate(
        [
            ("has no Citus: CREATE EXTENSION", [], {"extension": False}),
            ("citus_set_coordinator_host", [], {"workers": False}),
            ("outbox is in use", ["UPDATE installation SET tell = '{sent}'"], {}),
            ("stored hashed", ["SELECT recipients_hash_from_now_on(decode(repeat('00', 32), 'hex'))"], {}),
            (
                "more than 100,000 rows",
                ["INSERT INTO send_log (wire_key, send_key, feed) SELECT n, n, 'f' FROM generate_series(0, 100000) n"],
                {},
            ),
        ]
    ):
        url = await nodes.make(f"refused_{number}", **made)
        await migrate(url)
        await citus_kit.execute(url, *statements)
        with pytest.raises(UserError, match=told) as refused:
            await migrate(url, shards=8)
        assert "\n" not in str(refused.value)
        assert await pending(url) == []


async def test_migrations_after_it_run_and_the_functions_are_laid_again(nodes, tmp_path):
    folder = tmp_path / "migrations"
    shutil.copytree(default_folder(), folder)
    url = await nodes.make("later")
    await migrate(url, folder=folder, shards=4)
    n = len(list(folder.glob("*.sql")))
    (folder / f"{n + 1:04d}_column.sql").write_text(
        "ALTER TABLE send_log ADD COLUMN more text;\nCREATE TABLE another (id int PRIMARY KEY);\n"
        "CREATE OR REPLACE FUNCTION campaign_standing(campaign text) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;\n"
    )
    (folder / f"{n + 2:04d}_index.sql").write_text(
        "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS send_log_more ON send_log (more)\n"
    )
    assert len(await pending(url, folder)) == 2
    assert await migrate(url, folder=folder) == [f"{n + 1:04d}_column.sql", f"{n + 2:04d}_index.sql", "citus"]
    assert await pending(url, folder) == []
    async with await open_pool(url, size=2, application="tests") as pool:
        assert (await claim(pool, "k", "f"))["outcome"] == "claimed"
        assert await pool.fetchval("SELECT more FROM send_log") is None
        assert await pool.fetchval("SELECT campaign_standing('none')") is None
    (folder / "citus" / "newer.sql").write_text("SELECT 1;\n")
    assert await pending(url, folder) == ["citus"]
    assert await migrate(url, folder=folder) == ["citus"]


GENERIC = "SELECT proname FROM pg_proc WHERE 'plan_cache_mode=force_generic_plan' = ANY (proconfig)"


DURABLE = """
SELECT c.relname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid WHERE t.tgname = 'be_durable' ORDER BY 1
"""


async def test_triggers_are_on_no_distributed_table_whether_it_was_distributed_before_them_or_after(nodes, tmp_path):
    folder = tmp_path / "migrations"
    shutil.copytree(default_folder(), folder)
    for later in sorted(folder.glob("*.sql"))[29:]:
        later.unlink()
    before, after = await nodes.make("before_triggers"), await nodes.make("after_triggers")
    await migrate(before, folder=folder, shards=4)
    await migrate(before)
    await migrate(after, shards=4)
    for url in (before, after):
        async with await open_pool(url, size=1, application="tests") as pool:
            tables = [name for (name,) in await pool.fetch(DURABLE)]
            assert tables == ["campaign", "feed_state", "idempotency", "suppression"]
            assert (await claim(pool, "k", "f"))["outcome"] == "claimed"


async def test_no_function_asks_for_plans_without_values_which_citus_cannot_make(nodes):
    url, migrated_before = await nodes.make("generic"), await nodes.make("generic_later", extension=False)
    await migrate(url, shards=4)
    await migrate(migrated_before)
    for server in nodes.servers:
        await citus_kit.execute(server.dsn("generic_later"), "CREATE EXTENSION citus")
    await nodes.join("generic_later")
    await migrate(migrated_before, shards=4)
    # As an upgrade runs it, long before the functions are laid again.
    await citus_kit.execute(url, (default_folder() / "0028_kept_plans.sql").read_text())
    for distributed_url in (url, migrated_before):
        async with await open_pool(distributed_url, size=1, application="tests") as pool:
            assert await pool.fetch(GENERIC) == []
            assert (await claim(pool, "k", "f"))["outcome"] == "claimed"


async def test_of_many_who_claim_one_key_at_once_one_gets_it(db):
    outcomes = Counter(
        answer["outcome"] for answer in await asyncio.gather(*[claim(db, "one:key", "mg-one") for _ in range(60)])
    )
    assert outcomes == {"claimed": 1, "in_flight": 59}


async def test_a_sender_that_dies_before_its_commit_leaves_no_claim(dsn, db):
    await db.execute("SELECT send_enqueue('dies:1', 'mg-dies', '{}')")
    connection = await asyncpg.connect(dsn)
    await connection.execute("BEGIN")
    assert (await claim(connection, "dies:1", "mg-dies"))["outcome"] == "claimed"
    await citus_kit.execute(dsn, f"SELECT pg_terminate_backend({connection.get_server_pid()}, 5000)")
    assert await state(db, "dies:1") == "pending"
    assert (await claim(db, "dies:1", "mg-dies"))["outcome"] == "claimed"


async def test_a_node_that_is_killed_loses_nothing_that_was_answered(nodes, db):
    answers = {f"killed:{n}": await claim(db, f"killed:{n}", "mg-kill") for n in range(40)}
    worker = nodes.workers[0]
    await asyncio.to_thread(let_die, worker)
    done, refused = set(), set()
    for key, answer in answers.items():
        try:
            assert await confirm(db, key, answer["fence"], f"m:{key}") == "sent"
            done.add(key)
        except (asyncpg.PostgresError, OSError):
            refused.add(key)
    with mock.patch.dict(os.environ, RECONCILER_PG_BIN=str(citus_kit.binaries())):
        worker.start()
    assert done
    assert refused, "of about half of the sends the row lies on the node that was away, or what bears its message id"
    for key in refused:
        assert await until_taken(lambda key=key: confirm(db, key, answers[key]["fence"], f"m:{key}")) == "sent"
    assert {await state(db, key) for key in answers} == {"sent"}


async def until_taken(call):
    """Call again while the coordinator still holds connections that died with their node."""
    for _ in range(100):
        try:
            return await call()
        except (asyncpg.PostgresError, OSError):
            await asyncio.sleep(0.05)
    return await call()


async def test_events_wake_the_pass_which_settles_their_sends(dsn, db):
    heard = asyncio.Event()
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("evidence", lambda *_: heard.set())
    sent = {key: await claim(db, key, "mg-events", submit_within="1 hour") for key in ("ev:1", "ev:2", "ev:3")}
    said = [
        Event(kind=Kind.DELIVERED, testimony=Testimony.ACCEPTED, message_id="m-1", event_id="e-1", send_key="ev:1"),
        Event(kind=Kind.DELIVERED, testimony=Testimony.ACCEPTED, message_id="m-1", event_id="e-1", send_key="ev:1"),
        Event(
            kind=Kind.REJECTED,
            testimony=Testimony.REJECTED,
            message_id="m-2",
            event_id="e-2",
            send_key="ev:2",
            reason="no such",
        ),
    ]
    inbox = Inbox()
    await inbox.open(db)
    assert await inbox.store("mg-events", said) == (2, 1)
    assert await inbox.store("mg-events", said) == (0, 3), "nothing is stored twice"
    await inbox.close()
    await asyncio.wait_for(heard.wait(), 10)
    await listener.close()
    report = await reconcile(db, scope=Scope(feed="mg-events"))
    assert (report.counts["sent:accepted"], report.counts["failed:rejected"]) == (1, 1)
    assert [await state(db, key) for key in sent] == ["sent", "failed", "claimed"]
    assert (await claim(db, "ev:1", "mg-events"))["outcome"] == "already_sent"
    assert await confirm(db, "ev:3", sent["ev:3"]["fence"], "m-3") == "sent"
    await event(db, "ev:2", feed="mg-events", message_id="m-2", event_id="e-9")
    await reconcile(db, scope=Scope(feed="mg-events"))
    assert await state(db, "ev:2") == "sent", "late evidence corrects a failure"


async def test_an_event_without_our_key_is_joined_by_its_message_id(db):
    await timed_out(db, "byid:1", "az-id", known_message_id="op-1")
    await timed_out(db, "byid:2", "az-id", known_message_id="op-2")
    await event(db, None, feed="az-id", message_id="op-1", event_id="e-1")
    await reconcile(db, scope=Scope(feed="az-id"))
    assert await state(db, "byid:1") == "sent"
    assert await state(db, "byid:2") == "claimed"
    assert await db.fetchval("SELECT delivery FROM send_log WHERE wire_key = $1", wire_key("byid:1")) == "delivered"


NOW = "SELECT clock_timestamp()"


async def test_an_outcome_that_may_be_of_two_sends_is_of_neither(db):
    for key in ("both:1", "both:2"):
        fence = (await claim(db, key, "az-both", recipient=f"{key[-1]}@example.org"))["fence"]
        assert await confirm(db, key, fence, "shared") == "sent"
    await event(db, None, feed="az-both", kind="bounced", message_id="shared")
    await event(db, None, feed="az-both", kind="deferred", message_id="shared", recipient="2@example.org")
    await reconcile(db)
    found = await db.fetch("SELECT delivery FROM send_log WHERE feed = 'az-both' ORDER BY send_key")
    assert [one["delivery"] for one in found] == [None, "deferred"]


async def test_a_write_repeats_what_was_heard_by_message_id_and_that_no_hold_is_on(db):
    keys = ["guarded:1", "guarded:2", "guarded:3"]
    for key in keys:
        await timed_out(db, key, "az-guarded", known_message_id=f"id of {key}")
    await event(db, None, feed="az-guarded", message_id="id of guarded:1")
    now = await db.fetchval(NOW)
    ends = [Verdict(action, "gave_up", next_check_at=now) for action in (Action.FAILED, Action.FAILED, Action.RELEASED)]
    decided = [
        Decided(wire_key(key), "claimed", await fence_of(db, key), end, {}) for key, end in zip(keys, ends, strict=True)
    ]

    async def failed(those):
        async with db.acquire() as connection:
            now = await connection.fetchval(NOW)
            return await ledger.fail(connection, those, now, 1, "test")

    async with db.acquire() as connection:
        await feeds.pause(connection, "az-guarded", "why", "test")
        assert not await failed(decided)
        assert await feeds.resume(connection, "az-guarded", "why", "test")
        assert await failed(decided[:2]) == {"gave_up": 1}
        now = await connection.fetchval(NOW)
        done = await releasing.release(connection, [decided[0], decided[2]], unlimited, now, 1, "test")
        assert done.counts == {"gave_up": 1}
    assert [await state(db, key) for key in keys] == ["claimed", "failed", "pending"]


async def test_what_silence_releases_is_given_out_again_and_explained(db, dsn):
    await known_feed(db, "mg-silence")
    await timed_out(db, "silent:1", "mg-silence")
    report = await reconcile(db, scope=Scope(feed="mg-silence"))
    assert report.counts["released:absent"] == 1
    assert (await claim(db, "silent:1", "mg-silence"))["attempt"] == 2
    story = await tell(db, policies(), "silent:1")
    assert [entry.what for entry in story.timeline].count("verdict") == 1
    assert await confirm(db, "silent:1", await fence_of(db, "silent:1"), "m-1") == "sent"


@pytest.fixture
async def plain(nodes):
    """A pool on a database that is not distributed."""
    url = await nodes.make(f"plain_{uuid4().hex[:8]}", extension=False)
    await migrate(url)
    pool = await open_pool(url, size=10, application="tests")
    yield pool
    await asyncio.wait_for(pool.close(), 10)


async def test_silence_is_worth_the_same_as_on_one_server(db, plain):
    verdicts = []
    for pool in (plain, db):
        await known_feed(pool, "mg-same")
        for n in range(40):
            await timed_out(pool, f"same:{n}", "mg-same", timedelta(minutes=20 + 3 * n))
        await reconcile(pool, scope=Scope(feed="mg-same"))
        verdicts.append(
            await pool.fetch(
                "SELECT wire_key, action, reason, coalesce(risk, (inputs ->> 'risk')::float8) AS risk FROM verdict"
                " WHERE wire_key IN (SELECT wire_key FROM send_log WHERE feed = 'mg-same' AND answered_at IS NULL)"
                " ORDER BY wire_key"
            )
        )
    one, many = verdicts
    assert len(one) == 40
    assert [tuple(row)[:3] for row in many] == [tuple(row)[:3] for row in one]
    assert [row["risk"] for row in many] == pytest.approx([row["risk"] for row in one], rel=0.05)


async def test_evidence_keeps_a_released_send_from_being_given_out(db):
    await known_feed(db, "mg-late")
    await timed_out(db, "late:1", "mg-late")
    await reconcile(db, scope=Scope(feed="mg-late"))
    assert await state(db, "late:1") == "pending"
    await event(db, "late:1", feed="mg-late")
    assert (await claim(db, "late:1", "mg-late"))["outcome"] == "already_sent"


async def test_a_pause_stops_releases_and_a_budget_bounds_them(db):
    await known_feed(db, "mg-bound")
    for n in range(5):
        await timed_out(db, f"bound:{n}", "mg-bound", timedelta(minutes=30 + 25 * n))
    async with db.acquire() as connection:
        await feeds.pause(connection, "mg-bound", "trial", "test")
    assert (await reconcile(db, scope=Scope(feed="mg-bound"))).counts["released:absent"] == 0
    async with db.acquire() as connection:
        await feeds.resume(connection, "mg-bound", "trial", "test")
    await db.execute("UPDATE send_log SET next_check_at = now() WHERE feed = 'mg-bound' AND state = 'claimed'")
    two = Limit(count=2, share=1.0, canary=1.0, awaited=timedelta(0))
    passes = [reconcile(db, scope=Scope(feed="mg-bound"), limit=two) for _ in range(3)]
    reports = await asyncio.gather(*passes)
    released = sum(report.counts["released:absent"] for report in reports)
    assert released == 2


async def test_a_campaign_gives_each_recipient_out_once_and_keeps_to_caps_and_suppressions(db):
    assert ((once := await loaded(db, people(60))).added, once.duplicates) == (60, 0)
    assert ((again := await loaded(db, people(60))).added, again.duplicates) == (0, 60)
    await db.execute("INSERT INTO suppression (recipient_key, source) VALUES ('person3@example3.com', 'test')")
    async with db.acquire() as slow, slow.transaction():
        held = await batch(slow, 5)
        given = await asyncio.wait_for(asyncio.gather(*[batch(db, 10) for _ in range(4)]), 20)
        assert (await claim(db, "campaign:other", "mg"))["outcome"] == "claimed", "nobody waits for a slow worker"
    given.append(held)
    rows = [row for one in given for row in one]
    claimed = [row["wire_key"] for row in rows if row["outcome"] == "claimed"]
    assert len(claimed) == len(set(claimed))
    while more := await batch(db, 20):
        claimed += [row["wire_key"] for row in more if row["outcome"] == "claimed"]
    assert len(claimed) == len(set(claimed))
    assert await states(db) == {"claimed": 59, "failed": 1}


async def test_a_frequency_cap_counts_claims_of_all_nodes(db):
    await keep_caps(db, [Cap("news", 2, timedelta(days=1), None, "UTC")])
    answers = await asyncio.gather(
        *[claim(db, f"cap:{n}", "mg-cap", message_class="news", recipient="a@example.com") for n in range(8)]
    )
    assert Counter(answer["outcome"] for answer in answers) == {"claimed": 2, "capped": 6}
    await keep_caps(db, [Cap("news", 3, timedelta(days=1), None, "UTC")])
    again = [
        await claim(db, f"cap:{n}", "mg-cap", message_class="news", recipient="a@example.com")
        for n, answer in enumerate(answers)
        if answer["outcome"] == "capped"
    ]
    assert Counter(answer["outcome"] for answer in again) == {"claimed": 1, "capped": 5}
    await keep_caps(db, [])


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_claim_that_waited_for_a_recipients_places_looks_again(db, end):
    await keep_caps(db, [Cap("news", 9, timedelta(days=1), None, "UTC")])
    options = {"message_class": "news", "recipient": f"{end}@example.com"}
    async with db.acquire() as first:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, f"cap-{end}:1", "mg-cap", **options))["outcome"] == "claimed"
        waiting = asyncio.create_task(claim(db, f"cap-{end}:2", "mg-cap", **options))
        async with asyncio.timeout(10):
            while not await db.fetchval("SELECT count(*) FROM citus_lock_waits"):
                assert not waiting.done(), "it did not wait"
                await asyncio.sleep(0.01)
        await event(db, f"cap-{end}:2", feed="mg-cap", message_id=f"cap-{end}")
        await getattr(transaction, end)()
        assert (await waiting)["outcome"] == "already_sent"
    taken = await db.fetchval("SELECT wire_keys FROM cap_taken WHERE recipient_key = $1", options["recipient"])
    assert taken == ([wire_key(f"cap-{end}:1")] if end == "commit" else None)
    await keep_caps(db, [])


async def test_a_prune_deletes_what_is_over_and_drops_months(db):
    month = datetime.now(UTC).replace(day=1) - timedelta(days=100)
    await make_month(db, month)
    await event(db, "gone:1", feed="mg-old", occurred_at=month)
    await db.execute(
        """
        INSERT INTO provider_event (wire_key, message_id, event_id, feed, partition_at, received_at, kind, testimony,
                                    source)
        VALUES ('gone', 'm', 'e', 'mg-old', '1970-01-01Z', now() - interval '90 days', 'sent', 'accepted', 'http')
        """
    )
    old = datetime.now(UTC) - timedelta(days=29)
    for n in range(30):
        at = old.isoformat()
        said = {"claimed_at": at, "answered_at": at, "heard_at": at}
        assert await db.fetchval(ADOPT, f"old:{n}", "mg-old", json.dumps(said)) == "adopted"
    done = await retention.prune(
        db, Ages(timedelta(days=20), timedelta(days=40), timedelta(days=14), timedelta(days=7))
    )
    assert done.ended
    assert done.rows["send_log"] == 30
    assert done.rows["provider_event"] == 1, "the undated one"
    assert [(f"{found.month:%Y%m}", found.outcome) for found in done.months] == [(f"{month:%Y%m}", "dropped")]
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE feed = 'mg-old'") == 0


async def test_roles_get_by_with_what_they_are_granted(dsn, db):
    await db.execute("CREATE ROLE shop LOGIN")
    await db.execute("CREATE ROLE daemon LOGIN")
    await grant(dsn, {"shop": ["sender"], "daemon": ["reconciler", "receiver"]})
    as_role = dsn.replace("postgres@", "{}@", 1).format
    async with await open_pool(as_role("shop"), size=2, application="tests") as shop:
        answer = await claim(shop, "role:1", "mg-role", submit_within="1 s")
        assert await confirm(shop, "role:1", answer["fence"]) == "sent"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await shop.fetch("SELECT * FROM send_log")
    async with await open_pool(as_role("daemon"), size=4, application="tests") as daemon:
        await timed_out(daemon, "role:2", "mg-role")
        await event(daemon, "role:2", feed="mg-role")
        assert (await reconcile(daemon, scope=Scope(feed="mg-role"))).counts["sent:accepted"] == 1
        assert await daemon.fetch("SELECT provider_event_make_partitions(3)"), "a month more"
        assert (await retention.prune(daemon, Ages(*[timedelta(days=60)] * 3, timedelta(days=7)))).ended


async def test_status_and_the_command_say_that_it_is_distributed(dsn):
    environ = {**os.environ, "RECONCILER_DATABASE__URL": dsn}
    command = [sys.executable, "-m", "reconciler"]
    for words, said in (
        (["migrate", "--check"], "the schema is up to date"),
        (["status"], "8 shards on 2 nodes (1"),
        (["status", "--json"], '"shards": 8'),
    ):
        done = await asyncio.to_thread(subprocess.run, [*command, *words], env=environ, capture_output=True, text=True)
        assert said in done.stdout, done.stderr
    done = await asyncio.to_thread(
        subprocess.run, [*command, "what-if", "--rules", os.devnull, "--since", "1d"], env=environ,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


async def test_what_is_not_done_there_says_so_in_one_line(db):
    for statement in distributed.REFUSED:
        with pytest.raises(UserError, match=r"is not done on tables distributed with Citus: see docs/citus\.md"):
            await db.fetch(statement)


async def test_every_other_statement_is_one_that_citus_takes(db, plain):
    """All that the program says to a database, with made up arguments: where one server takes it Citus does."""
    refused = {}
    for name, statement in citus_kit.statements():
        if statement in distributed.REFUSED or name.split(".")[-2] in NOT_DONE:
            continue
        if not await citus_kit.complaint(plain, statement) and (said := await citus_kit.complaint(db, statement)):
            refused[name] = said
    assert not refused


NOT_DONE = ("drift", "inventory", "what_if", "forgetting", "delivery", "citus")
"""Modules that are refused by their first statement."""
