# SPDX-License-Identifier: Apache-2.0
"""The loopback provider keeps to each provider's own words: our sender's side, receiver and look-ups understand it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import asyncpg
import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, web
from clients import boto_client
from kit import claim, reconcile, row
from serving import until

import reconciler.breakable
from reconciler.breakable.esp import SHAPES, Esp, Webhook, esp, request
from reconciler.breakable.fate import SAID, Fate, Fates, Telling
from reconciler.composition import feeds
from reconciler.configuration.settings import Settings
from webhooks.api import open_api
from webhooks.counters import Counters
from webhooks.event import Answer, wire_key
from webhooks.fetch import open_fetch
from webhooks.inbox import Inbox
from webhooks.intake import Intake
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Feed
from webhooks.receiver import add_receiver, make_runner
from webhooks.registry import PROVIDERS

ADA = "ada@example.com"
LIMIT = 30.0
"""Seconds that anything is waited for; only a failing test waits that long."""

every_shape = pytest.mark.parametrize("shape", SHAPES)
askable = pytest.mark.parametrize("shape", [name for name in SHAPES if name != "ses"])


def now() -> datetime:
    return datetime.now(UTC)


def configured(settings: dict[str, Any]) -> Feed:
    return feeds(Settings.model_validate({"feeds": {"main": settings}}))["main"]


@asynccontextmanager
async def receiving(db: asyncpg.Pool, settings: dict[str, Any]) -> AsyncIterator[str]:
    """Run the real receiver with one feed, and give the address of its endpoint."""
    inbox = Inbox()
    await inbox.open(db)
    async with open_fetch() as fetch:
        app = web.Application()
        add_receiver(app, {"main": configured(settings)}, Intake(inbox, fetch, now, Counters()), fetch)
        runner = make_runner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/webhooks/main"
        finally:
            await runner.cleanup()
            await inbox.close()


@asynccontextmanager
async def heard(db: asyncpg.Pool, shape: str, folder: Path, **options: Any) -> AsyncIterator[Esp]:
    """Run a provider whose webhooks go to the real receiver."""
    async with esp(shape, **options) as provider, receiving(db, provider.feed(folder)) as url:
        provider.webhook = Webhook(url)
        yield provider


async def submit(provider: Esp, shape: str, key: str, recipient: str = ADA) -> tuple[str, str | None]:
    """Return what our sender's side makes of the answer, and the message id; the error's name where there is none."""
    headers, body = request(shape, key, recipient)
    try:
        async with (
            ClientSession(timeout=ClientTimeout(total=LIMIT)) as session,
            session.post(provider.url, headers=headers, data=body) as answer,
        ):
            got = {name.lower(): value for name, value in answer.headers.items()}
            (reply,) = PROVIDERS[shape].read_reply(answer.status, got, await answer.read())
            return reply.meaning, reply.message_id
    except ClientError as error:
        return type(error).__name__, None


async def submit_and_give_up(provider: Esp, shape: str, key: str) -> None:
    """Submit to a provider that does not answer, until it has decided the request's fate."""
    asking = asyncio.create_task(submit(provider, shape, key))
    before = provider.met.total()

    async def decided() -> bool:
        return provider.met.total() > before

    await until(decided, "the request's fate")
    answered, _ = await asyncio.wait({asking}, timeout=0.05)
    assert not answered
    asking.cancel()
    await asyncio.wait({asking})


async def told(provider: Esp) -> None:
    async with asyncio.timeout(LIMIT):
        await provider.told()


async def stored(db: asyncpg.Pool) -> list[tuple[str, str, str, str]]:
    events = await db.fetch("SELECT kind, message_id, wire_key, recipient FROM provider_event")
    return sorted(tuple(event) for event in events)


MEANT = {
    Fate.ANSWERED: "accepted",
    Fate.RESET: "ClientOSError",
    Fate.LATE_ERROR: "ambiguous",
    Fate.REFUSED: "rejected",
    Fate.BUSY: "not_sent",
    Fate.DOWN: "ServerDisconnectedError",
}


