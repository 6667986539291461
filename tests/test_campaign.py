# SPDX-License-Identifier: Apache-2.0
"""Campaigns: recipients are loaded once and given out once, and not at all while paused, late or cancelled."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from campaign_kit import PLAN, RELEASES, batch, decide_claimed, loaded, people, states
from kit import FEED, claim, confirm, event, fail, make_older, reasons, reconcile, row, until_it_waits
from program import Program
from snippets import block

from reconciler import campaign, guard, guard_many, keys
from reconciler.campaigns import load as campaign_load
from reconciler.campaigns import suppression
from reconciler.campaigns.file import read_lines, row_maker
from reconciler.errors import UserError
from reconciler.passes.feeds import pause as pause_feed
from webhooks.registry import PROVIDERS

ADA = "campaign:spring:ada@example.com"


async def names(db: asyncpg.Pool) -> list[str]:
    return [r["send_key"] for r in await db.fetch("SELECT send_key FROM send_log ORDER BY send_key")]


# Loading


async def test_a_load_makes_one_pending_send_of_each_recipient_with_its_own_data(db: asyncpg.Pool) -> None:
    done = await loaded(db, b"recipient,name,city\nAda@EXAMPLE.com,Ada,London\n\nbob@example.org,Bob,\n")
    assert (done.lines, done.added, done.duplicates, done.suppressed, done.bad_lines) == (2, 2, 0, 0, 0)
    assert await names(db) == [ADA, "campaign:spring:bob@example.org"]
    found = dict(await row(db, ADA))
    wanted = {
        "state": "pending",
        "feed": FEED,
        "message_class": "default",
        "campaign": "spring",
        "recipient": "Ada@EXAMPLE.com",
        "recipient_key": "Ada@example.com",
        "attempt": 0,
        "next_check_at": None,
        "known_message_id": None,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert json.loads(found["payload"]) == {"name": "Ada", "city": "London"}


async def test_json_lines_keep_every_digit_and_a_byte_order_mark_is_no_part_of_them(db: asyncpg.Pool) -> None:
    lines = b'\xef\xbb\xbf{"recipient": "ada@example.com", "n": 12345678901234567890.10, "of": {"a": [1, null]}}\n'
    done = await loaded(db, lines + b'{"email": "bob@example.org"}\n')
    assert done.added == 2
    assert (
        await db.fetchval("SELECT payload ->> 'n' FROM send_log WHERE send_key = $1", ADA) == "12345678901234567890.10"
    )
    assert await db.fetchval("SELECT payload IS NULL FROM send_log WHERE send_key <> $1", ADA)


async def test_who_is_there_twice_is_loaded_once_in_a_file_across_files_and_on_a_rerun(db: asyncpg.Pool) -> None:
    first = b"recipient\nada@example.com\nADA@example.com\n Ada <ada@Example.com> \nbob@example.org\n"
    done = await loaded(db, first)
    assert (done.added, done.duplicates) == (2, 2)
    done = await loaded(db, b"recipient\nbob@example.org\ncarl@example.net\n", replace(PLAN, source="more.csv"))
    assert (done.added, done.duplicates) == (1, 1)
    done = await loaded(db, first)
    assert (done.added, done.duplicates) == (0, 4)
    assert (await batch(db, 1))[0]["outcome"] == "claimed"
    assert (await loaded(db, first)).added == 0, "whatever became of them"
    assert sum((await states(db)).values()) == 3


async def test_suppressed_recipients_are_skipped_and_counted_whatever_their_case(db: asyncpg.Pool) -> None:
    await suppression.add(db, ["ADA@Example.com"], "asked to", "me")
    content = b"recipient\nada@example.com\nAda@example.com\nbob@example.org\n"
    done = await loaded(db, content)
    assert (done.added, done.suppressed, done.duplicates) == (1, 2, 0)
    status = await campaign.status(db, "spring")
    assert status is not None
    assert status.suppressed == 2
    assert await suppression.remove(db, ["ada@example.com"]) == 1
    assert (await loaded(db, content)).added == 1, "who is no longer on the list is loaded by a rerun"


async def test_bad_lines_are_named_by_number_and_never_by_address(db: asyncpg.Pool) -> None:
    content = (
        b"recipient,name\nada@example.com,Ada\nnobody,x\n,y\nx@example.com,a,b\na@example.com,,\n"
        b'"a@example.com, b@example.com",z\nc@ex\x01ample.com,z\n@example.com,z\nd\xff@example.com,z\n'
        b'e@example.com,a\x00b\nf@example.com,"broken" quote\nbob@example.org,Bob\n'
    )
    done = await loaded(db, content)
    assert await names(db) == [ADA, "campaign:spring:bob@example.org"]
    assert done.bad_lines == 10
    assert [bad.line for bad in done.bad] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert "example" not in "".join(bad.why for bad in done.bad)
    assert done.lines == 12


async def test_every_line_that_an_open_quotation_swallows_is_counted_and_named(db: asyncpg.Pool) -> None:
    swallowed = "".join(f"s{n}@example.com,{'x' * 90}\n" for n in range(1200))
    content = f'recipient,name\nada@example.com,Ada\nb@example.com,"Bob\n{swallowed}carl@example.org,Carl\n'
    content += 'd@example.com,"D\ne@example.com,"E"\n'
    done = await loaded(db, content.encode())
    assert done.added + done.bad_lines == 2 + 1200 + 1 + 2
    assert done.lines == 2 + 1200 + 1 + 2
    assert [bad.line for bad in done.bad[:3]] == [3, 4, 5]


async def test_a_line_that_the_database_refuses_fails_no_other(db: asyncpg.Pool) -> None:
    lines = [json.dumps({"recipient": f"r{n}@example.com", "x": "\0" if n == 7 else "y"}) for n in range(20)]
    done = await loaded(db, "\n".join(lines).encode())
    assert (done.added, [bad.line for bad in done.bad]) == (19, [8])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name,city\nada,x\n", "no column recipient"),
        (b"recipient,recipient\n", "twice"),
        (b"ada@example.com\n", "no column recipient"),
    ],
)
async def test_a_file_of_the_wrong_form_begins_no_campaign(db: asyncpg.Pool, content: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        await loaded(db, content)
    assert await campaign.standing(db, "spring") is None


ADDRESSES = (
    "ada@example.com",
    "Ada.Byron+news@EXAMPLE.com",
    "o'neill%x@example.com",
    "a:b@example.com",
    " Ada <ada@Example.com>",
    "päul@müller.example",
    '"quoted local"@example.com',
    "a@b@Example.com",
    "x" * 250 + "@example.com",
)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("namespace", ["", "staging"])
async def test_the_short_road_to_the_keys_leads_where_the_long_one_does(
    db: asyncpg.Pool, address: str, namespace: str
) -> None:
    made = row_maker("spring.2", namespace, None)((1, address, None))
    key = keys.send_key("campaign", "spring.2", address, fold_local=True)
    twins = await db.fetchrow("SELECT wire_key($1, $2) AS wire_key, recipient_key($3)", key, namespace, address)
    assert twins is not None
    assert made == (1, twins["wire_key"], key, address, twins["recipient_key"], None, None)


async def test_a_provider_whose_message_id_we_choose_gets_it_with_the_load(db: asyncpg.Pool) -> None:
    await loaded(db, b"recipient\nada@example.com\n", provider="azure_acs")
    known = guard.known_message_id("azure_acs", ADA)
    assert known
    assert (await row(db, ADA))["known_message_id"] == known


class Breaks(io.BytesIO):
    """A file that can't be read beyond its middle."""

    def readinto(self, buffer: Any) -> int:
        if self.tell() > len(self.getvalue()) // 2:
            raise OSError("gone")
        return super().readinto(memoryview(buffer)[:100])


