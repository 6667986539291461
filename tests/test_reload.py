# SPDX-License-Identifier: Apache-2.0
"""SIGHUP reads the settings again: a secret is rotated, a token revoked, a feed added, while requests go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from serving import FEEDS, Server, environment, sample, serving, until, write_config

from reconciler.configuration.settings import ConfigError, Settings, load_settings
from reconciler.serving.reload import merge
from reconciler.tokens import hash_of
from webhooks.provider import Delivery
from webhooks.registry import PROVIDERS

OLD, NEW = FEEDS["mg"].secrets[0], "key-the-rotated-one-0123"
pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The file that the secret of a feed is read from, beside the settings."""
    path = tmp_path / "signing-key"
    path.write_text(OLD)
    return path


@pytest.fixture
def config(tmp_path: Path, secret: Path) -> Path:
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace(f'["{OLD}"]', f'["file:{secret}", "file:{secret}-next"]'))
    secret.with_name("signing-key-next").write_text(OLD)
    return config


@pytest.fixture
async def server(config: Path, dsn: str) -> AsyncIterator[Server]:
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as running:
        await running.becomes(200)
        yield running


def signed(secret: str, key: str) -> Delivery:
    return PROVIDERS["mailgun"].sample("delivered", key, replace(FEEDS["mg"], secrets=(secret,)), datetime.now(UTC))


async def reloaded(server: Server, event: str = "settings_reloaded") -> dict[str, object]:
    """Send SIGHUP and return the line that tells how it went."""
    before = len(server.events(event))
    server.process.send_signal(signal.SIGHUP)

    async def told() -> bool:
        assert server.process.returncode is None, "it ended"
        return len(server.events(event)) > before

    await until(told, event)
    return server.events(event)[-1]


async def test_a_rotated_secret_is_taken_and_no_delivery_is_lost_meanwhile(
    server: Server, secret: Path, db: asyncpg.Pool
) -> None:
    """While deliveries signed with the old one keep coming, which is listed beside the new one."""
    rotated, numbers, answers = asyncio.Event(), iter(range(10_000)), list[int]()

    async def provider() -> None:
        while not rotated.is_set():
            answers.append(await server.deliver("mg", signed(OLD, f"old-{next(numbers)}")))

    delivering = [asyncio.create_task(provider()) for _ in range(4)]
    assert await server.deliver("mg", signed(NEW, "new-0")) == 401
    secret.with_name("signing-key-next").write_text(NEW)
    for _ in range(5):
        line = await reloaded(server)

    async def enough() -> bool:
        return len(answers) > 20

    await until(enough, "deliveries meanwhile")
    rotated.set()
    await asyncio.gather(*delivering)
    assert await server.deliver("mg", signed(NEW, "new-1")) == 200
    assert set(answers) == {200}
    assert await db.fetchval("SELECT count(*) FROM provider_event WHERE wire_key LIKE 'old-%'") == len(answers)
    assert line["needs_restart"] == []
    assert server.events("settings_reloaded")[0]["changed"] == ["feeds.mg"]
    secret.write_text(NEW)
    await reloaded(server)
    assert await server.deliver("mg", signed(OLD, "old-again")) == 401
    assert not [line for line in server.lines if NEW in str(line) or OLD in str(line)]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("[feeds.mg]\nprovidr = 'mailgun'", "did you mean"), ("[feeds", "reconciler.toml"), (None, "reconciler.toml")],
)
async def test_settings_that_can_not_be_used_are_refused_in_one_line_and_the_old_ones_stay(
    server: Server, config: Path, broken: str | None, reason: str
) -> None:
    good = config.read_text()
    if broken is None:
        config.unlink()
    else:
        config.write_text(broken)
    line = await reloaded(server, "settings_refused")
    assert reason in str(line["reason"])
    assert "\n" not in str(line["reason"])
    assert len(server.events("settings_refused")) == 1
    assert await server.deliver("mg", signed(OLD, "k")) == 200
    config.write_text(good)
    await reloaded(server)
    assert await server.deliver("mg", signed(OLD, "k-2")) == 200


