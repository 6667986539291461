# SPDX-License-Identifier: Apache-2.0
"""A database restored from a backup is noticed; it gives out and releases nothing until a person resumes (case 064)."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from kit import FEED, claim, confirm, make_due, make_older, old_claim, row, state, until_it_waits
from places import PREFIX, parent_folder
from program import Program
from serving import Server, sample, serving, until, write_config
from structlog.testing import capture_logs

from reconciler.composition import policies
from reconciler.configuration.settings import Settings
from reconciler.database.binaries import accounts, find_binaries
from reconciler.database.grants import grant
from reconciler.database.migrate import migrate
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.insight.findings import judge
from reconciler.insight.status import read_status
from reconciler.passes import feeds, restore
from reconciler.passes.feeds import ALL_FEEDS
from reconciler.passes.restore import Found, Heart, Memory, gone_back
from reconciler.serving.daemon import Daemon

GAP = 1_000_000_000
"""What a resume leaves between the highest fence known and the next one."""


def run(server: EmbeddedPostgres, *command: str) -> None:
    """Run a program as the account that the server's files belong to."""
    done = next(accounts(server.root, server.data)).run(command)
    assert done.returncode == 0, done.stderr


def tool(server: EmbeddedPostgres, name: str, *arguments: str) -> None:
    run(server, str(find_binaries() / name), *arguments)


def dump(server: EmbeddedPostgres, dsn: str) -> Path:
    file = server.root / f"{uuid.uuid4().hex}.dump"
    tool(server, "pg_dump", "--format=custom", f"--file={file}", dsn)
    return file


async def restore_in_place(server: EmbeddedPostgres, dsn: str, file: Path) -> None:
    """Put a dump in the place of the database, under whoever uses it."""
    name = dsn.partition("@/")[2].partition("?")[0]
    async with connected(server.dsn()) as admin:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.execute(f"CREATE DATABASE {name}")
    tool(server, "pg_restore", "--single-transaction", f"--dbname={dsn}", str(file))


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def pool_of(dsn: str) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=3) as pool:
        yield pool


