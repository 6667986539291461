# SPDX-License-Identifier: Apache-2.0
"""Recipients are stored hashed: no table ever holds an address, and what needs none works as before."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from api_kit import Sent, asked
from apis import mailgun, postmark
from campaign_kit import batch, loaded
from inbox_kit import event as said
from kit import FEED, call, claim, confirm, fail, make_older, old_claim, reconcile, row, state
from program import Program
from receiver_app import running
from sends_kit import api

from reconciler import campaign
from reconciler.campaign import batches
from reconciler.campaigns import suppression
from reconciler.database.migrate import MigrationError, migrate
from reconciler.keys import hashed_key
from reconciler.passes import feeds
from reconciler.passes.lookup import look_up_send
from reconciler.passes.second_witness import SecondWitness
from reconciler.rule.policy import Witness
from reconciler.upkeep.forgetting import forget
from webhooks.event import HASHED_RECIPIENT, Answer, hashed_recipient, wire_key
from webhooks.inbox import Inbox
from webhooks.lookup import Sought, is_about
from webhooks.provider import Feed
from webhooks.writer import read_layout

ANA, BOB = "ana.reyes@example.com", "bob@example.org"
KEY = hashed_key("order.receipt", "o-1042", ANA)
PM = Feed("pm", "postmark", ("basic:hooks:0123456789",))
BASIC = {"Authorization": "Basic aG9va3M6MDEyMzQ1Njc4OQ==", "Content-Type": "application/json"}
FIXTURES = Path(__file__).parent / "providers/fixtures/postmark"
HOUR = timedelta(hours=1)
LOST = wire_key("order:1")


@pytest.fixture
async def hashed(db: asyncpg.Pool, dsn: str) -> asyncpg.Pool:
    """A database in which recipients are stored hashed."""
    await migrate(dsn, hash_recipients=True)
    return db


async def salt(db: asyncpg.Pool) -> bytes:
    found: bytes = await db.fetchval("SELECT recipient_salt FROM installation")
    return found


TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1
"""


async def where_it_stands(db: asyncpg.Pool, text: str) -> list[str]:
    """Return the tables of which some row holds this text, in any column, bytes included."""
    found = []
    for (table,) in await db.fetch(TABLES):
        whole = f"SELECT count(*) FROM {table} AS t WHERE t::text ILIKE $1 OR t::text LIKE $2"  # noqa: S608
        if await db.fetchval(whole, f"%{text}%", f"%{text.encode().hex()}%"):
            found.append(table)
    return found


def delivery(name: str, **changes: Any) -> bytes:
    """A body as Postmark posts it."""
    return json.dumps(json.loads((FIXTURES / name).read_text()) | changes).encode()


# How it is begun


async def test_it_is_begun_once_before_the_first_send_and_stays(dsn: str, db: asyncpg.Pool) -> None:
    await suppression.add(db, ["Ana.Reyes@Example.COM", "ana.reyes@example.com", BOB], None, "me")
    assert await salt(db) is None
    await migrate(dsn, hash_recipients=True)
    first = await salt(db)
    assert len(first) == 32
    assert await where_it_stands(db, "example") == [], "who was suppressed before is hashed too"
    assert await suppression.remove(db, [ANA]) == 1
    await claim(db, KEY, recipient=ANA)
    await migrate(dsn, hash_recipients=True, namespace="")
    await migrate(dsn)
    assert await salt(db) == first


@pytest.mark.parametrize("by", ["a send", "an event"])
async def test_where_an_address_may_be_stored_already_it_is_refused(
    dsn: str, db: asyncpg.Pool, inbox: Inbox, by: str
) -> None:
    if by == "a send":
        await claim(db, KEY, recipient=ANA)
    else:
        await inbox.store("pm", [said(1, recipient=ANA)])
    with pytest.raises(MigrationError, match="can't be stored hashed any more: .* fresh database"):
        await migrate(dsn, hash_recipients=True)
    assert await salt(db) is None
    assert await db.fetchval("SELECT recipient_here($1)", ANA) == ANA


