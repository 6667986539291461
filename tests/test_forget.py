# SPDX-License-Identifier: Apache-2.0
"""A recipient is forgotten: nothing in the database holds the address any more, and nothing is sent again."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
from kit import FEED, call, claim, confirm, event, fail, make_older, old_claim, reconcile, row, state, until_it_waits
from program import Program

from reconciler.campaigns import suppression
from reconciler.upkeep import forgetting
from reconciler.upkeep.forgetting import forget
from webhooks.event import wire_key

ADA, BOB = "ada@example.org", "bob@example.org"
KEY = f"order.receipt:1:{ADA}"


async def sent(db: asyncpg.Pool, key: str, recipient: str = ADA, message_id: str = "m-1", **options: str) -> int:
    """A send that was answered, and of which two events speak in words; returns its fence."""
    claimed = await claim(db, key, recipient=recipient, payload=json.dumps({"to": recipient}), **options)
    await confirm(db, key, claimed["fence"], message_id, response={"accepted": recipient})
    for kind in ("delivered", "opened"):
        await event(db, key, kind=kind, message_id=message_id, event_id=kind, recipient=recipient.partition(",")[0],
                    reason=f"250 <{recipient}> ok")  # fmt: skip
    await db.execute("UPDATE provider_event SET raw = $1 WHERE wire_key = wire_key($2)", recipient.encode(), key)
    fence: int = claimed["fence"]
    return fence


TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1
"""


async def where_it_stands(db: asyncpg.Pool, text: str) -> list[str]:
    """Return the tables of which some row holds this text, in any column."""
    found = []
    for (table,) in await db.fetch(TABLES):
        whole = f"SELECT count(*) FROM {table} AS t WHERE t::text ILIKE $1 OR t::text LIKE $2"  # noqa: S608
        if await db.fetchval(whole, f"%{text}%", f"%{text.encode().hex()}%"):
            found.append(table)
    return found