async def test_a_load_that_broke_off_gives_out_nothing_and_is_resumed_by_a_rerun(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_load, "CHUNK_ROWS", 10)
    with pytest.raises(OSError, match="gone"):
        await campaign_load.load(db, PLAN, Breaks(people(100)), PROVIDERS["mailgun"], lambda _: None)
    before = (await states(db))["pending"]
    assert 10 <= before < 100
    assert await campaign.standing(db, "spring") == "loading"
    assert await batch(db) == []
    done = await loaded(db, people(100))
    assert (done.added, done.duplicates) == (100 - before, before)
    assert len(await batch(db, 100)) == 100


async def test_a_second_file_that_broke_off_keeps_the_campaign_from_finishing(db: asyncpg.Pool) -> None:
    await loaded(db, people(1))
    second = replace(PLAN, source="more.csv")
    with pytest.raises(OSError, match="gone"):
        await campaign_load.load(db, second, Breaks(people(500, 1)), PROVIDERS["mailgun"], lambda _: None)
    for claimed in await batch(db, 500):
        await confirm(db, claimed["send_key"], claimed["fence"])
    assert await campaign.standing(db, "spring") == "active"
    await loaded(db, people(1), second)
    assert await campaign.standing(db, "spring") == "finished"


async def test_two_loads_of_overlapping_files_at_once_load_each_recipient_once(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_load, "CHUNK_ROWS", 200)
    one, other = await asyncio.gather(
        loaded(db, people(2000)), loaded(db, people(2000, 1000), replace(PLAN, source="more.csv"))
    )
    assert one.added + other.added == 3000
    assert one.duplicates + other.duplicates == 1000
    assert await states(db) == {"pending": 3000}


async def test_a_campaign_keeps_its_feed_and_class(db: asyncpg.Pool) -> None:
    await loaded(db, people(1), replace(PLAN, message_class="news"))
    with pytest.raises(UserError, match="spring is on feed mg, message class news: take another name"):
        await loaded(db, people(1), replace(PLAN, feed="other"))
    with pytest.raises(UserError, match="take another name"):
        await loaded(db, people(1), replace(PLAN, message_class="receipts"))
    assert (await loaded(db, people(2))).added == 1