async def test_the_program_begins_it_and_says_so(program: Program, db: asyncpg.Pool) -> None:
    assert (await program("migrate", "--check", "--hash-recipients")).exit_code == 2
    assert "recipients:" not in (await program("status")).stdout
    done = await program("migrate", "--hash-recipients")
    assert done.stdout == "the schema is up to date\nrecipients are stored hashed\n"
    assert "recipients:    stored hashed\n" in (await program("status")).stdout
    assert (await program.json("status"))["hashed_recipients"] is True
    assert "can't be asked where recipients are stored hashed" in (await program("providers", "mailgun")).stdout
    assert "hashed" not in (await program("providers", "postmark")).stdout


async def test_two_installations_hash_one_address_differently(db: asyncpg.Pool, hashed: asyncpg.Pool) -> None:
    made = await hashed.fetchval("SELECT recipient_here($1)", ANA)
    assert made == hashed_recipient(ANA, await salt(db))
    assert HASHED_RECIPIENT.fullmatch(made)
    assert made != hashed_recipient(ANA, b"another salt of sixteen bytes")
    assert made.split("@") != hashed_recipient(ANA, b"").split("@")


# From the claim to the evidence


async def test_a_providers_event_settles_the_send_and_no_table_holds_the_address(hashed: asyncpg.Pool) -> None:
    fence = await old_claim(hashed, KEY, feed="pm", recipient=f"Ana Reyes <{ANA}>", cause=f"timed out for <{ANA}>")
    async with running(hashed, [PM]) as app:
        answer = await app.post("pm", delivery("delivery.json", Metadata={"send_key": KEY}), BASIC)
        assert answer.json == {"stored": 1, "repeated": 0}
    await reconcile(hashed)
    assert await state(hashed, KEY) == "sent"
    assert await confirm(hashed, KEY, fence, "id-1", response={"To": ANA, "ErrorCode": 0}) == "sent"
    found = await row(hashed, KEY)
    assert (found["recipient"], found["response"], found["cause"]) == (None, None, "timed out for ~")
    (event,) = await hashed.fetch("SELECT recipient, raw FROM provider_event WHERE source = 'http'")
    assert (event["recipient"], event["raw"]) == (found["recipient_key"], b"")
    assert HASHED_RECIPIENT.fullmatch(found["recipient_key"])
    for part in (ANA, "ana.reyes", "example.com"):
        assert await where_it_stands(hashed, part) == []


async def test_an_event_without_our_key_is_joined_by_message_id_and_recipient(hashed: asyncpg.Pool) -> None:
    for n, who in enumerate((ANA, BOB)):
        await old_claim(hashed, f"order:{n}", feed="pm", recipient=who, known_message_id="id-of-both")
    async with running(hashed, [PM]) as app:
        body = delivery("delivery.json", Metadata={}, MessageID="id-of-both", Recipient="Ana.Reyes@Example.com")
        assert (await app.post("pm", body, BASIC)).status == 200
    await reconcile(hashed)
    assert [await state(hashed, f"order:{n}") for n in (0, 1)] == ["sent", "claimed"]
    assert await where_it_stands(hashed, "example.com") == []


async def test_what_a_provider_says_in_words_loses_the_address(hashed: asyncpg.Pool, inbox: Inbox) -> None:
    box = Inbox()
    await box.open(hashed)
    await box.store("pm", [said(1, recipient=ANA, reason=f"550 5.1.1 <{ANA}>: user unknown")])
    await box.store("pm", [said(2, recipient=None, reason="250 OK"), said(3, recipient=" ", reason=None)])
    await box.close()
    found = await hashed.fetch("SELECT reason, recipient IS NULL AS nobody FROM provider_event ORDER BY message_id")
    assert [tuple(one) for one in found] == [("550 5.1.1 ~ user unknown", False), ("250 OK", True), (None, True)]


async def test_a_receiver_that_began_before_stores_no_address_either(dsn: str, db: asyncpg.Pool, inbox: Inbox) -> None:
    await migrate(dsn, hash_recipients=True)
    assert await inbox.store("pm", [said(1, recipient=ANA, reason=f"for {ANA}", raw=ANA.encode())]) == (1, 0)
    (event,) = await db.fetch("SELECT recipient, reason, raw FROM provider_event")
    assert tuple(event) == (hashed_recipient(ANA, await salt(db)), "for ~", b"")


