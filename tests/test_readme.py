# SPDX-License-Identifier: Apache-2.0
"""The README is true: what a newcomer types works on a machine that has only Python, and its tables are facts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import indent
from typing import Any

import aiohttp
import asyncpg
import pytest
from kit import claim, confirm, fail, heard_neighbours, old_claim, policies, reconcile, row
from program import Program
from serving import serving as running
from serving import write_config

from reconciler import feeds, guard
from reconciler.breakable.esp import esp
from reconciler.breakable.fate import Fate
from reconciler.migrate import migrate, pending
from reconciler.settings import Settings, load_settings
from reconciler.status import read_status
from reconciler.tokens import hash_of, new_token
from reconciler.units import format_duration
from reconciler.why import tell
from webhooks.event import Event, Kind, Testimony, wire_key
from webhooks.inbox import Inbox
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
COPIED = (
    "reconciler",
    "webhooks",
    "migrations",
    "examples",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
)


WHSEC = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
FOUND_BY = {"key": "our key", "recipient": "recipient and time", "id": "the id we chose", "nothing": "-"}


def provider_table() -> str:
    """The table as the facts give it."""
    return "".join(
        f"| `{name}` | {facts.title} | {format_duration(facts.redelivers_for)} | "
        f"{format_duration(facts.same_key_window) if facts.same_key_window else '-'} | "
        f"{'its delivery' if facts.first_event_is_delivery else 'its acceptance'} | "
        f"{FOUND_BY[facts.finds_by]} | {'yes' if facts.lists else '-'} |\n"
        for name, facts in ((name, provider.facts) for name, provider in PROVIDERS.items())
    )


def test_the_provider_table_says_what_the_facts_say() -> None:
    assert provider_table() in README


def snippets(language: str, *words: str) -> list[str]:
    """The code blocks of a language that hold these words."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return [block for block in blocks if all(word in block for word in words)]


@pytest.mark.parametrize(
    ("fate", "outcome", "state", "again"),
    [
        (Fate.ANSWERED, "sent", "sent", "already_sent"),
        (Fate.REFUSED, "failed", "failed", "failed"),
        (Fate.BUSY, "released", "pending", "released"),
        (Fate.LATE_ERROR, "waiting", "claimed", "in_flight"),
        (Fate.RESET, "waiting", "claimed", "in_flight"),
    ],
)
async def test_the_sender_in_python_tells_each_answer_as_what_it_proves(
    db: asyncpg.Pool, fate: Fate, outcome: str, state: str, again: str
) -> None:
    (sender,) = snippets("python", "send_once")
    names: dict[str, Any] = {}
    exec(sender, names)  # noqa: S102 - it is what readers copy
    order = {"id": 1234, "email": "a@example.com", "text": "Thank you."}
    async with esp("mailgun") as provider, aiohttp.ClientSession() as session:
        provider.next_fates.extend([fate, fate])
        sent = await names["send_receipt"](db, session, provider.url, order)
        assert sent.outcome == outcome
        assert set(provider.taken) <= {wire_key("order.receipt:1234:a@example.com")}
        assert dict(await db.fetchrow("SELECT state, message_class, fingerprint IS NOT NULL AS has FROM send_log")) == {
            "state": state,
            "message_class": "receipts",
            "has": True,
        }
        assert (await names["send_receipt"](db, session, provider.url, order)).outcome == again
        assert provider.taken.total() == fate.taken


def http_blocks() -> list[str]:
    return re.findall(r"<!-- http -->\n```sh\n(.*?)```", README, re.DOTALL)


async def test_the_sender_with_curl_claims_confirms_and_fails(db: asyncpg.Pool, dsn: str, tmp_path: Path) -> None:
    token = new_token()
    settings = (
        '[feeds.mailgun-main]\nprovider = "mailgun"\nsecrets = ["key-0123456789abcdef"]\n'
        f'[api.tokens.shop]\nhash = ["{hash_of(token)}"]\n'
    )
    async with running(write_config(tmp_path, settings), RECONCILER_DATABASE__URL=dsn) as daemon:
        await daemon.becomes(200)
        environment = {**os.environ, "URL": daemon.url, "TOKEN": token}
        claiming, reporting = http_blocks()
        claimed = json.loads(await curl(claiming, environment))
        assert (claimed["outcome"], claimed["stamp"]["body"]) == ("claimed", {"v:send_key": claimed["wire_key"]})
        repeated = json.loads(await curl(claiming, environment))
        assert (repeated["outcome"], repeated.get("fence")) == ("in_flight", None)
        said = await curl(reporting, {**environment, "FENCE": str(claimed["fence"])})
    assert [json.loads(part)["outcome"] for part in said.replace("}{", "}\n{").splitlines()] == ["sent", "sent"]
    row = await db.fetchrow("SELECT state, provider_message_id FROM send_log")
    assert tuple(row) == ("sent", "20260501.1234@example.com")