@pytest.mark.parametrize("fate", MEANT)
@every_shape
async def test_each_answer_looks_to_the_sender_as_it_should_and_the_truth_is_counted(shape: str, fate: Fate) -> None:
    async with esp(shape) as provider:
        provider.next_fates.append(fate)
        meaning, message_id = await submit(provider, shape, "order.receipt:1")
        assert meaning == MEANT[fate]
        assert provider.taken == ({wire_key("order.receipt:1"): 1} if fate.taken else {})
        assert message_id == (provider.messages[0].id if fate is Fate.ANSWERED else None)
        assert (provider.arrived.is_set(), provider.met) == (fate.taken, {fate: 1})


@pytest.mark.parametrize("fate", [Fate.HANGS, Fate.LOST])
@every_shape
async def test_where_it_never_answers_the_truth_is_counted_too(shape: str, fate: Fate) -> None:
    async with esp(shape) as provider:
        provider.next_fates.append(fate)
        await submit_and_give_up(provider, shape, "order.receipt:1")
        assert provider.taken == ({wire_key("order.receipt:1"): 1} if fate.taken else {})
        assert (provider.arrived.is_set(), provider.met) == (fate.taken, {fate: 1})


@every_shape
async def test_its_signed_webhooks_are_taken_and_decide_a_send_whose_answer_was_lost(
    db: asyncpg.Pool, shape: str, tmp_path: Path
) -> None:
    await claim(db, "order.receipt:1", feed="main", recipient=ADA)
    async with heard(db, shape, tmp_path, fates=Fates(reset=1)) as provider:
        await submit(provider, shape, "order.receipt:1")
        await told(provider)
        assert set(provider.answers) == {200}
        ids = {message.id for message in provider.messages}
    assert {(message_id, recipient) for _, message_id, _, recipient in await stored(db)} == {(*ids, ADA)}
    await reconcile(db)
    found = await row(db, "order.receipt:1")
    assert (found["state"], found["delivery"]) == ("sent", "delivered")


@every_shape
async def test_everything_it_says_is_understood(db: asyncpg.Pool, shape: str, tmp_path: Path) -> None:
    async with heard(db, shape, tmp_path, telling=Telling(kinds=SAID)) as provider:
        await submit(provider, shape, "order-1")
        await told(provider)
        acknowledged = provider.acknowledged["order-1"]
    taking = [] if shape == "postmark" else ["sent" if shape in ("ses", "resend") else "queued"]
    assert [kind for kind, *_ in await stored(db)] == ["bounced", "complained", "deferred", "delivered", *taking]
    assert acknowledged == set(SAID) - ({"accepted"} if shape == "postmark" else set())


@every_shape
async def test_the_credential_of_a_feed_is_carried(db: asyncpg.Pool, shape: str, tmp_path: Path) -> None:
    secret = "basic:hooks:0123456789"
    settings = {"provider": shape, "secrets": [secret]}
    async with receiving(db, settings) as url, esp(shape, webhook=Webhook(url, secret)) as provider:
        assert provider.feed(tmp_path)["secrets"] == [secret]
        await submit(provider, shape, "order-1")
        await told(provider)
        assert set(provider.answers) == {200}


@pytest.mark.parametrize("shape", ["ses", "sendgrid", "postmark"])
async def test_a_secret_that_signs_nothing_is_refused_at_once(shape: str) -> None:
    async with esp(shape) as provider:
        with pytest.raises(ValueError, match="sign"):
            provider.webhook = Webhook("http://127.0.0.1:1/", "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE")


async def test_what_comes_twice_late_and_in_disorder_is_stored_once(db: asyncpg.Pool, tmp_path: Path) -> None:
    keys = [f"order-{n}" for n in range(40)]
    telling = Telling(delay=(0.0, 0.1), tail=0.2, tail_delay=(0.2, 0.3), twice=1.0, shuffled=True)
    async with heard(db, "mailgun", tmp_path, telling=telling) as provider:
        await asyncio.gather(*(submit(provider, "mailgun", key) for key in keys))
        await told(provider)
        assert provider.answers == {200: 4 * len(keys)}
    assert Counter((key, kind) for kind, _, key, _ in await stored(db)) == dict.fromkeys(
        [(key, kind) for key in keys for kind in ("queued", "delivered")], 1
    )


async def test_sendgrid_posts_batches(db: asyncpg.Pool, tmp_path: Path) -> None:
    async with heard(db, "sendgrid", tmp_path, telling=Telling(batch=100)) as provider:
        await asyncio.gather(*(submit(provider, "sendgrid", f"order-{n}") for n in range(60)))
        await told(provider)
        assert provider.answers == {200: 2}
    assert len(await stored(db)) == 120


