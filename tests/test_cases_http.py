# SPDX-License-Identifier: Apache-2.0
"""Cases from public trouble reports, posted over real HTTP to the real receiver: answers, rows and evidence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from kit import reconcile
from receiver_app import Answer, Running, case_request, running
from sns_signer import CertificateStore, case_store
from structlog.testing import capture_logs

from webhooks import metrics, sns
from webhooks.event import normal_recipient, wire_key
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

CASES = {path.name[:3]: json.loads(path.read_text()) for path in (Path(__file__).parent / "cases").glob("*.json")}
PLAIN_RUNS = [
    *("001", "002", "003", "006", "008", "009", "010", "011", "012", "013", "014", "015", "016", "019", "020", "022"),
    *("026", "028", "030", "031", "032", "033", "034", "036", "039", "040", "041", "042", "044", "047", "048", "051"),
    *("072", "075", "076", "077", "079", "099", "100"),
]
PINGS = ("016", "019", "020")
KINDS = {  # cases/README.md
    "008": {"accepted": "delivered"},
    "009": {"accepted": "queued"},
    "015": {"accepted": "sent"},
    "014": {"rejected": "failed"},
    "013": {"suppression_changed": "unsubscribed"},
}
SECRETS = ("sendgrid_public_keys", "svix_secrets", "mailgun_signing_keys", "mandrill_keys", "mailersend_secrets")


@pytest.fixture(autouse=True)
def _no_certificates_from_other_tests() -> Iterator[None]:
    sns._fetched.clear()
    yield
    sns._fetched.clear()


def feed_of(case: Mapping[str, Any]) -> Feed:
    config = case["config"]
    secrets = [secret for name in SECRETS for secret in config.get(name, [])]
    if "basic_auth" in config:
        secrets.append("basic:" + config["basic_auth"])
    provider = case["provider"].partition("-")[0]
    tolerance = PROVIDERS[provider].facts.tolerance
    topics = tuple(config.get("sns_topics", ()))
    url = config.get("public_url")
    return Feed(f"case-{case['id']}", provider, tuple(secrets), tolerance, signed_url=url, topics=topics)


def clock_of(case: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(case["clock"])


@asynccontextmanager
async def receiver_of(case: Mapping[str, Any], db: asyncpg.Pool, store: CertificateStore | None = None, **changes: Any):
    now = changes.pop("now", clock_of(case))
    async with running(db, [replace(feed_of(case), **changes)], now=now, fetch=store or case_store(case)) as app:
        yield app


# Rows of the send log, as senders make them


async def claim(db: asyncpg.Pool, row: Mapping[str, Any], feed: str) -> None:
    """Make a row as the case asks for: claimed so long ago, and confirmed if it is a sent one."""
    options = json.dumps({"recipient": row["recipient"]})
    fence = await db.fetchval("SELECT fence FROM send_claim($1, $2, $3)", row["send_key"], feed, options)
    age = timedelta(seconds=row["claimed_seconds_before_clock"])
    await db.execute(
        "UPDATE send_log SET first_claimed_at = first_claimed_at - $2::interval,"
        " claimed_at = claimed_at - $2::interval, submit_by = submit_by - $2::interval,"
        " next_check_at = next_check_at - $2::interval WHERE send_key = $1",
        row["send_key"],
        age,
    )
    if row["state"] == "sent":
        await db.execute("SELECT send_confirm($1, $2, $3, '{}')", row["send_key"], fence, row["provider_id"])
        await db.execute("DELETE FROM provider_event")  # of the answer: the case asks what the feed proves


async def set_up(case: Mapping[str, Any], db: asyncpg.Pool) -> None:
    for row in case.get("setup", []):
        await claim(db, row, feed_of(case).name)


# Posting


def requests_of(case: Mapping[str, Any]) -> list[tuple[bytes, dict[str, str]]]:
    more = case.get("requests", [])
    if isinstance(more, dict):
        return [case_request(case)] * more["repeat"]
    return [case_request(case), *map(case_request, more)]


def at_once(case: Mapping[str, Any]) -> int:
    more = case.get("requests", [])
    if isinstance(more, dict):
        return more.get("concurrent", 1)
    return len(more) + 1 if any(request.get("concurrent") for request in more) else 1


async def post_all(case: Mapping[str, Any], app: Running) -> list[Answer]:
    turn = asyncio.Semaphore(at_once(case))

    async def post(body: bytes, headers: dict[str, str]) -> Answer:
        async with turn:
            return await app.post(feed_of(case).name, body, headers)

    return await asyncio.gather(*(post(body, headers) for body, headers in requests_of(case)))


# Asking


async def heard(db: asyncpg.Pool, key: str) -> str | None:
    """What is heard of a send: by the sender's own function where it has a row, else by its wire key."""
    row = await db.fetchrow("SELECT * FROM send_log WHERE send_key = $1", key)
    if row is None:
        return await db.fetchval("SELECT min(testimony) FROM provider_event WHERE wire_key = $1", wire_key(key))
    ids = (row["provider_message_id"], row["known_message_id"])
    return await db.fetchval(
        "SELECT send_heard($1, $2, $3, $4, $5)", row["wire_key"], row["feed"], row["recipient_key"], *ids
    )