@pytest.fixture
def own() -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, not yet started."""
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder()))
    server = EmbeddedPostgres(root, fast=True)
    yield server
    server.stop()
    shutil.rmtree(root, ignore_errors=True)


async def resume(db: asyncpg.Pool, feed: str = ALL_FEEDS) -> bool:
    async with db.acquire() as connection:
        return await feeds.resume(connection, feed, "replayed", "ann")


async def standing(db: Any) -> asyncpg.Record:
    return await db.fetchrow("SELECT * FROM feed_state WHERE feed = '*'")


async def go_back(db: Any, heartbeat: int = 1) -> None:
    """What a backup taken at that heartbeat brings back."""
    await db.execute("UPDATE feed_state SET heartbeat = $1, suspect_at = NULL WHERE feed = '*'", heartbeat)


async def beats(heart: Heart, db: asyncpg.Pool, n: int) -> None:
    for _ in range(n):
        await heart.beat(db)


# The real thing: a dump restored under a running daemon


async def test_case_064_a_daemon_notices_a_restored_dump_and_holds_until_a_person_resumes(
    tmp_path: Path, pg: EmbeddedPostgres, dsn: str, logs_as_before: None
) -> None:
    config = write_config(tmp_path, '[rules]\non_unknown = "release"')
    async with serving(config, RECONCILER_DATABASE__URL=dsn, RECONCILER_RECONCILE__EVERY="1h") as server:
        async with connected(dsn) as db:
            await until_heartbeat(db, 1)
            await claim(db, "mail:1")
            backup = dump(pg, dsn)
            await until_heartbeat(db, (await standing(db))["heartbeat"] + 2)
            fence = (await claim(db, "mail:2"))["fence"]
            assert await confirm(db, "mail:2", fence) == "sent"  # of which the backup knows nothing
        await restore_in_place(pg, dsn, backup)
        await holds_everything(server, dsn)
        resumed = await Program(config, dsn)("resume", "--reason", "events replayed")
        assert resumed.stdout == "all feeds: not on hold\n"
        async with connected(dsn) as db:
            await goes_on(server, db, fence)
        assert await server.stop() == 0
    assert len(server.events("database_suspect")) == 1


async def until_heartbeat(db: asyncpg.Connection, number: int) -> None:
    async def there() -> bool:
        return (await standing(db))["heartbeat"] >= number

    await until(there, f"heartbeat {number}")


async def holds_everything(server: Server, dsn: str) -> None:
    told = await server.told("database_suspect")
    assert told["reason"].startswith("the database answers heartbeat ")
    async with connected(dsn) as db:
        assert (await standing(db))["reason"] == told["reason"]
        answer = await claim(db, "mail:2")
        assert (answer["outcome"], answer["reason"]) == ("held", "suspect")
        await make_older(db, "mail:1", timedelta(hours=30))  # otherwise it would be released now
        assert await server.deliver("mg", sample("mg", "accepted", "mail:2")) == 200

        async def decided() -> bool:
            return await state(db, "mail:2") == "sent" and (await row(db, "mail:1"))["held_reason"] is not None

        await until(decided, "a pass, called by what was brought back")
        assert (await row(db, "mail:1"))["held_reason"] == "suspect"
        assert (await claim(db, "mail:3"))["outcome"] == "held"


async def goes_on(server: Server, db: asyncpg.Connection, fence: int) -> None:
    await server.told("database_accepted")
    await until_heartbeat(db, (await standing(db))["heartbeat"] + 2)
    assert (await claim(db, "mail:2"))["outcome"] == "already_sent"
    assert (await claim(db, "mail:3"))["fence"] > fence


async def test_case_064_a_dump_started_on_a_second_machine_is_noticed_by_a_process_that_remembers_nothing(
    tmp_path: Path, pg: EmbeddedPostgres, own: EmbeddedPostgres, dsn: str, db: asyncpg.Pool
) -> None:
    old = Heart(tmp_path / "old", "old")
    await beats(old, db, 3)
    await claim(db, "mail:1")
    backup = dump(pg, dsn)
    await beats(old, db, 2)
    own.start()
    tool(own, "pg_restore", "--single-transaction", f"--dbname={own.dsn()}", str(backup))
    async with pool_of(own.dsn()) as moved:
        new = Heart(tmp_path / "new", "new:1")
        assert not await new.check(moved)
        found = await standing(moved)
        assert "it was restored from a dump, or moved" in found["reason"]
        assert (found["who"], found["heartbeat"]) == ("new:1", 3)
        assert (await claim(moved, "mail:2"))["reason"] == "suspect"

        assert await resume(moved)
        assert await new.check(moved)
        await new.beat(moved)
        assert await old.check(moved)  # what was accepted is accepted for all
        assert (await claim(moved, "mail:2"))["fence"] > GAP


# Time lines


def copy(server: EmbeddedPostgres, name: str) -> Path:
    """Copy a stopped server's data, as a backup of the disk does."""
    backup = server.root / name
    run(server, "/bin/cp", "-a", str(server.data), str(backup))
    return backup


async def promote(server: EmbeddedPostgres) -> None:
    """Start a stopped server on a new time line, as a fail-over or a restore from an archive does."""
    script = (
        f"echo \"restore_command = 'false'\" >> {server.data}/postgresql.auto.conf; touch {server.data}/recovery.signal"
    )
    run(server, "/bin/sh", "-c", script)
    server.start()
    async with connected(server.dsn()) as db:

        async def over() -> bool:
            return not await db.fetchval("SELECT pg_is_in_recovery()")

        await until(over, "the end of the recovery")


async def test_a_planned_fail_over_is_no_restore_and_a_backup_is_one_even_when_its_heartbeats_overtook(
    tmp_path: Path, own: EmbeddedPostgres
) -> None:
    heart, other = Heart(tmp_path / "one", "one"), Heart(tmp_path / "two", "two")
    own.start()
    await migrate(own.dsn())
    async with pool_of(own.dsn()) as db:
        await beats(heart, db, 3)
    own.stop()
    backup = copy(own, "backup")
    own.start()
    async with pool_of(own.dsn()) as db:
        await beats(other, db, 1)
        await beats(heart, db, 2)
    own.stop()

    await promote(own)
    async with pool_of(own.dsn()) as db:
        await beats(heart, db, 1)
        assert await other.check(db)
        found = await standing(db)
        assert (found["timeline"], found["line_from"], found["heartbeat"], found["suspect_at"]) == (2, 7, 7, None)
    own.stop()

    shutil.rmtree(own.data)
    backup.rename(own.data)
    await promote(own)
    async with pool_of(own.dsn()) as db:
        await beats(Heart(tmp_path / "new", "new"), db, 9)
        assert (await standing(db))["heartbeat"] == 12
        assert not await other.check(db)
        assert (await standing(db))["reason"] == (
            "heartbeat 4 is missing from the database, whose time line 2 began with heartbeat 4: "
            "it was restored from a backup, or a fail-over lost its end"
        )
        assert await resume(db)
        assert await other.check(db)
        assert await heart.check(db)