async def test_a_receiver_sends_no_address_to_the_database(hashed: asyncpg.Pool) -> None:
    async with hashed.acquire() as connection:
        rows = await read_layout(connection)
    made, _ = rows.make("pm", [said(1, recipient=f"Ana <{ANA}>", reason=f"for {ANA}", raw=ANA.encode())], "http")
    ((_, _, _, recipient, reason, _, raw),) = made.values()
    assert (recipient, reason, raw) == (hashed_recipient(ANA, await salt(hashed)), "for ~", b"")


LATER = """
INSERT INTO provider_event (feed, message_id, event_id, partition_at, wire_key, kind, testimony, recipient, source)
VALUES ('pm', 'm', 'e', date_trunc('month', now()) + interval '4 months', 'k', 'sent', 'accepted', $1, 'http')
"""


async def test_a_month_that_is_made_later_takes_no_address_either(hashed: asyncpg.Pool) -> None:
    await hashed.execute("SELECT provider_event_make_partitions(4)")
    await hashed.execute(LATER, ANA)
    assert await where_it_stands(hashed, ANA) == []
    assert await hashed.fetchval("SELECT recipient FROM provider_event") == hashed_recipient(ANA, await salt(hashed))


# What may be written, by whatever road


async def test_a_send_key_with_an_address_is_refused_without_naming_it(hashed: asyncpg.Pool) -> None:
    key = f"order.receipt:1:{ANA}"
    with pytest.raises(asyncpg.InvalidParameterValueError, match="this send key holds an @: make it with") as caught:
        await claim(hashed, key, recipient=ANA)
    assert ANA not in str(caught.value)
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await call(hashed, "send_enqueue", key, FEED, "{}")
    async with api(hashed) as client:
        status, told = await client.claim(key, "mg")
    assert status == 422
    assert "keys.hashed_key" in told["detail"]
    assert await hashed.fetchval("SELECT count(*) FROM send_log") == 0
    assert (await claim(hashed, hashed_key("order.receipt", 1, ANA), recipient=ANA))["outcome"] == "claimed"


OLD_ROAD = """
INSERT INTO send_log (wire_key, send_key, feed, recipient, recipient_key)
VALUES ($1, $1, 'mg', $2, recipient_key($2))
"""


async def test_what_an_older_release_writes_is_hashed_too(hashed: asyncpg.Pool) -> None:
    await hashed.execute(OLD_ROAD, "old", "Ana <ana.reyes@EXAMPLE.com>")
    found = await row(hashed, "old")
    assert (found["recipient"], found["recipient_key"]) == (None, hashed_recipient(ANA, await salt(hashed)))
    await hashed.execute("UPDATE send_log SET recipient = $1, recipient_key = $1", BOB)
    assert await where_it_stands(hashed, BOB) == []


async def test_a_send_to_several_is_one_to_several_and_no_control(hashed: asyncpg.Pool) -> None:
    for key, who in (("one", ANA), ("several", f"{ANA}, {BOB}"), ("unknown", None)):
        await confirm(hashed, key, (await claim(hashed, key, recipient=who))["fence"])
    several = await row(hashed, "several")
    made = [hashed_recipient(who, await salt(hashed)) for who in (ANA, BOB)]
    assert (several["recipient"], several["recipient_key"]) == (",".join(made), None)
    assert {one["wire_key"] for one in await hashed.fetch("SELECT wire_key FROM control")} == {"one", "unknown"}
    domains = await hashed.fetch("SELECT wire_key, domain FROM control")
    assert {one["wire_key"]: one["domain"] for one in domains} == {"one": made[0].partition("@")[2], "unknown": None}


async def test_domains_are_told_apart_and_no_more(hashed: asyncpg.Pool) -> None:
    ask = "SELECT recipient_domain(recipient_here($1))"
    one, same, other = [await hashed.fetchval(ask, who) for who in (ANA, "x@EXAMPLE.com", BOB)]
    assert (one == same, one == other, await hashed.fetchval(ask, "nobody")) == (True, False, None)


async def test_a_claim_of_an_enqueued_send_changes_no_recipient(hashed: asyncpg.Pool) -> None:
    await call(hashed, "send_enqueue", "order:1", FEED, json.dumps({"recipient": ANA}))
    before = await row(hashed, "order:1")
    await claim(hashed, "order:1", recipient=f"{ANA}, {BOB}")
    after = await row(hashed, "order:1")
    assert after["recipient_key"] == before["recipient_key"] == hashed_recipient(ANA, await salt(hashed))
    assert before["recipient"] is after["recipient"] is None