@pytest.mark.parametrize(
    "forgets",
    [
        "UPDATE campaign SET created_at = now() - interval '31 days'",
        "UPDATE installation SET pruned_until = clock_timestamp()",
    ],
)
async def test_a_campaign_whose_sends_may_be_pruned_is_not_loaded_again(db: asyncpg.Pool, forgets: str) -> None:
    await loaded(db, people(1))
    await db.execute(forgets)
    with pytest.raises(UserError, match="spring is older than sends are kept"):
        await loaded(db, people(1))


async def test_a_load_that_a_cancel_overtakes_adds_nothing_more(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_load, "CHUNK_ROWS", 1)
    monkeypatch.setattr(campaign_load, "AT_ONCE", 1)
    async with db.acquire() as other:
        await loaded(db, people(1))
        transaction = other.transaction()
        await transaction.start()
        await other.fetch(campaign.CANCEL, "spring", "", "me")
        await other.fetch(campaign.MEET_CLAIMS, "spring")
        loading = asyncio.create_task(loaded(db, people(5), replace(PLAN, source="more.csv")))
        await until_it_waits(db, loading)
        await transaction.commit()
    with pytest.raises(UserError, match="was cancelled"):
        await loading
    assert await states(db) == {"pending": 1}


# Giving out


async def test_a_batch_brings_what_the_rows_know_in_the_order_of_their_keys(db: asyncpg.Pool) -> None:
    await loaded(db, people(5), replace(PLAN, message_class="news"))
    rows = await batch(db, 3, submit_within="30 seconds", claimed_by="worker-1")
    first = rows[0]
    assert [r["wire_key"] for r in rows] == sorted(r["wire_key"] for r in rows)
    assert (first["outcome"], first["attempt"], first["seconds_left"], first["message_class"]) == (
        "claimed",
        1,
        30.0,
        "news",
    )
    number = first["recipient"].removeprefix("person")[0]
    assert json.loads(first["payload"]) == {"name": f"Name {number}"}
    assert (await row(db, first["send_key"]))["claimed_by"] == "worker-1"
    assert await confirm(db, first["send_key"], first["fence"]) == "sent"
    assert {r["wire_key"] for r in await batch(db)}.isdisjoint(r["wire_key"] for r in rows)


async def test_of_many_workers_each_send_goes_to_one(db: asyncpg.Pool, dsn: str) -> None:
    await loaded(db, people(500))
    pool = await asyncpg.create_pool(dsn, min_size=10, max_size=10)

    async def worker() -> list[str]:
        return [one.claim.wire_key async for claims in campaign.batches(pool, "spring", size=7) for one in claims]

    got = await asyncio.gather(*(worker() for _ in range(10)))
    await pool.close()
    claims = [one for some in got for one in some]
    assert len(claims) == len(set(claims)) == 500
    assert min(map(len, got)) > 0, "each got some"


async def test_workers_do_not_wait_for_each_other(db: asyncpg.Pool) -> None:
    await loaded(db, people(20))
    async with db.acquire() as slow, slow.transaction():
        first = await batch(slow, 10)
        second = await asyncio.wait_for(batch(db, 20), 20)
    assert len(first) == len(second) == 10


async def test_batches_are_committed_and_refused_inside_a_transaction(db: asyncpg.Pool) -> None:
    await loaded(db, people(1))
    async with db.acquire() as connection, connection.transaction():
        with pytest.raises(guard.GuardError, match="inside a transaction"):
            await anext(campaign.batches(connection, "spring"))
        with pytest.raises(asyncpg.PostgresError, match="invalid transaction termination"):
            await connection.fetch(campaign.CLAIM, "spring", 1, "{}")


@pytest.mark.parametrize(
    ("name", "size", "options", "says"),
    [
        ("spring", 0, {}, "batch must lie between 1 and 1000"),
        ("spring", 1001, {}, "batch must lie between 1 and 1000"),
        ("spring", 1, {"recipient": "a"}, "unknown option"),
        ("sprung", 1, {}, "no campaign has the name 'sprung'"),
    ],
)
async def test_a_batch_that_is_a_mistake_is_refused(
    db: asyncpg.Pool, name: str, size: int, options: Any, says: str
) -> None:
    await loaded(db, people(1))
    with pytest.raises(asyncpg.InvalidParameterValueError, match=says):
        await batch(db, size, name, **options)


async def first_batch(db: asyncpg.Pool, name: str) -> object:
    return await anext(campaign.batches(db, name))