HERE: dict[str, Any] = {"kept_system": 7, "kept_timeline": 2, "line_from": 90, "system": 7}


def found(heartbeat: int, **others: Any) -> Found:
    return Found(**{**HERE, "heartbeat": heartbeat, "suspect": False, "reason": None, **others})


def memory(heartbeat: int, system: int | None = 7, timeline: int | None = 2, line_from: int = 90) -> Memory:
    return Memory(heartbeat=heartbeat, system=system, timeline=timeline, line_from=line_from, fence=0)


@pytest.mark.parametrize(
    ("remembered", "answered", "words"),
    [
        pytest.param(None, found(0, kept_system=None, kept_timeline=None, line_from=0), None, id="first start"),
        pytest.param(None, found(100), None, id="nothing remembered"),
        pytest.param(memory(100), found(100), None, id="as it was"),
        pytest.param(memory(100), found(250), None, id="others beat too"),
        pytest.param(memory(431), found(120), "answers heartbeat 120 after 431", id="smaller"),
        pytest.param(memory(89, timeline=1, line_from=1), found(95), None, id="before the new time line"),
        pytest.param(memory(90, timeline=1, line_from=1), found(95), "heartbeat 90 is missing", id="not on it"),
        pytest.param(memory(95, line_from=80), found(99), "heartbeat 95 is missing", id="another line of its number"),
        pytest.param(memory(89, system=6), found(95), None, id="a resumed move"),
        pytest.param(memory(94, system=6), found(95), "heartbeat 94 is missing", id="another server"),
        pytest.param(None, found(95, system=8), "was on server 7 and it is on server 8 now", id="moved"),
        pytest.param(memory(95), found(95, system=None), None, id="a server that does not tell"),
        pytest.param(memory(95, None, None), found(95, kept_system=None, kept_timeline=None), None, id="never told"),
    ],
)
def test_what_shows_that_a_database_has_gone_back(
    remembered: Memory | None, answered: Found, words: str | None
) -> None:
    told = gone_back(remembered, answered)
    assert told is None if words is None else told is not None and words in told


# What is remembered


