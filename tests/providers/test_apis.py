# SPDX-License-Identifier: Apache-2.0
"""What every provider's look-up promises. A provider gets all of it from its server in `apis/`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from api_kit import NOW, FakeApi, Sent, asked, search
from conformance_kit import check

from webhooks.asking import ApiError, Query, Searches
from webhooks.event import Answer
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Parsed
from webhooks.registry import PROVIDERS

KEY, CONTROL = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474", "c" * 48
ADA = "ada@example.org"
FAKES: dict[str, type[FakeApi]] = {
    file.stem: importlib.import_module(f"apis.{file.stem}").Fake
    for file in sorted((Path(__file__).parent / "apis").glob("*.py"))
}
each_api = pytest.mark.parametrize("name", FAKES)


def others(n: int = 8) -> list[Sent]:
    """Sends of the same minutes, to somebody else and to the same recipient."""
    return [
        Sent(f"{i:048x}", (ADA, "ana.reyes@example.com")[i % 2], f"{i:08x}-2222-4333-8444-555555555555")
        for i in range(n)
    ]


def message_id(name: str, wire_key: str) -> str | None:
    return PROVIDERS[name].stamp(wire_key).message_id


def sent(name: str, wire_key: str, **more: object) -> Sent:
    return replace(Sent(wire_key, message_id=message_id(name, wire_key) or f"{wire_key[:8]}-9999-4333-8444-5"), **more)


def sought(name: str) -> Sought:
    return Sought(
        KEY, NOW - timedelta(minutes=42), NOW - timedelta(minutes=41), "ana.reyes@example.com", message_id(name, KEY)
    )


def settled(name: str) -> datetime:
    """When the API has had its time to show the send."""
    return sought(name).submit_by + PROVIDERS[name].facts.settles_after


def control(name: str) -> Sought:
    at = NOW - timedelta(minutes=40)
    return Sought(CONTROL, at, at + timedelta(minutes=1), ADA, message_id(name, CONTROL))


async def witness(name: str, fake: FakeApi, **more: object) -> Found:
    later = settled(name)
    async with asked(name, fake, **more) as (feed, api):  # type: ignore[arg-type]
        found = await look_up(PROVIDERS[name], feed, api, sought(name), control(name), later)
    check(Parsed(found.events))
    return found


def test_who_can_be_asked_has_a_server_in_the_tests() -> None:
    assert set(FAKES) == {name for name, provider in PROVIDERS.items() if isinstance(provider, Searches)}
    assert {name for name, p in PROVIDERS.items() if p.facts.finds_by != "nothing" or p.facts.lists} == set(FAKES)


@each_api
async def test_an_accepted_send_is_found_among_others_on_whichever_page(name: str) -> None:
    for place in (0, 4, 8):
        sends = others()
        sends.insert(place, sent(name, KEY))
        found = await witness(name, FAKES[name](sends))
        assert (found.answer, found.reason) == (Answer.ACCEPTED, "")
        assert found.events


TELLS_NO_REJECTION = {"elastic_email", "postmark"}
"""Their lists show a send that was taken and never sent like any other."""


@each_api
async def test_what_the_provider_will_never_send_is_rejected(name: str) -> None:
    found = await witness(name, FAKES[name]([*others(), sent(name, KEY, rejected=True)]))
    assert found.answer is (Answer.ACCEPTED if name in TELLS_NO_REJECTION else Answer.REJECTED)


@each_api
async def test_a_send_that_is_not_there_while_the_control_is_is_absent(name: str) -> None:
    assert (await witness(name, FAKES[name]([*others(), sent(name, CONTROL, recipient=ADA)]))).answer is Answer.ABSENT


@each_api
async def test_without_its_control_absence_means_nothing(name: str) -> None:
    found = await witness(name, FAKES[name](others()))
    assert (found.answer, found.reason) == (Answer.SILENT, "control_not_found")
    async with asked(name, FAKES[name](others())) as (feed, api):
        found = await look_up(PROVIDERS[name], feed, api, sought(name), None, settled(name))
        assert (found.answer, found.reason) == (Answer.SILENT, "no_control")
        early = replace(control(name), claimed_at=sought(name).submit_by - timedelta(seconds=1))
        found = await look_up(PROVIDERS[name], feed, api, sought(name), early, settled(name))
        assert (found.answer, found.reason) == (Answer.SILENT, "no_control")


@each_api
async def test_before_it_settles_and_once_it_forgets_absence_means_nothing(name: str) -> None:
    fake = FAKES[name]([*others(), sent(name, CONTROL, recipient=ADA)])
    forgotten = sought(name).claimed_at + PROVIDERS[name].facts.kept_for
    times = {
        "not_settled": settled(name) - timedelta(seconds=1),
        "": settled(name),
        "too_old": forgotten,
    }
    async with asked(name, fake) as (feed, api):
        for reason, now in times.items():
            found = await look_up(PROVIDERS[name], feed, api, sought(name), control(name), now)
            assert (found.answer, found.reason) == (Answer.SILENT if reason else Answer.ABSENT, reason)


@each_api
async def test_a_busy_api_is_asked_again(name: str) -> None:
    busy: Iterator[int] = iter([429, 503])

    def spoil(_: web.Request) -> web.Response | None:
        status = next(busy, None)
        return web.Response(status=status, headers={"Retry-After": "0"}) if status else None

    found = await witness(name, FAKES[name]([*others(), sent(name, KEY)]), spoil=spoil)
    assert found.answer is Answer.ACCEPTED


FAULTS = {
    "rate_limited": lambda _: web.Response(status=429),
    "server_error": lambda _: web.Response(status=500),
    "unauthorized": lambda _: web.Response(status=401),
    "forbidden": lambda _: web.Response(status=403),
    "garbage": lambda _: web.Response(text="<html>"),
}


@each_api
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_api_that_fails_is_silent_and_says_why(name: str, fault: str) -> None:
    found = await witness(name, FAKES[name]([sent(name, KEY)]), spoil=FAULTS[fault])
    assert (found.answer, found.reason) == (Answer.SILENT, fault)
    assert found.hint
    assert len(found.hint.splitlines()) == 1


@each_api
@pytest.mark.parametrize("text", ["[]", "{}", "7", '"x"', "null", '{"error": "no"}', '[7, null, {"a": []}]'])
async def test_an_answer_of_another_shape_is_never_taken_for_absence(name: str, text: str) -> None:
    fake = FAKES[name]([*others(), sent(name, CONTROL, recipient=ADA)])

    def spoil(_: web.Request) -> web.Response:
        return web.json_response(text=text)

    assert (await witness(name, fake, spoil=spoil)).answer is Answer.SILENT


@each_api
async def test_an_endless_answer_is_not_read_for_ever(name: str) -> None:
    if PROVIDERS[name].facts.finds_by == "id":
        pytest.skip("it answers about one send, on one page")
    found = await witness(name, FAKES[name](others(), endless=True))
    assert (found.answer, found.reason) in {(Answer.SILENT, "endless"), (Answer.SILENT, "too_many")}


@each_api
async def test_without_a_credential_it_says_which_setting_is_missing(name: str) -> None:
    fake = FAKES[name]([sent(name, KEY)])
    async with asked(name, fake) as (feed, api):
        found = await look_up(PROVIDERS[name], replace(feed, api_key=""), api, sought(name), None, NOW)
    assert (found.answer, found.reason) == (Answer.SILENT, "unconfigured")
    assert "feeds.main.api_key" in found.hint
    assert not fake.requests


@pytest.mark.parametrize("name", [name for name in FAKES if PROVIDERS[name].facts.lists])
async def test_a_back_fill_lists_every_send_of_the_span_and_carries_its_key(name: str) -> None:
    sends = [*others(), sent(name, KEY), sent(name, CONTROL, at=NOW - timedelta(days=2))]
    async with asked(name, FAKES[name](sends)) as (feed, api):
        events = await search(name, feed, api, Query(NOW - timedelta(hours=3), NOW))
    check(Parsed(events))
    keys = {event.send_key for event in events if event.send_key}
    assert {f"{i:048x}" for i in range(8)} | {KEY} <= keys
    assert {event.testimony for event in events} == {"accepted"}
    assert all(event.message_id for event in events)


@pytest.mark.parametrize("name", [name for name in FAKES if PROVIDERS[name].facts.lists])
async def test_a_back_fill_of_an_endless_list_ends_with_an_error(name: str) -> None:
    async with asked(name, FAKES[name](others(), endless=True)) as (feed, api):
        with pytest.raises(ApiError, match="^(endless|too_many)"):
            await search(name, feed, api, Query(NOW - timedelta(hours=3), NOW))
