# SPDX-License-Identifier: Apache-2.0
"""Replay: what was kept goes through the same parse and store as live deliveries, as often as one likes."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path

import asyncpg
import pytest
from aws_server import REGION, client
from kit import heard_neighbours, old_claim, reconcile, state
from receiver_app import no_fetch
from serving import FEEDS, sample
from test_archive import archive

from reconciler.filling import common as fillings
from reconciler.filling.common import SET_FILLING, filling
from reconciler.filling.replay import Summary, replay
from reconciler.passes.feeds import feed_health
from webhooks import sources
from webhooks.asking import ApiError
from webhooks.aws import Place
from webhooks.provider import Delivery, Feed, Parsed
from webhooks.registry import PROVIDERS
from webhooks.sources import Files, S3Files

FIREHOSE = Path(__file__).parent / "providers/fixtures/ses/firehose_records.ndjson"
SES = Feed("ses-eu", "ses")
ALL = {**FEEDS, "ses-eu": SES}


async def replayed(db: asyncpg.Pool, path: Path, feed: str | None = None, **more: object) -> Summary:
    files = Files(path)
    return await replay(db, files, await files.blobs(), ALL, feed=feed, verify=more.pop("verify", None), **more)


def counts(summary: Summary) -> tuple[int, int, int, int]:
    return summary.entries, summary.events, summary.stored, summary.damaged_entries


async def test_ses_events_that_firehose_wrote_to_files_are_stored_once(db, tmp_path: Path) -> None:
    (tmp_path / "2026" / "11").mkdir(parents=True)
    (tmp_path / "2026" / "11" / "plain").write_bytes(FIREHOSE.read_bytes())
    (tmp_path / "2026" / "11" / "packed.gz").write_bytes(gzip.compress(FIREHOSE.read_bytes()))
    lines = len(FIREHOSE.read_bytes().splitlines())
    first = await replayed(db, tmp_path, "ses-eu")
    assert first.entries == 2 * lines
    assert (first.stored, first.repeated) == (first.events // 2, first.events // 2)
    again = await replayed(db, tmp_path, "ses-eu")
    assert (again.stored, again.events) == (0, first.events)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == first.stored
    assert await db.fetchval("SELECT DISTINCT source FROM provider_event") == "replay"


async def test_an_archive_brings_its_feeds_headers_and_query_with_it(db, tmp_path: Path) -> None:
    kept = archive(tmp_path, "http://127.0.0.1:9")
    delivered = sample("re", "delivered", "key-1")
    kept.add(FEEDS["re"], delivered, datetime.now(UTC))
    kept.add(FEEDS["mg"], sample("mg", "bounced", "key-2"), datetime.now(UTC))
    await kept.write()
    summary = await replayed(db, tmp_path, verify=no_fetch)
    assert counts(summary) == (2, 2, 2, 0)
    assert summary.feeds == {"re": 1, "mg": 1}
    rows = await db.fetch("SELECT feed, wire_key, event_id FROM provider_event ORDER BY wire_key")
    assert [tuple(row)[:2] for row in rows] == [("re", "key-1"), ("mg", "key-2")]
    assert rows[0]["event_id"] == delivered.headers["svix-id"]


async def test_an_event_was_received_when_it_was_stored_however_long_ago_it_was_delivered(db, tmp_path: Path) -> None:
    kept = archive(tmp_path, "http://127.0.0.1:9")
    kept.add(FEEDS["re"], sample("re", "delivered", "key-1"), datetime.now(UTC) - timedelta(days=9))
    kept.add(FEEDS["mg"], sample("mg", "delivered", "key-2"), datetime.now(UTC) - timedelta(days=9))
    await kept.write()
    before = await db.fetchval("SELECT clock_timestamp()")
    assert (await replayed(db, tmp_path, verify=None)).stored == 2
    assert await db.fetchval("SELECT min(received_at) FROM provider_event") >= before


async def test_signatures_are_checked_where_asked_and_their_age_is_not(db, tmp_path: Path) -> None:
    old = sample("mg", "delivered", "key-1")
    forged = json.loads(old.body) | {"signature": {"timestamp": "1", "token": "t", "signature": "0" * 64}}
    (tmp_path / "a.json").write_bytes(old.body)
    (tmp_path / "b.json").write_text(json.dumps(forged))
    strict = {"mg": replace(FEEDS["mg"], tolerance=timedelta(0))}
    files = Files(tmp_path)
    summary = await replay(db, files, await files.blobs(), strict, feed="mg", verify=no_fetch)
    assert counts(summary) == (2, 1, 1, 1)
    assert summary.damaged == [(f"{tmp_path / 'b.json'}:1", "is not proved to be the provider's (signature)")]


async def test_what_is_damaged_is_named_and_its_neighbours_are_stored(db, tmp_path: Path) -> None:
    line = sample("mg", "delivered", "key-1").body
    broken = gzip.compress(sample("mg", "delivered", "key-3").body + b"\n" + os.urandom(5000).hex().encode())[:-400]
    (tmp_path / "a.ndjson").write_bytes(line + b"\n" + line[:-9] + b"\n\n" + b'"text"\n[]\n' + line)
    (tmp_path / "b.gz").write_bytes(broken)
    (tmp_path / "c").write_bytes(b"")
    (tmp_path / "d").write_bytes(b"prose\nmore prose")
    (tmp_path / "e.ndjson").write_text('{"feed": "mg", "received_at": "x", "headers": [], "body": 7}\n')
    (tmp_path / "f.ndjson").write_text('{"feed": "nobody", "received_at": "x", "headers": {}, "body": "{}"}\n')
    summary = await replayed(db, tmp_path, "mg")
    assert [row[0] for row in await db.fetch("SELECT wire_key FROM provider_event")] == ["key-1", "key-3"]
    damaged = {name.removeprefix(f"{tmp_path}/"): why for name, why in summary.damaged}
    assert damaged == {
        "a.ndjson:2": "is no JSON: cut off or damaged",
        "a.ndjson:4": "neither JSON nor a form of Mailgun's legacy webhooks",
        "a.ndjson:5": "neither JSON nor a form of Mailgun's legacy webhooks",
        "b.gz": "can't be read on: EOFError",
        "c": "is empty",
        "d": "neither JSON nor a form of Mailgun's legacy webhooks",
        "e.ndjson:1": "is no whole line of an archive",
    }
    assert (summary.damaged_entries, summary.others) == (7, 1)


async def test_an_entry_at_which_our_adapter_fails_stops_no_other(db, tmp_path: Path) -> None:
    bodies = [sample("mg", "delivered", key).body for key in ("key-1", "key-2", "key-3")]
    (tmp_path / "a.ndjson").write_bytes(b"\n".join(bodies))
    files = Files(tmp_path)
    whole = PROVIDERS["mailgun"]

    class Failing:
        facts = whole.facts

        def parse(self, delivery: Delivery) -> Parsed:
            if b"key-2" in delivery.body:
                raise RuntimeError("about ada@example.org")
            return whole.parse(delivery)

    providers = {"mailgun": Failing()}
    summary = await replay(
        db,
        files,
        await files.blobs(),
        ALL,
        feed="mg",
        verify=None,
        providers=providers,  # type: ignore[arg-type]
    )
    assert (summary.stored, summary.damaged) == (
        2,
        [(f"{tmp_path}/a.ndjson:2", "could not be read (RuntimeError): a fault of ours")],
    )


def test_a_line_that_is_too_long_is_one_damaged_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ENTRY", 20)
    found = list(sources.entries("a", BytesIO(b'{"a": 1}\n' + b'{"b": "' + b"x" * 100 + b'"}\n{"c": 1}')))
    assert [(entry.name, bool(entry.delivery)) for entry in found] == [("a:1", True), ("a:2", False), ("a:3", True)]


async def test_a_delivery_that_names_no_feed_is_skipped_and_says_what_to_do(db, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(sample("mg", "delivered", "key-1").body)
    summary = await replayed(db, tmp_path)
    why = "doesn't say which feed it is of: name it with --feed"
    assert (summary.stored, summary.damaged) == (0, [(f"{tmp_path}/a.json:1", why)])


async def test_entries_of_other_feeds_are_passed_over(db, tmp_path: Path) -> None:
    kept = archive(tmp_path, "http://127.0.0.1:9")
    for feed, key in (("re", "key-1"), ("mg", "key-2"), ("mg", "key-3")):
        kept.add(FEEDS[feed], sample(feed, "delivered", key), datetime.now(UTC))
    await kept.write()
    summary = await replayed(db, tmp_path, "mg")
    assert (*counts(summary), summary.others) == (3, 2, 2, 0, 1)


async def test_a_dry_run_counts_and_stores_nothing(db, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(sample("mg", "delivered", "key-1").body)
    summary = await replayed(db, tmp_path, "mg", dry_run=True)
    assert counts(summary) == (1, 1, 0, 0)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0
    assert await db.fetchval("SELECT count(*) FROM feed_state WHERE filling_until IS NOT NULL") == 0


COUNT_MARKS = """
CREATE TABLE marks (at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION note_mark() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO marks DEFAULT VALUES; RETURN NEW; END $$;
CREATE TRIGGER note_mark AFTER INSERT OR UPDATE ON feed_state FOR EACH ROW EXECUTE FUNCTION note_mark();
"""


async def test_however_much_is_skipped_the_mark_is_renewed(db, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fillings, "RENEW_SECONDS", 0.0)
    await db.execute(COUNT_MARKS)
    good = sample("mg", "delivered", "key-1").body
    (tmp_path / "a.ndjson").write_bytes(good + b"\n" + b'["junk"]\n' * 2000)
    await replayed(db, tmp_path, "mg")
    assert await db.fetchval("SELECT count(*) FROM marks") > 2


async def test_what_is_no_file_is_passed_over(db, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(sample("mg", "delivered", "key-1").body)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    assert counts(await replayed(db, tmp_path, "mg")) == (1, 1, 1, 0)


async def test_a_torn_first_line_loses_only_itself(db, tmp_path: Path) -> None:
    bodies = [sample("mg", "delivered", key).body for key in ("key-1", "key-2")]
    (tmp_path / "torn.ndjson").write_bytes(bodies[0][50:] + b"\n" + bodies[1] + b"\n")
    (tmp_path / "blank.ndjson").write_bytes(b"\n" + bodies[0] + b"\n")
    summary = await replayed(db, tmp_path, "mg")
    assert (summary.stored, summary.damaged) == (
        2,
        [(f"{tmp_path}/torn.ndjson:1", "is no JSON: cut off or damaged")],
    )


async def test_a_prefix_in_s3_is_a_folder_or_a_file_and_never_its_neighbour(aws: str) -> None:
    async with client("s3", aws) as s3:
        await s3.create_bucket(Bucket="mail", CreateBucketConfiguration={"LocationConstraint": REGION})
        for key in ("raw/1", "raw/2/3", "raw-of-another/1"):
            await s3.put_object(Bucket="mail", Key=key, Body=b"{}")

    async def names(prefix: str) -> list[str]:
        return [blob.name for blob in await S3Files(Place("mail", prefix, REGION, aws)).blobs()]

    assert await names("raw") == ["raw/1", "raw/2/3"]
    assert await names("raw/1") == ["raw/1"]
    assert len(await names("")) == 3


async def test_s3_is_read_as_the_archive_wrote_it(aws: str, db, tmp_path: Path) -> None:
    async with client("s3", aws) as s3:
        await s3.create_bucket(Bucket="mail", CreateBucketConfiguration={"LocationConstraint": REGION})
        await s3.put_object(Bucket="mail", Key="raw/firehose", Body=FIREHOSE.read_bytes())
        await s3.put_object(Bucket="mail", Key="other/firehose", Body=b"not below the prefix")
    files = S3Files(Place("mail", "raw", REGION, aws))
    summary = await replay(db, files, await files.blobs(), ALL, feed="ses-eu", verify=None)
    assert summary.entries == len(FIREHOSE.read_bytes().splitlines())
    assert summary.damaged == []
    with pytest.raises(ApiError, match="NoSuchBucket"):
        await S3Files(Place("no-such", "", REGION, aws)).blobs()


async def test_while_a_feed_is_filled_its_silence_releases_nothing(db) -> None:
    await heard_neighbours(db)
    await old_claim(db, "lonely", timedelta(hours=2))
    async with filling(db, "mg"):
        await reconcile(db)
    assert await db.fetchval("SELECT held_reason FROM send_log WHERE send_key = 'lonely'") == "filling"
    await db.execute("UPDATE feed_state SET filling_until = clock_timestamp()")
    await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE send_key = 'lonely'")
    await reconcile(db)
    assert await state(db, "lonely") == "pending"


async def test_the_mark_of_a_killed_replay_ends_by_itself(db) -> None:
    async def is_marked() -> bool:
        async with db.acquire() as connection:
            return (await feed_health(connection, {"mg"}))["mg"].filling

    await db.execute(SET_FILLING, "mg", timedelta(seconds=60))
    assert await is_marked()
    left = await db.fetchval("SELECT filling_until - clock_timestamp() FROM feed_state WHERE feed = 'mg'")
    assert timedelta(seconds=50) < left <= timedelta(seconds=60)
    await db.execute("UPDATE feed_state SET filling_until = filling_until - interval '60 seconds' WHERE feed = 'mg'")
    assert not await is_marked()


async def test_a_shorter_word_does_not_end_a_longer_one(db) -> None:
    await db.execute(SET_FILLING, "mg", timedelta(seconds=60))
    await db.execute(SET_FILLING, "mg", timedelta(seconds=1))
    left = await db.fetchval("SELECT filling_until - clock_timestamp() FROM feed_state WHERE feed = 'mg'")
    assert left > timedelta(seconds=30)