@pytest.mark.parametrize("name", ["sprung", "SPRING", "spring ", "", "spr\0ng", "spr\udcffng"])
@pytest.mark.parametrize(
    "ask",
    [
        first_batch,
        lambda db, name: campaign.pause(db, name, "", "me"),
        lambda db, name: campaign.resume(db, name, "", "me"),
        lambda db, name: campaign.cancel(db, name, "", "me"),
    ],
    ids=["batches", "pause", "resume", "cancel"],
)
async def test_whoever_misspells_a_campaigns_name_is_told_so(db: asyncpg.Pool, ask: Any, name: str) -> None:
    await loaded(db, people(1))
    with pytest.raises(campaign.UnknownCampaign) as refused:
        await ask(db, name)
    assert str(refused.value) == f"no campaign is named {name!a}: see reconciler campaign list"
    assert await campaign.status(db, name) is None
    assert await campaign.standing(db, name) is None
    assert await campaign.standing(db, "spring") == "active"


async def test_a_campaign_is_loaded_by_no_name_that_it_cannot_have(db: asyncpg.Pool) -> None:
    for name in ("", "a b", "a\0", "a\udcff", "a" * 101):
        with pytest.raises(UserError, match="a campaign's name is made of"):
            await loaded(db, people(1), replace(PLAN, name=name))
    assert await campaign.names(db, 10) == []


async def test_a_batch_is_submitted_in_one_call_and_each_outcome_is_stored(db: asyncpg.Pool) -> None:
    await loaded(db, people(3))
    (claims,) = [some async for some in campaign.batches(db, "spring", provider="postmark")]
    messages = {one.claim.send_key: {"To": one.recipient, **one.payload} for one in claims}

    async def submit(asked: Any) -> object:
        body = [messages[claimed.send_key] | dict(claimed.stamp.body) for claimed in asked]
        assert [item["name"][:5] for item in body] == ["Name "] * 3
        return 200, {}, b'[{"ErrorCode":0,"MessageID":"m-0"},{"ErrorCode":406},{"ErrorCode":0,"MessageID":"m-2"}]'

    sent = await guard_many.submit_claimed_many(db, [one.claim for one in claims], submit)
    assert [one.outcome for one in sent] == ["sent", "failed", "sent"]
    assert await guard_many.submit_claimed_many(db, [], submit) == []
    assert await states(db) == {"sent": 2, "failed": 1}
    assert await campaign.standing(db, "spring") == "finished"


async def test_what_was_released_is_given_out_again_by_the_same_call_when_it_is_free(db: asyncpg.Pool) -> None:
    await loaded(db, people(2))
    one, other = await batch(db)
    assert await fail(db, one["send_key"], one["fence"], not_sent=True) == "released"
    (again,) = await batch(db)
    assert (again["send_key"], again["attempt"]) == (one["send_key"], 2)
    await fail(db, other["send_key"], other["fence"], "timed out")
    assert await batch(db) == [], "nobody can tell what became of it"
    assert await decide_claimed(db, ()) == (0, 2)
    assert {r["send_key"] for r in await batch(db)} == {one["send_key"], other["send_key"]}


async def test_a_same_key_retry_of_a_campaign_is_given_out_by_its_own_fingerprint(db: asyncpg.Pool) -> None:
    await loaded(db, people(1))
    (one,) = await batch(db)
    await db.execute("UPDATE send_log SET fingerprint = 'f'")
    await fail(db, one["send_key"], one["fence"], "timed out")
    await make_older(db, one["send_key"], timedelta(minutes=5))
    await reconcile(db, key_window=timedelta(hours=1))
    (again,) = await batch(db)
    assert (again["attempt"], again["fingerprint"]) == (2, "f")


async def test_a_send_that_was_heard_of_is_passed_over_for_the_next_one(db: asyncpg.Pool) -> None:
    await loaded(db, people(3))
    keys_in_order = [r["send_key"] for r in await db.fetch("SELECT send_key FROM send_log ORDER BY wire_key")]
    await event(db, keys_in_order[0])
    await event(db, keys_in_order[1], "none", kind="unknown", message_id="m-2")
    assert [r["send_key"] for r in await batch(db, 1)] == [keys_in_order[2]]
    assert (await row(db, keys_in_order[0]))["state"] == "sent"


async def test_a_held_feed_gives_out_of_a_campaign_only_what_it_may(db: asyncpg.Pool) -> None:
    await loaded(db, people(2))
    (one,) = await batch(db, 1)
    await fail(db, one["send_key"], one["fence"], "timed out")
    await decide_claimed(db, ())
    async with db.acquire() as connection:
        await pause_feed(connection, FEED, "test", "ann")
    assert [r["attempt"] for r in await batch(db)] == [1], "a pause of the feed holds what a pass released"
    await db.execute("UPDATE feed_state SET paused_at = NULL")
    await db.execute("UPDATE feed_state SET suspect_at = now() WHERE feed = '*'")
    assert await batch(db) == []


async def test_with_every_the_iterator_goes_on_until_the_campaign_has_finished(db: asyncpg.Pool) -> None:
    await loaded(db, people(3))
    attempts = []
    async for claims in campaign.batches(db, "spring", size=2, every=0.01):
        for one in claims:
            attempts.append(one.claim.attempt)
            if one.claim.attempt == 1:
                await guard.fail(db, one.claim, "refused", not_sent=True)
            else:
                await guard.confirm(db, one.claim, "m")
    assert attempts.count(1) == attempts.count(2) == 3
    assert await campaign.standing(db, "spring") == "finished"