def evidence_of(case: Mapping[str, Any]) -> dict[str, str]:
    expect = case["expect"]
    wanted = expect.get("evidence")
    if isinstance(wanted, dict):
        return wanted
    key = expect.get("send_key") or next((row["send_key"] for row in case.get("setup", [])), None)
    return {key: wanted} if wanted and key else {}


def among(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


async def assert_stored(case: Mapping[str, Any], db: asyncpg.Pool) -> None:
    expect = case["expect"]
    rows = await db.fetch("SELECT * FROM provider_event")
    assert len(rows) in among(expect["events_stored"])
    for row in rows:
        if "type" in expect:
            renamed = KINDS.get(case["id"], {})
            assert row["kind"] in [renamed.get(name, name) for name in among(expect["type"])]
        if "message_id" in expect:
            assert row["message_id"] == (expect["message_id"] or "~" + row["event_id"])
        if "recipient" in expect:
            assert row["recipient"] == expect["recipient"]
        assert row["recipient"] != expect.get("recipient_not", "-")
        assert row["raw"]
    if "recipients" in expect:
        assert {row["recipient"]: row["kind"] for row in rows} == expect["recipients"]
    if "recipient_matches_row" in expect:
        assert rows[0]["recipient"] == await db.fetchval("SELECT recipient_key FROM send_log")
    for key, wanted in evidence_of(case).items():
        assert (await heard(db, key) or "none") == wanted, key


def assert_answered(expect: Mapping[str, Any], answers: list[Answer]) -> None:
    wanted = expect["http_status"]
    allowed = {200} if 200 in wanted else set(wanted)  # of all that means done we always say 200
    assert {answer.status for answer in answers} <= allowed


def anomalies(feed: str) -> float:
    return metrics.ANOMALIES.labels(feed, "duplicate_keys")._value.get()


@pytest.mark.parametrize("number", PLAIN_RUNS)
async def test_case(number, db):
    case = CASES[number]
    await set_up(case, db)
    store = case_store(case)
    feed = feed_of(case).name
    async with receiver_of(case, db, store) as app:
        answers = await post_all(case, app)
        await app.counters.flush(db)
    assert_answered(case["expect"], answers)
    await assert_stored(case, db)
    counted = dict(await db.fetch("SELECT outcome, sum(n)::int FROM feed_delivery WHERE feed = $1 GROUP BY 1", feed))
    assert sum(counted.values()) == len(answers)
    assert counted.get("control", 0) == case["expect"].get("control_messages", int(number in PINGS))
    assert anomalies(feed) == case["expect"].get("duplicate_key_anomalies", 0)
    if "outgoing_requests_to_disallowed_hosts" in case["expect"]:
        assert store.calls == []


# Variants and mutations


async def test_case_002_both_spellings_of_the_discriminator_are_one_event(db):
    old, new = CASES["002"], CASES["030"]
    async with receiver_of(old, db) as app:
        await post_all(old, app)
        await app.post(feed_of(old).name, *case_request(new))
    assert await heard(db, "order.receipt:1001") == "accepted"


async def test_case_003_the_log_names_raw_delivery_as_the_cause(db):
    async with receiver_of(CASES["003"], db) as app:
        with capture_logs() as logs:
            await post_all(CASES["003"], app)
    assert [(line["event"], line["reason"]) for line in logs] == [("delivery_refused", "raw_delivery")]
    assert "raw message delivery" in logs[0]["hint"]


async def test_case_009_the_missing_sub_object_is_as_good_as_null(db):
    case = CASES["009"]
    without = case | {
        "body_text": case["body_text"].replace('"delivery-status":null,', "").replace(',"delivery-status":null', "")
    }
    assert "delivery-status" not in without["body_text"]
    await set_up(case, db)
    async with receiver_of(case, db) as app:
        assert_answered(case["expect"], await post_all(without, app))
    await assert_stored(case, db)


async def test_case_013_the_next_account_event_does_not_clash(db):
    case = CASES["013"]
    other = case | {"body_text": case["body_text"].replace("ada@example.org", "bob@example.org")}
    async with receiver_of(case, db) as app:
        for one in (case, other, case):
            assert_answered(case["expect"], await post_all(one, app))
    assert await db.fetchval("SELECT count(*) FROM provider_event WHERE message_id = ''") == 0
    assert await db.fetchval("SELECT count(*) FROM provider_event") in {0, 2}


async def test_case_026_without_its_last_two_bytes_the_signature_does_not_fit(db):
    case = CASES["026"]
    stripped = case | {"body_text": case["body_text"].removesuffix("\r\n")}
    assert stripped != case
    expect = case["expect"]["mutation"]["strip_trailing_crlf"]
    async with receiver_of(case, db) as app:
        assert_answered(expect, await post_all(stripped, app))
    assert await db.fetchval("SELECT count(*) FROM provider_event") == expect["events_stored"]


async def test_case_030_what_is_fresh_for_sns_is_stale_for_svix_and_the_clock_is_named(db):
    case = CASES["028"]
    async with receiver_of(case, db, now=clock_of(case) + timedelta(hours=3.5)) as app:
        with capture_logs() as logs:
            (answer,) = await post_all(case, app)
    assert answer.status == 401
    assert logs[0]["reason"] == "stale"
    assert "clock skew suspected" in logs[0]["hint"]


async def test_case_034_a_certificate_that_can_not_be_had_asks_for_another_try(db):
    case = CASES["034"]
    expect = case["expect"]["variant"]["empty cert_store and fetch fails"]
    async with receiver_of(case, db, CertificateStore({})) as app:
        answers = await post_all(case, app)
        await app.counters.flush(db)
    assert_answered(expect, answers)
    assert all("Retry-After" in answer.headers for answer in answers)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == expect["events_stored"]
    assert await db.fetchval("SELECT sum(n)::int FROM feed_delivery WHERE outcome = 'later:certificate'") == 2


@pytest.mark.parametrize("secrets", [(), ("",), ("whsec_",), (" ",)])
async def test_case_036_without_a_secret_everything_is_refused(db, secrets):
    case = CASES["036"]
    async with receiver_of(case, db, secrets=secrets) as app:
        assert_answered(case["expect"], await post_all(case, app))
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0


async def test_case_039_a_truncated_gzip_body_is_400(db):
    case = CASES["039"]
    body, headers = case_request(case)
    async with receiver_of(case, db) as app:
        answers = [await app.post(feed_of(case).name, body[:cut], headers) for cut in (-1, -9, len(body) // 2, 11)]
    assert_answered(case["expect"]["variant"]["truncated gzip"], answers)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0


async def test_case_041_two_replicas_days_apart_store_the_event_once(db):
    case = CASES["041"]
    async with receiver_of(case, db) as one, receiver_of(case, db, now=clock_of(case) + timedelta(hours=29)) as two:
        answers = [answer for both in await asyncio.gather(post_all(case, one), post_all(case, two)) for answer in both]
        await one.counters.flush(db)
        await two.counters.flush(db)
    assert sum(answer.json["stored"] for answer in answers) == 1
    assert await db.fetchval("SELECT sum(n)::int FROM feed_delivery WHERE outcome = 'stored'") == 92


async def test_case_044_in_reverse_order_gives_the_same_rows(db):
    case = CASES["044"]
    (bounce,) = case["requests"]
    reverse = case | {**bounce, "requests": [{name: case[name] for name in ("headers", "body_text")}]}
    await set_up(case, db)
    async with receiver_of(case, db) as app:
        assert_answered(case["expect"], await post_all(reverse, app))
    await assert_stored(case, db)


async def test_case_048_many_rounds_end_alike(db):
    case = CASES["048"]
    async with receiver_of(case, db) as app:
        for _ in range(50):
            assert_answered(case["expect"], await post_all(case, app))
            assert await db.fetchval("SELECT count(*) FROM provider_event") == 2
            await db.execute("DELETE FROM provider_event")


async def test_case_066_a_secret_rotated_at_the_provider_only_shows_in_the_counts(db):
    case = CASES["028"]
    async with receiver_of(case, db, secrets=("whsec_" + "b3RoZXI=",)) as app:
        for _ in range(100):
            await post_all(case, app)
        await app.counters.flush(db)
    assert [tuple(row) for row in await db.fetch("SELECT outcome, sum(n)::int FROM feed_delivery GROUP BY 1")] == [
        ("refused:signature", 100)
    ]


async def test_case_077_a_redelivered_large_batch_is_all_repeats(db):
    case = CASES["077"]
    async with receiver_of(case, db) as app:
        answers = [*await post_all(case, app), *await post_all(case, app)]
    assert [answer.json for answer in answers] == [{"stored": 6_000, "repeated": 0}, {"stored": 0, "repeated": 6_000}]


async def test_case_100_other_spellings_of_an_address_are_the_same_and_plus_addresses_are_not():
    same = ["Ada@EXAMPLE.org", '"Ada B" <Ada@example.org>', " Ada@example.org "]
    assert {normal_recipient(address) for address in same} == {"Ada@example.org"}
    assert normal_recipient("Ada+news@example.org") == "Ada+news@example.org"


# What the next pass makes of it


AFTER_PASS = [
    number
    for number, case in sorted(CASES.items())
    if number in PLAIN_RUNS
    and {"send_log_after", "delivery_status", "provider_id_after", "after_row_insert_and_reconcile"}
    & case["expect"].keys()
]


@pytest.mark.parametrize("number", AFTER_PASS)
async def test_case_after_a_pass(number, db):
    case, expect = CASES[number], CASES[number]["expect"]
    await set_up(case, db)
    async with receiver_of(case, db) as app:
        await post_all(case, app)
    states = expect.get("send_log_after", {}) | expect.get("after_row_insert_and_reconcile", {})
    for key in expect.get("after_row_insert_and_reconcile", {}):
        row = {"send_key": key, "recipient": "ada@example.org", "state": "claimed", "claimed_seconds_before_clock": 300}
        await claim_around_evidence(db, row, feed_of(case).name)
    for _ in range(2):
        await reconcile(db)
        found = {row["send_key"]: row for row in await db.fetch("SELECT * FROM send_log")}
        assert {key: found[key]["state"] for key in states} == states
        for row in found.values():
            assert row["delivery"] == expect.get("delivery_status", row["delivery"])
            assert row["provider_message_id"] == expect.get("provider_id_after", row["provider_message_id"])


async def claim_around_evidence(db: asyncpg.Pool, row: Mapping[str, Any], feed: str) -> None:
    """Make a claimed row as if its claim had committed before the event came, which a claim now would find."""
    await db.execute("CREATE TEMP TABLE kept AS SELECT * FROM provider_event; DELETE FROM provider_event")
    await claim(db, row, feed)
    await db.execute("INSERT INTO provider_event SELECT * FROM kept")