async def let_late_window_pass(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE send_log SET failed_at = failed_at - interval '8 days' WHERE state = 'failed'")


async def test_no_table_holds_the_address_of_a_forgotten_recipient(db: asyncpg.Pool) -> None:
    await sent(db, KEY)
    await sent(db, f"news:7:{ADA}", f"{BOB}, Ada <{ADA}>", "m-2")
    refused = await claim(db, f"order:2:{ADA}", recipient=ADA)
    await fail(db, f"order:2:{ADA}", refused["fence"], f"550 {ADA} unknown", not_sent=False)
    await old_claim(db, "order:3", recipient=ADA, cause=f"timed out for {ADA}")
    await event(db, "order:3", "rejected", kind="rejected", recipient=ADA, event_id="e-3",
                reason=f"no mailbox {ADA}")  # fmt: skip
    await reconcile(db)  # failed by evidence, with the provider's words in the verdict
    await old_claim(db, "order:4", recipient=ADA)
    await call(db, "operator_decide", "order:4", "sent", f"{ADA} says so", "ann")
    await event(db, None, message_id="m-9", event_id="e-9", recipient=ADA, kind="unsubscribed")
    assert await where_it_stands(db, ADA) == ["provider_event", "send_log", "verdict"]
    await let_late_window_pass(db)
    done = await forget(db, ADA)
    assert await where_it_stands(db, ADA) == []
    assert done.rows["send_log"] == 5
    assert done.rows["provider_event"] >= 6
    assert (done.undecided, done.rows["verdict"]) == (0, 3)


async def test_the_guard_of_a_forgotten_send_stays(db: asyncpg.Pool) -> None:
    await sent(db, KEY, fingerprint="f")
    refused = await claim(db, f"order:2:{ADA}", recipient=ADA)
    await fail(db, f"order:2:{ADA}", refused["fence"], "invalid", not_sent=False)
    await let_late_window_pass(db)
    await forget(db, ADA)
    assert (await claim(db, KEY, recipient=ADA))["outcome"] == "already_sent"
    assert (await claim(db, KEY, recipient=ADA, fingerprint="f"))["outcome"] == "already_sent"
    assert (await claim(db, KEY, recipient=ADA, fingerprint="g"))["outcome"] == "key_reused"
    assert (await claim(db, f"order:2:{ADA}", recipient=ADA))["outcome"] == "failed"
    assert (await call(db, "send_enqueue", KEY, FEED, json.dumps({"recipient": ADA})))["outcome"] == "exists"
    assert await where_it_stands(db, ADA) == []


async def test_a_late_answer_to_a_forgotten_send_is_still_its_own(db: asyncpg.Pool) -> None:
    fence = await sent(db, KEY)
    await forget(db, ADA)
    assert await confirm(db, KEY, fence, "m-1") == "sent"


async def test_other_peoples_sends_are_untouched(db: asyncpg.Pool) -> None:
    await sent(db, KEY)
    await sent(db, "order:5", BOB, "m-5")
    await sent(db, "order:6", "xada@example.org", "m-6")
    await sent(db, "order:7", "ada@example.org.uk", "m-7")
    before = await db.fetch("SELECT * FROM send_log WHERE send_key LIKE 'order:%' ORDER BY 1")
    events = await db.fetch("SELECT * FROM provider_event WHERE message_id <> 'm-1' ORDER BY 1, 2, 3")
    await forget(db, ADA)
    assert await db.fetch("SELECT * FROM send_log WHERE send_key LIKE 'order:%' ORDER BY 1") == before
    assert await db.fetch("SELECT * FROM provider_event WHERE message_id <> 'm-1' ORDER BY 1, 2, 3") == events


@pytest.mark.parametrize("written", ["ADA@Example.ORG", "Ada L. <ada@example.org>", " ada@EXAMPLE.org "])
async def test_an_address_is_the_same_however_it_is_written(db: asyncpg.Pool, written: str) -> None:
    await sent(db, "order:1", "Ada@example.org")
    assert (await forget(db, written)).rows["send_log"] == 1
    assert await where_it_stands(db, ADA) == []


async def test_a_send_that_is_not_decided_keeps_its_recipient_and_is_counted(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, recipient=ADA, known_message_id="m-3")
    await event(db, None, "none", kind="unknown", message_id="m-3", recipient=ADA)
    await call(db, "send_enqueue", f"order:2:{ADA}", FEED, json.dumps({"recipient": ADA}))
    done = await forget(db, ADA)
    assert (done.undecided, done.rows["send_log"], done.rows["provider_event"]) == (2, 0, 0)
    assert (await row(db, KEY))["recipient"] == ADA
    await call(db, "operator_decide", KEY, "failed", "note", "ann")
    await let_late_window_pass(db)
    done = await forget(db, ADA)
    assert (done.undecided, done.rows["send_log"], done.rows["provider_event"]) == (1, 1, 1)


async def test_a_forgotten_event_never_proves_anothers_send(db: asyncpg.Pool) -> None:
    """One message id for several recipients, and no key: what was said of Ada must not become a word about Bob."""
    await claim(db, KEY, recipient=ADA, known_message_id="m-1")
    await old_claim(db, "order:2", recipient=BOB, known_message_id="m-1")
    await call(db, "operator_decide", KEY, "sent", "note", "ann")
    await event(db, None, message_id="m-1", recipient=ADA)
    await forget(db, ADA)
    await db.execute("DELETE FROM send_log WHERE wire_key = wire_key($1)", KEY)
    await reconcile(db)
    assert await state(db, "order:2") == "claimed"


async def test_a_forgotten_send_never_hides_what_is_said_of_anothers(db: asyncpg.Pool) -> None:
    await claim(db, KEY, recipient=ADA, known_message_id="m-1")
    await call(db, "operator_decide", KEY, "sent", "note", "ann")
    await forget(db, ADA)
    await old_claim(db, "order:2", recipient=BOB, known_message_id="m-1")
    await event(db, None, message_id="m-1", recipient=BOB)
    await reconcile(db)
    assert await state(db, "order:2") == "sent"


@pytest.mark.parametrize(("recipient", "control"), [(ADA, True), (f"{ADA}, {BOB}", False)])
async def test_a_forgotten_send_stays_a_control_or_none(db: asyncpg.Pool, recipient: str, control: bool) -> None:
    await sent(db, KEY, recipient)
    assert await db.fetchval("SELECT count(*) FROM control") == int(control)
    await forget(db, ADA)
    assert await db.fetchval("SELECT count(*) FROM control") == int(control)


async def test_a_forgotten_send_that_an_operator_frees_is_claimed_under_its_own_row(db: asyncpg.Pool) -> None:
    claimed = await claim(db, KEY, recipient=ADA)
    await fail(db, KEY, claimed["fence"], "invalid", not_sent=False)
    await make_older(db, KEY, timedelta(seconds=61))
    await forget(db, ADA)
    assert (await call(db, "operator_release", KEY, "note", "ann"))["outcome"] == "released"
    again = await call(db, "send_claim_released", FEED, 1, "{}")
    assert (again["outcome"], again["wire_key"]) == ("claimed", claimed["wire_key"])
    assert await db.fetchval("SELECT count(*) FROM send_log") == 1


async def test_two_send_keys_are_still_told_apart_beside_a_forgotten_one(db: asyncpg.Pool) -> None:
    await sent(db, KEY)
    await sent(db, "order.receipt:2", BOB, "m-2")
    await forget(db, ADA)
    answer = await claim(db, (await row(db, "order.receipt:2"))["wire_key"])
    assert answer["outcome"] == "key_reused"


async def test_a_send_that_is_released_meanwhile_stays(db: asyncpg.Pool) -> None:
    claimed = await claim(db, KEY, recipient=ADA)
    await fail(db, KEY, claimed["fence"], "invalid", not_sent=False)
    await make_older(db, KEY, timedelta(seconds=61))
    await let_late_window_pass(db)
    async with db.acquire() as other:
        transaction = other.transaction()
        await transaction.start()
        await call(other, "operator_release", KEY, "note", "ann")
        task = asyncio.create_task(forget(db, ADA))
        await until_it_waits(db, task)
        await transaction.commit()
    assert (await task).rows["send_log"] == 0
    assert (await row(db, KEY))["recipient"] == ADA


async def test_many_are_redacted_in_batches(db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "BATCH", 3)
    monkeypatch.setattr(forgetting, "PAUSE", 0.0)
    for n in range(7):
        await sent(db, f"order:{n}", ADA, f"m-{n}")
        await event(db, None, "none", kind="unsubscribed", message_id=f"x-{n}", event_id="e", recipient=ADA)
    done = await forget(db, ADA)
    assert done.rows == {"send_log": 7, "provider_event": 28, "verdict": 0, "cap_taken": 0}
    assert await where_it_stands(db, ADA) == []


async def test_a_dry_run_counts_and_changes_nothing(db: asyncpg.Pool, program: Program) -> None:
    await sent(db, KEY)
    await old_claim(db, "order:2", recipient=ADA)
    sends = await db.fetch("SELECT * FROM send_log ORDER BY 1")
    would = await program.json("forget", ADA, "--dry-run")
    assert (would["rows"], would["undecided"]) == (
        {"send_log": 1, "provider_event": 3, "verdict": 0, "cap_taken": 0},
        1,
    )
    assert await db.fetch("SELECT * FROM send_log ORDER BY 1") == sends
    done = await program.json("forget", ADA)
    assert done["rows"] == would["rows"]
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE recipient = $1", ADA) == 1


async def test_what_remains_is_said(db: asyncpg.Pool, program: Program, config: Path) -> None:
    config.write_text(config.read_text("utf-8") + '[archive]\nurl = "s3://mail/raw"\n')
    await sent(db, KEY)
    await old_claim(db, "order:2", recipient=ADA)
    await suppression.add(db, [ADA.upper()], "asked to", "me")
    await db.execute("UPDATE send_log SET created_at = '2026-03-05T10:00:00Z' WHERE state = 'sent'")
    await db.execute(
        "INSERT INTO idempotency (id, fingerprint, state, lease_until, keep_until, wire_key, status, headers, body)"
        " VALUES ('i', 'f', 'answered', now(), '2026-12-24T10:00:00Z', wire_key($1), 201, '{}', '')", KEY,
    )  # fmt: skip
    today = await db.fetchval("SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY/MM/DD')")
    archive = (
        f"the archive may hold it, in deliveries as they came, from s3://mail/raw/2026/03/05/ to s3://mail/raw/{today}/,"
        " and so may the files that wait in its spool: delete them there"
    )
    undecided = (
        f"1 send is not decided for good yet and left ({wire_key('order:2')}): run it again then; "
        "one that nobody will claim is ended by reconciler fail KEY"
    )
    assert (await program("forget", ADA)).stdout.splitlines() == [
        "redacted 1 send, 3 events, 0 verdicts",
        undecided,
        "1 answer kept for an Idempotency-Key: deleted without you by 2026-12-24T10:00:00Z",
        "the suppression list keeps the address, or campaigns would write to him: see suppress remove",
        archive,
        "not reached: backups and replicas of the database, the application's own tables and logs, the provider",
        "an event that the provider delivers later brings the address back: run it again some days from now",
    ]


@pytest.mark.parametrize("text", ["", "ada", "@example.org", "ada@", f"{ADA},{BOB}", "ada\n@example.org"])
async def test_what_is_no_address_is_refused(program: Program, text: str) -> None:
    done = await program("forget", text)
    assert (done.exit_code, done.stdout) == (2, "")


async def test_a_send_that_failed_lately_is_left_until_no_late_acceptance_counts(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY, recipient=ADA, known_message_id="op-1"))["fence"]
    await fail(db, KEY, fence, not_sent=False)
    done = await forget(db, ADA)
    assert (done.rows["send_log"], done.undecided, done.left) == (0, 1, [wire_key(KEY)])
    await event(db, None, message_id="op-1", event_id="e", recipient=ADA)
    await reconcile(db)
    assert (await row(db, KEY))["state"] == "sent", "it was accepted after all"
    assert (await forget(db, ADA)).rows["send_log"] == 1
    assert await where_it_stands(db, ADA) == []