async def test_the_iterator_that_waits_goes_on_until_nothing_is_claimed(db: asyncpg.Pool) -> None:
    await loaded(db, people(1))
    (one,) = await batch(db)

    async def next_batch() -> list[guard.Released]:
        return await anext(campaign.batches(db, "spring", every=0.01))

    waits = asyncio.create_task(next_batch())
    assert await campaign.standing(db, "spring") == "active"
    await fail(db, one["send_key"], one["fence"], not_sent=True)
    (again,) = await asyncio.wait_for(waits, 10)
    assert again.claim.attempt == 2


async def test_the_documented_worker_sends_a_campaign(db: asyncpg.Pool) -> None:
    await loaded(db, people(3))
    code = block("docs/campaigns.md", "python", "campaign.batches")
    place: dict[str, Any] = {}
    exec(compile(code, "docs/campaigns.md", "exec"), place)  # noqa: S102 - our own page
    posted: list[Any] = []

    async def post(messages: list[Any]) -> object:
        posted.extend(messages)
        return 200, {}, json.dumps([{"ErrorCode": 0, "MessageID": f"m-{n}"} for n in range(len(messages))]).encode()

    await place["work"](db, "spring", post)
    assert {m["To"]: m["TemplateModel"] for m in posted}["person2@example2.com"] == {"name": "Name 2"}
    assert await states(db) == {"sent": 3}


# Suppressed since


async def test_who_is_suppressed_after_the_load_is_not_written_to(db: asyncpg.Pool) -> None:
    await loaded(db, people(2) + b"ada@example.com,Ada\n")
    await suppression.add(db, ["ADA@example.com"], None, "me")
    refused = await claim(db, ADA)
    assert (refused["outcome"], refused["reason"]) == ("held", "suppressed")
    rows = await batch(db)
    assert sorted((r["outcome"], r["reason"], r["fence"] is None) for r in rows) == [
        ("claimed", None, False),
        ("claimed", None, False),
        ("failed", "suppressed", True),
    ]
    found = await row(db, ADA)
    assert (found["state"], found["verdict_source"], found["verdict_reason"]) == ("failed", "operator", "suppressed")
    assert await reasons(db, ADA) == ["failed:suppressed"]


async def test_the_iterator_goes_on_behind_any_number_of_suppressed_sends(db: asyncpg.Pool) -> None:
    await loaded(db, people(50))
    order = [r["recipient"] for r in await db.fetch("SELECT recipient FROM send_log ORDER BY wire_key")]
    await suppression.add(db, order[:40], None, "me")
    got = [one.recipient async for claims in campaign.batches(db, "spring", size=5) for one in claims]
    assert got == order[40:]
    assert await states(db) == {"claimed": 10, "failed": 40}


async def test_an_import_counts_names_bad_lines_and_leaves_who_is_there(db: asyncpg.Pool) -> None:
    await suppression.add(db, ["ada@example.com"], "by phone", "me")
    content = b"email,reason\nADA@example.com,bounced\nbob@example.org,bounced\nbob@example.org,\nnobody,x\n"
    done = await suppression.import_lines(db, read_lines(io.BytesIO(content)), "list.csv")
    assert (done.added, done.known, done.bad_lines, [bad.line for bad in done.bad]) == (1, 2, 1, [5])
    found = await suppression.listed(db, 10)
    assert [(one.recipient_key, one.reason, one.source) for one in found] == [
        ("ada@example.com", "by phone", "me"),
        ("bob@example.org", "bounced", "list.csv"),
    ]


# Pause, start, cancel


async def test_a_paused_campaign_gives_out_nothing_by_any_road_until_it_is_resumed(db: asyncpg.Pool) -> None:
    await loaded(db, people(2))
    (one,) = await batch(db, 1)
    await fail(db, one["send_key"], one["fence"], not_sent=True)
    assert await campaign.pause(db, "spring", "wrong picture", "me")
    assert not await campaign.pause(db, "spring", "again", "me")
    assert await batch(db) == []
    refused = await claim(db, one["send_key"])
    assert (refused["outcome"], refused["reason"]) == ("held", "campaign_paused")
    assert await guard.claim_released(db, FEED, 10) == []
    assert await campaign.resume(db, "spring", "", "me")
    assert len(await batch(db)) == 2


async def paused_in_between(db: asyncpg.Pool, asked: Any) -> Any:
    """What a claim answers that began while the pause was being committed."""
    async with db.acquire() as pauser:
        transaction = pauser.transaction()
        await transaction.start()
        await pauser.fetch(campaign.PAUSE, "spring", "", "me")
        await pauser.fetch(campaign.MEET_CLAIMS, "spring")
        waiting = asyncio.create_task(asked)
        await until_it_waits(db, waiting)
        await transaction.commit()
        return await waiting


