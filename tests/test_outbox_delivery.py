# SPDX-License-Identifier: Apache-2.0
"""The daemon tells the application: over HTTP and SQS, at least once, in order, and not for ever."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aws_server import client
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from kit import FEED, call, claim, event, fail, old_claim, reconcile, release_by_pass
from program import Program
from serving import serving, until, write_config
from snippets import block
from structlog.testing import capture_logs
from test_outbox import entries

from reconciler.configuration.settings import Settings, load_settings
from reconciler.configuration.tables import OutboxSettings
from reconciler.errors import UserError
from reconciler.insight.findings import judge
from reconciler.insight.status import read_status
from reconciler.outbox.channels import LONGEST_WAIT, retry_after
from reconciler.outbox.delivery import backoff, clean, telling
from webhooks.registry import PROVIDERS

KEY = b"0123456789abcdef01234567"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OLD_SECRET = "whsec_" + base64.b64encode(KEY[::-1]).decode()


class Receiver:
    """An application's endpoint. `answers` are given in turn, then 204; `handle` may do anything instead."""

    def __init__(self) -> None:
        self.got: list[tuple[web.Request, bytes]] = []
        self.answers: list[web.Response] = []
        self.handle: Callable[[], Awaitable[None]] | None = None
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.got.append((request, await request.read()))
        if self.handle:
            await self.handle()
        return self.answers.pop(0) if self.answers else web.Response(status=204)

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    @property
    def types(self) -> list[str]:
        return [f"{told['type']} {told['data']['send_key']}" for told in self.told]

    @property
    def ids(self) -> list[str]:
        return [request.headers["webhook-id"] for request, _ in self.got]


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hooks", receiver.take)
    server = TestServer(app, scheme="https" if tls else "http")
    await server.start_server(ssl=tls)
    async with server:
        receiver.url = str(server.make_url("/hooks"))
        yield receiver


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with listening() as found:
        yield found


def pushing(db: asyncpg.Pool, receiver: Receiver, **settings: Any) -> Callable[[], Awaitable[None]]:
    """One daemon's worker."""
    wanted = {"url": receiver.url, "secrets": SECRET, "tell": ["released", "sent", "failed", "held"], **settings}
    return telling(db, OutboxSettings.model_validate(wanted))


async def released(db: asyncpg.Pool, key: str = "order:1") -> int:
    fence: int = (await claim(db, key, message_class="receipts", recipient="ada@example.com", payload={"s": 1}))[
        "fence"
    ]
    await fail(db, key, fence, not_sent=True)
    return fence


async def outbox(db: asyncpg.Pool) -> list[asyncpg.Record]:
    return await db.fetch("SELECT * FROM release_outbox ORDER BY id")


async def later(db: asyncpg.Pool, by: timedelta) -> None:
    """Let time go by, for the outbox."""
    await db.execute(
        "UPDATE release_outbox SET next_try_at = next_try_at - $1::interval,"
        " leased_until = leased_until - $1::interval,"
        " created_at = created_at - $1::interval, tried_since = tried_since - $1::interval,"
        " dead_at = dead_at - $1::interval, delivered_at = delivered_at - $1::interval,"
        " cancelled_at = cancelled_at - $1::interval",
        by,
    )


# What arrives


def verified(headers: Any, body: bytes, key: bytes) -> bool:
    """Standard Webhooks, as its specification says and as a receiver writes it."""
    content = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    wanted = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    given = [one.split(",", 1) for one in headers["webhook-signature"].split(" ")]
    fresh = abs(datetime.now(UTC).timestamp() - int(headers["webhook-timestamp"])) < 300
    return fresh and any(version == "v1" and hmac.compare_digest(text, wanted) for version, text in given)