async def test_what_nobody_takes_is_posted_until_somebody_does(db: asyncpg.Pool, tmp_path: Path) -> None:
    async with esp("mailgun", webhook=Webhook("http://127.0.0.1:1/", again=(0.02,))) as provider:
        await submit(provider, "mailgun", "order-1")

        async def in_vain() -> bool:
            return provider.answers[0] > 2

        await until(in_vain, "posts to where nobody listens")
        async with receiving(db, {**provider.feed(), "secrets": ["another key"]}) as stranger:
            provider.webhook = Webhook(stranger, again=(0.02,))

            async def refused() -> bool:
                return provider.answers[401] > 2

            await until(refused, "posts that are refused")
        assert provider.acknowledged == {}
        async with receiving(db, provider.feed()) as url:
            provider.webhook = Webhook(url)
            await told(provider)
    assert len(await stored(db)) == 2


async def test_a_refusal_that_ends_a_delivery_at_this_provider_ends_it_here(db: asyncpg.Pool) -> None:
    stranger = {"provider": "ses", "secrets": ["basic:a:b"]}
    async with esp("ses") as provider, receiving(db, stranger) as url:
        provider.webhook = Webhook(url)
        await submit(provider, "ses", "order-1")
        await told(provider)  # SNS never comes back after a 401
    assert (provider.answers, provider.acknowledged) == ({401: 2}, {})


async def test_resend_sends_nothing_again_for_a_key_that_it_knows(db: asyncpg.Pool) -> None:
    async with esp("resend") as provider:
        provider.next_fates.extend([Fate.HANGS, Fate.ANSWERED, Fate.ANSWERED])
        await submit_and_give_up(provider, "resend", "order-1")
        assert await submit(provider, "resend", "order-1") == ("accepted", provider.messages[0].id)
        assert await submit(provider, "resend", "order-1", "another@example.com") == ("accepted", None)
        assert provider.taken == {"order-1": 1}
        provider.fates = Fates(refused=1)
        assert await submit(provider, "resend", "order-1") == ("accepted", provider.messages[0].id)
        assert await submit(provider, "resend", "order-2") == ("rejected", None)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "resend"])
async def test_the_others_take_a_repeated_request_again(shape: str) -> None:
    async with esp(shape) as provider:
        first, second = await submit(provider, shape, "order-1"), await submit(provider, shape, "order-1")
        assert (provider.taken["order-1"], first[1] == second[1]) == (2, False)


@askable
async def test_its_api_can_be_asked_what_became_of_a_send(shape: str) -> None:
    async with esp(shape) as provider:
        for n in range(3):
            await submit(provider, shape, f"order-{n}", f"r{n}@example.com")
        found = await asked(provider, shape, "order-1", "r1@example.com")
        assert found.answer is Answer.ACCEPTED
        assert {(event.send_key, event.message_id) for event in found.events} == {("order-1", provider.messages[1].id)}
        never = await asked(provider, shape, "order-7", "r7@example.com", control="order-2")
        assert never.answer is Answer.ABSENT


@askable
async def test_its_api_lies_behind(shape: str) -> None:
    async with esp(shape, lag=3600) as provider:
        await submit(provider, shape, "order-1", "r1@example.com")
        assert (
            await asked(provider, shape, "order-1", "r1@example.com", control="order-1")
        ).reason == "control_not_found"
        provider.lag = 0
        assert (await asked(provider, shape, "order-1", "r1@example.com")).answer is Answer.ACCEPTED


async def asked(provider: Esp, shape: str, key: str, recipient: str, *, control: str | None = None) -> Found:
    """Ask as a pass does an hour later."""
    begun = now() - timedelta(seconds=60)
    sought = Sought(key, begun, begun + timedelta(seconds=30), recipient)
    later = Sought(control, now(), now(), f"r{control[-1]}@example.com") if control else None
    async with open_api() as api:
        feed = configured(provider.feed())
        return await look_up(PROVIDERS[shape], feed, api, sought, later, now() + timedelta(hours=1))