async def test_what_people_and_senders_say_in_words_loses_the_address(hashed: asyncpg.Pool) -> None:
    fence = (await claim(hashed, "order:1", recipient=ANA))["fence"]
    await fail(hashed, "order:1", fence, f"550 {ANA} unknown", not_sent=False)
    assert (await row(hashed, "order:1"))["verdict_reason"] == "550 ~ unknown"
    await old_claim(hashed, "order:2", recipient=ANA)
    await call(hashed, "operator_decide", "order:2", "sent", f"{ANA} says so", "ann")
    assert await hashed.fetchval("SELECT note FROM verdict WHERE wire_key = wire_key('order:2')") == "~ says so"
    assert await where_it_stands(hashed, ANA) == []


OLD_SUPPRESSION = "INSERT INTO suppression (recipient_key, reason, source) VALUES ($1, $2, 'me') ON CONFLICT DO NOTHING"


async def test_a_suppression_that_an_older_release_writes_holds_its_recipient(hashed: asyncpg.Pool) -> None:
    await loaded(hashed, b"recipient,id\nana.reyes@example.com,1\nbob@example.org,2\n")
    for _ in range(2):
        await hashed.execute(OLD_SUPPRESSION, ANA, f"{ANA} asked")
    assert [one.reason for one in await suppression.listed(hashed, 10)] == ["~ asked"]
    assert {(one["outcome"], one["reason"]) for one in await batch(hashed)} == {
        ("failed", "suppressed"),
        ("claimed", None),
    }
    await hashed.execute("UPDATE suppression SET recipient_key = $1", BOB)
    assert await suppression.remove(hashed, [BOB]) == 1
    assert await where_it_stands(hashed, "example") == []


@pytest.mark.parametrize("hashed_first", [True, False])
async def test_reasons_of_people_lose_the_address(dsn: str, db: asyncpg.Pool, hashed_first: bool) -> None:
    if hashed_first:
        await migrate(dsn, hash_recipients=True)
    words = f"{ANA} complained"
    await db.execute("INSERT INTO campaign (name, feed) VALUES ('spring', 'mg')")
    await campaign.pause(db, "spring", words, "ann")
    await suppression.add(db, [BOB], words, "ann")
    async with db.acquire() as connection:
        await feeds.pause(connection, FEED, words, "ann")
        await feeds.pause(connection, FEED, words, "ann")
    await migrate(dsn, hash_recipients=True)
    for table in ("campaign", "suppression", "feed_state"):
        found = await db.fetch(f"SELECT reason FROM {table} WHERE reason IS NOT NULL")  # noqa: S608
        assert [one["reason"] for one in found] == ["~ complained"], table


async def test_a_past_send_is_brought_in_without_its_address(hashed: asyncpg.Pool) -> None:
    at = (datetime.now(UTC) - HOUR).isoformat()
    options = {"claimed_at": at, "answered_at": at, "heard_at": at, "recipient": ANA}
    assert (await call(hashed, "send_adopt", "old:1", FEED, json.dumps(options)))["outcome"] == "adopted"
    made = hashed_recipient(ANA, await salt(hashed))
    assert (await row(hashed, "old:1"))["recipient_key"] == made
    assert await hashed.fetchval("SELECT recipient FROM provider_event") == made
    assert await where_it_stands(hashed, ANA) == []


async def test_a_frequency_cap_counts_the_hashed_recipient(hashed: asyncpg.Pool) -> None:
    await hashed.execute("INSERT INTO frequency_cap (message_class, most, span) VALUES ('news', 1, '1 day')")
    outcomes = [
        (await claim(hashed, f"news:{n}", recipient=who, message_class="news"))["outcome"]
        for n, who in enumerate((ANA, "Ana.REYES@example.com", BOB))
    ]
    assert outcomes == ["claimed", "capped", "claimed"]
    assert await where_it_stands(hashed, "example") == []


# What is asked by an address


