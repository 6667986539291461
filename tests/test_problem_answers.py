# SPDX-License-Identifier: Apache-2.0
"""Whatever the process answers as an error is `application/problem+json`, but for the pages that browsers are shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus

import aiohttp
import pytest
from aiohttp import hdrs, web
from structlog.testing import capture_logs

from reconciler.configuration.settings import Settings
from reconciler.metrics import FeedFigures
from reconciler.serving.daemon import Daemon, Only
from webhooks.fetch import open_fetch
from webhooks.receiver import make_runner

SETTINGS = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}}})


@asynccontextmanager
async def answering(app: web.Application) -> AsyncIterator[str]:
    """Run an application as `serve` does; give its address."""
    runner = make_runner(app, 1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def daemon(only: Only = None) -> AsyncIterator[tuple[Daemon, str]]:
    """A daemon that has not reached its database yet."""
    one = Daemon(SETTINGS, only)
    async with open_fetch() as fetch, answering(one.app(fetch)) as url:
        yield one, url


async def problem(answer: aiohttp.ClientResponse, status: int) -> dict[str, object]:
    """Assert that an answer is such a problem, and return it."""
    assert (answer.status, answer.headers[hdrs.CONTENT_TYPE]) == (status, "application/problem+json")
    told: dict[str, object] = await answer.json()
    assert (told["type"], told["title"], told["status"]) == ("about:blank", HTTPStatus(status).phrase, status)
    assert isinstance(told["detail"], str)
    assert told["detail"]
    return told


@pytest.mark.parametrize("only", ["receiver", "reconciler"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/nope", 404),
        ("POST", "/nope", 404),
        ("POST", "/webhooks", 404),
        ("POST", "/webhooks/nobodys", 404),
        ("POST", "/webhooks/mg/", 404),
        ("POST", "/healthz", 405),
        ("PUT", "/metrics", 405),
        ("GET", "/ui", 404),
        ("GET", "/ui/", 404),
        ("GET", "/ui/static/ui.css", 404),
        ("POST", "/ui/sign-in", 404),
    ],
)
async def test_what_is_not_served_is_a_problem(only: Only, method: str, path: str, status: int) -> None:
    async with daemon(only) as (_, url), aiohttp.ClientSession() as session:
        async with session.request(method, url + path) as answer:
            await problem(answer, status)
        async with session.head(f"{url}/nope") as answer:
            assert (answer.status, answer.content_type) == (404, "application/problem+json")


async def test_a_method_that_is_not_served_says_which_are() -> None:
    async with daemon() as (_, url), aiohttp.ClientSession() as session, session.post(f"{url}/healthz") as answer:
        await problem(answer, 405)
        assert answer.headers[hdrs.ALLOW] == "GET,HEAD"


async def test_what_a_client_expects_and_nobody_does_is_a_problem() -> None:
    async with daemon() as (_, url), aiohttp.ClientSession() as session:
        for path in ("/healthz", "/webhooks/mg"):
            async with session.post(url + path, headers={hdrs.EXPECT: "a-miracle"}) as answer:
                await problem(answer, 417)


async def test_not_ready_is_a_problem_that_has_what_ready_has() -> None:
    async with daemon() as (one, url), aiohttp.ClientSession() as session:
        one.health.note_check("the database is not available")
        async with session.get(f"{url}/readyz") as answer:
            told = await problem(answer, 503)
        assert (told["ready"], told["problem"]) == (False, "the database is not available")
        assert told["detail"] == told["problem"]
        one.health.note_check(None)
        one.health.note_feeds({"mg": FeedFigures(datetime.now(UTC) - timedelta(minutes=1), None, 0)})
        async with session.get(f"{url}/readyz") as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            assert set(await answer.json()) == {"ready", "problem", "feeds"} <= set(told)


async def test_figures_at_a_port_that_many_answer_at_are_a_problem() -> None:
    async with daemon() as (one, url), aiohttp.ClientSession() as session:
        one.health.shared_port = int(url.rpartition(":")[2])
        async with session.get(f"{url}/metrics") as answer:
            assert "each worker" in str((await problem(answer, 421))["detail"])


async def test_a_redirection_stays_one() -> None:
    async def page(_: web.Request) -> web.Response:
        raise web.HTTPFound("/there")

    app = web.Application()
    app.router.add_get("/", page)
    async with (
        answering(app) as url,
        aiohttp.ClientSession() as session,
        session.get(url, allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers[hdrs.LOCATION]) == (302, "/there")


async def test_a_mistake_of_ours_is_a_problem_and_logged_without_what_it_quotes() -> None:
    async def fails(_: web.Request) -> web.Response:
        raise RuntimeError("about ada@example.org")

    app = web.Application()
    app.router.add_get("/", fails)
    async with answering(app) as url, aiohttp.ClientSession() as session:
        with capture_logs() as logs:
            for _ in range(3):
                async with session.get(url) as answer:
                    assert "ada" not in str(await problem(answer, 500))
    (line,) = [line for line in logs if line["log_level"] != "debug"]
    assert (line["log_level"], line["event"], line["error"]) == ("error", "request_failed", "RuntimeError")
    assert "ada" not in str(line)
