# SPDX-License-Identifier: Apache-2.0
"""Queues when AWS fails, or its credentials, the database, a delete, our own code: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiohttp import web
from queue_kit import QUICK, Gate, Queue, as_proxy, deletes_nothing, events, fails, open_queue, reading, stored
from receiver_app import NOW, Cut, no_fetch
from serving import until
from sns_signer import TOPIC, FakeSNS
from structlog.testing import capture_logs

from reconciler.configuration.settings import Settings
from reconciler.errors import UserError
from reconciler.serving.daemon import Daemon
from webhooks.database import connect_pool
from webhooks.inbox import Inbox
from webhooks.sqs import Pace

RECORD = (Path(__file__).parent / "providers/fixtures/ses/event_send.json").read_text()


@pytest.fixture
async def queue(aws: str) -> AsyncIterator[Queue]:
    async with open_queue(aws) as found:
        yield found


def told(logs: list[Any], event: str) -> list[tuple[str, str]]:
    return [(line["log_level"], line["reason"]) for line in logs if line["event"] == event]


async def asked(gate: Gate, n: int) -> None:
    async def enough() -> bool:
        return len(gate.of("ReceiveMessage")) >= n

    await until(enough, f"{n} receives")


# Deleting


async def test_case_091_what_was_stored_and_not_deleted_is_deleted_when_it_comes_again(
    db: asyncpg.Pool, queue: Queue
) -> None:
    dead = await queue.make("dead")
    arn = (await queue.sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"]))["Attributes"]["QueueArn"]
    await queue.make("alive", RedrivePolicy=json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 3}))
    await queue.send(events("1"))
    queue.gate.next["DeleteMessageBatch"].extend([deletes_nothing, deletes_nothing])
    with capture_logs() as logs:
        async with reading(db, queue.feed(), pace=replace(QUICK, hidden=1)) as running:
            await queue.emptied()
            assert await running.outcomes() == {"stored": 3}
    assert len(queue.gate.of("DeleteMessageBatch")) == 3
    assert [row["event_id"] for row in await stored(db)] == ["1"]
    assert await queue.left(dead) == 0
    assert told(logs, "queue_messages_not_deleted") == [("warning", "InternalError")]


async def test_a_delete_that_is_refused_as_a_whole_is_made_again_too(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send(events("1"))
    queue.gate.next["DeleteMessageBatch"].append(fails(403, "AccessDenied"))
    async with reading(db, queue.feed(), pace=replace(QUICK, hidden=1)) as running:
        await queue.emptied()
        assert await running.outcomes() == {"stored": 2, "later:queue": 1}
    assert [row["event_id"] for row in await stored(db)] == ["1"]


async def test_a_message_that_could_not_be_kept_hidden_is_stored_once_nevertheless(
    db: asyncpg.Pool, queue: Queue
) -> None:
    queue.gate.always["ChangeMessageVisibilityBatch"] = fails(403, "AccessDenied")
    await queue.send(events("1"))
    with capture_logs() as logs:
        async with db.acquire() as other, reading(db, queue.feed(), loops=2, pace=replace(QUICK, hidden=1)):
            await other.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")

            async def seen_by_both() -> bool:
                return queue.received() >= 2

            await until(seen_by_both, "the other loop to receive it, too")
            await other.execute("COMMIT")
            await queue.emptied()
    assert [row["event_id"] for row in await stored(db)] == ["1"]
    assert told(logs, "queue_messages_not_hidden") == [("warning", "forbidden")]


async def test_what_outlasts_the_time_for_a_stop_is_left_in_the_queue(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send(events("1"))
    async with db.acquire() as other:
        await other.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")
        with capture_logs() as logs:
            async with reading(db, queue.feed(), pace=replace(QUICK, drain=0.2)) as running:

                async def in_flight() -> bool:
                    return await other.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")

                await until(in_flight, "it to be stored")
                await running.reader.finish()
                assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["queue_cancelled"]
                await other.execute("COMMIT")
    assert queue.gate.of("DeleteMessageBatch") == []
    assert await queue.left() == 1
    async with reading(db, queue.feed()):
        await queue.emptied()
    assert [row["event_id"] for row in await stored(db)] == ["1"]


# The database


@asynccontextmanager
async def cut_off(dsn: str, sockets: Path) -> AsyncIterator[tuple[Cut, asyncpg.Pool]]:
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=3, min_size=1, application="test", lock_seconds=None)
        yield cut, pool
        pool.terminate()


async def test_while_the_database_is_away_messages_stay_and_do_not_wear_out(
    dsn: str, db: asyncpg.Pool, queue: Queue, sockets: Path
) -> None:
    with capture_logs() as logs:
        async with cut_off(dsn, sockets) as (cut, pool), reading(db, queue.feed(), pool=pool) as running:
            await asked(queue.gate, 1)
            cut.cut()
            await queue.send_all(*(events(n) for n in range(3)))
            await running.counted("later:database")
            received = queue.received()
            with pytest.raises(asyncio.TimeoutError):  # ten times the longest pause
                await asyncio.wait_for(asked(queue.gate, len(queue.gate.of("ReceiveMessage")) + 2), 2)
            assert await queue.left() == 3
            assert queue.gate.of("DeleteMessageBatch") == []
            cut.resume()
            await queue.emptied()
            assert queue.received() <= received + 3
    assert [row["event_id"] for row in await stored(db)] == ["0", "1", "2"]
    assert ("error", "database") in told(logs, "queue_message_not_stored")


async def test_what_a_full_inbox_refuses_is_seen_again_at_once(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send_all(*(events(n) for n in range(10)))
    async with reading(db, queue.feed(), inbox=Inbox(queue_events=3)) as running:
        await queue.emptied()
        outcomes = await running.outcomes()
    assert outcomes["stored"] == 10
    assert outcomes["later:busy"] >= 7
    assert [row["event_id"] for row in await stored(db)] == [str(n) for n in range(10)]
    first, *_ = queue.gate.of("ChangeMessageVisibilityBatch")  # whoever is refused once more comes later
    assert {entry["VisibilityTimeout"] for entry in first.body["Entries"]} == {0}


# What can't be judged now


async def test_a_message_whose_certificate_cannot_be_fetched_is_left_for_a_later_try(
    db: asyncpg.Pool, queue: Queue
) -> None:
    sns = FakeSNS()
    pems, sns.store.pems = sns.store.pems, {}
    await queue.send(as_proxy(sns.delivery(sns.message(RECORD, now=NOW))))
    async with reading(db, queue.feed("ses", topics=(TOPIC,)), fetch=sns.store) as running:
        await running.counted("later:certificate")
        assert await queue.left() == 1
        sns.store.pems = pems
        await queue.emptied()
    assert [row["kind"] for row in await stored(db)] == ["sent"]


async def test_a_message_at_which_verifying_fails_comes_again_ever_more_rarely(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send(events("1"), x_fault="verify")
    with capture_logs() as logs:
        async with reading(db, queue.feed("plain", ("secret",)), pace=replace(QUICK, latest=900)) as running:
            await running.counted("later:verify_failed")

            async def put_off_twice() -> bool:
                return len(queue.gate.of("ChangeMessageVisibilityBatch")) == 2

            await until(put_off_twice, "the second try")
    delays = [call.body["Entries"][0]["VisibilityTimeout"] for call in queue.gate.of("ChangeMessageVisibilityBatch")]
    assert delays == [1, 2]
    assert await queue.left() == 1
    assert await stored(db) == []
    (line,) = [line for line in logs if line["event"] == "queue_message_not_stored"]
    assert (line["log_level"], line["reason"]) == ("error", "verify_failed")
    (line,) = [line for line in logs if line["event"] == "verify_failed"]
    assert (line["log_level"], line["error"]) == ("error", "RuntimeError")


# AWS


@pytest.mark.parametrize(
    ("status", "code", "reason", "hint"),
    [
        (403, "AccessDenied", "forbidden", "AWS refused it (AccessDenied): give this role the right"),
        (400, "QueueDoesNotExist", "not_found", "check its name, region and account"),
        (400, "InvalidClientTokenId", "unauthorized", "renew them, or check the region"),
        (400, "OverLimit", "refused", "AWS answered OverLimit"),
    ],
)
async def test_a_queue_that_cannot_be_read_is_told_in_a_line_counted_and_tried_again(
    db: asyncpg.Pool, queue: Queue, status: int, code: str, reason: str, hint: str
) -> None:
    queue.gate.always["ReceiveMessage"] = fails(status, code)
    await queue.send(events("1"))
    with capture_logs() as logs:
        async with reading(db, queue.feed()) as running:
            await asked(queue.gate, 5)
            assert await running.outcomes() == {"later:queue": 1}, "five failures within as many seconds count once"
            queue.gate.always.clear()
            await queue.emptied()
    assert told(logs, "queue_failed") == [("error", reason)]
    (line,) = [line for line in logs if line["event"] == "queue_failed"]
    assert line["hint"].endswith(hint)
    assert (line["feed"], line["region"]) == ("queue", "eu-west-1")
    assert [line["feed"] for line in logs if line["event"] == "queue_recovered"] == ["queue"]
    assert [row["event_id"] for row in await stored(db)] == ["1"]


@pytest.mark.parametrize("wrong", [{"region": "eu-north-1"}, {"queue_url": "http://127.0.0.1/123456789012/other"}])
async def test_a_wrong_region_or_name_is_no_such_place(db: asyncpg.Pool, queue: Queue, wrong: dict[str, str]) -> None:
    with capture_logs() as logs:
        async with reading(db, queue.feed(**wrong)) as running:
            await running.counted("later:queue")
    assert told(logs, "queue_failed") == [("error", "not_found")]


async def test_a_queue_that_is_made_later_is_read_then(db: asyncpg.Pool, queue: Queue) -> None:
    feed = queue.feed(queue_url=queue.url.replace("events", "later"))
    async with reading(db, feed) as running:
        await running.counted("later:queue")
        await queue.make("later")
        await queue.send(events("1"))
        await queue.emptied()
    assert [row["event_id"] for row in await stored(db)] == ["1"]


async def test_while_aws_is_away_the_process_waits_and_goes_on_by_itself(db: asyncpg.Pool, queue: Queue) -> None:
    queue.gate.away = True
    await queue.send(events("1"))
    with capture_logs() as logs:
        async with reading(db, queue.feed(), loops=2) as running:
            await running.counted("later:queue")
            queue.gate.away = False
            await queue.emptied()
    assert told(logs, "queue_failed") == [("error", "unreachable")]
    assert [row["event_id"] for row in await stored(db)] == ["1"]


@pytest.mark.parametrize(("failures", "seconds"), [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (8, 60), (100_000, 60)])
def test_pauses_between_failures_double_up_to_a_minute(failures: int, seconds: float) -> None:
    assert Pace().pause(failures) == seconds


# Credentials


class CredentialServer:
    """Gives out credentials over HTTP, as a container's host does; each is another one and soon to expire."""

    def __init__(self) -> None:
        self.failing = True
        self.asked = 0
        self.url = ""

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.failing:
            return web.Response(status=400, text="not now")
        expires = datetime.now(UTC) + timedelta(seconds=30)
        credentials = {
            "AccessKeyId": f"KEY{self.asked}",
            "SecretAccessKey": "throw-away",
            "Token": "throw-away",
            "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return web.json_response(credentials)


@pytest.fixture
async def no_credentials(aws: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.fixture
async def credentials(no_credentials: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CredentialServer]:
    server = CredentialServer()
    app = web.Application()
    app.router.add_get("/credentials", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/credentials"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url)
    yield server
    await runner.cleanup()


async def test_case_092_credentials_that_fail_and_then_expire_again_and_again_are_renewed(
    db: asyncpg.Pool, queue: Queue, credentials: CredentialServer
) -> None:
    with capture_logs() as logs:
        async with reading(db, queue.feed()) as running:
            await running.counted("later:queue")
            assert queue.gate.calls == []
            credentials.failing = False
            for n in range(3):  # each expires so soon that it is renewed before each call
                await queue.send(events(n))
                await queue.emptied()
    keys = [call.access_key for call in queue.gate.calls]
    assert len(set(keys)) >= 3
    assert keys == sorted(keys, key=lambda key: int(key.removeprefix("KEY")))
    assert [row["event_id"] for row in await stored(db)] == ["0", "1", "2"]
    assert len(told(logs, "queue_failed")) == 1
    assert [line["feed"] for line in logs if line["event"] == "queue_recovered"] == ["queue"]


async def test_credentials_that_come_later_are_found(
    db: asyncpg.Pool, queue: Queue, no_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.send(events("1"))
    with capture_logs() as logs:
        async with reading(db, queue.feed()) as running:
            await running.counted("later:queue")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "throw-away")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "throw-away")
            await queue.emptied()
    (line,) = [line for line in logs if line["event"] == "queue_failed"]
    assert line["reason"] == "unconfigured"
    assert line["hint"].startswith("no AWS credentials found")


# Settings


@pytest.fixture
def without_the_extra(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "aiobotocore", None)  # as if it were not installed
    return


QUEUED = Settings.model_validate(
    {"feeds": {"bus": {"provider": "ses", "queue_url": "https://sqs.eu-west-1.amazonaws.com/1/q"}}}
)


async def test_without_the_extra_a_queue_is_refused_at_start(without_the_extra: None) -> None:
    with pytest.raises(UserError, match="queue_url needs AWS's client: install the extra aws of"):
        Daemon(QUEUED, None).app(no_fetch)
    Daemon(QUEUED, "reconciler").app(no_fetch)  # which reads none
    Daemon(Settings(), None).app(no_fetch)


async def test_a_process_that_never_opened_ends_without_having_read(aws: str) -> None:
    daemon = Daemon(QUEUED, None)
    daemon.app(no_fetch)
    daemon.drain()
    await daemon.close()