async def test_any_number_of_processes_with_one_database_never_suspect_each_other(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    hearts = [Heart(tmp_path / folder, folder) for folder in ("a", "a", "b")]
    for _ in range(8):
        await asyncio.gather(*(work(db) for heart in hearts for work in (heart.beat, heart.check)))
    late = Heart(tmp_path / "a", "late")
    assert await late.check(db)
    found = await standing(db)
    assert (found["heartbeat"], found["suspect_at"]) == (24, None)


async def test_a_process_started_again_trusts_the_same_database_and_suspects_one_that_was_restored_meanwhile(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    await beats(Heart(tmp_path, "first"), db, 3)
    again = Heart(tmp_path, "again")
    assert await again.check(db)
    await beats(again, db, 1)
    await go_back(db, 2)
    assert not await Heart(tmp_path, "third").check(db)
    assert (await standing(db))["reason"] == "the database answers heartbeat 2 after 4: it was restored from a backup"


async def test_another_installation_in_the_same_folder_is_not_compared(tmp_path: Path, db: asyncpg.Pool) -> None:
    await beats(Heart(tmp_path, "one"), db, 3)
    await go_back(db, 0)
    await db.execute("UPDATE schema_migration SET applied_at = applied_at - interval '1 day' WHERE version = 1")
    assert await Heart(tmp_path, "other").check(db)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00", b'{"heartbeat": "7"}', None])
async def test_a_file_that_can_t_be_read_is_told_once_and_taken_as_a_first_start(
    tmp_path: Path, db: asyncpg.Pool, content: bytes | None
) -> None:
    await beats(Heart(tmp_path, "before"), db, 2)
    (file,) = tmp_path.iterdir()
    if content is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(content)
    heart = Heart(tmp_path, "after")
    with capture_logs() as logs:
        assert await heart.check(db)
        assert await heart.check(db)
    assert [(line["event"], line["log_level"]) for line in logs] == [("heartbeat_unreadable", "warning")]
    if content is not None:
        await heart.beat(db)
        assert msgspec.json.decode(file.read_bytes())["heartbeat"] == 3
        assert list(tmp_path.iterdir()) == [file]


async def test_without_a_folder_to_write_it_says_so_once_and_remembers_while_it_runs(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    (tmp_path / "file").write_text("in the way")
    heart = Heart(tmp_path / "file", "me")
    with capture_logs() as logs:
        await beats(heart, db, 3)
    warned = [line["event"] for line in logs]
    assert sorted(set(warned)) == ["heartbeat_not_kept", "heartbeat_unreadable"]
    assert warned.count("heartbeat_not_kept") == 1
    await go_back(db)
    assert not await heart.check(db)


# While it is suspect


async def test_a_suspicion_is_told_once_and_so_is_its_end(tmp_path: Path, db: asyncpg.Pool) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, db, 3)
    await go_back(db)
    with capture_logs() as logs:
        await beats(heart, db, 3)
        assert (await standing(db))["heartbeat"] == 1  # none is committed meanwhile
        await resume(db)
        await beats(heart, db, 2)
    assert [line["event"] for line in logs] == ["database_suspect", "database_accepted"]
    assert (await standing(db))["heartbeat"] == 1_000_005


async def test_a_second_backup_tried_after_the_first_is_suspect_again(tmp_path: Path, db: asyncpg.Pool) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, db, 5)
    await go_back(db, 2)
    assert not await heart.check(db)
    await go_back(db, 3)
    assert not await heart.check(db)
    assert (await standing(db))["suspect_at"] is not None


async def test_whoever_waited_while_a_person_resumed_does_not_suspect_what_was_accepted(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    one, two = Heart(tmp_path / "one", "one"), Heart(tmp_path / "two", "two")
    await beats(one, db, 3)
    await beats(two, db, 3)
    await go_back(db)
    assert not await one.check(db)
    async with db.acquire() as person:
        transaction = person.transaction(isolation="read_committed")
        await transaction.start()
        await feeds.resume(person, ALL_FEEDS, "replayed", "ann")
        waiting = asyncio.create_task(two.check(db))
        await until_it_waits(db, waiting)
        await transaction.commit()
    assert await waiting
    assert (await standing(db))["suspect_at"] is None


async def test_the_first_pass_of_a_daemon_looks_at_the_database_before_it_releases_anything(
    tmp_path: Path, dsn: str, db: asyncpg.Pool
) -> None:
    settings = Settings(database={"url": dsn, "data_dir": tmp_path}, rules={"on_unknown": "release"})
    await beats(Heart(tmp_path, "before"), db, 3)
    await go_back(db)
    await old_claim(db, "mail:1", timedelta(hours=30))
    await Daemon(settings, None)._passes(db, policies(settings))()
    assert (await row(db, "mail:1"))["held_reason"] == "suspect"
    await resume(db)
    await make_due(db, "mail:1")
    await Daemon(settings, None)._passes(db, policies(settings))()
    assert (await row(db, "mail:1"))["release_basis"] == "gave_up"  # nothing else had held it


async def test_status_says_what_was_found_and_what_to_do_first(tmp_path: Path, db: asyncpg.Pool) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, db, 2)
    await go_back(db)
    await heart.check(db)
    async with db.acquire() as connection:
        status = await read_status(connection, Settings(), lambda: datetime.now(UTC))
    (suspicion,) = [finding for finding in judge(status, Settings()) if finding.code == "suspect"]
    assert suspicion.needs_person
    assert suspicion.line() == (
        "suspect: no feed claims or releases while it lasts (the database answers heartbeat 1 after 2: it was restored "
        "from a backup): bring back what the gap lacks with reconciler replay or reconciler backfill, then "
        "reconciler resume --reason TEXT"
    )


# What resuming does


async def test_fences_to_come_are_greater_than_what_any_process_remembers_wherever_a_person_resumes(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    one, two = Heart(tmp_path / "one", "one"), Heart(tmp_path / "two", "two")
    await beats(one, db, 1)
    await db.execute("SELECT setval('send_fence', 5000000000)")
    await beats(two, db, 2)
    await go_back(db, 0)
    await db.execute("SELECT setval('send_fence', 10)")
    assert not await one.check(db)
    assert not await two.check(db)  # who comes second adds what it remembers
    found = await standing(db)
    assert (found["heartbeat_seen"], found["fence_seen"]) == (3, 5_000_000_000)
    assert await resume(db)
    assert (await claim(db, "mail:1"))["fence"] == 5_000_000_001 + GAP
    found = await standing(db)
    assert (found["heartbeat"], found["heartbeat_seen"], found["fence_seen"]) == (1_000_003, 0, 0)


@pytest.mark.parametrize("where", ["send_log", "verdict", "provider_event"])
async def test_fences_to_come_are_greater_than_what_any_row_names(tmp_path: Path, db: asyncpg.Pool, where: str) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, db, 1)
    fence = await old_claim(db, "mail:1")
    await go_back(db, 0)
    assert not await heart.check(db)
    if where == "send_log":
        await db.execute("UPDATE send_log SET fence = 7000000000 WHERE wire_key = wire_key('mail:1')")
    elif where == "verdict":
        await db.execute(
            "INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who)"
            " VALUES ('k', 1, 7000000000, 'held', 'silent', 'inferred', 'me')"
        )
    else:  # a sender that claimed before the restore confirms after it
        assert await confirm(db, "mail:1", 7_000_000_000) != "not_yours"
    assert fence < 10
    await resume(db)
    assert (await claim(db, "mail:2"))["fence"] == 7_000_000_001 + GAP


async def test_resuming_a_pause_moves_neither_fences_nor_heartbeats(tmp_path: Path, db: asyncpg.Pool) -> None:
    await beats(Heart(tmp_path, "me"), db, 2)
    before = (await claim(db, "mail:1"))["fence"]
    async with db.acquire() as connection:
        await feeds.pause(connection, ALL_FEEDS, "incident", "ann")
    assert await resume(db)
    assert not await resume(db)
    assert (await claim(db, "mail:2"))["fence"] == before + 1
    assert (await standing(db))["heartbeat"] == 2


@pytest.fixture
async def plain(dsn: str, db: asyncpg.Pool) -> AsyncIterator[asyncpg.Pool]:
    """A pool of a role that has no more than what a reconciler is granted."""
    role = f"plain_{uuid.uuid4().hex[:12]}"
    await db.execute(f"CREATE ROLE {role} LOGIN")
    await grant(dsn, {role: ["reconciler"]})
    async with pool_of(dsn.replace("postgres@", f"{role}@")) as pool:
        yield pool
    await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_an_ordinary_role_notices_a_restore_and_resumes(tmp_path: Path, plain: asyncpg.Pool) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, plain, 3)
    found = await standing(plain)
    assert found["system_identifier"] is not None
    assert found["timeline"] == 1
    await go_back(plain)
    assert not await heart.check(plain)
    assert await resume(plain)
    assert (await claim(plain, "mail:1", FEED))["fence"] > GAP


