# SPDX-License-Identifier: Apache-2.0
"""The operator's page in a real browser, on a phone and on a desk, with scripts and without them.

`UI_PICTURES=folder` keeps pictures of its pages.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
from browser import DESK, PHONE, Tab, program, running, tab
from kit import event, heard_neighbours, make_older, old_claim, old_claims, reconcile, row, state
from ui_kit import OPS, READER, Page, last_verdict, page

KEY = "order.receipt:1234:ada@example.org"
WITH_AND_WITHOUT = pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])


class Desk:
    """A person in front of a browser."""

    def __init__(self, browser: Tab, url: str, *kept_in: str) -> None:
        folder = os.environ.get("UI_PICTURES")
        self.browser, self.url = browser, url
        self._pictures = Path(folder, *kept_in) if folder else None

    async def text(self) -> str:
        return Page(0, await self.browser.html("main"), {}, "").text

    async def picture(self, name: str) -> None:
        if self._pictures:
            self._pictures.mkdir(parents=True, exist_ok=True)
            await self.browser.picture(self._pictures / f"{name}.png")

    async def fits(self, name: str) -> None:
        """The page is no wider than its window, nothing was refused by its policy, and a picture is kept."""
        await self.picture(name)
        assert await self.browser.wider_than_window() == 0
        assert self.browser.errors == []

    async def sign_in(self, bearer: str, path: str = "/ui/") -> None:
        await self.browser.go(f"{self.url}{path}")
        await self.fits("sign-in")
        await self.browser.write("#token", bearer)
        await self.browser.click("main button", leads=True)


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    """The browser's address."""
    found = program()
    if found is None:
        pytest.skip("chromium is not installed")
    with running(found) as address:
        yield address


@pytest.fixture
async def url(db: asyncpg.Pool) -> AsyncIterator[str]:
    async with page(db) as person:
        yield str(person.client.make_url("")).rstrip("/")


async def a_bad_night(db: asyncpg.Pool) -> None:
    """One send that is held for hours, and what else happens."""
    await heard_neighbours(db, n=60)
    await old_claim(db, KEY, recipient="ada@example.org", message_class="receipt", campaign="may")
    await event(db, KEY, "none", kind="deferred", reason="451 4.3.0 try again later, mailbox busy", feed="sg")
    await db.execute("DELETE FROM provider_event WHERE wire_key = wire_key($1)", KEY)
    await old_claims(db, "newsletter-2026-05-with-a-rather-long-name", 3, feed="sg", message_class="news")
    await reconcile(db)
    await make_older(db, KEY, timedelta(hours=3))


@WITH_AND_WITHOUT
async def test_on_a_phone_a_held_send_is_found_understood_and_released(db, url, chromium, scripts):
    await a_bad_night(db)
    wire_key = (await row(db, KEY))["wire_key"]
    async with tab(chromium, PHONE, scripts=scripts) as browser:
        desk = Desk(browser, url, "phone", "scripts" if scripts else "none")
        await desk.sign_in(OPS)
        assert "1 send of class receipt held" in await desk.text()
        await desk.fits("overview")
        await browser.click("a[href*='state=held'][href*='class=receipt']", leads=True)
        await desk.fits("sends")
        assert len(await browser.nodes("[data-choose-all] input")) == scripts
        await browser.click(f"a[href='/ui/sends/{wire_key}']", leads=True)
        for said in ("recipient ada@example.org", "attempt 1 claimed", "What would decide it"):
            assert said in await desk.text()
        await desk.fits("send")
        await browser.click("input[value=release]")
        await browser.write("#why", "not in the provider's log")
        await desk.fits("send-filled")
        await browser.click("main form button", leads=True)
        assert "Released: it is free for another attempt." in await desk.text()
        await desk.fits("released")
        assert browser.dialogs == (["release: Decide about this send?"] if scripts else [])
    assert (await state(db, KEY), (await row(db, KEY))["release_basis"]) == ("pending", "operator")
    recorded = await last_verdict(db)
    assert (recorded["who"], recorded["note"]) == ("ui:ops", "not in the provider's log")


FORGE = """
const form = document.createElement("form");
form.method = "post";
form.action = location.pathname;
const token = document.querySelector("input[name=form_token]").value;
for (const [name, value] of Object.entries({form_token: token, verb: "release", reason: "why", attempt: "1"})) {
  const field = document.createElement("input");
  field.name = name;
  field.value = value;
  form.append(field);
}
document.body.append(form);
form.submit();
"""


