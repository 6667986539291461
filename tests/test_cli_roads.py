# SPDX-License-Identifier: Apache-2.0
"""The commands of the other roads: replay, back-fill, look-up, endpoints, self-test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from api_kit import Sent, asked
from apis.mailgun import Fake
from kit import event, old_claim, row
from program import Program
from serving import sample

from webhooks.event import wire_key

CONFIG = """
[receiver]
public_url = "https://hooks.example.com/"
[feeds.mg]
provider = "mailgun"
secrets = ["key-0123456789abcdef"]
[feeds.resend-main]
provider = "resend"
secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="]
"""
UNSET = "set feeds.mg.api_key and api_scope, without which this provider can't be asked"
URL = "https://hooks.example.com/webhooks/mg"


@asynccontextmanager
async def mailgun(program: Program, config: Path, sends: list[Sent] | None = None) -> AsyncIterator[Fake]:
    """Let the feed mg ask a Mailgun on loopback."""
    config.write_text(CONFIG)
    fake = Fake(sends or [])
    async with asked("mailgun", fake) as (feed, _):
        settings = {"API_KEY": feed.api_key, "API_SCOPE": feed.api_scope, "API_URL": feed.api_url}
        program.env |= {f"RECONCILER_FEEDS__MG__{name}": value for name, value in settings.items()}
        yield fake


def line(result: Any) -> str:
    """The one line that a failure prints."""
    (found,) = [text for text in result.stderr.splitlines() if text.startswith("reconciler: ")]
    return found.removeprefix("reconciler: ")


# -- replay


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


async def test_replay_says_what_it_did_and_names_what_it_skipped(
    program: Program, db: asyncpg.Pool, folder: Path
) -> None:
    body = sample("mg", "delivered", "key-1").body
    (folder / "kept.ndjson").write_bytes(body + b"\n" + body[:-5] + b"\n")
    done = await program("replay", str(folder / "kept.ndjson"), "--feed", "mg")
    assert done.stdout.splitlines() == [
        "2 entries: 1 event, 1 new, 0 known before",
        f"{'SKIPPED':{len(str(folder)) + 14}}  WHY",
        f"{folder}/kept.ndjson:2  is no JSON: cut off or damaged",
    ]
    assert (done.exit_code, line(done)) == (1, "1 of 2 entries were skipped")
    (folder / "kept.ndjson").write_bytes(body)
    again = await program.json("replay", str(folder), "--feed", "mg", "--verify")
    assert (again["stored"], again["repeated"], again["damaged"]) == (0, 1, [])


async def test_replay_refuses_what_it_can_t_read_in_one_line(
    program: Program, db: asyncpg.Pool, tmp_path: Path
) -> None:
    done = await program("replay", str(tmp_path / "nothing"), "--feed", "mg")
    assert (done.exit_code, line(done)) == (1, f"{tmp_path}/nothing: No such file or directory")
    done = await program("replay", str(tmp_path), "--feed", "mgg")
    assert (done.exit_code, line(done)) == (1, 'no feed is named "mgg": did you mean "mg"?')
    for place, wish in (("s3:X", "No such file"), ("s3://X", "names no bucket"), ("s3://", "write s3://bucket/prefix")):
        assert wish in (await program("replay", place, "--feed", "mg")).stderr


async def test_replay_from_s3_without_credentials_says_what_to_set(
    program: Program, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    done = await program("replay", "s3://mail/raw", "--feed", "mg", "--endpoint-url", "http://127.0.0.1:9")
    assert (done.exit_code, line(done).partition(":")[0]) == (1, "unconfigured")


# -- back-fill and look-up


async def test_backfill_pulls_a_span_of_time(program: Program, config: Path, db: asyncpg.Pool) -> None:
    at = datetime.now(UTC) - timedelta(hours=2)
    async with mailgun(program, config, [Sent("key-1", at=at), Sent("key-2", at=at - timedelta(days=3))]):
        done = await program("backfill", "--feed", "mg", "--since", "4h")
        assert done.exit_code == 0, done.output
        assert done.stdout.endswith(" events, 2 new\n")
        since = (at - timedelta(days=4)).isoformat()
        done = await program.json("backfill", "--feed", "mg", "--since", since, "--until", "24h")
        assert done["stored"] == 2
    assert await db.fetchval("SELECT count(DISTINCT wire_key) FROM provider_event") == 2


async def test_an_empty_source_is_a_failure(program: Program, db: asyncpg.Pool, folder: Path) -> None:
    done = await program("replay", str(folder), "--feed", "mg")
    assert (done.exit_code, line(done)) == (1, f"{folder} holds nothing that could be replayed")


async def test_the_stamp_is_shown_for_senders_in_any_language(program: Program, db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET namespace = 'shop-a'")
    found = await program.json("stamp", "--feed", "resend-main", "order:1")
    key = wire_key("order:1", "shop-a")
    assert (found["wire_key"], found["headers"]) == (key, {"Idempotency-Key": key})
    assert f'"value": "{key}"' in (await program("stamp", "--feed", "resend-main", "order:1")).stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--since", "2999-01-01"), "lies in the future"),
        (("--since", "0001-01-01T00:00:00+14:00"), "is no time"),
        (("--since", "soon"), "is no time: write 2026-11-02T08:00:00Z, or how long ago as in 36h"),
        (("--since", "1h", "--until", "2h"), "lies after --until"),
        ((), "Missing option '--since'"),
    ],
)
async def test_backfill_says_how_times_are_written(program: Program, args: tuple[str, ...], text: str) -> None:
    done = await program("backfill", "--feed", "mg", *args)
    assert done.exit_code == 2
    assert text in done.stderr


async def test_without_an_api_key_the_setting_is_named(program: Program, db: asyncpg.Pool) -> None:
    done = await program("backfill", "--feed", "mg", "--since", "1h")
    assert (done.exit_code, line(done)) == (1, f"mg was not asked: {UNSET}")
    await old_claim(db, "order:1", recipient="ada@example.org")
    done = await program("lookup", "order:1")
    assert (done.exit_code, done.stdout, line(done)) == (1, "", f"mg was not asked: {UNSET}")
    assert (await program.json("lookup", "order:1"))["found"]["reason"] == "unconfigured"
    program.env["RECONCILER_FEEDS__MG__API_KEY"] = "key-throw-away"
    done = await program("lookup", "order:1")
    assert line(done) == "mg was not asked: set feeds.mg.api_scope, without which this provider can't be asked"


async def test_a_look_up_that_could_ask_nobody_is_a_failure_and_no_answer(
    program: Program, config: Path, db: asyncpg.Pool
) -> None:
    await old_claim(db, "order:1")
    async with mailgun(program, config) as fake:
        done = await program("lookup", "order:1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert line(done) == "mg was not asked: this provider is asked by recipient, and the row holds none"
    assert not fake.requests


async def test_lookup_says_what_the_provider_says(program: Program, config: Path, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", recipient="ada@example.org")
    at = datetime.now(UTC) - timedelta(hours=2)
    async with mailgun(program, config, [Sent(wire_key("order:1"), "ada@example.org", at=at)]):
        done = await program("lookup", "order:1")
    assert done.stdout.splitlines() == [
        "mg says: accepted",
        "2 events about it, 2 of them new",
        "the row is claimed; the next pass settles it, or reconciler reconcile --key order:1",
    ]
    assert (await program("reconcile", "--key", "order:1")).exit_code == 0
    assert (await row(db, "order:1"))["verdict_source"] == "look-up"
    told = (await program("why", "order:1")).stdout
    assert "by look-up" in told


async def test_lookup_says_why_the_provider_is_silent(program: Program, config: Path, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", recipient="ada@example.org")
    async with mailgun(program, config):
        done = await program("lookup", "order:1")
    assert done.stdout.startswith("mg says: silent (no_control: no later send of its class is known to be accepted")
    assert (await program.json("lookup", "order:1"))["found"]["reason"] == "unreachable"


# -- endpoints


async def test_endpoints_show_says_what_to_enter_where(program: Program, config: Path) -> None:
    config.write_text(CONFIG)
    done = await program("endpoints", "show")
    assert done.exit_code == 0
    assert URL in done.stdout
    assert "{url}" not in done.stdout
    shown = await program.json("endpoints", "show", "--feed", "resend-main")
    assert set(shown) == {"resend-main"}
    assert shown["resend-main"]["url"] == "https://hooks.example.com/webhooks/resend-main"


async def test_endpoints_are_checked_set_up_once_and_then_left_alone(program: Program, config: Path) -> None:
    async with mailgun(program, config) as fake:
        done = await program("endpoints", "check")
        assert done.exit_code == 3
        assert done.stdout.startswith("mg: to be changed at the provider: ")
        done = await program("endpoints", "apply", "--dry-run")
        assert (done.exit_code, fake.urls) == (0, {})
        assert all(text.startswith("mg: would ") for text in done.stdout.splitlines())
        done = await program("endpoints", "apply", "--feed", "mg")
        assert done.exit_code == 0, done.output
        assert {url for urls in fake.urls.values() for url in urls} == {URL}
        done = await program("endpoints", "apply")
        assert done.stdout == "mg: as it should be\n"
        assert (await program("endpoints", "check")).stdout == "mg: as it should be\n"


async def test_endpoints_say_what_is_missing_to_look_at_them(program: Program, config: Path) -> None:
    done = await program("endpoints", "check")
    assert (done.exit_code, line(done)[:32]) == (1, "receiver.public_url is not set: ")
    config.write_text(CONFIG)
    done = await program("endpoints", "check")
    assert done.exit_code == 1
    assert line(done).startswith("no feed's provider can be asked: mg: unconfigured: set feeds.mg.api_")
    done = await program("endpoints", "check", "--feed", "mg")
    assert (done.exit_code, done.stdout[:30]) == (3, "mg: unconfigured: set feeds.mg")


async def test_a_wrong_key_fails_in_one_line(program: Program, config: Path) -> None:
    async with mailgun(program, config):
        program.env["RECONCILER_FEEDS__MG__API_KEY"] = "key-of-another"
        done = await program("endpoints", "apply")
        assert (done.exit_code, line(done)[:55]) == (1, "mg: look at the webhook: unauthorized: the API refused ")


# -- self-test


SENDER = """
import json, os, sys
stamp = json.loads(os.environ["STAMP_BODY"])
assert stamp == {"v:send_key": os.environ["SEND_KEY"]}, stamp
open(sys.argv[1], "w").write(os.environ["SEND_KEY"])
"""


async def test_the_self_test_hears_of_the_message_that_the_command_sent(
    program: Program, db: asyncpg.Pool, tmp_path: Path
) -> None:
    sent = tmp_path / "sent"
    running = asyncio.create_task(
        program(
            "selftest", "correlation", "--feed", "mg", "--wait", "3s", "--", sys.executable, "-c", SENDER, str(sent)
        )
    )
    async with asyncio.timeout(20):
        while not (key := sent.read_text() if sent.exists() else ""):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)
    await event(db, key, message_id="m-1", kind="queued")
    await event(db, None, message_id="m-1", kind="opened")
    done = await running
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first.endswith("s: queued (accepted), our key came back")
    assert second.endswith("s: opened (accepted), WITHOUT our key")
    assert "waiting up to 3s for its events" in done.stderr


async def test_a_self_test_that_hears_nothing_says_where_to_look(program: Program, db: asyncpg.Pool) -> None:
    done = await program("selftest", "correlation", "--feed", "mg", "--wait", "1s", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, [])
    assert "SEND_KEY selftest-" in done.stderr
    assert "\nwaiting up to 1s for its events (--wait); Ctrl-C ends\n" in done.stderr
    assert line(done).startswith("no event came: was the message sent")


@pytest.mark.parametrize(
    ("command", "text"),
    [(("no-such-program",), "no-such-program can't be run"), (("false",), "false ended with status 1")],
)
async def test_a_command_that_fails_ends_the_self_test(
    program: Program, db: asyncpg.Pool, command: tuple[str, ...], text: str
) -> None:
    done = await program("selftest", "correlation", "--feed", "mg", "--", *command)
    assert done.exit_code == 1
    assert line(done).startswith(text)