async def test_a_batch_meets_whoever_is_pausing(db: asyncpg.Pool) -> None:
    await loaded(db, people(2))
    assert await paused_in_between(db, batch(db)) == []
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE next_check_at IS NOT NULL") == 0, (
        "rows are left alone"
    )


async def test_a_single_claim_meets_whoever_is_pausing(db: asyncpg.Pool) -> None:
    await loaded(db, b"recipient\nada@example.com\n")
    refused = await paused_in_between(db, claim(db, ADA))
    assert (refused["outcome"], refused["reason"]) == ("held", "campaign_paused")


@pytest.mark.parametrize("end", [campaign.pause, campaign.cancel])
async def test_a_pause_waits_for_the_claims_under_way(db: asyncpg.Pool, end: Any) -> None:
    await loaded(db, people(2))
    async with db.acquire() as claimer:
        transaction = claimer.transaction()
        await transaction.start()
        assert len(await batch(claimer, 1)) == 1
        waiting = asyncio.create_task(end(db, "spring", "", "me"))
        await until_it_waits(db, waiting)
        assert await asyncio.wait_for(batch(db), 20) == [], "it works at once all the same"
        await transaction.commit()
        await waiting


async def test_nothing_is_given_out_before_the_campaigns_time(db: asyncpg.Pool) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    await loaded(db, b"recipient\nada@example.com\n", replace(PLAN, starts_at=at))
    assert await campaign.standing(db, "spring") == "scheduled"
    assert await batch(db) == []
    refused = await claim(db, ADA)
    assert (refused["outcome"], refused["reason"], refused["retry_at"]) == ("held", "campaign_scheduled", at)
    await db.execute("UPDATE campaign SET starts_at = now() - interval '1 hour'")
    assert len(await batch(db)) == 1, "an hour late is not late"


async def test_a_start_hours_after_its_time_asks_for_confirmation(db: asyncpg.Pool) -> None:
    at = datetime.now(UTC) - timedelta(hours=3)
    plan = replace(PLAN, starts_at=at)
    await loaded(db, people(2), plan)
    assert await campaign.standing(db, "spring") == "late"
    assert await batch(db) == []
    assert not await campaign.resume(db, "spring", "", "me"), "to resume is not to confirm"
    assert await campaign.pause(db, "spring", "", "me")
    assert await campaign.resume(db, "spring", "", "me")
    assert await campaign.standing(db, "spring") == "late"
    assert await campaign.resume(db, "spring", "", "me", late=True)
    await loaded(db, people(2), plan)
    assert len(await batch(db, 1)) == 1, "loading it again takes back nothing"
    await loaded(db, people(2), replace(plan, starts_at=at + timedelta(minutes=1)))
    assert await campaign.standing(db, "spring") == "active", "what has begun is not late"


async def test_another_time_has_to_be_confirmed_anew_and_the_lateness_can_be_chosen(db: asyncpg.Pool) -> None:
    at = datetime.now(UTC) - timedelta(hours=3)
    await loaded(db, people(2), replace(PLAN, starts_at=at, max_lateness=timedelta(hours=4)))
    assert await campaign.standing(db, "spring") == "active"
    await loaded(db, people(2), replace(PLAN, max_lateness=timedelta(hours=1)))
    assert await campaign.resume(db, "spring", "", "me", late=True)
    await loaded(db, people(2), replace(PLAN, starts_at=at - timedelta(hours=1)))
    assert await campaign.standing(db, "spring") == "late"


async def test_a_cancel_fails_released_sends_keeps_fresh_ones_and_never_touches_claimed_ones(db: asyncpg.Pool) -> None:
    await loaded(db, people(5))
    running, freed, heard, sent = [r["send_key"] for r in await batch(db, 4)]
    fences = {key: (await row(db, key))["fence"] for key in (running, freed, heard, sent)}
    for key in (freed, heard):
        await fail(db, key, fences[key], not_sent=True)
    await event(db, heard)
    await confirm(db, sent, fences[sent])
    before = await row(db, running)
    assert await campaign.cancel(db, "spring", "wrong list", "me")
    assert await row(db, running) == before
    assert (await row(db, heard))["state"] == "sent"
    found = await row(db, freed)
    assert (found["state"], found["verdict_source"], found["verdict_reason"]) == ("failed", "operator", "cancelled")
    assert await states(db) == {"claimed": 1, "sent": 2, "failed": 1, "pending": 1}
    assert await batch(db) == []
    fresh = await db.fetchval("SELECT send_key FROM send_log WHERE state = 'pending'")
    refused = await claim(db, fresh)
    assert (refused["outcome"], refused["reason"]) == ("held", "campaign_cancelled")
    await reconcile(db)
    assert (await row(db, fresh))["state"] == "pending"
    assert not await campaign.resume(db, "spring", "", "me", late=True)
    with pytest.raises(UserError, match="spring was cancelled: take another name"):
        await loaded(db, people(9))


