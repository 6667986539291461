# SPDX-License-Identifier: Apache-2.0
"""Bringing in sends of the time before: what becomes of each, and that doing it again changes nothing."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from kit import (
    FEED,
    RULES,
    call,
    claim,
    event,
    fail,
    heard_neighbours,
    old_claim,
    reconcile,
    row,
    state,
    stored_delivery,
)
from program import Program
from snippets import block

from reconciler.filling.importing import OPTIONS
from reconciler.passes.reconcile import Report
from webhooks.event import wire_key

NOW = datetime.now(UTC)


def ago(hours: float, seconds: float = 0) -> str:
    return (NOW - timedelta(hours=hours) + timedelta(seconds=seconds)).isoformat()


async def adopt(db: Any, key: str, feed: str = FEED, **options: Any) -> str:
    return (await call(db, "send_adopt", key, feed, json.dumps({"claimed_at": ago(3)} | options)))["outcome"]


def said(report: Report) -> dict[str, int]:
    return {name: n for name, n in report.counts.items() if n}


async def events(db: Any, key: str) -> list[asyncpg.Record]:
    return await db.fetch("SELECT * FROM provider_event WHERE wire_key = wire_key($1)", key)


def jsonl(*lines: dict[str, Any] | str) -> str:
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def answered(key: str, hours: float = 3, **more: Any) -> dict[str, Any]:
    return {"key": key, "feed": FEED, "claimed_at": ago(hours), "answered_at": ago(hours, 1), **more}


# -- The function


async def test_a_send_that_the_provider_answered_is_sent_and_a_control_of_its_feed(db: asyncpg.Pool) -> None:
    options = {"answered_at": ago(3, 2), "message_id": "<m-7>", "recipient": "Ann <ann@EXAMPLE.com>", "campaign": "c"}
    assert await adopt(db, "Order 1", message_class="receipts", source="shop", fingerprint="f", **options) == "adopted"
    found = await row(db, "Order 1")
    assert (found["wire_key"], found["send_key"], found["feed"]) == (wire_key("Order 1"), "Order 1", FEED)
    assert (found["state"], found["verdict_source"], found["verdict_reason"]) == ("sent", "sender", "adopted")
    assert (found["message_class"], found["campaign"], found["source"]) == ("receipts", "c", "shop")
    assert (found["attempt"], found["provider_message_id"], found["fingerprint"]) == (1, "m-7", "f")
    assert found["recipient_key"] == "ann@example.com"
    assert found["claimed_at"] == found["first_claimed_at"] == NOW - timedelta(hours=3)
    assert found["submit_by"] == NOW - timedelta(hours=3) + timedelta(seconds=60)
    assert found["answered_at"] == found["sent_at"] == NOW - timedelta(hours=3) + timedelta(seconds=2)
    assert await db.fetchval("SELECT count(*) FROM control WHERE wire_key = $1", found["wire_key"]) == 1
    assert await db.fetchval("SELECT count(*) FROM ambiguous") == 0
    assert (await claim(db, "Order 1"))["outcome"] == "already_sent"


async def test_a_send_that_the_provider_refused_has_failed_and_late_evidence_still_corrects_it(
    db: asyncpg.Pool,
) -> None:
    for n, failed in enumerate((True, "true", "T", 1, "1")):
        assert await adopt(db, f"refused-{n}", failed=failed, claimed_at=ago(24 * 20)) == "adopted"
        found = await row(db, f"refused-{n}")
        assert (found["state"], found["verdict_source"], found["verdict_reason"]) == ("failed", "sender", "adopted")
    assert await adopt(db, "not-refused", failed=False) == "adopted"
    assert await state(db, "not-refused") == "claimed"
    assert await db.fetchval("SELECT count(*) FROM ambiguous") == 1
    await event(db, "refused-0")
    await reconcile(db)
    assert [await state(db, key) for key in ("refused-0", "refused-1")] == ["sent", "failed"]


async def test_a_send_of_which_nobody_got_the_answer_is_claimed_with_its_past_times_and_a_pass_looks_at_it(
    db: asyncpg.Pool,
) -> None:
    assert await adopt(db, "lost", submit_by=ago(3, 30)) == "adopted"
    found = await row(db, "lost")
    assert (found["state"], found["attempt"], found["answered_at"]) == ("claimed", 1, None)
    assert found["submit_by"] == found["next_check_at"] == NOW - timedelta(hours=3) + timedelta(seconds=30)
    assert (await claim(db, "lost"))["outcome"] == "in_flight"
    assert said(await reconcile(db)) == {"held:unstamped": 1}


async def test_testimony_that_was_there_before_settles_an_adopted_claim_and_is_the_delivery_of_a_sent_one(
    db: asyncpg.Pool,
) -> None:
    await event(db, "lost")
    await event(db, "sent", kind="bounced")
    await event(db, None, kind="complained", message_id="m-9")
    await adopt(db, "lost")
    await adopt(db, "sent", answered_at=ago(3), heard_at=ago(2), heard_kind="delivered")
    await adopt(db, "by-id", answered_at=ago(3), message_id="m-9")
    assert await state(db, "lost") == "claimed"
    assert [(await row(db, key))["delivery"] for key in ("sent", "by-id")] == ["bounced", "complained"]
    assert said(await reconcile(db)) == {"sent:accepted": 1}
    assert await state(db, "lost") == "sent"


async def test_a_rejection_that_was_there_before_fails_an_adopted_claim(db: asyncpg.Pool) -> None:
    await event(db, "lost", "rejected", kind="rejected")
    await adopt(db, "lost")
    assert said(await reconcile(db)) == {"failed:rejected": 1}


async def test_when_its_first_event_was_heard_becomes_testimony_with_that_lag(db: asyncpg.Pool) -> None:
    await adopt(db, "order:1", answered_at=ago(3), heard_at=ago(3, 8), heard_kind="delivered", recipient="a@B.example")
    await adopt(db, "order:2", heard_at=ago(3, 9), message_id="m-2")
    (first,), (second,) = await events(db, "order:1"), await events(db, "order:2")
    assert (first["received_at"], first["kind"]) == (NOW - timedelta(hours=3) + timedelta(seconds=8), "delivered")
    assert (first["testimony"], first["source"], first["feed"]) == ("accepted", "replay", FEED)
    assert (first["message_id"], first["event_id"], first["recipient"]) == ("~adopted", "adopted", "a@b.example")
    assert (second["kind"], second["message_id"]) == ("sent", "~adopted")
    assert first["partition_at"] == first["received_at"]
    found = await row(db, "order:1")
    assert (found["delivery"], found["delivery_at"]) == ("delivered", first["received_at"])
    assert await state(db, "order:2") == "claimed"
    await reconcile(db)
    assert (await row(db, "order:2"))["verdict_source"] == "feed"


async def adopt_neighbours(db: asyncpg.Pool, *, heard: bool) -> None:
    """Bring in 600 answered sends, one in each ten seconds, three quarters of them before a claim of two hours ago."""
    options = []
    for n in range(600):
        at = 2 + (60 - (n - 450 + 0.5) * 10) / 3600
        told = {"heard_at": ago(at, 3)} if heard else {}
        options.append(json.dumps({"claimed_at": ago(at), "answered_at": ago(at, 1), **told}))
    keys = [f"neighbour-{n:03}" for n in range(600)]
    await db.fetch("SELECT send_adopt_all($1, $2, $3::text[]::jsonb[])", keys, [FEED] * 600, options)
    await stored_delivery(db)


async def test_only_an_undecided_send_that_carried_its_key_is_released_on_absence(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await adopt(db, "stamped", claimed_at=ago(2), stamped=True)
    await adopt(db, "unstamped", claimed_at=ago(2))
    rules = dataclasses.replace(RULES, max_risk=0.5)
    assert said(await reconcile(db, rules)) == {"released:absent": 1, "held:unstamped": 1}
    assert [await state(db, key) for key in ("stamped", "unstamped")] == ["pending", "claimed"]


@pytest.mark.parametrize(("heard", "counted"), [(True, "released:absent"), (False, "held:no_echo")])
async def test_adopted_controls_testify_for_and_against_a_feed_as_live_ones_do(
    db: asyncpg.Pool, heard: bool, counted: str
) -> None:
    await adopt_neighbours(db, heard=heard)
    await old_claim(db, "order:1")
    assert said(await reconcile(db)) == {counted: 1}


async def test_a_send_to_several_is_no_control(db: asyncpg.Pool) -> None:
    await adopt(db, "several", answered_at=ago(3), recipient="a@example.com, b@example.com")
    assert (await row(db, "several"))["recipient_key"] is None
    assert await db.fetchval("SELECT count(*) FROM control") == 0


async def test_what_is_there_stays_as_it_is(db: asyncpg.Pool) -> None:
    fence = (await claim(db, "running", fingerprint="f"))["fence"]
    await fail(db, "free", (await claim(db, "free"))["fence"], not_sent=True)
    await adopt(db, "adopted", answered_at=ago(3))
    before = [await row(db, key) for key in ("running", "free", "adopted")]
    for key in ("running", "free", "adopted"):
        assert await adopt(db, key, failed=True, message_class="other") == "exists"
        assert await adopt(db, key, answered_at=ago(2), heard_at=ago(2)) == "exists"
    assert [await row(db, key) for key in ("running", "free", "adopted")] == before
    assert (before[0]["fence"], await db.fetchval("SELECT count(*) FROM provider_event")) == (fence, 0)
    assert await adopt(db, "running", fingerprint="g") == "key_reused"
    assert await adopt(db, wire_key("Order 1")) == "adopted"
    assert await adopt(db, "Order 1") == "key_reused"


async def test_older_than_the_guard_s_memory_is_left_out(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET memory = '10 days'")
    assert await adopt(db, "old", claimed_at=ago(24 * 10 + 1), heard_at=ago(1)) == "beyond_memory"
    assert await adopt(db, "young", claimed_at=ago(24 * 10 - 1)) == "adopted"
    assert await adopt(db, "young", claimed_at=ago(24 * 10 + 1)) == "exists"
    assert await db.fetchval("SELECT count(*) FROM send_log") == 1
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0


async def test_of_an_undecided_send_no_same_key_retry_is_made(db: asyncpg.Pool) -> None:
    await adopt(db, "lost", fingerprint="f", claimed_at=ago(1))
    report = await reconcile(db, key_window=timedelta(hours=24))
    assert (said(report), await state(db, "lost")) == ({"held:unstamped": 1}, "claimed")


async def test_each_adopted_send_has_a_fence_of_its_own_that_no_claim_gets(db: asyncpg.Pool) -> None:
    await adopt(db, "one")
    await adopt(db, "two", answered_at=ago(1))
    fences = [(await row(db, key))["fence"] for key in ("one", "two")]
    assert (await claim(db, "three"))["fence"] > max(fences)
    assert fences[0] != fences[1]


async def test_it_is_part_of_the_caller_s_transaction(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        assert await adopt(connection, "order:1", heard_at=ago(1)) == "adopted"
        await transaction.rollback()
    assert await row(db, "order:1") is None
    assert await events(db, "order:1") == []


async def test_a_namespace_holds_for_adopted_sends_too(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET namespace = 'shop-a'")
    found = await call(db, "send_adopt", "order:1", FEED, json.dumps({"claimed_at": ago(1)}))
    assert found["wire_key"] == wire_key("order:1", "shop-a")


async def test_of_two_in_one_call_with_one_key_the_first_that_is_young_enough_counts(db: asyncpg.Pool) -> None:
    options = [json.dumps({"claimed_at": ago(hours), "campaign": str(hours)}) for hours in (24 * 31, 2, 1)]
    rows = await db.fetch(
        "SELECT n, outcome FROM send_adopt_all($1, $2, $3::text[]::jsonb[])", ["k"] * 3, [FEED] * 3, options
    )
    assert [tuple(r) for r in rows] == [(1, "exists"), (2, "adopted"), (3, "exists")]
    assert (await row(db, "k"))["campaign"] == "2"


async def test_a_time_without_a_zone_is_one_of_utc_whatever_the_session_s_is(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        await connection.execute("SET timezone = 'America/New_York'")
        at = (NOW - timedelta(hours=3)).strftime("%Y-%m-%d %H:%M:%S")
        await adopt(connection, "order:1", claimed_at=at)
    assert (await row(db, "order:1"))["claimed_at"] == (NOW - timedelta(hours=3)).replace(microsecond=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"claimed_at": None}, "claimed_at is missing"),
        ({"claimed_at": ago(-1)}, "claimed_at lies in the future"),
        ({"claimed_at": "yesterday"}, "claimed_at is no time: write 2026-11-02T08:00:00Z"),
        ({"claimed_at": "02/11/2026 08:00"}, "claimed_at is no time"),
        ({"claimed_at": 1_700_000_000}, "claimed_at is no time"),
        ({"claimed_at": "2026-13-01T00:00:00Z"}, "out of range"),
        ({"submit_by": ago(3)}, "submit_by must lie after claimed_at"),
        ({"submit_by": ago(3 - 24.1)}, "by 24 hours at most"),
        ({"answered_at": ago(3.1)}, "answered_at lies before claimed_at"),
        ({"answered_at": ago(-1)}, "answered_at lies in the future"),
        ({"heard_at": ago(3.1)}, "heard_at lies before claimed_at"),
        ({"heard_at": ago(-1)}, "heard_at lies in the future"),
        ({"failed": "maybe"}, "failed must be true or false"),
        ({"failed": [True]}, "must be text or a number: failed"),
        ({"failed": True, "answered_at": ago(3)}, "failed means that the provider refused it"),
        ({"failed": True, "heard_at": ago(3)}, "failed means that the provider refused it"),
        ({"failed": True, "message_id": "m"}, "failed means that the provider refused it"),
        ({"message_id": "m"}, "a message_id shows that the provider took it"),
        ({"heard_kind": "sent"}, "heard_kind needs heard_at"),
        ({"heard_at": ago(2), "heard_kind": "rejected"}, "heard_kind must prove acceptance"),
        ({"recipient": ["a"]}, "must be text or a number: recipient"),
        ({"attempt": 2}, "unknown option: attempt"),
    ],
)
async def test_what_can_t_be_true_is_refused_in_one_line(db: asyncpg.Pool, options: dict[str, Any], words: str) -> None:
    with pytest.raises(asyncpg.DataError) as refused:
        await adopt(db, "order:1", **options)
    assert words in str(refused.value.args[0])
    assert await db.fetchval("SELECT count(*) FROM send_log") == 0


async def test_the_file_s_columns_are_the_function_s_options(db: asyncpg.Pool) -> None:
    with pytest.raises(asyncpg.DataError) as refused:
        await adopt(db, "order:1", nothing=1)
    assert sorted(refused.value.hint.removeprefix("known: ").split(", ")) == sorted(OPTIONS)


# -- The command


async def test_json_lines_are_brought_in_and_again_change_nothing(
    program: Program, db: asyncpg.Pool, tmp_path: Path
) -> None:
    file = tmp_path / "sends.jsonl"
    file.write_text(
        jsonl(
            answered("order:1", heard_at=ago(3, 4)),
            {"key": "order:2", "feed": FEED, "claimed_at": ago(3)},
            "",
            answered("order:3", feed="resend-main"),
            {"key": "order:4", "feed": FEED, "claimed_at": ago(3), "failed": True},
            answered("order:5", 24 * 40),
        )
    )
    done = await program("import", str(file))
    assert (done.exit_code, done.stdout.splitlines()) == (
        0,
        [
            "5 sends: 4 adopted, 1 left out, since they are older than the guard's memory",
            "2 were answered and have no heard_at: to their feeds' history they are unheard of",
        ],
    )
    assert [await state(db, f"order:{n}") for n in (1, 2, 3, 4)] == ["sent", "claimed", "sent", "failed"]
    assert (await row(db, "order:3"))["feed"] == "resend-main"
    before = await db.fetch("SELECT * FROM send_log ORDER BY wire_key")
    again = await program.json("import", str(file))
    assert (again["outcomes"], again["bad"]) == ({"exists": 4, "beyond_memory": 1}, [])
    assert await db.fetch("SELECT * FROM send_log ORDER BY wire_key") == before


async def test_csv_is_brought_in_from_stdin_and_empty_cells_say_nothing(program: Program, db: asyncpg.Pool) -> None:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["key", "claimed_at", "answered_at", "failed", "campaign"])
    rows.writerow(["order:1", ago(3), ago(3, 1), "", "two\nlines, one cell"])
    rows.writerow(["order:2", ago(3), "", "TRUE", ""])
    rows.writerow(["order:3", ago(3), "", "", ""])
    done = await program("import", "-", "--feed", FEED, stdin="\ufeff" + text.getvalue())
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "3 sends: 3 adopted")
    assert [await state(db, f"order:{n}") for n in (1, 2, 3)] == ["sent", "failed", "claimed"]
    assert [(await row(db, f"order:{n}"))["campaign"] for n in (1, 2)] == ["two\nlines, one cell", None]


async def test_bad_lines_are_named_with_their_reason_and_stop_no_other(program: Program, db: asyncpg.Pool) -> None:
    lines = [
        answered("good:1"),
        "{",
        "[1]",
        {"feed": FEED, "claimed_at": ago(1)},
        {"key": "no-feed", "claimed_at": ago(1)},
        answered("foreign", feed="nobody"),
        {"key": "soon", "feed": FEED, "claimed_at": "soon"},
        answered("zero", campaign="a\0b"),
        answered("odd", colour="red"),
        answered("long", known_message_id="".join(map(str, range(40_000)))),
        answered("x" * 256),
        {"key": "undated", "feed": FEED},
        answered("good:2"),
    ]
    done = json.loads((await program("import", "-", "--json", stdin=jsonl(*lines))).stdout)
    assert done["bad"] == [
        [2, "is no JSON object"],
        [3, "is no JSON object"],
        [4, "has no key, which is text"],
        [5, "names no feed: give --feed"],
        [6, "is of the feed nobody, which is not configured"],
        [7, "claimed_at is no time: write 2026-11-02T08:00:00Z"],
        [8, "is not UTF-8, or holds a zero byte"],
        [9, "gives colour, which is no option"],
        [10, done["bad"][8][1]],
        [11, "a send key is text of 1 to 255 bytes, this one has 256"],
        [12, "claimed_at is missing: when it was submitted"],
    ]
    assert "index row requires" in done["bad"][8][1]
    assert (done["outcomes"], done["bad_lines"], await state(db, "good:1"), await state(db, "good:2")) == (
        {"adopted": 2},
        11,
        "sent",
        "sent",
    )


async def test_bad_csv_lines_are_counted_with_all_lines_that_they_take(program: Program, db: asyncpg.Pool) -> None:
    good = f"{ago(3)},{ago(3, 1)}"
    rows = (f"order:1,{good}", "short,1", f'"a"b,{good}', f"order:2,{good}", f'"open,{good}', f"order:3,{good}")
    text = "\n".join(("key,claimed_at,answered_at", *rows, ""))
    done = await program("import", "-", "--feed", FEED, stdin=text)
    assert done.exit_code == 1
    assert [line.split()[0] for line in done.stdout.splitlines() if line[:1] in " 346"] == ["3", "4", "6"]
    assert "has 2 cells, and the header 3" in done.stdout
    assert done.stderr.endswith("reconciler: 4 lines were passed over\n")
    assert await db.fetchval("SELECT array_agg(send_key ORDER BY send_key) FROM send_log") == ["order:1", "order:2"]


async def test_the_first_twenty_bad_lines_are_named_and_the_others_counted(program: Program, db: asyncpg.Pool) -> None:
    lines = [answered(f"order:{n}", claimed_at=ago(-1)) if n % 2 else "{" for n in range(1, 31)]
    done = await program("import", "-", stdin=jsonl(*lines, answered("good")))
    assert done.exit_code == 1
    named = [line.split()[0] for line in done.stdout.splitlines() if re.match(r" *\d+  ", line)]
    assert named == [str(n) for n in range(1, 21)]
    assert done.stdout.splitlines()[-1] == "... and 10 more"
    assert await state(db, "good") == "sent"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "name,claimed_at\na,b\n",
            "the CSV header names 'name', which is no column or there twice; there are key, feed,",
        ),
        ("claimed_at\na\n", "the CSV header names no column key"),
        ("key,key\na,b\n", "the CSV header names 'key', which is no column or there twice"),
        ("x" * 200_000, "its first line is no CSV header"),
        ("\n\n", "holds no send"),
        ("key,claimed_at\n", "holds no send"),
    ],
)
async def test_a_file_that_is_no_such_thing_is_refused_in_one_line(
    program: Program, db: asyncpg.Pool, text: str, words: str
) -> None:
    done = await program("import", "-", "--feed", FEED, stdin=text)
    assert (done.exit_code, words in done.stderr) == (1, True), done.stderr


async def test_a_dry_run_says_what_would_be_done_and_keeps_nothing(program: Program, db: asyncpg.Pool) -> None:
    await adopt(db, "order:1")
    lines = jsonl(answered("order:1"), answered("order:2", heard_at=ago(2)), answered("order:3", claimed_at="?"))
    done = await program("import", "-", "--dry-run", stdin=lines)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (
        1,
        "2 sends: 1 adopted, 1 there already (a dry run: nothing was kept)",
    )
    assert await db.fetchval("SELECT count(*) FROM send_log") == 1
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0
    assert await db.fetchval("SELECT count(*) FROM feed_state WHERE filling_until IS NOT NULL") == 0


async def test_an_unknown_feed_is_answered_with_the_one_that_is_meant(program: Program, db: asyncpg.Pool) -> None:
    done = await program("import", "-", "--feed", "resend-mian", stdin=jsonl(answered("order:1")))
    assert (done.exit_code, done.stderr) == (
        1,
        'reconciler: no feed is named "resend-mian": did you mean "resend-main"?\n',
    )


async def test_while_it_runs_the_feed_s_silence_means_nothing(program: Program, db: asyncpg.Pool) -> None:
    await program("import", "-", stdin=jsonl(answered("order:1")))
    marked = await db.fetch("SELECT feed FROM feed_state WHERE filling_until > clock_timestamp()")
    assert [r["feed"] for r in marked] == [FEED]


async def until(db: asyncpg.Pool, question: str) -> None:
    async with asyncio.timeout(40):
        while not await db.fetchval(question):  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.02)


def history(n: int) -> str:
    return jsonl(*(answered(f"order {i}", 3 + i / n, heard_at=ago(3 + i / n, 2)) for i in range(n)))


@pytest.fixture
async def locked(db: asyncpg.Pool) -> Any:
    """A transaction that has brought in one of the sends and does not end: an import stops there."""
    async with db.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await adopt(connection, "order 5500", campaign="another")
        yield transaction


@pytest.mark.timeout(90)
async def test_an_import_that_was_killed_in_the_middle_is_ended_by_running_it_again(
    program: Program, db: asyncpg.Pool, locked: Any, tmp_path: Path
) -> None:
    file = tmp_path / "sends.jsonl"
    file.write_text(history(10_000))
    command = [sys.executable, "-c", "from reconciler.cli import main; main()", "import", str(file)]
    environment = {**os.environ, **{name: value or "" for name, value in program.env.items()}}
    running = await asyncio.create_subprocess_exec(*command, env=environment, stderr=asyncio.subprocess.DEVNULL)
    try:
        await until(db, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')")
    finally:
        running.kill()
        await running.wait()
    await locked.commit()
    await until(  # the server notices that its client is gone
        db,
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'reconciler import'"
        " AND datname = current_database())",
    )
    there = await db.fetchval("SELECT count(*) FROM send_log")
    assert 5_000 < there < 10_000
    done = await program.json("import", str(file))
    assert done["outcomes"] == {"adopted": 10_000 - there, "exists": there}
    assert await db.fetchval("SELECT count(*) FROM send_log") == 10_000
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 9_999
    assert (await row(db, "order 5500"))["campaign"] == "another"


async def test_two_imports_of_one_file_at_once_bring_each_send_in_once(
    program: Program, db: asyncpg.Pool, tmp_path: Path
) -> None:
    file, reversed_file = tmp_path / "sends.jsonl", tmp_path / "reversed.jsonl"
    lines = history(3_000).splitlines(keepends=True)
    file.write_text("".join(lines))
    reversed_file.write_text("".join(reversed(lines)))
    commands = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from reconciler.cli import main; main()", "import", "--json", str(path)),
            env={**os.environ, **{name: value or "" for name, value in program.env.items()}},
            stdout=subprocess.PIPE,
        )
        for path in (file, reversed_file)
    ]
    said = [json.loads((await command.communicate())[0])["outcomes"] for command in commands]
    assert sum(outcomes.get("adopted", 0) for outcomes in said) == 3_000
    assert sum(outcomes.get("exists", 0) for outcomes in said) == 3_000
    assert await db.fetchval("SELECT count(*) FROM send_log") == 3_000


async def test_the_documented_file_is_taken(program: Program, db: asyncpg.Pool) -> None:
    text = block("docs/begin.md", "csv")
    today = (NOW - timedelta(days=1)).strftime("%Y-%m-%d")
    done = await program("import", "-", "--feed", FEED, stdin=re.sub(r"\d{4}-\d\d-\d\d", today, text))
    assert (done.exit_code, done.stdout) == (0, "3 sends: 3 adopted\n")
    assert await db.fetch("SELECT state FROM send_log ORDER BY send_key") == [("sent",), ("claimed",), ("failed",)]