async def test_a_database_whose_server_tells_nothing_of_itself_is_judged_by_its_heartbeats(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, db, 1)
    await db.execute("""
        CREATE OR REPLACE FUNCTION database_line(OUT system_identifier bigint, OUT timeline bigint)
        LANGUAGE sql AS 'SELECT NULL::bigint, NULL::bigint'
    """)
    await beats(heart, db, 2)
    await beats(Heart(tmp_path, "again"), db, 1)
    found = await standing(db)
    assert (found["heartbeat"], found["system_identifier"], found["suspect_at"]) == (4, None, None)
    await go_back(db, 1)
    assert not await heart.check(db)


async def test_a_database_that_is_still_being_restored_is_said_to_be_so(tmp_path: Path, db: asyncpg.Pool) -> None:
    await db.execute("DELETE FROM feed_state")
    with pytest.raises(restore.UserError, match="is a restore of the database still running"):
        await Heart(tmp_path, "me").check(db)


async def test_a_fence_that_a_sender_made_up_does_not_keep_anybody_from_resuming(
    tmp_path: Path, db: asyncpg.Pool
) -> None:
    heart = Heart(tmp_path, "me")
    await beats(heart, db, 1)
    await confirm(db, "mail:1", 12)
    await db.execute("UPDATE provider_event SET fence = 9223372036854775807")  # as an earlier release kept it
    await go_back(db, 0)
    assert not await heart.check(db)
    assert await resume(db)
    assert (await claim(db, "mail:2"))["fence"] < 2 * GAP
