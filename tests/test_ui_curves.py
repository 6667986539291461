# SPDX-License-Identifier: Apache-2.0
"""The lag curves of the operator's page: drawn by the server, in words and numbers too, as `report lag` has them."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import asyncpg
from kit import heard_neighbours
from program import Program
from ui_kit import OPS, page

LAGS_OF_UP_TO_40_SECONDS = """
UPDATE provider_event SET received_at = received_at + (split_part(message_id, '-', 2)::int % 40) * interval '1 s'
"""


async def test_a_feed_shows_how_fast_it_speaks_as_report_lag_tells_it(db: asyncpg.Pool, program: Program) -> None:
    await heard_neighbours(db)
    await db.execute(LAGS_OF_UP_TO_40_SECONDS)
    async with page(db) as person:
        await person.sign_in(OPS)
        shown = await person.get("/ui/feeds")
    (lag,) = [one for one in await program.json("report", "lag", "--feed", "mg") if one["message_class"] == "default"]
    (text,) = re.findall(r"<svg.*?</svg>", shown.source, re.DOTALL)
    picture = ET.fromstring(text)  # noqa: S314 - our own page
    assert picture.get("role") == "img"
    assert str(picture.get("aria-label")).startswith("Lag curve of mg, class default. ")
    (line,) = picture.iter("polyline")
    assert len(str(line.get("points")).split()) == len([point for point in lag["points"] if point["heard"] is not None])
    assert {one.get("class") for one in picture.iter("line")} == {"mark", "advice"}
    assert "style" not in text, "the page's policy lets no style of its own in"
    said = f"Of {lag['sends']} answered sends half were heard of within {lag['half_after']:.0f}s, 98 in 100 within "
    assert said in shown.text
    assert said in str(picture.get("aria-label"))
    for point in lag["points"]:
        if point["heard"]:
            assert f"{100 * point['heard']:.1f} %" in shown.text


async def test_names_that_senders_chose_are_text_in_a_picture_too(db: asyncpg.Pool) -> None:
    name = "\"><script>alert('1')</script>"
    await heard_neighbours(db, n=30, message_class=name)
    async with page(db) as person:
        await person.sign_in(OPS)
        shown = await person.get("/ui/feeds")
    assert "<svg" in shown.source
    assert "<script>alert" not in shown.source
    assert name in shown.text


async def test_a_feed_without_answered_sends_has_no_curve_and_a_busy_one_five(db: asyncpg.Pool) -> None:
    async with page(db) as person:
        await person.sign_in(OPS)
        assert "<svg" not in (await person.get("/ui/feeds")).source
        for number in range(7):
            await heard_neighbours(db, n=110 + number, message_class=f"class-{number}", name=f"of-{number}")
        shown = await person.get("/ui/feeds")
    drawn = re.findall(r'aria-label="Lag curve of mg, class (class-\d)\.', shown.source)
    assert drawn == [f"class-{number}" for number in (6, 5, 4, 3, 2)]