async def test_a_send_whose_sender_gave_no_recipient_is_found_by_its_key_and_by_its_events(db: asyncpg.Pool) -> None:
    for key in (f"receipt:7:{ADA}", "receipt:8", f"receipt:9:n{ADA}", f"receipt:10:{ADA}.uk"):
        fence = (await claim(db, key, payload={"to": ADA if key[8] in "78" else BOB}))["fence"]
        await confirm(db, key, fence, f"m-{key}")
    await event(db, "receipt:8", message_id="m-8", recipient=ADA)
    assert (await forget(db, ADA)).rows["send_log"] == 2
    kept = [r["send_key"] for r in await db.fetch("SELECT send_key FROM send_log WHERE send_key LIKE 'receipt:%'")]
    assert sorted(kept) == [f"receipt:10:{ADA}.uk", f"receipt:9:n{ADA}"], "longer addresses are other people's"
    assert await db.fetchval("SELECT count(*) FROM provider_event WHERE recipient = $1", ADA) == 0


async def test_what_events_about_others_say_of_him_goes_and_they_stay_theirs(db: asyncpg.Pool) -> None:
    await sent(db, KEY)
    await event(db, None, message_id="x-1", recipient=BOB, reason=f"also to {ADA}")
    raw = json.dumps({"destination": [BOB, ADA]}).encode()
    await db.execute("UPDATE provider_event SET raw = $1 WHERE message_id = 'x-1'", raw)
    await forget(db, ADA)
    found = await db.fetchrow("SELECT recipient, raw, reason FROM provider_event WHERE message_id = 'x-1'")
    assert tuple(found) == (BOB, b"", None)
    assert await where_it_stands(db, ADA) == []