async def test_a_cancel_said_again_ends_what_was_released_since(db: asyncpg.Pool) -> None:
    await loaded(db, people(2))
    one, other = await batch(db)
    await campaign.cancel(db, "spring", "", "me")
    await fail(db, one["send_key"], one["fence"], not_sent=True)
    assert not await campaign.cancel(db, "spring", "", "me")
    assert await states(db) == {"failed": 1, "claimed": 1}
    await event(db, other["send_key"])
    await reconcile(db, RELEASES)
    assert await states(db) == {"failed": 1, "sent": 1}


async def test_only_a_cancelled_campaigns_sends_are_ended(db: asyncpg.Pool) -> None:
    await loaded(db, people(1))
    (one,) = await batch(db)
    await fail(db, one["send_key"], one["fence"], not_sent=True)
    assert await db.fetchval("SELECT campaign_end_released('spring', 10, 'me', '')") == 0
    assert await states(db) == {"pending": 1}


async def test_a_label_that_is_no_campaign_holds_nothing(db: asyncpg.Pool) -> None:
    await suppression.add(db, ["ada@example.com"], None, "me")
    claimed = await claim(db, "order:1", campaign="autumn", recipient="ada@example.com")
    assert claimed["outcome"] == "claimed"
    assert await campaign.standing(db, "autumn") is None


# How it stands


async def test_the_status_counts_each_state(db: asyncpg.Pool) -> None:
    await loaded(db, people(10))
    rows = await batch(db, 6)
    for one in rows[:2]:
        await confirm(db, one["send_key"], one["fence"])
    await fail(db, rows[2]["send_key"], rows[2]["fence"], "no", not_sent=False)
    await fail(db, rows[3]["send_key"], rows[3]["fence"], not_sent=True)
    await make_older(db, rows[4]["send_key"], timedelta(minutes=5))
    await db.execute(
        "UPDATE send_log SET held_reason = 'silent', held_since = now() WHERE wire_key = $1", rows[4]["wire_key"]
    )
    status = await campaign.status(db, "spring")
    assert status is not None
    counts = (status.pending, status.released, status.held, status.claimed, status.running, status.undecided)
    assert counts == (5, 1, 1, 2, 1, 1)
    assert (status.sent, status.failed, status.total, status.done) == (2, 1, 10, 3)
    assert status.oldest_claim == (await row(db, rows[4]["send_key"]))["claimed_at"]
    assert status.per_second == pytest.approx(2 / 60)
    assert status.seconds_left == pytest.approx(150)
    assert [(one.source, one.added, one.ended_at is None) for one in status.loads] == [("people.csv", 10, False)]
    assert await campaign.status(db, "none") is None


async def test_the_command_line_loads_shows_and_steers_a_campaign(
    db: asyncpg.Pool, program: Program, tmp_path: Any
) -> None:
    file = tmp_path / "people.csv"
    file.write_bytes(people(3) + b"nobody,x\nada@example.com,Ada\n")
    assert (await program("suppress", "add", "ada@example.com", "--reason", "asked to")).stdout == "1 added, 0 known\n"
    done = await program("campaign", "load", "spring", str(file), "--feed", "mg", "--class", "news")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == "5 lines: 3 added, 0 duplicates, 1 suppressed, 1 bad"
    assert "nobody" not in done.output
    assert (await program.json("campaign", "load", "spring", str(file), "--feed", "mg"))["duplicates"] == 3
    shown = await program.json("campaign", "status", "spring")
    assert (shown["standing"], shown["pending"], shown["total"], shown["suppressed"]) == ("active", 3, 3, 1)
    shown_loads = shown["loads"]
    shown = await program.json("campaign", "pause", "spring", "--reason", "wrong picture")
    assert shown == {"name": "spring", "changed": True, "standing": "paused"}
    assert "spring: paused" in (await program("campaign", "status", "spring")).stdout
    assert [one["name"] for one in await program.json("campaign", "list")] == ["spring"]
    assert [one["source"] for one in shown_loads] == [str(file)]
    assert (await program("campaign", "resume", "spring")).stdout == "spring: active\n"
    assert len(await batch(db)) == 3
    assert (await program("campaign", "cancel", "spring", "--yes")).stdout == "spring: cancelled\n"
    refused = await program("campaign", "resume", "spring")
    assert (refused.exit_code, refused.stderr) == (1, "reconciler: spring was cancelled, which is final\n")
    assert (await program("campaign", "status", "spring", "--follow")).exit_code == 0
    assert (await program("campaign", "status", "sprung")).exit_code == 1
    assert (await program("campaign", "load", "a b", str(file), "--feed", "mg")).exit_code == 2
    assert (await program("campaign", "load", "autumn", str(file), "--feed", "gm")).exit_code == 1


