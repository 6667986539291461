# SPDX-License-Identifier: Apache-2.0
"""`reconciler selftest`: it tries every promise, sees a broken one, and leaves the user's database as it was."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from receiver_app import Cut
from serving import environment, until

from reconciler.database.migrate import load
from reconciler.errors import UserError
from reconciler.trial.outcome import Count, NotTried
from reconciler.trial.promise import Promise
from reconciler.trial.run import PROMISES, try_promises
from reconciler.trial.scratch import COMMENT, PREFIX, scratch_schema

pytestmark = pytest.mark.proof

SCHEMAS = "SELECT array_agg(nspname::text ORDER BY 1) FROM pg_namespace WHERE nspname NOT LIKE 'pg_%'"
WITH_PREFIX = "SELECT count(*) FROM pg_namespace WHERE starts_with(nspname::text, $1)"
WORKERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND starts_with(application_name, $1)
"""


@asynccontextmanager
async def selftest(config: Path, dsn: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reconciler", "selftest", *arguments),
        cwd=config.parent,
        env=environment(config, RECONCILER_DATABASE__URL=dsn),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def finished(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    """Return exit status, stdout and stderr."""
    async with asyncio.timeout(200):
        out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_every_promise_is_tried_and_kept_and_the_users_schema_is_as_before(
    db: asyncpg.Pool, dsn: str, config: Path
) -> None:
    heard: list[object] = []

    def listener(*said: object) -> None:
        heard.append(said)

    async with db.acquire() as connection:
        await connection.add_listener("reconciler_outbox", listener)
        before = await db.fetchval(SCHEMAS)
        async with selftest(config, dsn, "--json") as process:
            status, out, errors = await finished(process)
        await connection.execute("SELECT 1")  # whatever was notified has come by now
        await connection.remove_listener("reconciler_outbox", listener)

    said = json.loads(out)
    assert [(one["name"], one["reason"] or one["counted"]) for one in said["promises"] if one["result"] != "kept"] == []
    assert (status, said["kept"], said["broken"], said["not_tried"]) == (0, len(PROMISES), 0, 0)
    assert errors.startswith(f"reconciler: trying {len(PROMISES)} promises in the schema {PREFIX}")
    assert said["seconds"] < 120
    assert await db.fetchval(SCHEMAS) == before
    for table in ("send_log", "provider_event", "pass", "feed_state"):
        assert not await db.fetchval(f"SELECT EXISTS (SELECT FROM {table} WHERE feed IS DISTINCT FROM '*')")  # noqa: S608
    assert heard == []


# Once the last migration is done: what it altered must be there until then.
BREAK = f"""
CREATE FUNCTION break_now() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('DROP FUNCTION %I.send_enqueue(text, text, jsonb)', TG_TABLE_SCHEMA);
    EXECUTE format($body$
        CREATE OR REPLACE FUNCTION %1$I.send_claim(key text, feed text, options jsonb)
        RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint, seconds_left double precision,
                       reason text, retry_at timestamptz)
        LANGUAGE plpgsql VOLATILE SET search_path = %1$I AS $f$
        #variable_conflict use_column
        DECLARE
            t timestamptz := clock_timestamp();
            late timestamptz := t + interval '2 s';
        BEGIN  -- gives everything out, always
            INSERT INTO send_log AS l (wire_key, send_key, state, feed, attempt, fence, first_claimed_at,
                                       claimed_at, submit_by, next_check_at)
            VALUES (key, key, 'claimed', feed, 1, nextval('send_fence'), t, t, late, late)
            ON CONFLICT (wire_key) DO UPDATE SET attempt = l.attempt + 1;
            RETURN QUERY SELECT 'claimed', key, 1, currval('send_fence'), 2::float8, NULL, NULL::timestamptz;
        END $f$
    $body$, TG_TABLE_SCHEMA);
    RETURN NULL;
END $$;
CREATE FUNCTION break_scratch() RETURNS event_trigger LANGUAGE plpgsql AS $$
DECLARE
    made text := (SELECT schema_name FROM pg_event_trigger_ddl_commands() JOIN pg_class ON oid = objid
                  WHERE relname = 'schema_migration');
BEGIN
    IF starts_with(made, 'reconciler_selftest_') THEN
        EXECUTE format('CREATE CONSTRAINT TRIGGER break AFTER INSERT ON %I.schema_migration
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.version = {load()[-1].version})
            EXECUTE FUNCTION public.break_now()', made);
    END IF;
END $$;
CREATE EVENT TRIGGER break_scratch ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION break_scratch();
"""  # noqa: S608 - a number


async def test_a_claim_that_is_given_twice_and_what_cant_be_tried_end_it_with_status_1(
    db: asyncpg.Pool, dsn: str, config: Path
) -> None:
    await db.execute(BREAK)
    async with selftest(config, dsn, "promises") as process:
        status, out, errors = await finished(process)
    lines = dict(_named(out))
    assert lines["killed-taken"].startswith("broken ")
    assert "taken 3 (NOT 1)" in lines["killed-taken"]
    assert lines["crowd"].startswith("broken ")
    assert "given 40 (NOT 1)" in lines["crowd"]
    assert lines["claim-waits"].startswith("not tried ")
    assert "send_enqueue" in lines["claim-waits"]
    assert lines["twice"].startswith("kept "), "what does not claim is as right as before"
    assert status == 1
    assert "promises are broken, 1 could not be tried" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert await db.fetchval(WITH_PREFIX, PREFIX) == 0


def _named(out: str) -> list[tuple[str, str]]:
    """Return the line of each promise's row, by the promise's name."""
    return [(p.name, line) for p in PROMISES for line in out.splitlines() if f"  {p.words}  " in line]


@pytest.mark.parametrize(("number", "exit_status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
@pytest.mark.usefixtures("interruptible")
async def test_whoever_stops_it_finds_neither_its_schema_nor_its_processes(
    db: asyncpg.Pool, dsn: str, config: Path, number: int, exit_status: int
) -> None:
    async with selftest(config, dsn) as process:

        async def workers() -> bool:
            return await db.fetchval(WORKERS, PREFIX) > 3

        await until(workers, "senders at work")
        process.send_signal(number)
        status, out, errors = await finished(process)
    assert (status, out) == (exit_status, "")
    assert errors.splitlines()[-1].startswith("reconciler: interrupted")
    assert "Traceback" not in errors
    assert await db.fetchval(WITH_PREFIX, PREFIX) == 0
    assert await db.fetchval(WORKERS, PREFIX) == 0


async def test_what_a_killed_run_left_behind_is_dropped_by_the_next_and_nothing_else_is(
    db: asyncpg.Pool, dsn: str
) -> None:
    await db.execute(f"CREATE SCHEMA {PREFIX}dead; COMMENT ON SCHEMA {PREFIX}dead IS '{COMMENT}'")
    await db.execute(f"CREATE SCHEMA {PREFIX}mine; COMMENT ON SCHEMA {PREFIX}mine IS 'of a user who likes the name'")
    async with scratch_schema(dsn) as other, scratch_schema(dsn) as scratch:
        schemas = await db.fetchval(SCHEMAS)
        assert f"{PREFIX}dead" not in schemas
        assert {f"{PREFIX}mine", other.name, scratch.name} <= set(schemas)
    assert f"{PREFIX}mine" in await db.fetchval(SCHEMAS)
    assert await db.fetchval(WITH_PREFIX, PREFIX) == 1


async def test_a_role_that_may_create_no_schema_is_told_so_in_one_line(
    db: asyncpg.Pool, dsn: str, config: Path
) -> None:
    role = f"selftest_{dsn.rpartition('/t_')[2][:8]}"
    await db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        async with selftest(config, dsn.replace("postgres@", f"{role}@")) as process:
            status, out, errors = await finished(process)
    finally:
        await db.execute(f"DROP ROLE {role}")
    assert (status, out) == (1, "")
    (line,) = errors.splitlines()
    assert "may not create one" in line
    assert "GRANT CREATE ON DATABASE" in line


async def test_a_pooler_that_keeps_no_search_path_is_refused(dsn: str, sockets: Path) -> None:
    async with Cut(dsn, sockets, pooled=True) as pooler:
        with pytest.raises(UserError, match=r"set database\.direct_url"):
            async with scratch_schema(pooler.dsn):
                pytest.fail("there is no schema of its own")


async def test_what_a_url_says_of_its_search_path_does_not_lead_into_the_users_schema(
    db: asyncpg.Pool, dsn: str
) -> None:
    await db.execute("ALTER DATABASE " + await db.fetchval("SELECT current_database()") + " SET search_path = public")
    async with scratch_schema(f"{dsn}&search_path=public&options=-csearch_path%3Dpublic") as scratch:
        connection = await asyncpg.connect(scratch.dsn)
        assert await connection.fetchval("SELECT current_schema()") == scratch.name
        await connection.close()


DEAF = """
CREATE OR REPLACE FUNCTION send_heard(w text, f text, recipient_key text, provider_message_id text,
    known_message_id text) RETURNS text LANGUAGE sql AS 'SELECT NULL'
"""
FORGETFUL = """
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RETURN CASE WHEN hashtext(NEW.event_id) % 10 <> 0 THEN NEW END; END $$;
CREATE TRIGGER swallow BEFORE INSERT ON provider_event FOR EACH ROW EXECUTE FUNCTION swallow();
"""
DUPLICATING = "ALTER TABLE provider_event DROP CONSTRAINT provider_event_pkey"
DISTRACTED = """
CREATE OR REPLACE FUNCTION send_confirm(key text, fence bigint, message_id text, options jsonb)
RETURNS TABLE (outcome text, reason text) LANGUAGE sql AS $$
    SELECT 'sent', NULL::text FROM (SELECT FROM send_log WHERE wire_key = key FOR UPDATE) AS locked
$$
"""
TWICE = """
CREATE FUNCTION repeat() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed)
    VALUES (NEW.wire_key, NEW.attempt, NEW.fence, NEW.action, 'again', NEW.source, NEW.who, NEW.feed);
    RETURN NULL;
END $$;
CREATE TRIGGER repeat AFTER INSERT ON verdict FOR EACH ROW
    WHEN (NEW.action = 'released' AND pg_trigger_depth() = 0) EXECUTE FUNCTION repeat();
"""


@pytest.mark.parametrize(
    ("fault", "name", "seen"),
    [
        (DEAF, "claim-waits", "taken again 1 (NOT 0)"),
        (DEAF, "nobodys", "asked again sent (NOT already_sent)"),
        (FORGETFUL, "receiver-killed", "(NOT 300)"),
        (DUPLICATING, "twice", "(NOT 1)"),
        (DISTRACTED, "confirm-cut", "state claimed (NOT sent)"),
        (DISTRACTED, "early", "kept"),
        (TWICE, "pass-killed", "releases 40 (NOT 20)"),
    ],
)
async def test_a_database_that_breaks_a_promise_is_found_out(dsn: str, fault: str, name: str, seen: str) -> None:
    (promise,) = (p for p in PROMISES if p.name == name)
    async with scratch_schema(dsn) as scratch:
        connection = await asyncpg.connect(scratch.dsn)
        await connection.execute(fault)
        await connection.close()
        (tried,) = await try_promises(scratch, [promise])
    assert seen in "; ".join([tried.result, *map(str, tried.counted)]), tried


async def _not_tried(_stage: Any) -> Sequence[Count]:
    raise NotTried("nobody was there to be killed")


async def _at_fault(_stage: Any) -> Sequence[Count]:
    raise ZeroDivisionError("our own mistake")


async def _no_count(_stage: Any) -> Sequence[Count]:
    return [Count("taken", 2, 1), Count("seen", 5)]


async def test_what_could_not_be_tried_is_no_pass_and_has_its_reason(dsn: str) -> None:
    promises = [Promise("one", "1", _not_tried), Promise("two", "2", _at_fault), Promise("three", "3", _no_count)]
    async with scratch_schema(dsn) as scratch:
        tried = await try_promises(scratch, promises)
    assert [(one.result, one.reason) for one in tried] == [
        ("not tried", "nobody was there to be killed"),
        ("not tried", "ZeroDivisionError: our own mistake"),
        ("broken", None),
    ]
    assert [str(count) for count in tried[2].counted] == ["taken 2 (NOT 1)", "seen 5"]