async def test_a_recipient_is_forgotten_by_the_plain_address(hashed: asyncpg.Pool) -> None:
    for key, who in (("one", ANA), ("several", f"{BOB},Ana <{ANA}>"), ("other", BOB)):
        await confirm(hashed, key, (await claim(hashed, key, recipient=who, payload="{}"))["fence"], f"m-{key}")
    box = Inbox()
    await box.open(hashed)
    await box.store(FEED, [said(1, send_key=None, message_id="m-9", recipient=ANA), said(2, recipient=BOB)])
    await box.close()
    made = hashed_recipient(ANA, await salt(hashed))
    assert await where_it_stands(hashed, made) == ["provider_event", "send_log"]
    done = await forget(hashed, "Ana.Reyes@example.COM")
    assert (done.rows["send_log"], done.rows["provider_event"]) == (2, 3)  # two of them answers
    assert await where_it_stands(hashed, made) == []
    one, several, other = [await row(hashed, key) for key in ("one", "several", "other")]
    assert (one["recipient"], one["recipient_key"][:11]) == (None, "~forgotten:")
    assert (several["recipient"], several["recipient_key"]) == ("~forgotten", None)
    assert other["recipient_key"] == hashed_recipient(BOB, await salt(hashed))
    assert (await claim(hashed, "one", recipient=ANA))["outcome"] == "already_sent"


async def test_who_is_suppressed_is_kept_as_a_hash_and_not_written_to(hashed: asyncpg.Pool) -> None:
    assert await suppression.add(hashed, ["Bob@Example.org"], "asked", "me") == 1
    assert await suppression.add(hashed, [BOB], "again", "me") == 0
    done = await loaded(hashed, b"recipient,id\nana.reyes@example.com,1\nBOB@example.org,2\n")
    assert (done.added, done.suppressed) == (1, 1)
    await suppression.add(hashed, [ANA], None, "me")
    assert [(one["outcome"], one["reason"]) for one in await batch(hashed)] == [("failed", "suppressed")]
    (first, second) = await suppression.listed(hashed, 10)
    assert {HASHED_RECIPIENT.fullmatch(one.recipient_key) is None for one in (first, second)} == {False}
    assert await suppression.remove(hashed, ["ANA.reyes@example.com"]) == 1
    assert await where_it_stands(hashed, "example") == []


async def test_a_campaigns_worker_gets_what_else_the_line_says_and_no_address(
    hashed: asyncpg.Pool, program: Program, tmp_path: Path
) -> None:
    file = tmp_path / "people.csv"
    file.write_text("recipient,customer\nAna.Reyes@example.com,17\nana.reyes@EXAMPLE.com,17\n")
    done = await program("campaign", "load", "spring", str(file), "--feed", FEED)
    assert done.stdout.splitlines()[1].startswith("recipients are stored hashed: workers get what else a line says")
    assert (await program.json("campaign", "load", "spring", str(file), "--feed", FEED))["duplicates"] == 2
    assert await where_it_stands(hashed, "example") == []
    ((one,),) = [found async for found in batches(hashed, "spring")]
    assert (one.recipient, one.payload) == (None, {"customer": "17"})
    assert one.claim.send_key == one.claim.wire_key == wire_key(f"campaign:spring:{ANA}")


async def test_a_campaigns_line_that_says_nothing_but_an_address_is_refused(hashed: asyncpg.Pool) -> None:
    done = await loaded(hashed, b"recipient\nana.reyes@example.com\n")
    assert (done.added, done.bad_lines) == (0, 1)
    assert done.bad[0].why.startswith("says nothing but an address, which is not kept here")


async def test_a_campaign_of_a_namespace_has_keys_of_its_own(hashed: asyncpg.Pool, dsn: str) -> None:
    await migrate(dsn, namespace="staging")
    assert (await loaded(hashed, b"recipient,id\nana.reyes@example.com,1\n")).added == 1
    key = wire_key(f"campaign:spring:{ANA}", "staging")
    assert await hashed.fetchval("SELECT send_key FROM send_log WHERE wire_key = $1", key) == key
    (one,) = await batch(hashed)
    assert (one["outcome"], one["wire_key"]) == ("claimed", key)


# Look-ups


@asynccontextmanager
async def provider(name: str, fake: Any) -> AsyncIterator[dict[str, Feed]]:
    async with asked(name, fake) as (feed, _):
        yield {FEED: replace(feed, name=FEED)}