async def test_a_secret_file_that_is_gone_takes_no_other_secret_with_it(
    server: Server, config: Path, secret: Path
) -> None:
    secret.unlink()
    config.write_text(config.read_text().replace("basic:hooks:0123456789", "basic:hooks:changed"))
    await reloaded(server, "settings_refused")
    assert await server.deliver("mg", signed(OLD, "k")) == 200
    assert await server.deliver("sg", sample("sg", "delivered", "k")) == 200


async def test_feeds_come_and_go(server: Server, config: Path) -> None:
    text = config.read_text()
    assert await server.deliver("mg-two", signed(NEW, "k")) == 404
    added = f'\n[feeds.mg-two]\nprovider = "mailgun"\nsecrets = ["{NEW}"]\n'
    config.write_text(text.replace("[feeds.re]", "[feeds.re-two]") + added)
    line = await reloaded(server)
    assert line["changed"] == ["feeds.mg-two", "feeds.re", "feeds.re-two"]
    assert await server.deliver("mg-two", signed(NEW, "k")) == 200
    assert await server.deliver("re", sample("re", "delivered", "k")) == 404
    assert await server.deliver("re-two", sample("re", "delivered", "k")) == 200
    assert await server.status("/webhooks/mg-two") == 200


async def test_a_revoked_token_opens_nothing_any_more_and_a_new_one_does(
    config: Path, dsn: str, tmp_path: Path
) -> None:
    def written(*tokens: str) -> str:
        hashes = ", ".join(f'"{hash_of(token)}"' for token in tokens)
        return f'{text}\n[api.tokens.shop]\nhash = [{hashes}]\nscopes = ["send"]\n'

    async def answered(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with server.session.get(f"{server.url}/v1/sends/k", headers=headers) as answer:
            return answer.status

    text = config.read_text()
    config.write_text(written("espr_old"))
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        assert (await answered("espr_old"), await answered("espr_new")) == (404, 401)
        config.write_text(written("espr_new"))
        await reloaded(server)
        assert (await answered("espr_old"), await answered("espr_new")) == (401, 404)


@pytest.mark.parametrize("before", ["", "[api.tokens.shop]\nhash = ['{}']\nscopes = ['send']\n"], ids=["none", "send"])
async def test_the_first_token_opens_what_nobody_was_let_into_before(config: Path, dsn: str, before: str) -> None:
    """The API and the page, whether or not there was a token for another purpose."""

    async def answered(path: str) -> int:
        headers = {"Authorization": "Bearer espr_first"}
        async with server.session.get(server.url + path, headers=headers, allow_redirects=False) as answer:
            return answer.status

    config.write_text(f"{config.read_text()}\n{before.format(hash_of('espr_send'))}")
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        assert [await answered(path) for path in ("/v1/sends/k", "/ui/", "/ui/sign-in")] == [401, 404, 404]
        first = f'[api.tokens.ann]\nhash = ["{hash_of("espr_first")}"]\nscopes = ["read"]\n'
        config.write_text(config.read_text() + first)
        line = await reloaded(server)
        assert (line["changed"], line["needs_restart"]) == (["api"], [])
        assert [await answered(path) for path in ("/v1/sends/k", "/ui/", "/ui/sign-in")] == [404, 303, 200]
        signed_in = {"token": "espr_first", "next": "/ui/"}
        async with server.session.post(f"{server.url}/ui/sign-in", data=signed_in, allow_redirects=False) as answer:
            assert answer.status == 303
            cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in answer.cookies.items())
        async with server.session.get(f"{server.url}/ui/", headers={"Cookie": cookie}) as answer:
            assert answer.status == 200, "it has a database, too"


async def test_whoever_is_signed_in_by_a_revoked_token_is_signed_out(config: Path, dsn: str) -> None:
    def written(*tokens: str) -> str:
        hashes = ", ".join(f'"{hash_of(token)}"' for token in tokens)
        return f'{text}\n[api.tokens.ann]\nhash = [{hashes}]\nscopes = ["read"]\n'

    async def entered(token: str) -> dict[str, str]:
        async with server.session.post(
            f"{server.url}/ui/sign-in", data={"token": token, "next": "/ui/"}, allow_redirects=False
        ) as answer:
            return {name: morsel.value for name, morsel in answer.cookies.items()}

    async def looked(cookies: dict[str, str]) -> int:
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        async with server.session.get(f"{server.url}/ui/", headers={"Cookie": header}, allow_redirects=False) as answer:
            return answer.status

    text = config.read_text()
    config.write_text(written("espr_old"))
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        old = await entered("espr_old")
        assert await looked(old) == 200
        config.write_text(written("espr_new"))
        await reloaded(server)
        assert await looked(old) == 303
        assert await entered("espr_old") == {}
        assert await looked(await entered("espr_new")) == 200


