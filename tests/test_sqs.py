# SPDX-License-Identifier: Apache-2.0
"""Queues as they should be: every road into one, each message stored once and only then deleted."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aws_server import client
from queue_kit import (
    Queue,
    as_proxy,
    events,
    open_queue,
    reading,
    stored,
)
from receiver_app import NOW, signature
from serving import FEEDS, serving, until, write_config
from sns_signer import TOPIC, FakeSNS
from structlog.testing import capture_logs

from webhooks.provider import BadPayload, Delivery, FetchError
from webhooks.queue_message import Carried, carried, read_message
from webhooks.registry import PROVIDERS
from webhooks.sqs import Pace

TESTS = Path(__file__).parent
SES = TESTS / "providers/fixtures/ses"
KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
"""The send key of the fixtures."""


@pytest.fixture
async def queue(aws: str) -> AsyncIterator[Queue]:
    async with open_queue(aws) as found:
        yield found


def case(number: str) -> dict[str, Any]:
    (path,) = (TESTS / "cases").glob(f"{number}-*.json")
    return json.loads(path.read_text())


def record(name: str) -> str:
    return (SES / f"{name}.json").read_text()


# How a queue is read


async def test_every_message_is_stored_and_then_deleted_ten_at_a_time(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send_all(*(events(f"{n:02}", f"{n:02}b") for n in range(23)))
    async with reading(db, queue.feed()) as running:
        await queue.emptied()
        assert await running.outcomes() == {"stored": 23}
    rows = await stored(db)
    assert [row["event_id"] for row in rows] == [f"{n:02}{letter}" for n in range(23) for letter in ("", "b")]
    assert {(row["feed"], row["source"], row["testimony"]) for row in rows} == {("queue", "sqs", "accepted")}
    assert [len(call.body["Entries"]) for call in queue.gate.of("DeleteMessageBatch")] == [10, 10, 3]


async def test_a_receive_waits_twenty_seconds_for_ten_messages_and_a_stop_ends_it_at_once(
    db: asyncpg.Pool, queue: Queue
) -> None:
    async with reading(db, queue.feed(), loops=2, pace=Pace()) as running:

        async def both_ask() -> bool:
            return len(queue.gate.of("ReceiveMessage")) == 2

        await until(both_ask, "both loops to ask")
        async with asyncio.timeout(15):
            await running.reader.finish()
    asked = queue.gate.of("ReceiveMessage")[0].body
    assert (asked["WaitTimeSeconds"], asked["MaxNumberOfMessages"]) == (20, 10)
    assert (asked["VisibilityTimeout"], asked["MessageAttributeNames"]) == (60, ["All"])


async def test_nothing_is_deleted_before_the_commit_and_stays_hidden_until_then(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send(events("slow"))
    async with db.acquire() as other, reading(db, queue.feed(), loops=2) as running:
        await other.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")

        async def renewed_for_long() -> bool:
            return len(queue.gate.of("ChangeMessageVisibilityBatch")) >= 10  # 3 s; unrenewed it is hidden for 2

        await until(renewed_for_long, "the message to be kept hidden")
        assert queue.gate.of("DeleteMessageBatch") == []
        assert await queue.left() == 1
        await other.execute("COMMIT")
        await queue.emptied()
        assert await running.outcomes() == {"stored": 1}
    assert queue.received() == 1, "nobody else saw it meanwhile"
    renewals = queue.gate.of("ChangeMessageVisibilityBatch")
    assert {entry["VisibilityTimeout"] for call in renewals for entry in call.body["Entries"]} == {2}
    assert [row["event_id"] for row in await stored(db)] == ["slow"]


async def test_several_readers_of_one_queue_store_each_event_once(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send_all(*(events(f"{n:02}") for n in range(40)), *(events(f"{n:02}") for n in range(40)))
    async with reading(db, queue.feed(), loops=3) as one, reading(db, queue.feed(), loops=3) as other:
        await queue.emptied()
        took = [(await running.outcomes())["stored"] for running in (one, other)]
    assert took[1] >= 80, "a queue may hand out a message twice"
    assert [row["event_id"] for row in await stored(db)] == [f"{n:02}" for n in range(40)]


async def test_a_stop_stores_and_deletes_what_was_received_and_leaves_the_rest(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send_all(*(events(n) for n in range(5)))
    async with db.acquire() as other:
        await other.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")
        async with reading(db, queue.feed()) as running:

            async def in_flight() -> bool:
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'provider_event'::regclass"
                return queue.received() == 5 and await db.fetchval(waiting) == 1

            await until(in_flight, "all to be received, and to wait for the table")
            stopping = asyncio.create_task(running.reader.finish())
            await queue.send(events("too late"))
            done, _ = await asyncio.wait([stopping], timeout=0.5)
            assert not done
            await other.execute("COMMIT")
            await stopping
    assert [row["event_id"] for row in await stored(db)] == ["0", "1", "2", "3", "4"]
    assert await queue.left() == 1


# Every road from SES


async def test_case_023_an_event_of_eventbridge_in_sns_in_sqs_is_stored_and_deleted(
    db: asyncpg.Pool, queue: Queue
) -> None:
    expect = case("023")["expect"]
    await queue.send(case("023")["body_text"])
    async with reading(db, queue.feed("ses")):
        await queue.emptied()
    (row,) = await stored(db)
    assert (row["kind"], row["testimony"], row["message_id"]) == (
        expect["type"],
        expect["evidence"],
        expect["message_id"],
    )
    assert row["wire_key"] == await db.fetchval("SELECT wire_key($1)", expect["send_key"])
    assert bytes(row["raw"]).decode() == json.loads(case("023")["body_text"])["Message"]


async def test_case_023_served_settles_the_claim_and_a_stop_loses_nothing_in_flight(
    dsn: str, db: asyncpg.Pool, queue: Queue, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        f'[feeds.bus]\nprovider = "ses"\nregion = "eu-west-1"\nqueue_url = "{queue.url}"\nqueue_consumers = 2\n'
        f'endpoint_url = "{queue.gate.url}"\n[reconcile]\nevery = "1h"',
    )
    await db.execute("CALL send_claim_commit($1, 'bus', '{}')", case("023")["setup"][0]["send_key"])
    await queue.send(case("023")["body_text"])
    async with serving(config, "--only", "reconciler", RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        assert await server.stop() == 0
    assert queue.gate.calls == [], "it reads no queue"
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server, db.acquire() as other:

        async def sent() -> bool:
            return bool(await db.fetchval("SELECT state = 'sent' FROM send_log"))

        await until(sent, "the claim to be settled")
        await queue.emptied()
        await other.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")
        await queue.send(record("event_click"))

        async def in_flight() -> bool:
            return queue.received() == 2

        await until(in_flight, "the second message to be received")
        stopping = asyncio.create_task(server.stop())
        await server.told("stopping")
        await other.execute("COMMIT")
        assert await stopping == 0
    assert await queue.left() == 0
    assert [row["kind"] for row in await db.fetch("SELECT kind FROM provider_event ORDER BY kind")] == [
        "clicked",
        "delivered",
    ]
    assert [line["consumers"] for line in server.events("queue_reading")] == [2]
    assert [line["event"] for line in server.lines if line["level"] in ("warning", "error")] == []


async def test_one_event_is_the_same_on_every_road_from_ses(db: asyncpg.Pool, queue: Queue, aws: str) -> None:
    sent = record("event_send")
    await queue.send(sent)
    bridged = json.loads(record("eventbridge_send"))
    await queue.send(json.dumps(bridged))
    arn = (await queue.sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["QueueArn"]))["Attributes"]
    async with client("sns", aws) as sns:
        for name, raw in (("whole", "false"), ("raw", "true")):
            topic = (await sns.create_topic(Name=name))["TopicArn"]
            await sns.subscribe(
                TopicArn=topic,
                Protocol="sqs",
                Endpoint=arn["QueueArn"],
                Attributes={"RawMessageDelivery": raw},
            )
            await sns.publish(TopicArn=topic, Message=sent)
            await sns.publish(TopicArn=topic, Message=json.dumps(bridged))
    assert await queue.left() == 6
    async with reading(db, queue.feed("ses")) as running:
        await queue.emptied()
        assert await running.outcomes() == {"stored": 6}
    (row,) = await stored(db)
    assert (row["wire_key"], row["kind"], row["recipient"]) == (KEY, "sent", "ana.reyes@example.com")


async def test_messages_as_sqs_hands_them_out_are_read_and_are_one_event(db: asyncpg.Pool, queue: Queue) -> None:
    for name in ("sns_envelope_send", "sns_envelope_send_redelivered", "raw_send", "eventbridge_send"):
        await queue.send(json.loads(record(f"sqs_{name}"))["Body"])
    async with reading(db, queue.feed("ses")) as running:
        await queue.emptied()
        assert await running.outcomes() == {"stored": 4}
    assert [(row["wire_key"], row["kind"]) for row in await stored(db)] == [(KEY, "sent")]


async def test_what_is_no_event_is_counted_and_deleted_and_no_confirmation_is_followed(
    db: asyncpg.Pool, queue: Queue
) -> None:
    fetched: list[str] = []

    async def fetch(url: str, *, max_bytes: int = 65_536) -> bytes:
        fetched.append(url)
        raise FetchError("not here")

    sns = FakeSNS()
    for message in (
        sns.message("confirm", now=NOW, type="SubscriptionConfirmation"),
        sns.message("gone", now=NOW, type="UnsubscribeConfirmation"),
        sns.message("Successfully validated SNS topic for Amazon SES event publishing.", now=NOW),
    ):
        await queue.send(json.dumps(message))
    async with reading(db, queue.feed("ses"), fetch=fetch) as running:
        await queue.emptied()
        assert await running.outcomes() == {"control": 3}
    assert fetched == []
    assert await stored(db) == []


# Other providers, through a gateway that passes on whatever the internet sends


def with_attributes(delivery: Delivery) -> tuple[str, dict[str, str]]:
    return delivery.body.decode(), {name.replace("-", "_"): value for name, value in delivery.headers.items()}


def in_envelope(delivery: Delivery) -> tuple[str, dict[str, str]]:
    return as_proxy(delivery), {}


def in_base64(delivery: Delivery) -> tuple[str, dict[str, str]]:
    return as_proxy(delivery, body=base64.b64encode(delivery.body).decode(), isBase64Encoded=True), {}


def compressed(delivery: Delivery) -> tuple[str, dict[str, str]]:
    packed = Delivery(gzip.compress(delivery.body), {**delivery.headers, "content-encoding": "gzip"})
    return as_proxy(packed, body=base64.b64encode(packed.body).decode(), isBase64Encoded=True), {}


WAYS = (with_attributes, in_envelope, in_base64, compressed)


def days_old(feed: str) -> list[tuple[str, dict[str, str]]]:
    """Return a delivery in each way that a gateway writes it down, signed nine days ago."""
    configured = FEEDS[feed]
    sample, then = PROVIDERS[configured.provider].sample, NOW - timedelta(days=9)
    return [way(sample("delivered", f"order-{n}", configured, then)) for n, way in enumerate(WAYS)]


@pytest.mark.parametrize("feed", ["mg", "sg", "re"])
async def test_a_delivery_that_waited_for_days_behind_a_gateway_is_verified_and_stored(
    db: asyncpg.Pool, queue: Queue, feed: str
) -> None:
    for body, headers in days_old(feed):
        await queue.send(body, **headers)
    strict = queue.feed(FEEDS[feed].provider, FEEDS[feed].secrets, tolerance=timedelta(minutes=5))
    async with reading(db, strict) as running:
        await queue.emptied()
        assert await running.outcomes() == {"stored": 4}
    rows = [(row["wire_key"], row["kind"], row["source"]) for row in await stored(db)]
    assert sorted(rows) == [(f"order-{n}", "delivered", "sqs") for n in range(4)]


OTHER_SECRETS = {"mg": "key-of-somebody-else", "sg": "basic:hooks:wrong", "re": "whsec_c29tZWJvZHkgZWxzZQ=="}


@pytest.mark.parametrize("feed", ["mg", "sg", "re"])
async def test_what_no_secret_fits_stays_until_the_secret_is_put_right(
    db: asyncpg.Pool, queue: Queue, feed: str
) -> None:
    sent = days_old(feed)
    for body, headers in sent:
        await queue.send(body, **headers)
    provider = FEEDS[feed].provider
    async with reading(db, queue.feed(provider, (OTHER_SECRETS[feed],))) as running:
        await running.counted("refused:signature", 4)
    assert await stored(db) == []
    assert await queue.left() == 4
    async with reading(db, queue.feed(provider, FEEDS[feed].secrets)):
        await queue.emptied()
    assert len(await stored(db)) == 4


async def test_ses_by_a_gateway_is_believed_only_with_the_signature_of_a_topic(db: asyncpg.Pool, queue: Queue) -> None:
    sns = FakeSNS()
    signed = sns.message(record("event_send"), now=NOW - timedelta(days=9))
    forged = signed | {"Message": record("event_delivery")}
    for message in (signed, forged):
        await queue.send(as_proxy(sns.delivery(message)))
    await queue.send(as_proxy(Delivery(record("event_bounce_permanent").encode(), {})))
    async with reading(db, queue.feed("ses", topics=(TOPIC,)), fetch=sns.store) as running:
        for outcome in ("stored", "refused:signature", "refused:raw_delivery"):
            await running.counted(outcome)
    assert [row["kind"] for row in await stored(db)] == ["sent"]
    assert await queue.left() == 2


async def test_a_header_of_the_wrong_signature_in_the_attributes_is_no_way_round(
    db: asyncpg.Pool, queue: Queue
) -> None:
    body = events("forged")
    await queue.send(body, X_Signature=signature(body.encode(), "not the secret"))
    await queue.send(body)
    async with reading(db, queue.feed("plain", ("the secret",))) as running:
        for outcome in ("refused:signature", "refused:missing"):
            await running.counted(outcome)
    assert await stored(db) == []
    assert await queue.left() == 2


def message(body: str, **attributes: Any) -> dict[str, Any]:
    return {"ReceiptHandle": "r", "Body": body, "MessageAttributes": attributes}


@pytest.mark.parametrize(
    ("envelope", "expected"),
    [
        ({"headers": {}, "body": "x"}, Delivery(b"x", {})),
        ({"headers": {"X-A": "1", "x-b": ["2", "3"], "X-C": 4, "X-D": []}, "body": None, "httpMethod": "GET"},
         Delivery(b"", {"x-a": "1", "x-b": "2"}, "GET")),
        ({"headers": {}, "body": "x", "requestContext": {"http": {"method": "PUT"}}, "rawQueryString": "a=1&a=2",
          "queryStringParameters": {"a": "1,2"}}, Delivery(b"x", {}, "PUT", "a=1&a=2")),
        ({"headers": {}, "body": "x", "queryStringParameters": {"to": "a b@example.org", "n": None}},
         Delivery(b"x", {}, query="to=a+b%40example.org")),
        ({"headers": {}, "body": "eA==", "isBase64Encoded": False, "queryStringParameters": None},
         Delivery(b"eA==", {})),
        ({"headers": {}, "body": "/w==", "isBase64Encoded": True}, Delivery(b"\xff", {})),
        ({"headers": {}, "body": "\ud83d"}, Delivery(b"\xed\xa0\xbd", {})),
    ],
)  # fmt: skip
def test_the_envelope_of_a_proxy_is_opened(envelope: dict[str, Any], expected: Delivery) -> None:
    assert carried(read_message(message(json.dumps(envelope)))) == Carried(expected, by_gateway=True)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "7",
        "headers",
        '{"headers": [], "body": "x"}',
        '{"headers": {}}',
        '{"headers": {}, "body": {"a": 1}}',
        '{"body": "x"}',
        "a=1&b=2",
        "[" * 100_000,
    ],
)
def test_what_is_no_envelope_is_the_delivery_itself_with_attributes_for_headers(body: str) -> None:
    attributes = {"X-A": {"StringValue": "1"}, "b": {"BinaryValue": b"\xff"}}
    found = carried(read_message(message(body, **attributes)))
    assert found == Carried(Delivery(body.encode(), {"x-a": "1", "b": "\udcff"}), by_gateway=False)


@pytest.mark.parametrize(
    "body",
    ["no base64!", base64.b64encode(b"no gzip").decode(), base64.b64encode(gzip.compress(bytes(10**8))).decode()],
)
def test_a_body_that_cannot_be_unpacked_is_bad_and_a_small_one_does_not_fill_the_memory(body: str) -> None:
    envelope = {"headers": {"Content-Encoding": "gzip"}, "body": body, "isBase64Encoded": True}
    with pytest.raises(BadPayload):
        carried(read_message(message(json.dumps(envelope))))


# What can't be read


@pytest.mark.parametrize(
    ("provider", "bodies"),
    [
        ("ses", ["\u00e9 no record", "[" * 100_000, '{"Type": "Notification", "Message": "{}"}']),
        ("trusted", ['[{"at": 1}]', '[{"at": 2}]']),
    ],
)
async def test_messages_that_cannot_be_read_are_kept_byte_by_byte_and_deleted(
    db: asyncpg.Pool, queue: Queue, provider: str, bodies: list[str]
) -> None:
    for body in bodies:
        await queue.send(body)
    async with reading(db, queue.feed(provider)) as running:
        await queue.emptied()
        assert await running.outcomes() == {"refused:format": len(bodies)}
    rows = await stored(db)
    assert {(row["kind"], row["testimony"], row["source"], row["reason"]) for row in rows} == {
        ("unknown", "none", "sqs", "refused:format")
    }
    assert [row["message_id"] for row in rows] == [f"~{row['event_id']}" for row in rows], "of no message"
    assert {bytes(row["raw"]) for row in rows} == {body.encode() for body in bodies}
    assert queue.received() == len(bodies)


async def test_of_an_envelope_that_cannot_be_opened_no_credential_is_kept(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send('{"headers": {"Authorization": "Bearer hidden"}, "body": "*", "isBase64Encoded": true}')
    async with reading(db, queue.feed("trusted")):
        await queue.emptied()
    assert [bytes(row["raw"]) for row in await stored(db)] == [b"*"]


async def test_a_message_at_which_the_adapter_fails_is_kept_as_damaged(db: asyncpg.Pool, queue: Queue) -> None:
    body = events("1")
    await queue.send(body, x_fault="parse")
    with capture_logs() as logs:
        async with reading(db, queue.feed()) as running:
            await queue.emptied()
            assert await running.outcomes() == {"stored": 1, "damaged": 1}
    (row,) = await stored(db)
    assert (row["kind"], row["testimony"], row["reason"], bytes(row["raw"])) == (
        "unknown",
        "none",
        "damaged",
        body.encode(),
    )
    (line,) = [line for line in logs if line["event"] == "delivery_damaged"]
    assert (line["feed"], line["error"]) == ("queue", "RuntimeError")
    assert "ada@example.org" not in str(logs)


async def test_poison_stops_nobody_and_is_told_once_a_feed_and_reason(db: asyncpg.Pool, queue: Queue) -> None:
    await queue.send_all("poison 1", events("good"), "poison 2", "poison 3", "poison 3")
    with capture_logs() as logs:
        async with reading(db, queue.feed()) as running:
            await queue.emptied()
            assert await running.outcomes() == {"stored": 1, "refused:format": 4}
    unread = [bytes(row["raw"]) for row in await stored(db) if row["kind"] == "unknown"]
    assert sorted(unread) == [b"poison 1", b"poison 2", b"poison 3"]
    kept = [line for line in logs if line["event"] == "queue_message_kept"]
    assert [(line["log_level"], line["feed"], line["reason"]) for line in kept] == [("warning", "queue", "format")]
    assert "poison" not in str(kept)