@WITH_AND_WITHOUT
async def test_whoever_may_only_read_finds_no_way_to_decide(db, url, chromium, scripts):
    await a_bad_night(db)
    wire_key = (await row(db, KEY))["wire_key"]
    async with tab(chromium, PHONE, scripts=scripts) as browser:
        desk = Desk(browser, url, "reader", "scripts" if scripts else "none")
        await desk.sign_in(READER)
        for name, path in (("sends", "/ui/sends"), ("feeds", "/ui/feeds"), ("send", f"/ui/sends/{wire_key}")):
            await browser.go(f"{url}{path}")
            await desk.fits(name)
            assert (
                await browser.nodes("main form[method=post], main input[type=checkbox], main input[type=radio]") == []
            )
        browser._loaded.clear()
        await browser.ask("Runtime.evaluate", expression=FORGE)
        async with asyncio.timeout(30):
            await browser._loaded.wait()
        assert "you may look, not act" in await desk.text()
    assert await state(db, KEY) == "claimed"


DUPLICATE = """
INSERT INTO duplicate (wire_key, sort, feed, evidence)
VALUES (wire_key($1), 'duplicate', 'mg', '{"because": "two_attempts", "acceptances": []}')
"""
PAGES = (
    "",
    "sends",
    "sends?state=failed",
    "feeds",
    "reports/duplicates",
    "reports/vanished",
    "reports/unknown",
    "passes",
)


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (DESK, False)])
async def test_every_page_fits_its_window_and_tells_screen_readers_what_it_is(db, url, chromium, size, dark):
    await a_bad_night(db)
    await event(db, "a-key-that-nobody-has", kind="delivered")
    await db.execute(DUPLICATE, KEY)
    wire_key = (await row(db, KEY))["wire_key"]
    async with tab(chromium, size, dark=dark) as browser:
        desk = Desk(browser, url, "phone" if size == PHONE else "desk", "dark" if dark else "light")
        await desk.sign_in(OPS)
        for path in (*PAGES, f"sends/{wire_key}"):
            await browser.go(f"{url}/ui/{path}")
            await desk.fits(path.replace("/", "-").replace("?", "-") or "overview")
            found = await browser.accessible()
            roles = [role for role, _, _ in found]
            assert {"banner", "navigation", "main", "contentinfo", "heading", "search"} <= set(roles), path
            controls = {"textbox", "button", "checkbox", "radio", "combobox", "link", "table"}
            assert [one for one in found if one[0] in controls and not one[1].strip()] == [], path
            pictures = [name.split(".")[0] for role, name, _ in found if role in ("image", "img")]
            assert pictures == (["Lag curve of mg, class default"] if path == "feeds" else []), path
            if "table" in roles:  # also where a phone shows its rows as cards
                assert {"row", "columnheader", "cell"} <= set(roles), path


async def test_after_signing_out_the_way_back_leads_to_signing_in(db, url, chromium):
    await a_bad_night(db)
    wire_key = (await row(db, KEY))["wire_key"]
    async with tab(chromium, DESK) as browser:
        desk = Desk(browser, url, "sign-out")
        await desk.sign_in(OPS, f"/ui/sends/{wire_key}")
        assert "ada@example.org" in await desk.text()
        await browser.click("footer button", leads=True)
        await browser.back()
        assert "Sign in" in await desk.text()
        assert "ada@example.org" not in await desk.text()


SMALLEST = (320, 640)
THUMB = 24
"""Pixels that a finger needs to hit a link."""


async def test_on_the_smallest_phone_nothing_leaves_its_card_and_each_link_can_be_hit(db, url, chromium):
    await a_bad_night(db)
    async with tab(chromium, SMALLEST) as browser:
        desk = Desk(browser, url, "smallest")
        await desk.sign_in(OPS)
        for path in ("", "sends", "passes"):
            await browser.go(f"{url}/ui/{path}")
            await desk.fits(path or "overview")
            edge = min(right for right, _, _ in await browser.boxes("tbody tr"))
            assert [box for box in await browser.boxes("td time, td a, td small") if box[0] > edge] == [], path
            links = await browser.boxes("td a, nav a, button, summary")
            assert [box for box in links if min(box[1:]) < THUMB] == [], path


async def test_the_keyboard_leads_past_the_navigation_and_shows_where_it_is(db, url, chromium):
    async with tab(chromium, DESK) as browser:
        desk = Desk(browser, url, "keyboard")
        await desk.sign_in(OPS)
        await browser.press("Tab", 9)
        await desk.picture("skip")
        focused = [(role, name) for role, name, focus in await browser.accessible() if focus and role != "RootWebArea"]
        assert focused == [("link", "Skip to the content")]


async def test_one_box_chooses_all_sends_of_a_page(db, url, chromium):
    await old_claims(db, "k", 5)
    await reconcile(db)
    async with tab(chromium, DESK) as browser:
        desk = Desk(browser, url, "bulk")
        await desk.sign_in(OPS)
        await browser.go(f"{url}/ui/sends?state=held")
        await browser.click("[data-choose-all] input")
        await browser.click("input[value=fail]")
        await browser.write("#why", "too old by now")
        await desk.fits("chosen")
        await browser.click("main form[method=post] button", leads=True)
        assert "5 failed." in await desk.text()
        await desk.fits("done")
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'failed'") == 5
