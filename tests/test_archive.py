# SPDX-License-Identifier: Apache-2.0
"""The archive: what was delivered lies in S3, without credentials, and S3 being away holds nothing up."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aws_server import REGION, client
from receiver_app import PLAIN, running, signed
from structlog.testing import capture_logs

from webhooks import archive as archives
from webhooks import metrics
from webhooks.archive import READY, Archive, encode
from webhooks.asking import ApiError
from webhooks.aws import Place, s3_place
from webhooks.provider import Delivery, Feed

NOW = datetime(2026, 11, 20, 10, 5, tzinfo=UTC)
BODY = b'[{"id": "1", "key": "some-key"}]'


def archive(spool: Path, url: str, *, every: float = 0.0, spool_max: int = 1_000_000) -> Archive:
    made = Archive(spool, Place("mail", "raw", REGION, url), timedelta(seconds=every), spool_max)
    made.open()
    return made


async def stored(url: str) -> dict[str, list[dict[str, object]]]:
    """Return the lines of each object in the bucket."""
    async with client("s3", url) as s3:
        listed = (await s3.list_objects_v2(Bucket="mail")).get("Contents", [])
        found = {}
        for one in listed:
            answer = await s3.get_object(Bucket="mail", Key=one["Key"])
            found[one["Key"]] = [json.loads(line) for line in gzip.decompress(await answer["Body"].read()).splitlines()]
        return found


@pytest.fixture
async def bucket(aws: str) -> str:
    async with client("s3", aws) as s3:
        await s3.create_bucket(Bucket="mail", CreateBucketConfiguration={"LocationConstraint": REGION})
    return aws


async def test_what_was_delivered_lies_in_s3_byte_for_byte(bucket: str, tmp_path: Path) -> None:
    kept = archive(tmp_path, bucket)
    kept.add(PLAIN, Delivery(BODY, {"X-Signature": "abc"}, query="a=b"), NOW)
    kept.add(PLAIN, Delivery(b"\xff\x00", {}), NOW)
    days = [datetime.now(UTC)]
    await kept.write()
    days.append(datetime.now(UTC))  # midnight may have been in between
    await kept.upload()
    (key, lines), *others = (await stored(bucket)).items()
    assert key.startswith(tuple(f"raw/{day:%Y/%m/%d}/" for day in days))
    assert key.endswith(".ndjson.gz")
    assert others == []
    assert lines[0] == {
        "feed": "plain-main",
        "received_at": "2026-11-20T10:05:00+00:00",
        "method": "POST",
        "query": "a=b",
        "headers": {"x-signature": "abc"},
        "body": BODY.decode(),
    }
    assert lines[1]["body_base64"] == "/wA="
    assert list(tmp_path.iterdir()) == []


def test_credentials_are_not_archived() -> None:
    feed = Feed("main", "postmark", ("header:X-Own=hidden-1", "query:token=hidden-2", "basic:user:hidden-3"))
    headers = {"X-Own": "hidden-1", "Authorization": "Basic hidden-3", "Cookie": "hidden-4", "X-Kept": "kept"}
    line = encode(feed, Delivery(BODY, headers, query="a=%ff+b&t%6Fken=hidden-2&kept=1"), NOW)
    assert b"hidden" not in line
    assert json.loads(line)["headers"] == {"x-kept": "kept"}
    assert json.loads(line)["query"] == "a=%ff+b&kept=1"


async def test_while_s3_is_away_the_spool_keeps_everything_and_is_carried_later(bucket: str, tmp_path: Path) -> None:
    away = archive(tmp_path, "http://127.0.0.1:9")
    away.add(PLAIN, Delivery(BODY, {}), NOW)
    await away.write()
    with pytest.raises(ApiError, match="^unreachable: no connection to AWS"):
        await away.upload()
    assert len(list(tmp_path.glob(READY))) == 1
    await archive(tmp_path, bucket).upload()
    assert [len(lines) for lines in (await stored(bucket)).values()] == [1]


async def test_a_bucket_that_is_not_there_is_one_clear_line(aws: str, tmp_path: Path) -> None:
    kept = archive(tmp_path, aws)
    kept.add(PLAIN, Delivery(BODY, {}), NOW)
    await kept.write()
    with pytest.raises(ApiError, match=r"^not_found: AWS knows no such place \(NoSuchBucket\)"):
        await kept.upload()
    assert len(list(tmp_path.glob(READY))) == 1


async def test_beyond_its_limit_the_spool_loses_the_oldest_file_first(tmp_path: Path) -> None:
    kept = archive(tmp_path, "http://127.0.0.1:9", spool_max=1500)
    for n in range(4):
        kept.add(PLAIN, Delivery(os.urandom(400), {}), NOW + timedelta(days=n))
        await kept.write()
    written = sorted(path.name for path in tmp_path.glob(READY))
    with pytest.raises(ApiError):
        await kept.upload()
    left = sorted(path.name for path in tmp_path.glob(READY))
    assert 0 < len(left) < 4
    assert left == written[-len(left) :]


WRITER = """
import asyncio, os, signal, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from webhooks.archive import Archive
from webhooks.aws import Place
from webhooks.provider import Delivery, Feed
archive = Archive(Path(sys.argv[1]), Place("mail", "", "eu-west-1"), timedelta(hours=1), 10**9)
archive.open()
archive.add(Feed("main", "resend"), Delivery(b"{}", {}), datetime.now(UTC))
asyncio.run(archive.write())
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_what_a_killed_process_wrote_is_carried_by_the_next(bucket: str, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    await archive(tmp_path, bucket).upload()
    assert [len(lines) for lines in (await stored(bucket)).values()] == [1]


async def test_what_the_disk_can_t_keep_up_with_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_WAITING", 100)
    before = metrics.ARCHIVE_DROPPED._value.get()
    kept = archive(tmp_path, "http://127.0.0.1:9")
    for _ in range(3):
        kept.add(PLAIN, Delivery(b"x" * 101, {}), NOW)
    await kept.write()
    kept.add(PLAIN, Delivery(b"y", {}), NOW)
    await kept.write()
    lines = [line for path in tmp_path.glob(READY) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert sorted(json.loads(line)["body"][0] for line in lines) == ["x", "y"]
    assert metrics.ARCHIVE_DROPPED._value.get() - before == 2


async def test_a_file_that_another_process_still_writes_is_left_alone(tmp_path: Path) -> None:
    living = archive(tmp_path, "http://127.0.0.1:9", every=3600)
    living.add(PLAIN, Delivery(BODY, {}), NOW)
    await living.write()
    archive(tmp_path, "http://127.0.0.1:9")
    assert list(tmp_path.glob(READY)) == []
    await living.close()
    assert len(list(tmp_path.glob(READY))) == 1


FULL_DISK = """
import asyncio, resource, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from webhooks.archive import Archive
from webhooks.aws import Place
from webhooks.provider import Delivery, Feed

async def main():
    archive = Archive(Path(sys.argv[1]), Place("mail", "", "eu-west-1"), timedelta(0), 10**9)
    archive.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for n in range(4):
        archive.add(Feed("main", "resend"), Delivery(b"%d" % n * 300, {}), datetime.now(UTC))
    for _ in range(20):
        try:
            await archive.write()
        except OSError:
            pass
    print(sum(path.stat().st_size for path in Path(sys.argv[1]).iterdir()), len(list(Path(sys.argv[1]).iterdir())))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await archive.write()

asyncio.run(main())
"""


def test_a_full_disk_loses_no_line_and_is_not_filled_further(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout == "0 1\n"
    (file,) = tmp_path.iterdir()
    lines = gzip.decompress(file.read_bytes()).splitlines()
    assert [json.loads(line)["body"][0] for line in lines] == ["0", "1", "2", "3"]


async def test_on_a_full_disk_it_is_opened_all_the_same_and_what_was_left_there_is_carried_later(
    bucket: str, tmp_path: Path
) -> None:
    """It is a copy: what it can't do must not keep events out."""
    name = "20261130T100000-host-aa.ndjson"
    (tmp_path / f"open-{name}").write_bytes(b"{}\n" * 2000)
    (tmp_path / f"{name}.part").symlink_to("/dev/full")
    with capture_logs() as lines:
        kept = archive(tmp_path, bucket)
    assert [(line["event"], line["reason"]) for line in lines] == [("archive_disk_full", "No space left on device")]
    await kept.upload()
    assert await stored(bucket) == {}
    await archive(tmp_path, bucket).upload()
    assert [len(carried) for carried in (await stored(bucket)).values()] == [2000]


def test_the_spool_is_for_its_owner_only(tmp_path: Path) -> None:
    kept = archive(tmp_path / "spool", "http://127.0.0.1:9", every=3600)
    kept.add(PLAIN, Delivery(BODY, {}), NOW)
    asyncio.run(kept.write())
    (file,) = (tmp_path / "spool").iterdir()
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "spool", file)] == ["0o700", "0o600"]
    asyncio.run(kept.close())
    (file,) = (tmp_path / "spool").iterdir()
    assert oct(file.stat().st_mode & 0o777) == "0o600"


OPENER = """
import sys
from datetime import timedelta
from pathlib import Path
from webhooks.archive import Archive
from webhooks.aws import Place
sys.stdin.read()
Archive(Path(sys.argv[1]), Place("mail", "", "eu-west-1"), timedelta(0), 10**9).open()
"""


def test_processes_that_take_over_one_spool_at_once_share_it(tmp_path: Path) -> None:
    for n in range(60):
        (tmp_path / f"open-20261130T10000{n:02}-host-aa.ndjson").write_bytes(b"{}\n" * 2000)
    command = [sys.executable, "-c", OPENER, str(tmp_path)]
    openers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for opener in openers:
        opener.stdin.close()
    assert [opener.wait(30) for opener in openers] == [0, 0, 0, 0]
    assert len(list(tmp_path.glob(READY))) == 60
    assert {gzip.decompress(path.read_bytes()) for path in tmp_path.iterdir()} == {b"{}\n" * 2000}


async def test_only_what_was_stored_is_kept(db) -> None:
    kept: list[tuple[str, bytes]] = []

    def keep(feed: Feed, delivery: Delivery, _at: datetime) -> None:
        kept.append((feed.name, delivery.body))

    async with running(db, [PLAIN], keep=keep) as app:
        assert (await app.post("plain-main", BODY, signed(BODY))).status == 200
        assert (await app.post("plain-main", BODY, {"x-signature": "wrong"})).status == 401
        assert (await app.post("plain-main", b"prose", signed(b"prose"))).status == 400
        assert (await app.post("plain-main", b"ping", signed(b"ping"))).status == 200, "no event, so nothing to keep"
    assert kept == [("plain-main", BODY)]


@pytest.mark.parametrize("url", ["s3:/mail", "s3://", "http://mail/x", "mail/x"])
def test_a_place_that_is_none_in_s3_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write s3://bucket/prefix"):
        s3_place(url, None, None)


@pytest.mark.parametrize("url", ["s3://UPPER/x", "s3://x/y", "s3://x", "s3://-mail/x", f"s3://{'a' * 64}"])
def test_a_name_that_no_bucket_can_have_is_refused_as_that(url: str) -> None:
    with pytest.raises(ValueError, match="^names no bucket: its name has 3 to 63 lower-case letters"):
        s3_place(url, None, None)
