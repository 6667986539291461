# SPDX-License-Identifier: Apache-2.0
"""The operator's page: what it shows and to whom, what it decides, what it refuses. Real HTTP on a real database."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from html import unescape
from ipaddress import ip_network
from urllib.parse import urlencode

import asyncpg
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from kit import claim, event, fail, make_older, old_claim, old_claims, reconcile, row, state
from multidict import CIMultiDict
from pydantic import ValidationError
from sends_kit import Sender, api, token
from serving import serving, write_config
from structlog.testing import capture_logs
from ui_kit import OPS, READER, SENDER, TOKENS, Page, Person, last_verdict, page, settings

from reconciler.configuration.tables import ApiSettings, ReceiverSettings, UiSettings
from reconciler.insight.status import read_status
from reconciler.tokens import hash_of
from reconciler.ui import viewers
from reconciler.ui.application import add_ui
from reconciler.ui.claims import Wanted, read_claims
from reconciler.ui.viewers import COOKIE, TRIES, TRIES_SECONDS, Throttle, Viewers

KEY = "order.receipt:1234:ada@example.org"
PROBE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
ACTIONS = ("/ui/sends", "/ui/sends/.+", "/ui/feeds")


@pytest.fixture
async def visitor(db: asyncpg.Pool) -> AsyncIterator[Person]:
    async with page(db) as person:
        yield person


@pytest.fixture
async def operator(visitor: Person) -> Person:
    assert (await visitor.sign_in(OPS)).status == 200
    return visitor


async def held(db: asyncpg.Pool, key: str = KEY, **options: str) -> asyncpg.Record:
    """A send of which nobody knows anything, held by a pass."""
    await old_claim(db, key, **options)
    await reconcile(db)
    found = await row(db, key)
    assert found["held_reason"] == "silent"
    return found


async def send_page(person: Person, db: asyncpg.Pool, key: str = KEY) -> Page:
    return await person.get(f"/ui/sends/{(await row(db, key))['wire_key']}")


# From what needs a person to what he decided


async def test_a_held_send_leads_from_the_overview_to_a_release_that_is_recorded(db, operator):
    wire_key = (await held(db))["wire_key"]
    await make_older(db, KEY, timedelta(hours=3))
    overview = await operator.get("/ui/")
    assert "held mg: 1 send of class default held (silent), the oldest for 3h" in overview.text
    assert 'href="/ui/sends?state=held&amp;feed=mg&amp;reason=silent&amp;class=default"' in overview.source
    listed = await operator.get("/ui/sends?state=held&feed=mg&reason=silent&class=default")
    assert f'href="/ui/sends/{wire_key}"' in listed.source
    shown = await operator.get(f"/ui/sends/{wire_key}")
    assert shown.status == 200
    for said in ("attempt 1 claimed", "held: silent", "nobody knows whether it was accepted", "What would decide it"):
        assert said in shown.text
    done = await operator.send(shown.form("/ui/sends/.+"), verb="release", reason="not in the provider's log")
    assert (done.status, done.url) == (200, f"/ui/sends/{wire_key}?did=released")
    assert "Released: it is free for another attempt." in done.text
    assert "note: not in the provider's log" in done.text
    assert dict(await last_verdict(db)) == {
        "action": "released",
        "reason": "operator",
        "source": "operator",
        "who": "ui:ops",
        "note": "not in the provider's log",
    }


@pytest.mark.parametrize(("verb", "becomes"), [("confirm", "sent"), ("fail", "failed")])
async def test_a_send_can_be_said_to_be_sent_or_failed(db, operator, verb, becomes):
    await held(db)
    done = await operator.send(
        (await send_page(operator, db)).form("/ui/sends/.+"), verb=verb, reason="told by support"
    )
    assert f"It is {becomes}." in done.text
    assert await state(db, KEY) == becomes
    assert (await last_verdict(db))["who"] == "ui:ops"


async def test_evidence_of_acceptance_makes_a_release_a_sent_send(db, operator):
    await held(db)
    shown = await send_page(operator, db)
    await event(db, KEY, "accepted")
    done = await operator.send(shown.form("/ui/sends/.+"), verb="release", reason="it never came")
    assert "It is sent." in done.text
    assert await state(db, KEY) == "sent"


async def test_a_refusal_is_shown_in_its_own_words_and_the_reason_is_still_there(db, operator):
    await held(db)
    await event(db, KEY, "none", kind="unknown")
    shown = await send_page(operator, db)
    refused = await operator.send(shown.form("/ui/sends/.+"), verb="release", reason="it never came")
    assert refused.status == 409
    assert "release refused: a provider spoke of it (none): see why" in refused.text
    assert ("reason", "it never came") in refused.form("/ui/sends/.+").fields
    assert await state(db, KEY) == "claimed"


async def test_times_are_utc_wherever_the_database_stands(dsn):
    there = {"timezone": "Asia/Kolkata", "datestyle": "German"}
    async with asyncpg.create_pool(dsn, min_size=1, server_settings=there) as abroad, page(abroad) as person:
        await claim(abroad, KEY)
        await person.sign_in(OPS)
        form = (await send_page(person, abroad)).form("/ui/sends/.+")
        refused = await person.send(form, verb="fail", reason="why")
        until = (await row(abroad, KEY))["submit_by"]
    assert f"its sender may still submit until {until:%Y-%m-%d %H:%M:%S}" in refused.text


async def test_what_was_meant_for_one_attempt_never_decides_about_the_next(db, operator):
    await held(db)
    form = (await send_page(operator, db)).form("/ui/sends/.+")
    assert (await operator.send(form, verb="release", reason="first")).status == 200
    await claim(db, KEY)
    await make_older(db, KEY, timedelta(hours=1))  # so that the function alone would grant it
    again = await operator.send(form, verb="release", reason="first")
    assert (again.status, await state(db, KEY)) == (409, "claimed")
    assert "attempt 2 has begun since you looked" in again.text


@pytest.mark.parametrize("verb", ["release", "fail"])
@pytest.mark.parametrize("meanwhile", ["release", "fail", "confirm"])
async def test_of_two_who_look_at_one_send_the_second_does_not_undo_what_he_has_not_seen(db, operator, meanwhile, verb):
    await held(db)
    first = second = (await send_page(operator, db)).form("/ui/sends/.+")
    listed = (await operator.get("/ui/sends?state=held")).form("/ui/sends")
    await operator.send(first, verb=meanwhile, reason="ada's")
    became = await state(db, KEY)
    refused = await operator.send(second, verb=verb, reason="bob's")
    assert (refused.status, f"{verb} refused: it is {became} since you looked: look again" in refused.text) == (
        409,
        True,
    )
    of_many = await operator.send(listed, send=[v for n, v in listed.choices if n == "send"], verb=verb, reason="bob's")
    assert f"refused it is {became} since you looked: look again" in of_many.text
    assert (await state(db, KEY), (await last_verdict(db))["note"]) == (became, "ada's")


async def test_whoever_knows_that_it_was_sent_can_say_so_although_it_was_released_meanwhile(db, operator):
    await held(db)
    form = (await send_page(operator, db)).form("/ui/sends/.+")
    await operator.send(form, verb="release", reason="ada's")
    assert "It is sent." in (await operator.send(form, verb="confirm", reason="bob has it")).text
    assert await state(db, KEY) == "sent"


async def test_chosen_sends_are_decided_together_each_with_its_answer(db, operator):
    for number in range(3):
        await held(db, f"k-{number}")
    form = (await operator.get("/ui/sends?state=held")).form("/ui/sends")
    chosen = [value for name, value in form.choices if name == "send"]
    assert chosen == ["k-0:1:claimed", "k-1:1:claimed", "k-2:1:claimed"]
    await event(db, "k-1", "accepted")
    done = await operator.send(form, send=chosen[:2], verb="release", reason="outage of 1 May")
    assert "1 released, 1 sent." in done.text
    assert [await state(db, f"k-{number}") for number in range(3)] == ["pending", "sent", "claimed"]


async def test_all_held_sends_of_a_filter_are_decided_and_no_others(db, operator):
    await held(db, "k-1")
    await held(db, "k-2", message_class="news")
    await old_claim(db, "k-3", feed="sg")
    await claim(db, "k-4")
    await reconcile(db)
    form = (await operator.get("/ui/sends?feed=mg&class=default&reason=silent")).form("/ui/sends")
    done = await operator.send(form, which="all", verb="fail", reason="too old by now")
    assert "1 failed." in done.text
    assert [await state(db, f"k-{number}") for number in (1, 2, 3, 4)] == ["failed", "claimed", "claimed", "claimed"]


@pytest.mark.parametrize("listed", ["failed", "released", "claimed", "pending", "capped"])
async def test_a_filter_that_names_no_held_sends_decides_about_none(db, operator, listed):
    await held(db, "held")
    await operator.send((await send_page(operator, db, "held")).form("/ui/sends/.+"), verb="fail", reason="why")
    await held(db, "k-1")
    shown = await operator.get("/ui/sends?state=failed")
    assert ("which", "all") not in shown.form("/ui/sends").choices
    form = (await operator.get("/ui/sends")).form("/ui/sends")
    refused = await operator.send(form, which="all", state=listed, verb="fail", reason="why")
    assert (refused.status, await state(db, "k-1")) == (422, "claimed")


async def test_feeds_are_paused_and_resumed_with_a_reason(db, operator):
    async def holds() -> dict[str, tuple[bool, str, str]]:
        rows = await db.fetch("SELECT feed, paused_at IS NOT NULL AS paused, reason, who FROM feed_state ORDER BY feed")
        return {found["feed"]: (found["paused"], found["reason"], found["who"]) for found in rows if found["who"]}

    form = (await operator.get("/ui/feeds")).form("/ui/feeds")  # the last one
    done = await operator.send(form, feed="mg", verb="pause", reason="incident 17")
    assert "Paused: nothing is released while it lasts." in done.text
    assert "On hold: paused (incident 17)." in done.text
    await operator.send(form, feed="*", verb="pause", reason="all of it")
    assert await holds() == {"*": (True, "all of it", "ui:ops"), "mg": (True, "incident 17", "ui:ops")}
    for feed in ("mg", "*"):
        given = {"feed": feed, "holds": "paused", "verb": "resume", "reason": "over"}
        assert "Resumed." in (await operator.send(form, **given)).text
    assert {paused for paused, _, _ in (await holds()).values()} == {False}
    assert "Nothing was on hold there." in (await operator.send(form, feed="mg", verb="resume", reason="over")).text
    assert (await operator.send(form, feed="nobodys", verb="pause", reason="why")).status == 404


@pytest.mark.parametrize("hold", ["breaker", "suspect"])
async def test_a_hold_that_came_after_the_page_was_shown_is_not_lifted(db, operator, hold):
    form = (await operator.get("/ui/feeds")).form("/ui/feeds")
    paused = await operator.send(form, feed="mg", verb="pause", reason="incident 17")
    form = next(form for form in paused.forms if ("feed", "mg") in form.fields)
    await db.execute(f"UPDATE feed_state SET {hold}_at = clock_timestamp() WHERE feed = 'mg'")  # noqa: S608 - our own
    refused = await operator.send(form, verb="resume", reason="incident 17 is over")
    assert (refused.status, f"{hold} came since you looked" in refused.text) == (409, True)
    assert await db.fetchval("SELECT paused_at IS NOT NULL FROM feed_state WHERE feed = 'mg'")
    form = next(form for form in (await operator.get("/ui/feeds")).forms if ("feed", "mg") in form.fields)
    assert "Resumed." in (await operator.send(form, verb="resume", reason="both are over")).text


async def test_accepting_a_restored_database_may_take_longer_than_a_page(db, operator, monkeypatch):
    form = (await operator.get("/ui/feeds")).form("/ui/feeds")
    await operator.send(form, feed="*", verb="pause", reason="restored")
    form = (await operator.get("/ui/feeds")).forms[1]
    monkeypatch.setattr("reconciler.ui.data.SECONDS", 0.0)
    done = await operator.post(form.action, form.filled(verb="resume", reason="it is right"), allow_redirects=False)
    assert (done.status, (await operator.get("/ui/feeds")).status) == (303, 503)


async def test_what_was_done_is_said_only_while_it_is_so(db, operator):
    wire_key = (await held(db))["wire_key"]
    for word in ("released", "sent", "failed", "paused"):
        assert 'class="did"' not in (await operator.get(f"/ui/sends/{wire_key}?did={word}")).source
    form = (await operator.get("/ui/feeds")).form("/ui/feeds")
    for did in ("paused", "paused&feed=mg", "sent", "sent&feed=mg"):
        assert 'class="did"' not in (await operator.get(f"/ui/feeds?did={did}")).source
    paused = await operator.send(form, feed="mg", verb="pause", reason="incident 17")
    assert "mg: Paused: nothing is released while it lasts." in paused.text
    await operator.send(form, feed="mg", holds="paused", verb="resume", reason="over")
    assert 'class="did"' not in (await operator.get(paused.url)).source


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"reason": " "}, 422),
        ({"reason": "x" * 1001}, 422),
        ({"reason": "a\0b"}, 422),
        ({"verb": "explode"}, 422),
        ({"attempt": "one"}, 422),
        pytest.param({"attempt": "1" * 9000}, 422, id="a long number"),
        ({"attempt": "7"}, 409),
        ({"state": "odd"}, 422),
    ],
)
async def test_a_form_that_cannot_be_meant_changes_nothing(db, operator, given, status):
    await held(db)
    form = (await send_page(operator, db)).form("/ui/sends/.+")
    answer = await operator.send(form, **{"verb": "release", "reason": "why", **given})
    assert (answer.status, await state(db, KEY)) == (status, "claimed")


async def test_of_many_nobody_or_too_many_are_refused(operator):
    form_token = dict((await operator.get("/ui/feeds")).form("/ui/feeds").fields)["form_token"]
    given = [("form_token", form_token), ("verb", "fail"), ("reason", "why")]
    assert (await operator.post("/ui/sends", given)).status == 422
    assert (await operator.post("/ui/sends", [*given, *(("send", f"k-{n}:1") for n in range(501))])).status == 422
    assert (await operator.post("/ui/sends", [*given, *(("send", f"k-{n}:1") for n in range(2500))])).status == 400
    assert (await operator.post("/ui/sends", [*given, ("send", "k" * 300_000)])).status == 413
    assert (await operator.post("/ui/sends", "{}", headers={"Content-Type": "application/json"})).status == 415


# Who may


async def test_whoever_may_only_read_sees_everything_and_no_button(db, visitor):
    await held(db)
    await visitor.sign_in(READER)
    wire_key = (await row(db, KEY))["wire_key"]
    for path in ("/ui/", "/ui/sends", f"/ui/sends/{wire_key}", "/ui/feeds"):
        shown = await visitor.get(path)
        assert (shown.status, "looking only" in shown.text) == (200, True)
        assert [action for action in ACTIONS if shown.has_form(action)] == []


async def test_whoever_may_only_read_decides_nothing(db, visitor):
    await held(db)
    await visitor.sign_in(READER)
    wire_key = (await row(db, KEY))["wire_key"]
    form_token = dict((await visitor.get("/ui/")).forms[-1].fields)["form_token"]
    given = {"form_token": form_token, "reason": "why", "attempt": "1", "send": f"{wire_key}:1", "feed": "mg"}
    for path, verb in (("/ui/sends", "fail"), (f"/ui/sends/{wire_key}", "release"), ("/ui/feeds", "pause")):
        refused = await visitor.post(path, {**given, "verb": verb})
        assert (refused.status, "you may look, not act" in refused.text) == (403, True)
    assert await state(db, KEY) == "claimed"
    assert await db.fetchval("SELECT count(*) FROM feed_state WHERE paused_at IS NOT NULL") == 0


async def test_a_form_without_its_token_or_from_elsewhere_does_nothing(db, operator):
    await held(db)
    form = (await send_page(operator, db)).form("/ui/sends/.+")
    given = {"verb": "release", "reason": "why"}
    for wrong in ("", "0" * 64, "\u00fc"):
        assert (await operator.send(form, form_token=wrong, **given)).status == 403
    without = [(name, value) for name, value in form.filled(**given) if name != "form_token"]
    assert (await operator.post(form.action, without)).status == 403
    for site in ("cross-site", "same-site"):
        answer = await operator.post(form.action, form.filled(**given), headers={"Sec-Fetch-Site": site})
        assert answer.status == 403
    assert await state(db, KEY) == "claimed"
    own = await operator.post(form.action, form.filled(**given), headers={"Sec-Fetch-Site": "same-origin"})
    assert (own.status, await state(db, KEY)) == (200, "pending")


async def test_anothers_form_token_is_refused(db, operator):
    form = (await operator.get("/ui/feeds")).form("/ui/feeds")
    await operator.post("/ui/sign-out", dict(form.fields))
    await operator.sign_in(OPS)
    assert (await operator.send(form, verb="pause", reason="why")).status == 403


async def test_nobody_unknown_sees_anything_and_a_post_of_his_does_nothing(visitor):
    for path in ("/ui/", "/ui/sends", "/ui/sends/k-1", "/ui/feeds", "/ui/reports/unknown", "/ui/passes", "/ui/nothing"):
        shown = await visitor.get(path, allow_redirects=False)
        assert (shown.status, shown.headers["Location"].split("?")[0]) == (303, "/ui/sign-in")
    with capture_logs() as logs:
        for path in ("/ui/feeds", "/ui/nothing", "/ui/static/ui.css", "/ui/static/a/b", "/ui/sign-in/x"):
            assert (await visitor.post(path, {"verb": "pause"})).status == 403
    assert logs == []


async def test_signing_in_leads_to_the_page_that_was_asked_for_and_out_again(visitor):
    shown = await visitor.sign_in(OPS, "/ui/sends?state=held")
    assert (shown.status, shown.url) == (200, "/ui/sends?state=held")
    cookie = next(iter(visitor.client.session.cookie_jar))
    assert (cookie.key, cookie["httponly"], cookie["samesite"], cookie["path"]) == (COOKIE, True, "Strict", "/ui")
    left = await visitor.post("/ui/sign-out", dict(shown.form("/ui/sign-out").fields))
    assert "Sign in" in left.text
    assert len(visitor.client.session.cookie_jar) == 0


ELSEWHERE = (
    *("https://evil.example", "//evil.example", "/ui/\\evil", "/v1/sends", "/ui/\nx", ""),
    *("/ui/../v1/sends", "/ui/..//evil.example", "/ui/%2e%2E//evil.example", "/ui/sends/.%2e/../..?x", "/ui/..#x"),
)


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_signing_in_leads_nowhere_else(visitor, path):
    answer = await visitor.post("/ui/sign-in", {"token": OPS, "next": path}, allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/ui/")


@pytest.mark.parametrize("bearer", ["", "espr_nobodys", SENDER, "\u00fc"])
async def test_a_token_that_is_unknown_or_for_senders_leads_nowhere(visitor, bearer):
    assert (await visitor.sign_in(bearer)).status == 403
    assert (await visitor.get("/ui/", allow_redirects=False)).status == 303


async def test_wrong_tokens_are_throttled_by_address_and_whoever_is_in_stays_in(db):
    found = settings(ui=UiSettings(proxy_networks=(ip_network("127.0.0.0/8"),)))
    async with page(db, found) as person:
        await person.sign_in(READER)
        attacker = {"X-Forwarded-For": "203.0.113.1, 198.51.100.7"}
        with capture_logs() as logs:
            for _ in range(TRIES):
                wrong = await person.post("/ui/sign-in", {"token": "espr_guess"}, headers=attacker)
                assert wrong.status == 403
            right = await person.post("/ui/sign-in", {"token": OPS}, headers=attacker)
        assert (right.status, 0 < int(right.headers["Retry-After"]) <= TRIES_SECONDS) == (429, True)
        assert "too many wrong tokens" in right.text
        assert (await person.get("/ui/")).status == 200
        elsewhere = {"X-Forwarded-For": "198.51.100.7, 203.0.113.1"}
        assert (await person.post("/ui/sign-in", {"token": OPS}, headers=elsewhere)).status == 200
    refusals = [line for line in logs if line["event"] == "ui_sign_in_refused"]
    assert [line["address"] for line in refusals] == ["198.51.100.7"]
    assert "espr_guess" not in str(logs)


def test_a_throttle_forgets_after_a_while_and_remembers_only_so_many(monkeypatch):
    now = 0.0
    throttle = Throttle(lambda: now)
    for _ in range(TRIES):
        throttle.note_failure("a")
    assert throttle.wait("a") == TRIES_SECONDS
    now = TRIES_SECONDS
    assert throttle.wait("a") is None
    monkeypatch.setattr(viewers, "MOST_ADDRESSES", 2)
    for address in ("b", "c", "d"):
        throttle.note_failure(address)
    assert list(throttle._failures) == ["c", "d"]


def requested(cookie: str) -> web.Request:
    return make_mocked_request("GET", "/ui/", headers={"Cookie": f"{COOKIE}={cookie}"})


def test_a_session_ends_with_its_time_its_token_and_its_scope_and_with_another_key():
    now = 1000.0
    key = UiSettings(session_key="k" * 32, session=timedelta(hours=1))
    ours = Viewers(key, lambda: ApiSettings(tokens=TOKENS), lambda: now)
    cookie = ours.session(OPS) or ""

    def knows(found: Viewers) -> bool | None:
        viewer = found.of(requested(cookie))
        return viewer and viewer.may_act

    def tokens(**given) -> Viewers:
        return Viewers(key, lambda: ApiSettings(tokens={**TOKENS, **given}), lambda: now)

    assert knows(ours) is True
    assert knows(tokens()) is True  # another process with the same settings
    assert knows(tokens(ops=token(OPS, scopes=("read",)))) is False
    assert knows(tokens(ops=token(OPS, scopes=("send",)))) is None
    assert knows(tokens(ops=token("espr_next", scopes=("operate",)))) is None
    for other in (UiSettings(session_key="x" * 32), UiSettings()):
        assert knows(Viewers(other, lambda: ApiSettings(tokens=TOKENS), lambda: now)) is None
    text, _, signature = cookie.partition(".")
    for forged in ("", ".", text, f"{text}.", f"{text}.{'0' * 64}", f"{text}x.{signature}", "\u00e9.\u00e9"):
        assert ours.of(requested(forged)) is None
    now = 1000.0 + 3600
    assert knows(ours) is None


async def test_a_token_that_is_taken_out_of_the_settings_leads_no_further(db):
    app = web.Application()
    data = add_ui(app, settings())
    data.pool = db
    async with TestClient(TestServer(app)) as client:
        person = Person(client)
        assert (await person.sign_in(OPS)).status == 200
        data.take(settings(api=ApiSettings(tokens={"reader": TOKENS["reader"]})))
        assert (await person.get("/ui/", allow_redirects=False)).status == 303
        assert (await person.sign_in(OPS)).status == 403


@pytest.mark.parametrize(("url", "secure"), [("https://hooks.example.com", True), ("http://hooks.example.com", False)])
async def test_the_cookie_is_for_https_alone_where_that_is_how_the_page_is_reached(db, url, secure):
    async with page(db, settings(receiver=ReceiverSettings(public_url=url))) as person:
        answer = await person.post("/ui/sign-in", {"token": OPS}, allow_redirects=False)
    assert ("secure" in answer.headers["Set-Cookie"].lower()) == secure


PROXY = UiSettings(
    proxy_header="X-Forwarded-User", proxy_networks=(ip_network("127.0.0.0/8"),), proxy_operators=("ada",)
)


async def test_a_trusted_proxy_says_who_looks_and_who_acts_is_recorded_by_name(db):
    await held(db)
    async with page(db, settings(ui=PROXY, api=ApiSettings())) as person:
        ada, bob = (Person(person.client, **{"X-Forwarded-User": name}) for name in ("ada", "bob"))
        form = (await send_page(ada, db)).form("/ui/sends/.+")
        shown = await send_page(bob, db)
        assert (shown.status, shown.has_form("/ui/sends/.+"), shown.has_form("/ui/sign-out")) == (200, False, False)
        assert (await bob.send(form, verb="release", reason="why")).status == 403
        await ada.send(form, verb="release", reason="why")
        assert (await last_verdict(db))["who"] == "proxy:ada"
        nobody = await person.get("/ui/")
        assert "the proxy in front of this page has to say who you are" in nobody.text


@pytest.mark.parametrize(
    ("ui", "headers"),
    [
        (PROXY.model_copy(update={"proxy_networks": (ip_network("10.0.0.0/8"),)}), [("X-Forwarded-User", "ada")]),
        (PROXY, [("X-Forwarded-User", "ada"), ("X-Forwarded-User", "bob")]),
        (PROXY, [("X-Forwarded-User", "")]),
        (PROXY, [("X-Forwarded-User", "a" * 201)]),
        (PROXY, [("X-Forwarded-User", "a\u202eda")]),
        (UiSettings(proxy_networks=(ip_network("127.0.0.0/8"),)), [("X-Forwarded-User", "ada")]),
    ],
)
async def test_a_name_that_no_trusted_proxy_gave_is_nobodys(db, ui, headers):
    async with page(db, settings(ui=ui)) as person:
        shown = await person.get("/ui/", headers=CIMultiDict(headers), allow_redirects=False)
    assert shown.status == 303


async def test_without_anybody_who_may_look_there_is_no_page(db):
    """Until settings that are read again name somebody."""
    app = web.Application()
    data = add_ui(app, settings(api=ApiSettings(tokens={"shop": token(SENDER)})))
    data.pool = db
    async with TestClient(TestServer(app)) as client:
        person = Person(client)
        for path in ("/ui", "/ui/", "/ui/sign-in", "/ui/static/style.css", "/ui/sends/k"):
            missing = await person.get(path, allow_redirects=False)
            assert (missing.status, "reconciler token --scope operate" in missing.text) == (404, True)
        assert (await person.post("/ui/sign-in", {"token": SENDER}, allow_redirects=False)).status == 404
        data.take(settings())
        assert (await person.sign_in(OPS)).status == 200
        assert (await person.get("/ui")).url == "/ui/"


# What is shown


async def test_nothing_that_others_wrote_becomes_markup(db, operator):
    key = f"k {PROBE}"
    options = {"recipient": f"{PROBE}@example.org", "message_class": PROBE, "campaign": PROBE, "claimed_by": PROBE}
    await old_claim(db, key, cause=PROBE, **options)
    await event(db, key, "none", kind="unknown", message_id=PROBE, reason=PROBE)
    await event(db, None, "accepted", message_id=f"nobodys {PROBE}")
    await reconcile(db)
    form = (await operator.get("/ui/feeds")).form("/ui/feeds")
    await operator.send(form, feed="mg", verb="pause", reason=PROBE)
    wire_key = (await row(db, key))["wire_key"]
    refused = await operator.send(
        (await operator.get(f"/ui/sends/{wire_key}")).form("/ui/sends/.+"), verb="release", reason=PROBE
    )
    assert refused.status == 409
    paths = ("/ui/", "/ui/sends", f"/ui/sends/{wire_key}", "/ui/feeds", "/ui/reports/unknown", "/ui/passes")
    asked = ("/ui/sends", {"reason": PROBE, "feed": PROBE}), ("/ui/sign-in", {"next": f"/ui/{PROBE}"})
    pages = [refused, *[await operator.get(path) for path in paths]]
    pages += [await operator.get(path, params=params) for path, params in asked]
    shown = [found.source for found in pages]
    assert [text for text in shown if "<script>" in text or "<img" in text] == []
    assert [index for index, text in enumerate(shown) if "&lt;script&gt;" not in text] == [6]  # passes name nothing


INVISIBLE = "a\u202egpj.\u200bexe\x07"
SEEN_AS = "a\\u202egpj.\\u200bexe\\x07"


async def test_characters_that_would_hide_or_turn_text_around_are_shown_by_their_numbers(db, operator):
    options = {"recipient": f"{INVISIBLE}@example.org", "message_class": INVISIBLE, "claimed_by": INVISIBLE}
    await old_claim(db, INVISIBLE, cause=INVISIBLE, **options)
    await event(db, INVISIBLE, "none", kind="unknown", message_id=INVISIBLE, reason=INVISIBLE)
    await event(db, None, "accepted", message_id=f"nobodys {INVISIBLE}")
    await reconcile(db)
    form = (await operator.get("/ui/feeds")).form("/ui/feeds")
    await operator.send(form, feed="mg", verb="pause", reason=INVISIBLE)
    wire_key = (await row(db, INVISIBLE))["wire_key"]
    for path in ("/ui/", "/ui/sends", f"/ui/sends/{wire_key}", "/ui/feeds", "/ui/reports/unknown"):
        shown = await operator.get(path)
        assert SEEN_AS in shown.text
        assert [char for char in INVISIBLE if not char.isprintable() and char in shown.text] == []
    listed = await operator.get("/ui/sends", params={"class": INVISIBLE})
    assert ("class", INVISIBLE) in listed.form("/ui/sends").fields  # what forms send is what was asked for
    assert SEEN_AS in listed.text


@pytest.mark.parametrize(
    ("key", "seen_as"), [(" ", r"\x20"), (" k-1", r"\x20k-1"), ("k-1 ", r"k-1\x20"), ("\u3000", r"\u3000")]
)
async def test_a_key_of_spaces_can_be_seen_clicked_and_found(db, operator, key, seen_as):
    await claim(db, "k-1")
    await claim(db, key)
    wire_key = (await row(db, key))["wire_key"]
    assert f'href="/ui/sends/{wire_key}"><code>{seen_as}</code>' in (await operator.get("/ui/sends")).source
    found = await operator.send((await operator.get("/ui/")).forms[0], key=key)
    assert (found.url, f"Send {seen_as} " in found.text) == (f"/ui/sends/{wire_key}", True)


async def test_no_two_fields_of_a_page_have_the_same_id(db):
    feeds = {name: settings().feeds["mg"] for name in ("all", "mg")}
    async with page(db, settings(feeds=feeds)) as person:
        shown = await person.sign_in(OPS, "/ui/feeds")
    assert [name for name, n in Counter(re.findall(' id="([^"]*)"', shown.source)).items() if n > 1] == []
    assert len(set(re.findall("<summary>.*</summary>", shown.source))) == 3  # of all feeds, and of the one named all


async def test_a_recipient_is_shown_on_the_page_of_his_send_and_nowhere_else(db, operator):
    with capture_logs() as logs:
        found = await held(db, recipient="ada@example.org")
        await event(db, KEY, "none", kind="unknown", recipient="ada@example.org", reason="no box ada@example.org")
        shown = await operator.get(f"/ui/sends/{found['wire_key']}")
        await operator.send(shown.form("/ui/sends/.+"), verb="release", reason="ada@example.org wrote")
        paths = ("/ui/", "/ui/sends", "/ui/feeds", "/ui/passes", *(f"/ui/reports/{n}" for n in REPORTS))
        others = [await operator.get(path) for path in paths]
    assert "recipient ada@example.org" in shown.text
    assert [page.url for page in others if "example.org" in page.source] == []
    assert "ada" not in str(logs)
    found = await operator.send(others[0].forms[0], key=KEY)
    assert ("order.receipt" in found.text, "example.org" in found.url) == (True, False)


REPORTS = ("duplicates", "vanished", "unknown")


async def test_a_send_is_found_by_either_key_under_a_namespace(db, operator):
    await db.execute("UPDATE installation SET namespace = 'shop'")
    await claim(db, "plain-key")
    wire_key = (await row(db, "plain-key"))["wire_key"]
    for key in ("plain-key", f" {wire_key} "):
        found = await operator.send((await operator.get("/ui/")).forms[0], key=key)
        assert (found.status, found.url) == (200, f"/ui/sends/{wire_key}")
    missing = await operator.send((await operator.get("/ui/")).forms[0], key="no such")
    assert (missing.status, "no send and no event has this key" in missing.text) == (404, True)
    assert (await operator.send((await operator.get("/ui/")).forms[0], key="k" * 256)).status == 422


def links(shown: Page, rel: str) -> list[str]:
    return [unescape(href) for href in re.findall(f'<a href="([^"]*)" rel="{rel}">', shown.source)]


async def walked(operator: Person, path: str) -> list[list[str]]:
    """Return the sends of each page of a list."""
    pages = []
    while True:
        shown = await operator.get(path)
        assert shown.status == 200
        pages.append([value.split(":")[0] for name, value in shown.form("/ui/sends").choices if name == "send"])
        assert bool(links(shown, "first")) == (len(pages) > 1)
        if not (then := links(shown, "next")):
            return pages
        path = then[0]


async def test_a_list_shows_each_send_once_in_the_order_of_their_next_look_however_many_there_are(db, operator):
    await old_claims(db, "k", 101, timedelta(0))  # of one moment
    await old_claims(db, "later", 10)
    await old_claims(db, "other", 10, feed="sg")
    pages = await walked(operator, "/ui/sends?feed=mg")
    assert [len(found) for found in pages] == [50, 50, 11]
    listed = [key for found in pages for key in found]
    assert len(set(listed)) == 111
    looks = {r["wire_key"]: r["next_check_at"] for r in await db.fetch("SELECT wire_key, next_check_at FROM send_log")}
    assert listed == sorted(listed, key=lambda key: (looks[key], key))


async def test_a_filter_that_fits_few_of_very_many_finds_them(db, operator):
    await old_claims(db, "k", 2100)
    for number in range(2):
        await claim(db, f"rare-{number}", message_class="rare")
    assert await walked(operator, "/ui/sends?class=rare") == [["rare-0", "rare-1"]]
    assert (await operator.get("/ui/sends?class=nobodys")).text.count("No such send") == 1


AS_STORED = (" news ", "news", "news\t")


@pytest.mark.parametrize("name", AS_STORED)
async def test_a_filter_takes_a_class_and_a_reason_as_they_are_stored(db, operator, name):
    for number, one in enumerate(AS_STORED):
        await held(db, f"held-{number}", message_class=one)
        fence = (await claim(db, f"failed-{number}", message_class=one))["fence"]
        assert await fail(db, f"failed-{number}", fence, one, not_sent=False) == "failed"
    wanted = AS_STORED.index(name)
    for field in ("class", "reason"):
        listed = await operator.get("/ui/sends?" + urlencode({"state": "failed", field: name}))
        assert [number for number in range(3) if f"failed-{number}" in listed.source] == [wanted]
    (link,) = re.findall(f'href="([^"]*;{re.escape(urlencode({"class": name}))})"', (await operator.get("/ui/")).source)
    form = (await operator.get(unescape(link))).form("/ui/sends")
    await operator.send(form, which="all", verb="fail", reason="too old by now")
    assert [n for n in range(3) if await state(db, f"held-{n}") == "failed"] == [wanted]


MOVE_ON = "UPDATE send_log SET next_check_at = clock_timestamp() + interval '1 day' WHERE wire_key = $1"


class MovingOn:
    """A connection, after whose first look at sends a pass moves the next look of one of them on."""

    def __init__(self, connection: asyncpg.Connection, wire_key: str) -> None:
        self.fetchval, self._connection, self._wire_key = connection.fetchval, connection, wire_key
        self.looks = 0

    async def fetch(self, query: str, *given: object) -> list[asyncpg.Record]:
        found = await self._connection.fetch(query, *given)
        self.looks += 1
        if self.looks == 1:
            await self._connection.execute(MOVE_ON, self._wire_key)
        return found


async def test_a_send_that_a_pass_moves_on_while_a_page_is_read_hides_no_other(db):
    await old_claims(db, "k", 1100)
    for key in ("rare-0", "rare-1", "rare-2"):
        await claim(db, key, message_class="rare")
    await db.execute("UPDATE send_log SET next_check_at = '2000-01-01Z' WHERE wire_key = 'rare-0'")
    async with db.acquire() as connection:
        moving = MovingOn(connection, "rare-0")
        first = await read_claims(moving, Wanted(message_class="rare"), None, 1)
        rest = await read_claims(connection, Wanted(message_class="rare"), first.then, 10)
    assert moving.looks > 1
    assert [send.wire_key for send in first.sends] == ["rare-0"]
    assert {send.wire_key for send in rest.sends} >= {"rare-1", "rare-2"}


async def test_failed_sends_are_listed_the_newest_first(db, operator):
    for number in range(60):
        fence = (await claim(db, f"k-{number:02}"))["fence"]
        await fail(db, f"k-{number:02}", fence, not_sent=False)
    pages = await walked(operator, "/ui/sends?state=failed")
    assert [key for found in pages for key in found] == [f"k-{number:02}" for number in reversed(range(60))]


async def test_a_list_calls_sends_as_status_does(db, operator):
    await held(db, "k-1")
    await held(db, "k-2", message_class="news")
    await claim(db, "k-3")
    await fail(db, "k-4", (await claim(db, "k-4"))["fence"], not_sent=True)
    await old_claim(db, "k-5", feed="sg")
    async with db.acquire() as connection:
        groups = (await read_status(connection, settings(), lambda: datetime.now(UTC))).undecided
    assert {group.state for group in groups} == {"held", "claimed", "released"}
    for group in groups:
        asked = {"state": group.state, "feed": group.feed, "reason": group.reason, "class": group.message_class}
        shown = await operator.get("/ui/sends", params=asked)
        assert Counter(name for name, _ in shown.form("/ui/sends").choices)["send"] == group.n


ODD_LINKS = (
    "sends?state=odd",
    "sends?after=odd",
    "sends?after=2026-01-01~k",
    "sends?after=0001-01-01T00:00:00%2B23:59~k",
    "sends?after=9999-12-31T23:59:59-23:59~k",
    "passes?before=odd",
    pytest.param("passes?before=" + "9" * 5000, id="a long number"),
)


@pytest.mark.parametrize("link", ODD_LINKS)
async def test_a_link_that_names_nothing_is_refused(operator, link):
    assert (await operator.get(f"/ui/{link}")).status == 400


async def test_passes_are_listed_the_newest_first(db, operator):
    for _ in range(3):
        await reconcile(db)
    await db.execute(
        "INSERT INTO pass (who, counts) SELECT 'filled', '{\"held:silent\": 3}' FROM generate_series(1, 60)"
    )
    first = await operator.get("/ui/passes")
    assert "held:silent 3" in first.text
    assert "test" not in first.text
    second = await operator.get(links(first, "next")[0])
    assert second.text.count("filled") == 10
    assert second.text.count(" s test everything") == 3
    assert (links(second, "next"), links(second, "first")) == ([], ["/ui/passes"])


async def test_reports_show_duplicates_and_unknown_events(db, operator):
    await claim(db, "k-1")
    evidence = json.dumps({"because": "two_attempts", "acceptances": []})
    await db.execute("INSERT INTO duplicate VALUES ('k-1', 'duplicate', clock_timestamp(), 'mg', $1)", evidence)
    await event(db, "nobodys-key")
    assert "k-1 k-1 duplicate mg" in (await operator.get("/ui/reports/duplicates")).text
    unknown = await operator.get("/ui/reports/unknown")
    assert "mg unknown delivered 1" in unknown.text
    assert 'href="/ui/sends/nobodys-key"' in unknown.source
    assert (await operator.get("/ui/reports/vanished")).status == 200
    assert (await operator.get("/ui/reports/nothing")).status == 404


async def test_every_answer_keeps_foreign_code_out_and_pages_are_kept_nowhere(db, operator):
    for path, status in (("/ui/", 200), ("/ui/nothing", 404), ("/ui/sign-in", 200), ("/ui/static/ui.css", 200)):
        shown = await operator.get(path)
        policy = shown.headers["Content-Security-Policy"]
        assert (shown.status, "default-src 'none'" in policy, "unsafe" in policy) == (status, True, False)
        assert (shown.headers["X-Content-Type-Options"], shown.headers["X-Frame-Options"]) == ("nosniff", "DENY")
        assert ("no-store" in shown.headers["Cache-Control"]) == ("static" not in path)
        assert [word for word in (" style=", "onclick", "javascript:", "<style") if word in shown.source] == []
    assert (await operator.get("/ui/static/pages.py")).status == 404


async def test_a_browser_keeps_a_static_file_only_under_the_address_of_what_it_was_given(operator):
    """While two versions run behind a balancer a page of the new one may ask the old one for its style."""
    address = re.findall(r"/ui/static/ui\.css\?v=\w+", (await operator.get("/ui/")).source)[0]
    assert "immutable" in (await operator.get(address)).headers["Cache-Control"]
    for other in ("/ui/static/ui.css?v=0123456789ab", "/ui/static/ui.css"):
        assert (await operator.get(other)).headers["Cache-Control"] == "no-cache"


async def test_without_a_database_a_page_says_so_and_nothing_is_known_of_what_was_asked():
    async with page(None) as person:
        shown = await person.sign_in(OPS)
        assert (shown.status, "the database is not available now" in shown.text) == (503, True)
        form_token = dict(shown.forms[-1].fields)["form_token"]
        given = {"form_token": form_token, "feed": "mg", "verb": "pause", "reason": "why"}
        asked = await person.post("/ui/feeds", given)
        assert (asked.status, "is not known: look before you repeat it" in asked.text) == (503, True)


async def test_what_the_database_did_not_answer_is_not_called_refused(db, operator):
    await held(db)
    form = (await send_page(operator, db)).form("/ui/sends/.+")
    async with db.acquire() as other, other.transaction():
        await other.execute("SELECT FROM send_log FOR UPDATE")
        shown = await operator.send(form, verb="fail", reason="why")
    assert (shown.status, "fail refused" in shown.text) == (503, False)
    assert "fail: the database did not answer: whether it was done is not known" in shown.text


async def test_a_mistake_of_ours_is_a_page_and_a_log_line(operator, monkeypatch):
    monkeypatch.setattr("reconciler.ui.pages.judge", lambda *_: 1 / 0)
    with capture_logs() as logs:
        shown = await operator.get("/ui/")
    assert (shown.status, "ZeroDivisionError" in shown.source) == (500, False)
    assert [line["reason"] for line in logs if line["event"] == "ui_request_failed"] == ["ZeroDivisionError"]


# Around it


@pytest.mark.parametrize(
    ("ui", "refusal"),
    [
        ({"proxy_header": "X-User"}, "has a proxy_header that anybody could send"),
        ({"proxy_header": "X User", "proxy_networks": ["10.0.0.0/8"]}, "is no name of a header"),
        ({"proxy_networks": ["10.0.0.1/8"]}, "is no network"),
        ({"session_key": "short"}, "is too short to sign with"),
    ],
)
def test_settings_that_would_let_in_anybody_are_refused(ui, refusal):
    with pytest.raises(ValidationError, match=refusal):
        UiSettings(**ui)


async def test_whoever_may_read_may_look_at_a_send_over_http_and_no_more(db):
    await claim(db, KEY)
    async with api(db, ApiSettings(tokens=TOKENS)) as sender:
        reader = Sender(sender.client, READER)
        assert (await reader.look(KEY))[0] == 200
        assert [(await asked)[0] for asked in (reader.claim(), reader.decide("release"))] == [403, 403]


async def test_the_daemon_serves_the_page_where_somebody_may_look(dsn, tmp_path):
    config = write_config(tmp_path)
    given = {"RECONCILER_DATABASE__URL": dsn}
    async with serving(config, "--only", "reconciler", **given) as server:
        await server.becomes(200)
        assert await server.status("/ui/") == 404
    given["RECONCILER_API__TOKENS__OPS__HASH"] = hash_of(OPS)
    given["RECONCILER_API__TOKENS__OPS__SCOPES"] = "operate"
    async with serving(config, "--only", "reconciler", **given) as server:
        await server.becomes(200)
        given_in = {"data": {"token": OPS}, "allow_redirects": False}
        async with server.session.post(f"{server.url}/ui/sign-in", **given_in) as answer:
            cookie = answer.headers["Set-Cookie"].split(";")[0]
        async with server.session.get(f"{server.url}/ui/feeds", headers={"Cookie": cookie}) as answer:
            assert answer.status == 200
            assert Page(200, await answer.text(), answer.headers, "").has_form("/ui/feeds")
        assert await server.stop() == 0
