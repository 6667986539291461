# SPDX-License-Identifier: Apache-2.0
"""`trigger` posts what a provider would post, to a real receiver over loopback."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import asyncpg
import pytest
from aiohttp import web
from kit import claim, reconcile, state

from reconciler.composition import feeds
from reconciler.configuration.settings import Settings
from reconciler.errors import UserError
from reconciler.selftest.trigger import post_samples, receiver_url
from webhooks.counters import Counters
from webhooks.event import Kind
from webhooks.fetch import open_fetch
from webhooks.inbox import Inbox
from webhooks.intake import Intake
from webhooks.provider import Feed, NoSample
from webhooks.receiver import add_receiver, make_runner
from webhooks.registry import PROVIDERS

SETTINGS = Settings.model_validate(
    {
        "feeds": {
            "mg": {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]},
            "re": {"provider": "resend", "secrets": ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="]},
            "pm": {"provider": "postmark", "secrets": ["query:token=a+b%26c", "basic:user:word"]},
            "ses": {"provider": "ses", "topics": ["arn:aws:sns:eu-west-1:000000000000:ses-events"]},
        }
    }
)


def now() -> datetime:
    return datetime.now(UTC)


@asynccontextmanager
async def receiving(db: asyncpg.Pool) -> AsyncIterator[str]:
    """Run a receiver of these feeds and give its address."""
    inbox = Inbox()
    await inbox.open(db)
    async with open_fetch() as fetch:
        app = web.Application()
        add_receiver(app, feeds(SETTINGS), Intake(inbox, fetch, now, Counters()), fetch)
        runner = make_runner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await inbox.close()


@pytest.mark.parametrize("feed", ["mg", "re", "pm"])
async def test_a_sample_is_taken_and_decides_its_sends(db: asyncpg.Pool, feed: str) -> None:
    await claim(db, "order.receipt:1", feed=feed)
    await claim(db, "plain-2", feed=feed)
    async with receiving(db) as base:
        answers = await post_samples(base, feeds(SETTINGS)[feed], "delivered", ["order.receipt:1", "plain-2"], now())
    assert [(a.key, a.status) for a in answers] == [("order.receipt:1", 200), ("plain-2", 200)]
    await reconcile(db)
    assert (await state(db, "order.receipt:1"), await state(db, "plain-2")) == ("sent", "sent")


@pytest.mark.parametrize("kind", ["accepted", "queued", "delivered", "bounced", "deferred", "complained", "rejected"])
@pytest.mark.parametrize("provider", ["mailgun", "resend", "sendgrid", "postmark"])
def test_common_words_ask_for_a_sample_of_every_provider_that_has_one(provider: str, kind: str) -> None:
    feed = Feed("f", provider, ("key-0123456789abcdef", "whsec_MDEyMzQ1Njc4OWFiY2RlZg==", "basic:user:word"))
    if provider == "postmark" and kind in ("accepted", "queued"):  # the first that it says is the delivery
        with pytest.raises(NoSample, match="delivered"):
            PROVIDERS[provider].sample(kind, "key-1", feed, now())
        return
    (event,) = PROVIDERS[provider].parse(PROVIDERS[provider].sample(kind, "key-1", feed, now())).events
    taken = {Kind.QUEUED, Kind.SENT} if kind in ("accepted", "queued") else {Kind(kind)}
    assert (event.send_key, event.kind in taken) == ("key-1", True)


async def test_a_key_is_found_under_a_namespace_too(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET namespace = 'shop'")
    await claim(db, "order:1", feed="mg")
    async with receiving(db) as base:
        await post_samples(base, feeds(SETTINGS)["mg"], "delivered", ["order:1"], now())
    await reconcile(db)
    assert await state(db, "order:1") == "sent"


async def test_an_answer_that_refuses_is_told(db: asyncpg.Pool) -> None:
    stranger = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": ["another-secret-key"]}}})
    async with receiving(db) as base:
        (answer,) = await post_samples(base, feeds(stranger)["mg"], "delivered", ["k"], now())
    assert answer.status == 401


async def test_what_can_not_be_sampled_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="only AWS can sign"):
        await post_samples("http://127.0.0.1:1", feeds(SETTINGS)["ses"], "delivered", ["k"], now())
    with pytest.raises(UserError, match="delivered"):
        await post_samples("http://127.0.0.1:1", feeds(SETTINGS)["mg"], "delivred", ["k"], now())


async def test_no_receiver_is_said_with_what_to_do() -> None:
    with socket.socket() as nobody:  # bound and not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(UserError, match="reconciler serve"):
            await post_samples(base, feeds(SETTINGS)["mg"], "delivered", ["k"], now())


async def test_an_address_that_is_none_is_said() -> None:
    with pytest.raises(UserError, match="can't be posted to"):
        await post_samples("localhost:8080", feeds(SETTINGS)["mg"], "delivered", ["k"], now())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8080"),  # noqa: S104
        ("::", "http://[::1]:8080"),
        ("::1", "http://[::1]:8080"),
        ("hooks.internal", "http://hooks.internal:8080"),
    ],
)
def test_the_receiver_is_found_where_it_listens(host: str, url: str) -> None:
    assert receiver_url(Settings.model_validate({"receiver": {"host": host}})) == url


def test_a_receiver_on_any_free_port_has_to_be_named() -> None:
    with pytest.raises(UserError, match="--url"):
        receiver_url(Settings.model_validate({"receiver": {"port": 0}}))