@pytest.mark.parametrize("verb", ["status", "pause", "resume", "cancel"])
async def test_the_command_line_says_in_one_line_which_campaign_there_is_not(program: Program, verb: str) -> None:
    done = await program("campaign", verb, "sprung")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "reconciler: no campaign is named 'sprung': see reconciler campaign list\n"


BAD_CSV = b"""recipient,name
ada@example.com
ada,Ada
,Ada
"ada@example.com,bob@example.com",both
ada@example.com,\xff
ada@example.com,\0
bob@example.com,Bob
ada@example.com,"Ada"s
"""
BAD_JSON = b"""{"recipient": "bob@example.com"}
{"recipient": 5}
ada@example.com
{"name": "Ada"}
{"recipient": "ada"}
{"recipient": "ada@example.com", "name": "\\u0000"}
"""
UNSTORABLE = "holds what the database can't store, such as a zero character"
BAD_LINES = {
    "csv": (
        BAD_CSV,
        {
            2: "has 1 cells, and the header 2",
            3: "names a recipient that is no address",
            4: "names no recipient",
            5: "names several recipients: give each a line",
            6: "is not UTF-8",
            7: UNSTORABLE,
            9: "is no CSV (',' expected after '\"')",
        },
    ),
    "jsonl": (
        BAD_JSON,
        {
            2: "is no JSON object with an address",
            3: "is no JSON object with an address",
            4: "names no recipient",
            5: "names a recipient that is no address",
            6: UNSTORABLE,
        },
    ),
}


@pytest.mark.parametrize("form", sorted(BAD_LINES))
async def test_the_command_line_names_each_bad_line_and_what_is_wrong_with_it_and_fails(
    db: asyncpg.Pool, program: Program, tmp_path: Path, form: str
) -> None:
    content, wanted = BAD_LINES[form]
    (tmp_path / form).write_bytes(content)
    done = await program("campaign", "load", "spring", str(tmp_path / form), "--feed", "mg")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[1:] == ["LINE  WHY", *(f"{line:>4}  {why}" for line, why in wanted.items())]
    assert done.stderr == f"reconciler: {len(wanted)} lines were passed over\n"
    assert await names(db) == ["campaign:spring:bob@example.com"]


async def test_why_says_that_a_campaign_refuses_its_sends(db: asyncpg.Pool, program: Program) -> None:
    await loaded(db, people(1))
    await campaign.pause(db, "spring", "wrong picture", "me")
    key = "campaign:spring:person0@example0.com"
    assert "its campaign is paused: every claim is refused" in (await program("why", key)).stdout


async def test_files_of_one_name_in_two_folders_and_two_pipes_are_two_files(
    db: asyncpg.Pool, program: Program, tmp_path: Path
) -> None:
    for part in ("1", "2"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "people.csv").write_bytes(people(3, 3 * int(part)))
        await program("campaign", "load", "spring", str(tmp_path / part / "people.csv"), "--feed", "mg")
    for pipe in ("a", "b"):
        loading = ("campaign", "load", "spring", "-", "--feed", "mg", "--source", pipe)
        assert (await program(*loading, stdin=f"recipient\n{pipe}@example.com\n")).exit_code == 0
    loads = (await program.json("campaign", "status", "spring"))["loads"]
    assert [one["source"] for one in loads] == [*(str(tmp_path / part / "people.csv") for part in ("1", "2")), "a", "b"]


async def test_the_command_line_asks_to_confirm_a_late_start(program: Program, tmp_path: Any) -> None:
    file = tmp_path / "people.jsonl"
    file.write_text('{"recipient": "ada@example.com"}\n')
    await program("campaign", "load", "spring", str(file), "--feed", "mg", "--starts-at", "2026-01-01T08:00:00Z")
    shown = await program("campaign", "status", "spring")
    assert "spring: late" in shown.stdout
    assert "reconciler campaign resume spring --late" in shown.stdout
    refused = await program("campaign", "resume", "spring")
    assert refused.exit_code == 1
    assert "was to start at 2026-01-01T08:00:00Z: say --late to start it all the same" in refused.stderr
    assert (await program("campaign", "resume", "spring", "--late")).stdout == "spring: active\n"


async def test_the_command_line_keeps_the_suppression_list(program: Program, tmp_path: Any) -> None:
    file = tmp_path / "list.csv"
    file.write_text("email,reason\nada@example.com,bounced\nbob@example.org,\n")
    assert (await program("suppress", "import", str(file))).stdout == "2 added, 0 there already, 0 bad lines\n"
    shown = await program.json("suppress", "list")
    assert shown["counts"] == {"list.csv": 2}
    assert [one["recipient_key"] for one in shown["suppressed"]] == ["ada@example.com", "bob@example.org"]
    assert (await program("suppress", "remove", "ADA@example.com")).stdout == "1 removed, 0 unknown\n"
    assert "1 in all, 1 of list.csv" in (await program("suppress", "list")).stdout
    wrong = await program("suppress", "add", "nobody")
    assert (wrong.exit_code, wrong.stderr) == (1, "reconciler: an argument names a recipient that is no address\n")