async def test_a_message_is_signed_and_says_what_the_application_needs_and_no_more(
    db: asyncpg.Pool, receiver: Receiver
) -> None:
    run = pushing(db, receiver, secrets=[SECRET, OLD_SECRET])
    await run()
    await released(db)
    await run()
    ((request, body),) = receiver.got
    assert verified(request.headers, body, KEY)
    assert verified(request.headers, body, KEY[::-1])
    assert not verified(request.headers, body, b"another")
    assert not verified(request.headers, body + b" ", KEY)
    assert request.headers["Content-Type"] == "application/json"
    (entry,) = await outbox(db)
    assert json.loads(body) == {
        "type": "send.released",
        "id": request.headers["webhook-id"],
        "timestamp": entry["created_at"].isoformat(),
        "data": {
            "wire_key": entry["wire_key"],
            "send_key": "order:1",
            "feed": FEED,
            "message_class": "receipts",
            "attempt": 1,
            "reason": "not_sent",
            "risk": None,
        },
    }
    assert request.headers["webhook-id"] == f"outbox_{entry['id']}_{entry['wire_key']}"
    assert (entry["delivered_at"] is not None, entry["leased_until"], entry["tries"]) == (True, None, 1)
    await run()
    assert len(receiver.got) == 1


async def test_a_release_on_absence_states_its_risk(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver)
    await run()
    await release_by_pass(db, "order:1")
    await run()
    (told,) = receiver.told
    assert told["data"]["reason"] == "absent"
    assert 0 < told["data"]["risk"] <= 0.01
    shown = json.loads(block("docs/outbox.md", "json"))
    assert (told.keys(), told["data"].keys()) == (shown.keys(), shown["data"].keys())


async def test_each_kind_of_news_gives_its_reason(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver)
    await run()
    await old_claim(db, "order:1")
    await reconcile(db)
    await run()
    await call(db, "operator_decide", "order:1", "failed", "note", "ann")
    await run()
    await event(db, "order:1")
    await reconcile(db)
    await run()
    assert [(told["type"], told["data"]["reason"]) for told in receiver.told] == [
        ("send.held", "silent"),
        ("send.failed", "operator"),
        ("send.sent", "accepted"),
    ]


async def test_only_what_the_settings_name_is_told_and_what_they_no_longer_name_is_cancelled(
    db: asyncpg.Pool, receiver: Receiver
) -> None:
    await pushing(db, receiver, tell=["held"])()
    await old_claim(db, "order:1")
    await reconcile(db)
    assert await entries(db) == ["held"]
    await pushing(db, receiver, tell=["released"])()
    assert await entries(db) == ["(held)"]
    await released(db, "order:2")
    await telling(db, OutboxSettings())()  # no channel any more
    assert await entries(db, "order:2") == ["(released)"]
    await released(db, "order:3")
    assert await entries(db, "order:3") == []
    assert receiver.got == []


async def test_a_process_without_these_settings_does_not_silence_the_others(
    db: asyncpg.Pool, receiver: Receiver
) -> None:
    run = pushing(db, receiver)
    await run()
    await telling(db, OutboxSettings())()
    await run()
    await released(db)
    await run()
    assert receiver.types == ["send.released order:1"]


# At least once, in order


async def test_evidence_that_comes_before_the_delivery_cancels_it(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver, tell=["released"])
    await run()
    await released(db)
    await event(db, "order:1")
    await reconcile(db)
    await run()
    assert receiver.got == []
    assert await entries(db) == ["(released)"]


async def test_what_the_trigger_could_not_cancel_is_seen_right_before_the_delivery(
    db: asyncpg.Pool, receiver: Receiver
) -> None:
    run = pushing(db, receiver)
    await run()
    await released(db, "order:1")
    await released(db, "order:2")
    await db.execute("DELETE FROM send_log WHERE send_key = 'order:1'")  # retention
    await run()
    assert receiver.types == ["send.released order:2"]
    assert [(e["cancelled_at"] is not None, e["delivered_at"] is not None) for e in await outbox(db)] == [
        (True, False),
        (False, True),
    ]


