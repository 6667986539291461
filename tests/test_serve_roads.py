# SPDX-License-Identifier: Apache-2.0
"""`reconciler serve` as a real process with an archive, and its daily look at the providers' side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from api_kit import asked
from apis.mailgun import EVENT_TYPES, Fake
from aws_server import REGION, client
from program import Program
from serving import sample, serving, start, until, write_config
from test_archive import stored

from reconciler.upkeep.endpoints import check_daily
from webhooks.provider import Feed

ARCHIVE = (
    '[archive]\nurl = "s3://mail/raw"\nregion = "{region}"\nendpoint_url = "{url}"\nevery = "1s"\nspool = "spool"\n'
)
URL = "https://hooks.example.com/webhooks/mg"


async def test_what_was_stored_is_archived_once_s3_is_there_and_until_then_status_says_so(
    aws: str, dsn: str, db: asyncpg.Pool, tmp_path: Path, program: Program
) -> None:
    config = write_config(tmp_path, ARCHIVE.format(region=REGION, url=aws))
    program.env["RECONCILER_CONFIG"] = str(config)

    async def finding() -> bool:
        return bool(await db.fetchval("SELECT count(*) FROM finding WHERE code = 'archive'"))

    async def gone() -> bool:
        return not await finding()

    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        delivery = sample("mg", "delivered", "key-1")
        assert await server.deliver("mg", delivery) == 200
        await until(finding, "the failure to be noted: there is no bucket")
        told = await program("status", "--check")
        assert told.exit_code == 3
        assert "MB wait for S3: not_found: AWS knows no such place (NoSuchBucket)" in told.stdout
        async with client("s3", aws) as s3:
            await s3.create_bucket(Bucket="mail", CreateBucketConfiguration={"LocationConstraint": REGION})
        await until(gone, "the archive to be carried")
        assert await server.deliver("mg", sample("mg", "delivered", "key-2")) == 200
        assert await server.stop() == 0
        assert (
            "NoSuchBucket" in next(line for line in server.lines if line["event"] == "archive_not_uploaded")["reason"]
        )
    lines = [line for lines in (await stored(aws)).values() for line in lines]
    assert [line["body"] for line in lines][:1] == [delivery.body.decode()]
    left = list((tmp_path / "spool").glob("*.ndjson.gz"))
    assert len(lines) + len(left) == 2, "the last one waits for the next process, if it wasn't carried yet"


async def test_a_process_that_ends_takes_back_what_it_told_of_the_archive(
    aws: str, dsn: str, db: asyncpg.Pool, tmp_path: Path
) -> None:
    """Whoever comes next says how it is then; where the archive was switched off, nobody would."""
    config = write_config(tmp_path, ARCHIVE.format(region=REGION, url=aws))

    async def finding() -> bool:
        return bool(await db.fetchval("SELECT count(*) FROM finding WHERE code = 'archive'"))

    async with serving(config, "--only", "receiver", RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        assert await server.deliver("mg", sample("mg", "delivered", "key-1")) == 200
        await until(finding, "the failure to be noted: there is no bucket")
        assert await server.stop() == 0
    assert not await finding()


async def test_a_spool_that_can_t_be_made_ends_serve_with_one_line(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path, '[archive]\nurl = "s3://mail/raw"\nspool = "file/spool"\n')
    async with aiohttp.ClientSession() as session:
        server = await start(config, session, RECONCILER_DATABASE__URL=dsn)
        assert await server.ended() == 1
    assert server.errors == ["reconciler: archive.spool can't be used (Not a directory): set it to a folder of ours"]


async def finding_of(db: asyncpg.Pool) -> str | None:
    return await db.fetchval("SELECT endpoint_finding FROM feed_state WHERE feed = 'mg'")


async def let_a_day_pass(db: asyncpg.Pool, hours: int = 24) -> None:
    await db.execute(
        "UPDATE feed_state SET endpoint_checked_at = endpoint_checked_at - make_interval(hours => $1)", hours
    )


async def test_the_daily_look_finds_what_the_provider_switched_off_and_sees_it_repaired(db: asyncpg.Pool) -> None:
    fake = Fake([], urls={name: [URL] for name in EVENT_TYPES})
    async with asked("mailgun", fake) as (feed, _):
        feeds = {"mg": replace(feed, name="mg")}
        await check_daily(db, feeds, lambda _: URL)
        assert await finding_of(db) is None
        del fake.urls["delivered"]
        await check_daily(db, feeds, lambda _: URL)
        assert await finding_of(db) is None, "once a day is enough"
        await let_a_day_pass(db)
        await check_daily(db, feeds, lambda _: URL)
        assert "add the endpoint to the URLs of delivered" in (await finding_of(db) or "")
        fake.urls["delivered"] = [URL]
        await let_a_day_pass(db, 1)
        await check_daily(db, feeds, lambda _: URL)
        assert await finding_of(db) is None, "what was wrong is looked at again within the hour"


async def test_a_feed_that_is_no_longer_asked_forgets_what_was_found(db: asyncpg.Pool) -> None:
    async with asked("mailgun", Fake([])) as (feed, _):
        feeds = {"mg": replace(feed, name="mg")}
        await check_daily(db, feeds, lambda _: URL)
        assert await finding_of(db)
        await let_a_day_pass(db)
        await check_daily(db, {"mg": replace(feeds["mg"], api_key="")}, lambda _: URL)
        assert await finding_of(db) is None
        await db.execute("UPDATE feed_state SET endpoint_finding = 'old' WHERE feed = 'mg'")
        await check_daily(db, {"other": Feed("other", "mailgun")}, lambda _: None)
        assert await finding_of(db) is None


@pytest.mark.parametrize("api_key", ["", "wrong"])
async def test_status_speaks_of_an_endpoint_only_where_it_can_be_looked_at(db: asyncpg.Pool, api_key: str) -> None:
    async with asked("mailgun", Fake([])) as (feed, _):
        await check_daily(db, {"mg": replace(feed, name="mg", api_key=api_key)}, lambda _: URL)
    assert (await finding_of(db) or "").partition(":")[0] == ("unauthorized" if api_key else "")