async def claimed_and_answered(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", 2 * HOUR, recipient=ANA)
    await confirm(db, "order:2", (await claim(db, "order:2", recipient=BOB))["fence"], "m-2")
    await make_older(db, "order:2", HOUR)


async def test_a_provider_that_is_asked_by_recipient_is_not_asked_and_that_is_said(
    hashed: asyncpg.Pool, program: Program
) -> None:
    await claimed_and_answered(hashed)
    fake = mailgun.Fake([Sent(LOST, ANA, at=datetime.now(UTC) - 2 * HOUR)])
    async with provider("mailgun", fake) as feeds:
        found = (await look_up_send(hashed, feeds, "order:1")).found
        assert (found.answer, found.reason) == (Answer.SILENT, "hashed_recipient")
        assert found.hint == "this provider is asked by recipient, and recipients are stored hashed"
        of = SecondWitness(feeds)
        assert await of.ask(hashed, [LOST]) == {LOST: Witness(Answer.SILENT, "hashed_recipient")}
    assert fake.requests == []
    assert await hashed.fetchval("SELECT count(*) FROM look_up") == 1, "the person's question, and none of the pass"
    program.env["RECONCILER_FEEDS__MG__API_KEY"] = "key-api"
    notes = [one for one in (await program.json("status"))["findings"] if one["code"] == "not_asked"]
    assert [(one["feed"], one["needs_person"]) for one in notes] == [(FEED, False)]


async def test_a_provider_that_is_asked_by_key_answers_as_before(hashed: asyncpg.Pool) -> None:
    await claimed_and_answered(hashed)
    at = datetime.now(UTC) - 2 * HOUR
    sends = [Sent(wire_key("order:2"), BOB, "m-2", at + HOUR)]
    fake = postmark.Fake(sends)
    async with provider("postmark", fake) as feeds:
        assert (await look_up_send(hashed, feeds, "order:1")).found.answer is Answer.ABSENT
        fake.sends = [*sends, Sent(LOST, ANA, "m-1", at)]
        assert (await look_up_send(hashed, feeds, "order:1")).found.answer is Answer.ACCEPTED
    assert (
        await hashed.fetchval("SELECT recipient FROM provider_event WHERE source = 'look-up' LIMIT 1")
        == (await row(hashed, "order:1"))["recipient_key"]
    )
    assert await where_it_stands(hashed, "example") == []


async def test_what_was_found_by_id_is_compared_by_hash() -> None:
    secret = b"s" * 32
    sought = Sought("k", datetime.now(UTC), datetime.now(UTC), hashed_recipient(ANA, secret), "id-1", secret)
    assert sought.query().recipient is None
    assert is_about(said(1, send_key=None, message_id="id-1", recipient="ANA.reyes@Example.com"), sought)
    assert not is_about(said(1, send_key=None, message_id="id-1", recipient=BOB), sought)
    assert is_about(said(1, send_key=None, message_id="id-1", recipient=None), sought)
    assert secret.decode() not in repr(sought)


# What people are shown, and who did not ask for it


async def test_people_are_shown_the_hash(hashed: asyncpg.Pool, program: Program) -> None:
    await old_claim(hashed, KEY, recipient=ANA)
    shown = await program("why", KEY, "--show-recipient", "--json")
    assert hashed_recipient(ANA, await salt(hashed)) in shown.stdout
    assert "example" not in shown.output


async def test_without_a_salt_everything_is_stored_as_it_was(db: asyncpg.Pool, inbox: Inbox) -> None:
    await old_claim(db, f"order:1:{ANA}", recipient=f"Ana <{ANA}>", cause=f"for {ANA}")
    await inbox.store(FEED, [said(1, send_key=f"order:1:{ANA}", recipient="ana.reyes@EXAMPLE.com", reason=f"to {ANA}")])
    found = await row(db, f"order:1:{ANA}")
    assert (found["recipient"], found["recipient_key"], found["cause"]) == (f"Ana <{ANA}>", ANA, f"for {ANA}")
    (event,) = await db.fetch("SELECT recipient, reason, raw FROM provider_event")
    assert tuple(event) == (ANA, f"to {ANA}", b"{}")
    assert await db.fetchval("SELECT recipient_here($1)", "Ana.Reyes@EXAMPLE.com") == "Ana.Reyes@example.com"
    assert await db.fetchval("SELECT count(*) FROM pg_trigger WHERE tgname = 'without_addresses'") == 0