async def test_news_of_a_send_waits_for_older_news_that_is_under_way(db: asyncpg.Pool, receiver: Receiver) -> None:
    run, another = pushing(db, receiver), pushing(db, receiver)
    await run()
    await another()
    await released(db)
    arrived, go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        arrived.set()
        await go.wait()

    receiver.handle = slow
    delivering = asyncio.ensure_future(run())
    async with asyncio.timeout(10):
        await arrived.wait()
        receiver.handle = None
        await event(db, "order:1")
        await reconcile(db)
        assert await entries(db) == ["(released)", "sent"]
        await another()
        assert receiver.types == ["send.released order:1"]
        go.set()
        await delivering
    await another()
    assert receiver.types == ["send.released order:1", "send.sent order:1"]


async def test_a_send_in_trouble_does_not_keep_others_waiting(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver)
    await run()
    await released(db, "order:1")
    receiver.answers = [web.Response(status=500)]
    await run()
    await released(db, "order:2")
    await run()
    assert receiver.types == ["send.released order:1", "send.released order:2"]


async def test_two_daemons_tell_everything_once(db: asyncpg.Pool, receiver: Receiver) -> None:
    runs = [pushing(db, receiver), pushing(db, receiver)]
    for run in runs:
        await run()
    for n in range(100):
        await released(db, f"order:{n}")
    while any(e["delivered_at"] is None for e in await outbox(db)):
        await asyncio.gather(*(run() for run in runs))
    assert sorted(receiver.types) == sorted(f"send.released order:{n}" for n in range(100))
    assert {e["tries"] for e in await outbox(db)} == {1}


async def test_no_connection_is_held_while_the_receiver_thinks(db: asyncpg.Pool, dsn: str, receiver: Receiver) -> None:
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=1)
    run = pushing(pool, receiver)
    await run()
    for n in range(5):
        await released(db, f"order:{n}")
    free = asyncio.Event()

    async def think() -> None:
        async with asyncio.timeout(20):
            assert await pool.fetchval("SELECT 1") == 1
        free.set()

    receiver.handle = think
    await run()
    await pool.close()
    assert free.is_set()
    assert all(e["delivered_at"] for e in await outbox(db))


PUSH = """
[outbox]
url = "{}"
secrets = ["env:OUTBOX_SECRET"]
[log]
level = "debug"
"""


async def test_a_daemon_killed_between_delivery_and_mark_leads_to_a_second_delivery_of_the_same_id(
    db: asyncpg.Pool, dsn: str, receiver: Receiver, tmp_path: Path
) -> None:
    config = write_config(tmp_path, PUSH.format(receiver.url))
    named = {"RECONCILER_DATABASE__URL": dsn, "OUTBOX_SECRET": SECRET}
    killed = asyncio.Event()

    async def wished() -> object:
        return await db.fetchval("SELECT tell = '{released}' FROM installation")

    async def delivered() -> object:
        return (await outbox(db))[0]["delivered_at"]

    async with serving(config, "--only", "reconciler", **named) as first:

        async def kill() -> None:
            first.process.kill()
            killed.set()

        receiver.handle = kill
        await until(wished, "the daemon to say what it tells")
        await released(db)
        async with asyncio.timeout(20):
            await killed.wait()
            await first.ended()
    receiver.handle = None
    (entry,) = await outbox(db)
    assert (entry["delivered_at"], entry["tries"], entry["leased_until"] is not None) == (None, 1, True)
    async with serving(config, "--only", "reconciler", **named) as second:
        await later(db, timedelta(seconds=60))  # the lease of the first runs out
        await until(delivered, "the second delivery")
        text = "\n".join(map(json.dumps, [*first.lines, *second.lines]))
    assert len(set(receiver.ids)) == 1
    assert len(receiver.ids) == 2
    assert "order:1" not in text
    assert SECRET not in text


# Failures