@askable
async def test_its_api_is_read_to_the_end_of_many_pages(shape: str) -> None:
    async with esp(shape) as provider:
        for n in range(7):
            await submit(provider, shape, f"order-{n}")
        async with open_api() as api, ClientSession() as session:
            feed = configured(provider.feed())
            params = {"limit": "2", "count": "2", "offset": "4"}
            place = {"mailgun": "/v3/mg.example.com/events", "postmark": "/messages/outbound", "resend": "/emails"}
            if shape in place:
                async with session.get(provider.api_url + place[shape], params=params) as answer:
                    page = await answer.json()
                assert len(page.get("items") or page.get("Messages") or page["data"]) == 2
            found = await look_up(PROVIDERS[shape], feed, api, Sought("order-0", now(), now(), ADA), None, now())
        assert found.answer is Answer.ACCEPTED


async def test_the_event_of_a_look_up_is_the_one_of_the_webhook(db: asyncpg.Pool, tmp_path: Path) -> None:
    telling = Telling(kinds=("accepted",))
    async with heard(db, "mailgun", tmp_path, telling=telling) as provider:
        await submit(provider, "mailgun", "order-1")
        await told(provider)
        found = await asked(provider, "mailgun", "order-1", ADA)
    assert await db.fetchval("SELECT event_id FROM provider_event") == found.events[0].event_id


async def test_amazons_own_client_can_send_by_it(tmp_path: Path) -> None:
    message = {
        "FromEmailAddress": ADA,
        "Destination": {"ToAddresses": [ADA]},
        "Content": {"Simple": {"Subject": {"Data": "hello"}, "Body": {"Text": {"Data": "hello"}}}},
    }
    async with esp("ses") as provider:
        client = boto_client(provider.api_url, 5, {"total_max_attempts": 1})
        sent = await asyncio.to_thread(client.send_email, **PROVIDERS["ses"].stamp("order-1").into(message))
        assert (sent["MessageId"], provider.taken) == (provider.messages[0].id, {"order-1": 1})
        client.close()


@every_shape
async def test_a_request_that_is_none_is_refused_and_meets_no_fate(shape: str) -> None:
    async with esp(shape, fates=Fates(hangs=1)) as provider, ClientSession() as session:
        async with session.post(provider.url, data=b"{}", headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400
        async with session.get(provider.api_url + "/nowhere") as answer:
            assert answer.status == 404
        assert (provider.taken, provider.met) == ({}, {})


async def fates_met(seed: int, keys: list[str]) -> dict[str, str]:
    mixed = Fates(reset=0.1, late_error=0.2, refused=0.2, busy=0.2, down=0.1)
    async with esp("postmark", seed=seed, fates=mixed) as provider:
        answers = await asyncio.gather(*(submit(provider, "postmark", key) for key in keys))
    return {key: meaning for key, (meaning, _) in zip(keys, answers, strict=True)}


async def test_the_same_seed_brings_the_same_fates_in_whichever_order_requests_arrive() -> None:
    keys = [f"order-{n}" for n in range(30)]
    first = await fates_met(7, keys)
    assert await fates_met(7, keys[::-1]) == first
    assert await fates_met(8, keys) != first
    assert len(set(first.values())) > 3


async def test_a_shape_that_there_is_not_is_said() -> None:
    with pytest.raises(ValueError, match="there are sendgrid, ses"):
        request("sparkpost", "order-1", ADA)
    with pytest.raises(ValueError, match="there are sendgrid, ses"):
        async with esp("sparkpost"):
            pass


def test_ses_needs_a_folder_for_its_certificate() -> None:
    with pytest.raises(ValueError, match="folder"):
        SHAPES["ses"]().feed(None)


async def test_the_example_of_its_documentation_works() -> None:
    (example,) = re.findall(r"\n\n((?:    .*\n|\n)+)", reconciler.breakable.__doc__ or "")
    names: dict[str, Any] = {}
    exec(dedent(example), names)  # noqa: S102 - our own text

    async def send_receipt(key: str, recipient: str, *, url: str) -> None:
        headers, body = request("mailgun", key, recipient)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), ClientSession() as session:
                await session.post(url, headers=headers, data=body)

    names["send_receipt"] = send_receipt
    test: Callable[[], Awaitable[None]] = names["test_a_timeout_makes_no_second_mail"]
    await test()