async def test_what_needs_a_restart_is_named_and_left(server: Server, config: Path) -> None:
    config.write_text(config.read_text().replace("port = 0", "port = 1") + "\n[rules]\ngrace = '1h'\n")
    line = await reloaded(server)
    assert (line["changed"], line["needs_restart"], line["level"]) == (["rules"], ["receiver"], "warning")
    assert await server.status("/readyz") == 200


async def test_a_hang_up_before_the_database_was_reached_is_taken_too(config: Path, secret: Path) -> None:
    async with serving(config, RECONCILER_DATABASE__URL="postgresql://postgres@127.0.0.1:1/nowhere") as server:
        await server.told("database_unavailable")
        secret.write_text(NEW)
        await reloaded(server)
        assert await server.deliver("mg", signed(NEW, "k")) == 503
        assert await server.deliver("mg", signed("key-nobody-has-this-one-00", "k")) == 401
        assert await server.stop() == 0


# The first terminal that the leader of a session opens is its own: of that it hears when it is closed.
TAKE_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"


async def test_a_closed_terminal_ends_serve_as_any_stop_does(config: Path, dsn: str) -> None:
    """That is a hang-up, too, but nobody asked for anything."""
    ours, its = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TAKE_TERMINAL, sys.executable, "-m", "reconciler", "serve"),
        cwd=config.parent,
        env=environment(config, RECONCILER_DATABASE__URL=dsn),
        stdin=its,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    os.close(its)
    async with aiohttp.ClientSession() as session:
        server = await Server(process, session).serving()
        await server.becomes(200)
        await reloaded(server)  # somebody's wish: the terminal is there
        os.close(ours)
        assert await server.ended() == 0
        assert server.events("stopped")


# What may be taken


def settings(text: str, tmp_path: Path) -> Settings:
    (tmp_path / "reconciler.toml").write_text(text)
    return load_settings(tmp_path / "reconciler.toml", {}, PROVIDERS)


def test_a_queue_stays_as_it_is_and_its_secrets_are_taken(tmp_path: Path) -> None:
    queue = (
        '[feeds.q]\nprovider = "mailgun"\nsecrets = ["{0}"]\n'
        'queue_url = "https://sqs.eu-west-1.amazonaws.com/000000000000/{1}"\n'
    )
    running = settings(queue.format("first-secret", "events"), tmp_path)
    merged = merge(running, settings(queue.format("second-secret", "others"), tmp_path))
    assert merged.settings.feeds["q"].secrets == ("second-secret",)
    assert merged.settings.feeds["q"].queue_url == running.feeds["q"].queue_url
    assert (merged.changed, merged.waiting) == (["feeds.q"], ["feeds.q"])
    gone = merge(running, settings("", tmp_path))
    assert (list(gone.settings.feeds), gone.changed, gone.waiting) == (["q"], [], ["feeds.q"])


def test_another_provider_under_the_name_of_a_feed_needs_a_restart(tmp_path: Path) -> None:
    running = settings('[feeds.a]\nprovider = "mailgun"\nsecrets = ["first-secret"]', tmp_path)
    merged = merge(running, settings('[feeds.a]\nprovider = "brevo"\nsecrets = ["bearer:second"]', tmp_path))
    assert merged.settings.feeds == running.feeds
    assert merged.waiting == ["feeds.a"]


def test_what_only_a_restart_could_allow_is_refused(tmp_path: Path) -> None:
    """Sends may be deleted sooner once requests about them are remembered for less time: both, or neither."""
    running = settings('[retention]\nrows = "60d"\n[api]\nidempotency_retention = "50d"', tmp_path)
    with pytest.raises(ConfigError, match="as long as it is not restarted"):
        merge(running, settings('[retention]\nrows = "31d"', tmp_path))