async def test_a_failure_is_tried_again_later_and_later_under_the_same_id(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver)
    await run()
    await released(db)
    receiver.answers = [
        web.Response(status=500),
        web.Response(status=404),
        web.Response(status=302, headers={"Location": "/elsewhere"}),
    ]
    with capture_logs() as logs:
        for tries, error, soonest, latest in ((1, "http_500", 2.5, 5), (2, "http_404", 5, 10), (3, "http_302", 10, 20)):
            before = await db.fetchval("SELECT clock_timestamp()")
            await run()
            after = await db.fetchval("SELECT clock_timestamp()")
            (entry,) = await outbox(db)
            assert (entry["tries"], entry["last_error"], entry["leased_until"]) == (tries, error, None)
            assert entry["next_try_at"] >= before + timedelta(seconds=soonest)
            assert entry["next_try_at"] <= after + timedelta(seconds=latest)
            # A minute more, so that a busy machine does not come to it meanwhile.
            await db.execute("UPDATE release_outbox SET next_try_at = next_try_at + interval '1 minute'")
            await run()  # too early
            assert len(receiver.got) == tries
            await later(db, timedelta(minutes=1, seconds=latest))
    await run()
    assert len(set(receiver.ids)) == 1
    assert len(receiver.ids) == 4
    (entry,) = await outbox(db)
    assert (entry["delivered_at"] is not None, entry["last_error"]) == (True, None)
    told = [(line["event"], line["reason"], line["wire_key"]) for line in logs]
    assert told == [("outbox_not_delivered", e, entry["wire_key"]) for e in ("http_500", "http_404", "http_302")]


@pytest.mark.parametrize(
    ("tries", "dice", "seconds"),
    [(1, 0, 5), (1, 1, 2.5), (2, 0, 10), (5, 0, 80), (10, 0, 2560), (11, 0, 3600), (1000, 0, 3600), (1000, 1, 1800)],
)
def test_the_wait_doubles_up_to_an_hour_and_dice_take_up_to_half(tries: int, dice: float, seconds: float) -> None:
    assert backoff(tries, dice).total_seconds() == seconds


NOW = datetime(2026, 11, 2, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("120", 120),
        (format_datetime(NOW + timedelta(minutes=5), usegmt=True), 300),
        (format_datetime(NOW - timedelta(minutes=5), usegmt=True), None),
        ("0", None),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("9" * 30, LONGEST_WAIT.total_seconds()),
        ("9" * 5000, None),
    ],
)
def test_what_retry_after_asks_for(said: str, seconds: float | None) -> None:
    wait = retry_after({"Retry-After": said}, NOW)
    assert (wait and wait.total_seconds()) == seconds


@pytest.mark.parametrize(("status", "waits"), [(429, True), (503, True), (500, False)])
async def test_a_receiver_that_says_when_is_left_alone_until_then(
    db: asyncpg.Pool, receiver: Receiver, status: int, waits: bool
) -> None:
    run = pushing(db, receiver)
    await run()
    await released(db)
    receiver.answers = [web.Response(status=status, headers={"Retry-After": "600"})]
    await run()
    await later(db, timedelta(seconds=590))
    await run()
    assert len(receiver.got) == (1 if waits else 2)


async def test_what_is_not_reached_has_a_short_reason(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver, url="http://127.0.0.1:1/hush?token=hush")
    await run()
    await released(db)
    await run()
    (entry,) = await outbox(db)
    assert entry["last_error"] == "unreachable (ClientConnectorError)"


