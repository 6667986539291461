# SPDX-License-Identifier: Apache-2.0
"""`report lag`: how fast a feed speaks, as text, JSON and picture, and a grace that is long enough and no longer."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import asyncpg
import pytest
from kit import claim, confirm, heard_neighbours, make_older, old_claim, row
from program import Program

from reconciler.composition import policies
from reconciler.configuration.settings import Settings
from reconciler.insight.lag import AGES
from reconciler.passes.reconcile import run_pass

SVG = "{http://www.w3.org/2000/svg}"


async def of(program: Program, feed: str = "mg") -> dict[str, Any]:
    (found,) = await program.json("report", "lag", "--feed", feed)
    return found


async def slower(db: asyncpg.Pool, by: timedelta) -> None:
    await db.execute("UPDATE provider_event SET received_at = received_at + $1::interval", by)


async def test_a_feed_without_any_answered_send_advises_nothing(program: Program) -> None:
    found = await of(program)
    assert (found["sends"], found["missing"], found["advised"], found["half_after"]) == (0, 100, None, None)
    assert found["why_none"] == "100 answered sends are missing before its silence means anything"
    assert "none is advised: 100 answered sends are missing" in (await program("report", "lag")).stdout


async def test_the_curve_says_what_share_was_heard_of_within_an_age(program: Program, db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=2000)
    await db.execute(
        "UPDATE provider_event SET received_at = received_at + interval '58 s'"
        " WHERE substring(message_id FROM 3)::int % 4 = 0"
    )
    found = await of(program)
    heard = {point["age"]: point["heard"] for point in found["points"]}
    assert (heard[1], heard[2], heard[45], heard[60]) == (0.0, 0.75, 0.75, 1.0)
    assert (found["half_after"], found["late_after"], found["sends"]) == (2.0, 60.0, 2000)
    assert all(point["age"] in AGES for point in found["points"])


async def test_the_grace_it_advises_is_enough_and_the_next_shorter_one_is_not(
    program: Program, db: asyncpg.Pool
) -> None:
    await heard_neighbours(db, n=2000)
    found = await of(program)
    advised = found["advised"]
    assert found["grace"] == 900.0
    assert advised == 60.0  # Mailgun's first event often takes that long, whatever this feed did
    risks = {point["age"]: point["risk"] for point in found["points"]}
    assert risks[advised] <= found["max_risk"]
    assert any(risk is None or risk > found["max_risk"] for age, risk in risks.items() if age < advised)
    text = (await program("report", "lag", "--feed", "mg")).stdout
    assert "the grace is 15m; 1m would be enough: this provider's first event often takes that long\n" in text


async def test_a_risk_is_told_in_per_cent_beside_the_max_risk_that_decided_the_advice(
    program: Program, db: asyncpg.Pool, config: Path
) -> None:
    await heard_neighbours(db, n=2000)
    await slower(db, timedelta(seconds=80))
    config.write_text(config.read_text() + "\n[rules]\nmax_risk = 0.004\n")
    found, text = await of(program), (await program("report", "lag", "--feed", "mg")).stdout
    risk = next(point["risk"] for point in found["points"] if point["age"] == found["advised"])
    assert 0 < risk < 0.004
    assert re.search(rf" {100 * risk:.2g} %  #", text)
    assert found["why_advised"] == "a release is as safe by then as max_risk (0.4 %) asks"


@pytest.mark.parametrize("too_young", [False, True])
async def test_a_silent_send_of_the_age_it_advises_is_released_and_a_younger_one_is_not(
    program: Program, db: asyncpg.Pool, too_young: bool
) -> None:
    await heard_neighbours(db, timedelta(minutes=5), n=2000, every=timedelta(seconds=1))
    await slower(db, timedelta(seconds=80))
    advised = timedelta(seconds=(await of(program))["advised"])
    assert advised >= timedelta(seconds=82)
    settings = Settings.model_validate(
        {"feeds": {"mg": {"provider": "mailgun", "secrets": ["k" * 9]}}, "rules": {"grace": advised}}
    )
    await old_claim(db, "order:1", advised * (0.5 if too_young else 1.05))
    await run_pass(db, policies(settings), who="test")
    assert (await row(db, "order:1"))["release_basis"] == (None if too_young else "absent")


async def test_a_slow_feed_is_advised_a_longer_grace_than_it_has(program: Program, db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=2000)
    await slower(db, timedelta(minutes=40))
    found = await of(program)
    assert found["advised"] >= 40 * 60 > found["grace"]
    text = (await program("report", "lag", "--feed", "mg")).stdout
    assert "the grace is 15m; 45m would be enough: a release is as safe by then as max_risk (1 %) asks\n" in text


async def test_a_feed_that_loses_too_much_is_advised_none_and_told_why(program: Program, db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=600)
    await db.execute("DELETE FROM provider_event WHERE substring(message_id FROM 3)::int % 5 = 0")
    found = await of(program)
    assert (found["advised"], found["late_after"]) == (None, None)
    assert found["why_none"] == "more than 2 in 100 are missed at every age: does the feed lose events?"


async def test_a_deaf_feed_is_advised_none_and_told_to_look_at_the_stamp(program: Program, db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=600, heard=0)
    assert (await of(program))["why_none"] == "the feed never spoke of this class: is it stamped?"


async def test_coverage_is_told_by_the_hour(program: Program, db: asyncpg.Pool) -> None:
    await heard_neighbours(db, timedelta(minutes=50), heard=450)
    hours = (await of(program))["hours"]
    assert (sum(hour["sends"] for hour in hours), sum(hour["heard"] for hour in hours)) == (600, 450)
    assert hours[0]["heard"] == hours[0]["sends"]
    assert hours[-1]["heard"] < hours[-1]["sends"]
    assert "HOUR" in (await program("report", "lag", "--feed", "mg")).stdout


async def test_each_class_has_its_own_curve(program: Program, db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=600)
    await heard_neighbours(db, n=200, message_class="news")
    found = await program.json("report", "lag", "--feed", "mg")
    assert [(lag["message_class"], lag["sends"]) for lag in found] == [("default", 600), ("news", 200)]


async def test_all_configured_feeds_are_told_and_an_unknown_one_is_refused(program: Program) -> None:
    assert [lag["feed"] for lag in await program.json("report", "lag")] == ["mg", "resend-main"]
    done = await program("report", "lag", "--feed", "mh")
    assert (done.exit_code, 'did you mean "mg"' in done.stderr or "mg" in done.stderr) == (1, True)


async def test_it_draws_a_picture_that_any_browser_reads(program: Program, db: asyncpg.Pool, tmp_path: Path) -> None:
    await heard_neighbours(db, n=2000, message_class="<news> & more")
    path = tmp_path / "lag.svg"
    done = await program("report", "lag", "--feed", "mg", "--plot", str(path))
    assert f"drawn: {path}" in done.stdout
    root = ET.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own
    assert root.tag == f"{SVG}svg"
    curves = root.findall(f".//{SVG}polyline")
    assert len(curves) == 2
    assert all(len(curve.attrib["points"].split()) > 10 for curve in curves)
    assert root.findall(f".//{SVG}rect[@class='bar']")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert any("class <news> & more: 2000 answered sends, grace 15m, advised grace" in (text or "") for text in texts)


async def test_a_picture_of_feeds_without_a_send_is_drawn_too(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "lag.svg"
    await program("report", "lag", "--plot", str(path))
    ET.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own


async def test_a_file_that_cant_be_written_is_one_line(program: Program, tmp_path: Path) -> None:
    done = await program("report", "lag", "--plot", str(tmp_path / "no" / "lag.svg"))
    assert done.exit_code == 1
    assert done.stderr == f"reconciler: {tmp_path}/no/lag.svg can't be written (No such file or directory)\n"


async def test_it_changes_nothing(program: Program, db: asyncpg.Pool) -> None:
    await confirm(db, "order:1", (await claim(db, "order:1"))["fence"])
    await make_older(db, "order:1", timedelta(hours=1))
    before = await row(db, "order:1")
    assert (await program("report", "lag")).exit_code == 0
    assert await row(db, "order:1") == before
