# SPDX-License-Identifier: Apache-2.0
"""The client of providers' APIs: patient where it helps, bounded, and one clear reason where it gives up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from webhooks import api as apis
from webhooks.api import HttpApi, open_session
from webhooks.asking import MAX_PAGES, ApiError, ApiReply, Pages, items

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
Handler = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def serving(answer: Handler, pause: float = 0.0) -> AsyncIterator[tuple[str, HttpApi, list[web.Request]]]:
    asked: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    async with TestServer(app) as server, open_session(2.0) as session:
        yield str(server.make_url("/x")), HttpApi(session, lambda: NOW, pause=pause, first_pause=0.0), asked


def in_turn(*answers: web.StreamResponse) -> Handler:
    left = iter(answers)
    return lambda _: next(left)


async def test_an_answer_is_its_status_and_its_json() -> None:
    async with serving(lambda _: web.json_response({"a": 2**60})) as (url, api, _):
        assert await api.call("GET", url) == ApiReply(200, {"a": 2**60})


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_busy_api_is_asked_again_whatever_the_method(status: int, method: str) -> None:
    answers = in_turn(web.Response(status=status), web.Response(status=status), web.json_response(1))
    async with serving(answers) as (url, api, asked):
        assert (await api.call(method, url)).value == 1
    assert len(asked) == 3


async def test_what_may_have_been_done_is_not_asked_again() -> None:
    async with serving(lambda _: web.Response(status=500)) as (url, api, asked):
        with pytest.raises(ApiError, match="^server_error: the API answered 500"):
            await api.call("POST", url, json={})
        assert len(asked) == 1
        with pytest.raises(ApiError, match="^server_error"):
            await api.call("GET", url)
    assert len(asked) == 1 + apis.TRIES


async def test_a_post_that_got_no_answer_is_not_made_again() -> None:
    def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(hang_up) as (url, api, asked):
        with pytest.raises(ApiError, match="^unreachable"):
            await api.call("POST", url, json={})
        assert len(asked) == 1
        with pytest.raises(ApiError, match="^unreachable"):
            await api.call("GET", url)
    assert len(asked) > apis.TRIES


@pytest.mark.parametrize("after", ["3600", format_datetime(NOW + timedelta(hours=1))])
async def test_an_api_that_asks_for_a_long_pause_is_left_alone(after: str) -> None:
    async with serving(lambda _: web.Response(status=429, headers={"Retry-After": after})) as (url, api, asked):
        with pytest.raises(ApiError, match="^rate_limited: the API asked to come back in 3600 s"):
            await api.call("GET", url)
    assert len(asked) == 1


@pytest.mark.parametrize("after", ["soon", "-1", "1e9", "Thu, 99 Foo", ""])
async def test_a_retry_after_that_means_nothing_does_no_harm(after: str) -> None:
    busy = web.Response(status=429, headers={"Retry-After": after})
    async with serving(in_turn(busy, web.json_response(1))) as (url, api, _):
        assert (await api.call("GET", url)).value == 1


REASONS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 400: "refused", 302: "refused", 500: "server_error"}


@pytest.mark.parametrize("status", REASONS)
async def test_a_refusal_names_its_reason_and_never_the_address_or_the_key(status: int) -> None:
    answer = web.Response(status=status, text="about ada@example.org", headers={"Location": "http://elsewhere/"})
    async with serving(lambda _: answer) as (url, api, _):
        with pytest.raises(ApiError) as failed:
            await api.call("POST", f"{url}?recipient=ada@example.org", headers={"Authorization": "hidden"})
    assert failed.value.reason == REASONS[status]
    assert len(str(failed.value).splitlines()) == 1
    assert not [word for word in ("ada@", "hidden", url) if word in str(failed.value)]


async def test_an_expected_status_is_an_answer() -> None:
    async with serving(lambda _: web.json_response({"code": "NotFound"}, status=404)) as (url, api, _):
        assert await api.call("GET", url, expect=(404,)) == ApiReply(404, {"code": "NotFound"})


@pytest.mark.parametrize("text", ["<html>", '{"a": ', "\x00"])
async def test_an_answer_that_is_no_json_is_garbage(text: str) -> None:
    async with serving(lambda _: web.Response(text=text)) as (url, api, _):
        with pytest.raises(ApiError, match="^garbage: "):
            await api.call("GET", url)


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "MAX_BYTES", 1000)
    async with serving(lambda _: web.Response(body=b" " * 2000)) as (url, api, _):
        with pytest.raises(ApiError, match="longer than 1000 bytes"):
            await api.call("GET", url)


async def test_nobody_there_is_said_without_the_url() -> None:
    async with serving(lambda _: web.Response()) as (_, api, _asked):
        with pytest.raises(ApiError, match=r"^unreachable: no connection to the API \(\w+\): check api_url") as failed:
            await api.call("GET", "http://127.0.0.1:9/?to=ada@example.org")
    assert "ada@" not in str(failed.value)


async def test_calls_keep_their_distance() -> None:
    async with serving(lambda _: web.json_response(1), pause=0.05) as (url, api, _):
        began = time.monotonic()
        for _ in range(5):
            await api.call("GET", url)
    assert time.monotonic() - began >= 4 * 0.05


def test_a_cursor_that_comes_again_has_no_end() -> None:
    pages = Pages()
    pages.turn("a")
    pages.turn("b")
    with pytest.raises(ApiError, match="^endless: the API's answer did not end after 2 pages"):
        pages.turn("a")


def test_ever_new_cursors_have_no_end_either() -> None:
    pages = Pages()
    for n in range(MAX_PAGES):
        pages.turn(str(n))
    with pytest.raises(ApiError, match="^endless"):
        pages.turn("one more")


@pytest.mark.parametrize("value", [None, 7, "x", {}, {"a": None}, {"a": {"b": {}}}, []])
def test_an_answer_of_another_shape_is_never_an_empty_list(value: object) -> None:
    with pytest.raises(ApiError, match="^garbage: no list at a.b of"):
        items(value, "a", "b")
    assert items({"a": {"b": [1]}}, "a", "b") == [1]