def stranger(folder: Path) -> ssl.SSLContext:
    """TLS with a certificate that nobody vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = made.add_extension(names, critical=False).sign(key, SHA256())
    (folder / "cert").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert", folder / "key")
    return context


async def test_a_receiver_that_cannot_prove_who_it_is_gets_nothing(db: asyncpg.Pool, tmp_path: Path) -> None:
    async with listening(stranger(tmp_path)) as receiver:
        run = pushing(db, receiver)
        await run()
        await released(db)
        await run()
        (entry,) = await outbox(db)
        assert (receiver.url[:6], entry["last_error"], receiver.got) == ("https:", "tls", [])


async def given_up(db: asyncpg.Pool, receiver: Receiver, key: str = "order:1") -> Callable[[], Awaitable[None]]:
    """A message that was tried for three days."""
    run = pushing(db, receiver, tell=["released"])
    await run()
    await released(db, key)
    receiver.answers = [web.Response(status=500), web.Response(status=500)]
    await run()
    await later(db, timedelta(days=3))
    await run()
    assert (await outbox(db))[-1]["dead_at"] is not None
    return run


async def codes(db: asyncpg.Pool) -> list[str]:
    settings = Settings.model_validate({"feeds": {FEED: {"provider": "mailgun", "secrets": "k"}}})
    async with db.acquire() as connection:
        status = await read_status(connection, settings, lambda: datetime.now(UTC))
    return [finding.line() for finding in judge(status, settings) if finding.code.startswith("outbox")]


async def test_what_was_given_up_needs_a_person_who_can_have_it_tried_again(
    db: asyncpg.Pool, receiver: Receiver, program: Program
) -> None:
    run = await given_up(db, receiver)
    await later(db, timedelta(hours=1))
    await run()
    assert len(receiver.got) == 2
    (line,) = await codes(db)
    assert line.startswith("outbox_dead: 1 message to the application given up, the newest failure: http_500: ")
    checked = await program("status", "--check")
    assert checked.exit_code == 3
    assert "outbox_dead" in checked.output
    (found,) = await program.json("outbox", "list")
    assert (found["what"], found["send_key"], found["tries"], found["last_error"]) == (
        "released",
        "order:1",
        2,
        "http_500",
    )
    assert "http_500" in (await program("outbox", "list")).stdout
    assert (await program("outbox", "retry")).exit_code == 2
    assert (await program.json("outbox", "retry", "order:2")) == {"retried": []}
    assert (await program("outbox", "retry", "order:1")).stdout == "1 will be delivered again\n"
    await run()
    assert len(set(receiver.ids)) == 1
    assert len(receiver.ids) == 3
    assert await codes(db) == []
    assert (await program("outbox", "list")).stdout == "every message was delivered\n"


async def test_what_was_given_up_gets_its_whole_time_again(
    db: asyncpg.Pool, receiver: Receiver, program: Program
) -> None:
    run = await given_up(db, receiver)
    await program("outbox", "retry", "--all")
    receiver.answers = [web.Response(status=500)]
    await run()
    (entry,) = await outbox(db)
    assert (entry["dead_at"], entry["tries"]) == (None, 1)


async def test_a_message_that_was_given_up_is_taken_back_when_its_send_goes_on(
    db: asyncpg.Pool, receiver: Receiver
) -> None:
    await given_up(db, receiver)
    assert (await claim(db, "order:1"))["outcome"] == "claimed"
    assert await codes(db) == []


async def test_a_receiver_that_is_gone_is_asked_once(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = pushing(db, receiver)
    await run()
    await released(db)
    receiver.answers = [web.Response(status=410)]
    await run()
    (entry,) = await outbox(db)
    assert (entry["dead_at"] is not None, entry["last_error"]) == (True, "http_410")


async def test_a_message_that_waits_long_needs_a_person(db: asyncpg.Pool, receiver: Receiver) -> None:
    await pushing(db, receiver)()
    await released(db)
    await later(db, timedelta(minutes=14))
    assert await codes(db) == []
    await later(db, timedelta(minutes=2))
    (line,) = await codes(db)
    assert line.startswith("outbox_waits: 1 message to the application not delivered, the oldest for 16m: ")


async def test_what_ended_a_week_ago_is_removed(db: asyncpg.Pool, receiver: Receiver) -> None:
    run = await given_up(db, receiver)
    await released(db, "delivered")
    await released(db, "cancelled")
    await claim(db, "cancelled")
    await run()
    await later(db, timedelta(days=7, hours=-1))
    await clean(db)
    assert len(await outbox(db)) == 3
    await later(db, timedelta(hours=2))
    await clean(db)
    assert [e["dead_at"] is not None for e in await outbox(db)] == [True]
    await later(db, timedelta(days=30))
    await clean(db)
    assert await outbox(db) == []


# SQS


async def messages(aws: str, url: str, *names: str) -> list[dict[str, Any]]:
    async with client("sqs", aws) as sqs:
        got = await sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, AttributeNames=["All"])
    return [
        {
            **json.loads(m["Body"])["data"],
            **{name: m["Attributes"][name] for name in names},
            "id": json.loads(m["Body"])["id"],
        }
        for m in got.get("Messages", [])
    ]


@pytest.mark.parametrize("fifo", [False, True])
async def test_a_queue_gets_the_same_message(db: asyncpg.Pool, aws: str, fifo: bool) -> None:
    name, attributes = ("told.fifo", {"FifoQueue": "true"}) if fifo else ("told", {})
    async with client("sqs", aws) as sqs:
        url = (await sqs.create_queue(QueueName=name, Attributes=attributes))["QueueUrl"]
    settings = OutboxSettings.model_validate({"queue_url": url, "region": "eu-west-1", "endpoint_url": aws})
    run = telling(db, settings)
    await run()
    await released(db)
    await run()
    names = ("MessageGroupId", "MessageDeduplicationId") if fifo else ()
    (told,) = await messages(aws, url, *names)
    (entry,) = await outbox(db)
    assert (told["send_key"], told["reason"], entry["delivered_at"] is not None) == ("order:1", "not_sent", True)
    assert told["id"] == f"outbox_{entry['id']}_{entry['wire_key']}"
    if fifo:
        assert (told["MessageGroupId"], told["MessageDeduplicationId"]) == (entry["wire_key"], told["id"])


async def test_a_queue_that_is_not_there_is_a_failure_like_any_other(db: asyncpg.Pool, aws: str) -> None:
    settings = OutboxSettings.model_validate({"queue_url": f"{aws}/000000000000/none", "endpoint_url": aws})
    run = telling(db, settings)
    await run()
    await released(db)
    await run()
    (entry,) = await outbox(db)
    assert entry["last_error"].startswith("not_found: AWS knows no such place")


# Settings


def settings_of(text: str, folder: Path) -> Settings:
    file = folder / "r.toml"
    file.write_text(text)
    return load_settings(file, {"OUTBOX_SECRET": SECRET}, PROVIDERS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('url = "https://a"', "outbox has a url and no secrets to sign with: set outbox.secrets to a whsec_ secret"),
        (
            f'url = "https://a"\nqueue_url = "https://b"\nsecrets = "{SECRET}"',
            "outbox has both url and queue_url: keep one",
        ),
        (
            'url = "https://a"\nsecrets = "hush!"',
            "outbox.secrets[0] can't sign a webhook: write whsec_ and 24 to 64 random bytes in base64",
        ),
        ('tell = "bounced"', "outbox.tell[0] must be 'released', 'sent', 'failed' or 'held'"),
    ],
)
def test_settings_that_could_not_work_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match="outbox") as refused:
        settings_of(f"[outbox]\n{text}", tmp_path)
    assert says in str(refused.value)
    assert "hush" not in str(refused.value)


def test_the_secret_of_the_outbox_is_shown_to_nobody(tmp_path: Path) -> None:
    settings = settings_of('[outbox]\nurl = "https://u:passw0rd@a/"\nsecrets = "env:OUTBOX_SECRET"', tmp_path)
    assert settings.outbox.give_up_after == timedelta(days=3)
    assert settings.outbox.tell == ("released",)
    shown = json.dumps(settings.masked()["outbox"], default=str)
    assert SECRET not in shown
    assert "passw0rd" not in shown
    assert {SECRET, "passw0rd"} <= set(settings.secret_values())