async def curl(script: str, environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec("/bin/sh", "-ec", script, env=environment, stdout=subprocess.PIPE)
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def test_the_sender_as_a_block_submits_once(db: asyncpg.Pool) -> None:
    (block,) = snippets("python", "guard.sending")
    told: list[str] = []
    names: dict[str, Any] = {"guard": guard, "print": told.append}
    exec("async def run(pool, session, url, key, form):\n" + indent(block, "    "), names)  # noqa: S102 - as above
    async with esp("mailgun") as provider, aiohttp.ClientSession() as session:
        for _ in range(2):
            await names["run"](db, session, provider.url, "order:1", {"to": "a@example.com"})
        assert (told, sum(provider.taken.values())) == (["sent", "already_sent"], 1)


async def test_the_sender_in_sql_claims_confirms_and_fails(db: asyncpg.Pool) -> None:
    (script,) = snippets("sql", "send_claim_commit")
    claim_it, confirm_it, fail_it = [line.partition(";")[0] for line in script.splitlines()]
    options = re.search("options: '(.*)'", script)
    assert options is not None
    key = "order.receipt:1234:a@example.com"
    claimed = await db.fetchrow(claim_it, key, "mailgun-main", options[1])
    assert (claimed["outcome"], claimed["wire_key"]) == ("claimed", wire_key(key))
    waiting = await db.fetchrow(fail_it, key, claimed["fence"], "time-out", None)
    confirmed = await db.fetchrow(confirm_it, key, claimed["fence"], "<20260501.1234@example.com>")
    assert (waiting["outcome"], confirmed["outcome"]) == ("waiting", "sent")
    row = await db.fetchrow("SELECT provider_message_id, fingerprint, submit_by - claimed_at AS time FROM send_log")
    assert tuple(row) == ("20260501.1234@example.com", "5f2c8e", timedelta(seconds=30))


async def test_a_worker_gets_what_may_be_sent_again_and_nothing_else(db: asyncpg.Pool) -> None:
    (query,) = snippets("sql", "send_claim_released_commit")
    statement = query.partition(";")[0]
    for key in ("free-1", "free-2", "running", "sent", "failed"):
        fence = (await claim(db, key, "mailgun-main"))["fence"]
        if key.startswith("free"):
            await fail(db, key, fence, "refused", not_sent=True)
    await fail(db, "failed", (await row(db, "failed"))["fence"], "422", not_sent=False)
    await confirm(db, "sent", (await row(db, "sent"))["fence"])
    await db.fetch("SELECT * FROM send_enqueue('new', 'mailgun-main', '{}')")
    assert [found["send_key"] for found in json.loads(await db.fetchval(statement))] == ["free-1", "free-2"]
    assert json.loads(await db.fetchval(statement)) == []
    async with db.acquire() as connection, connection.transaction():
        with pytest.raises(asyncpg.InvalidTransactionTerminationError):
            await connection.fetchval(statement)


async def test_another_role_can_do_everything_at_run_time_once_it_is_granted_what_the_readme_says(
    empty_dsn: str, tmp_path: Path
) -> None:
    admin = await asyncpg.connect(empty_dsn)
    try:
        await admin.execute(
            "CREATE ROLE mail_owner LOGIN; CREATE ROLE mail_app LOGIN; ALTER SCHEMA public OWNER TO mail_owner"
        )
        await migrate(empty_dsn.replace("postgres@", "mail_owner@"))
        (grants,) = snippets("sh", "reconciler migrate --grant")
        (tmp_path / "reconciler.toml").touch()
        program = Program(tmp_path / "reconciler.toml", empty_dsn.replace("postgres@", "mail_owner@"))
        assert (await program(*shlex.split(grants.partition("#")[0])[1:])).exit_code == 0
        await use_everything(empty_dsn.replace("postgres@", "mail_app@"))
    finally:
        await admin.execute("ALTER SCHEMA public OWNER TO postgres; DROP OWNED BY mail_app, mail_owner CASCADE")
        await admin.execute("DROP ROLE mail_app, mail_owner")
        await admin.close()


async def use_everything(dsn: str) -> None:
    """What daemon, senders and operators do, each once."""
    assert await pending(dsn) == []
    async with asyncpg.create_pool(dsn, min_size=1, max_size=3) as pool:
        await old_claim(pool, "order:1")
        await heard_neighbours(pool)
        assert (await reconcile(pool)).counts["released:absent"] == 1
        await pool.fetch("SELECT provider_event_make_partitions()")
        inbox = Inbox()
        await inbox.open(pool)
        await inbox.store(
            "mg",
            [
                Event(
                    kind=Kind.DELIVERED,
                    testimony=Testimony.ACCEPTED,
                    message_id="m",
                    event_id="e",
                    send_key="order:1",
                    raw=b"{}",
                )
            ],
        )
        await inbox.close()
        async with pool.acquire() as connection:
            await feeds.pause(connection, "mg", "why", "ann")
            await feeds.resume(connection, "mg", "why", "ann")
            await read_status(connection, Settings(), lambda: datetime.now(UTC))
        await fail(pool, "order:2", await old_claim(pool, "order:2"), "422", not_sent=False)
        released = await pool.fetchrow("SELECT outcome FROM operator_release('order:2', 'why', 'ann')")
        assert released["outcome"] == "released"
        assert (await tell(pool, policies(), "order:1")).state == "pending"


def test_the_settings_of_the_readme_are_taken_by_file_and_by_environment(tmp_path: Path) -> None:
    file = tmp_path / "reconciler.toml"
    (tmp_path / "sendgrid").write_text("basic:hooks:0123456789")
    (tmp_path / "mailgun-signing").write_text("signing-key")
    (tmp_path / "mailgun-api").write_text("api-key")
    file.write_text("".join(snippets("toml")).replace("/run/secrets", str(tmp_path)))
    (exports,) = snippets("sh", "export RECONCILER_DATABASE__URL")
    written = dict(line.removeprefix("export ").split("=", 1) for line in exports.splitlines())
    settings = load_settings(
        file,
        {**written, "SENDGRID_KEY": "basic:hooks:other-word", "OUTBOX_SECRET": WHSEC, "HOME": "/nowhere"},
        PROVIDERS,
    )
    assert settings.database.url == "postgresql://app@db.internal/mail"
    assert settings.feeds["sendgrid-main"].secrets == ("basic:hooks:other-word",)
    assert settings.feeds["mailgun-eu"].api_key == "api-key"
    assert settings.archive.url == "s3://mail-archive/raw"
    assert (settings.rules.grace, settings.classes["marketing"].on_unknown) == (timedelta(minutes=30), "fail")
    assert load_settings(file, {"HOME": "/nowhere", "OUTBOX_SECRET": WHSEC}, PROVIDERS).feeds[
        "sendgrid-main"
    ].secrets == ("basic:hooks:0123456789",)


def first_command() -> str:
    found = re.search(r"```sh\n(python3 -m venv .*serve)\n```", README)
    assert found is not None
    return found[1]


def quickstart_blocks() -> list[str]:
    return re.findall(r"<!-- quickstart -->\n```sh\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what is needed to install, as a newcomer has it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "quickstart-data"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.fixture
def bare_machine(checkout: Path) -> dict[str, str]:
    """An environment whose PATH holds a Python and nothing else: no git, curl, psql, gcc, nor PostgreSQL."""
    programs = checkout / "bin-of-this-machine"
    programs.mkdir()
    # Not a link to the program itself: a version manager's launcher decides by its own place.
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (programs / "python3").symlink_to(base)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    return {**kept, "PATH": str(programs), "HOME": str(checkout), "RECONCILER_RECEIVER__PORT": str(port)}


@pytest.fixture
def serving(checkout: Path, bare_machine: dict[str, str]) -> Iterator[dict[str, str]]:
    """README's first command, run until it serves; yields the environment."""
    log = (checkout / "serve.log").open("wb")
    server = subprocess.Popen(
        ["/bin/sh", "-c", f"exec 2>&1; {first_command()}"],
        cwd=checkout,
        env=bare_machine,
        stdout=log,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until_ready(server, bare_machine["RECONCILER_RECEIVER__PORT"], checkout / "serve.log")
        yield bare_machine
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
        log.close()


def wait_until_ready(server: subprocess.Popen[bytes], port: str, log: Path) -> None:
    end = time.monotonic() + 240  # it installs first
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"not ready: {log.read_text()[-3000:]}")


def sh(script: str, checkout: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", script],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def why(key: str, checkout: Path, environment: dict[str, str]) -> dict[str, object]:
    script = f"RECONCILER_CONFIG=examples/quickstart.toml .venv/bin/reconciler why {key} --json"
    told: dict[str, object] = json.loads(sh(script, checkout, environment))
    return told


@pytest.mark.index
@pytest.mark.timeout(400)
def test_the_first_command_and_a_few_lines_show_a_send_found_and_another_released(
    checkout: Path, serving: dict[str, str]
) -> None:
    claims, explanations = quickstart_blocks()
    assert claims.count("trigger accepted") == 1
    said = sh(claims, checkout, serving)
    assert said.count("claimed") == 12
    assert said.count('"stored": 1') == 11
    end = time.monotonic() + 60
    while (told := why("order:4", checkout, serving))["state"] != "pending":
        assert time.monotonic() < end, told
        time.sleep(0.5)
    assert why("order:12", checkout, serving)["state"] == "sent"
    explained = sh(claims.splitlines()[0] + "\n" + explanations, checkout, serving)
    assert "proves acceptance" in explained
    assert "released: absent" in explained
    assert "answered before and 7 after it, 0 not heard of" in explained
    assert "risk of a duplicate 0." in explained
