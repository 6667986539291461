# SPDX-License-Identifier: Apache-2.0
"""What tests of alerts share: a daemon that is scraped over HTTP, and Prometheus itself to judge what was scraped."""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
import yaml
from aiohttp.test_utils import TestClient
from program import Program
from prometheus_client.parser import text_string_to_metric_families

from reconciler.composition import policies
from reconciler.configuration.settings import Settings
from reconciler.insight.figures import figures
from reconciler.serving.daemon import Daemon
from reconciler.serving.self_check import SelfCheck
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parents[1]
RULES = ROOT / "helm/files/alerts.yaml"

SECRET = "key-0123456789abcdef"
SETTINGS = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": [SECRET]}}})

BEFORE, RISE, LAST = 70, 20, 150
"""Minutes: so long nothing happens, counters then rise so long, and until then all stays as it was scraped."""

EARLIER = "UPDATE feed_delivery SET minute = minute - $1::interval, last_at = last_at - $1::interval"

Scrape = dict[str, float]
"""Values by series. Times are counted from the scrape."""

TIMESTAMP = "_timestamp_seconds"


def alerts() -> dict[str, dict[str, object]]:
    """Return the rules by name."""
    return {
        rule["alert"]: rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]
    }


@dataclass(kw_only=True)
class Scraped:
    """A program, and its metrics before anything happened."""

    folder: Path
    program: Program
    before: Scrape = field(default_factory=dict)

    async def alarms(self, alert: str, finding: str, after: Scrape, minute: int = LAST) -> None:
        """Assert that `status --check` finds it, and that an alert fires on what `/metrics` showed."""
        await finds(self.program, finding)
        await self.fires(alert, after, minute)

    async def fires(self, alert: str, after: Scrape, minute: int = LAST) -> None:
        """Assert that an alert fires on what `/metrics` showed, and not on what it showed before."""
        await asyncio.to_thread(fires, alert, self.before, after, self.folder, minute)


@dataclass(kw_only=True)
class Watched(Scraped):
    """A daemon of which a test moves the parts."""

    daemon: Daemon
    client: TestClient
    db: asyncpg.Pool
    seconds: float = 0.0
    """The clock of the process's look at itself."""

    def __post_init__(self) -> None:
        self._self_check = SelfCheck("host:1", reconciles=True, seconds=lambda: self.seconds)

    async def later(self, minutes: float) -> None:
        """Let so many minutes pass for the process's look at itself, and let it look."""
        self.seconds += minutes * 60
        await self._self_check.tell(self.db)

    async def deliver(self, number: int, secret: str = SECRET) -> int:
        """Let the provider deliver an event, and return its status."""
        feed = Feed("mg", "mailgun", (secret,))
        delivery = PROVIDERS["mailgun"].sample("delivered", f"order-{number}", feed, datetime.now(UTC))
        answer = await self.client.post("/webhooks/mg", data=delivery.body, headers=dict(delivery.headers))
        return answer.status

    async def scrape(self) -> Scrape:
        """Let it read its figures, and return what `/metrics` shows."""
        await figures(self.db, SETTINGS, self.daemon.health.note_feeds, reconciles=True)()
        return await scraped(self.client)


@asynccontextmanager
async def watching(
    dsn: str, db: asyncpg.Pool, aiohttp_client: Callable[..., Any], folder: Path, program: Program
) -> AsyncIterator[Watched]:
    """Give a daemon over a fresh database; its work is done by the tests, one piece at a time."""

    async def no_fetch(_url: str) -> bytes:
        raise AssertionError

    database = SETTINGS.database.model_copy(update={"url": dsn, "data_dir": folder})
    settings = SETTINGS.model_copy(update={"database": database})
    daemon = Daemon(settings, None)
    client = await aiohttp_client(daemon.app(no_fetch))
    await daemon._inbox.open(db)
    await daemon._check(db, None)
    await daemon._passes(db, policies(settings))()
    found = Watched(folder=folder, program=program, daemon=daemon, client=client, db=db)
    found.before = await found.scrape()
    await found.later(0)
    yield found
    await daemon._inbox.close()


async def finds(program: Program, finding: str) -> str:
    """Assert that `status --check` names a finding, with its feed, as one that needs a person, and return all it says.

    A note is named by `note: ` before it; something else needs a person then.
    """
    done = await program("status", "--check")
    assert done.exit_code == 3, done.output
    assert any(line.startswith(f"{finding}: ") for line in done.output.splitlines()), done.output
    return done.output


def fires(alert: str, before: Scrape, after: Scrape, folder: Path, minute: int = LAST) -> None:
    """Assert that an alert did not fire before, and does at a minute; skips where Prometheus is not installed."""
    went = [_went(name, before.get(name), after.get(name)) for name in sorted(before.keys() | after.keys())]
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0'
    checks = [
        {"expr": firing, "eval_time": f"{BEFORE - 1}m"},
        {"expr": firing, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 1}]},
    ]
    test = {"interval": "1m", "input_series": went, "promql_expr_test": checks}
    path = folder / "scraped.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(path))


def series(name: str, **labels: str) -> str:
    """Return the name of a series as it is scraped in a cluster."""
    all_labels = sorted({"namespace": "mail", **labels}.items())
    return f"{name}{{{', '.join(f'{key}={json.dumps(value)}' for key, value in all_labels)}}}"


def value(scrape: Scrape, name: str, **labels: str) -> float | None:
    return scrape.get(series(name, **labels))


async def scraped(client: TestClient | aiohttp.ClientSession, url: str = "") -> Scrape:
    async with client.get(f"{url}/metrics") as answer:
        assert answer.status == 200
        return _read(await answer.text(), time.time())


def _read(text: str, now: float) -> Scrape:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("reconciler_") and not sample.name.endswith("_created"):
                found[series(sample.name, **sample.labels)] = (
                    sample.value - now if TIMESTAMP in sample.name else sample.value
                )
    return found


def _went(name: str, before: float | None, after: float | None) -> dict[str, str]:
    """Return how a series went, as promtool writes it: gauges jump, counters rise, times are those of the last scrape.

    A process that was scraped before goes on to be scraped, but reads and does nothing more; what it doesn't show any
    more ends.
    """
    if after is None:
        return {"series": name, "values": f"{before}x{BEFORE} stale"}
    if TIMESTAMP in name:
        return {"series": name, "values": f"{(0 if before is None else before):.0f}+60x{BEFORE} {BEFORE * 60}x80"}
    first = f"_x{BEFORE}" if before is None else f"{before}x{BEFORE}"
    if "_total{" not in name and "_bucket{" not in name:
        return {"series": name, "values": f"{first} {after}x80"}
    step = (after - (before or 0.0)) / RISE
    return {"series": name, "values": f"{first} {before or 0.0}+{step}x{RISE} {after}x60"}


def promtool(*arguments: str) -> None:
    """Run promtool and assert that it is content; skips where there is none."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def produced(files: Iterable[Path]) -> dict[str, set[str]]:
    """Return by alert the findings that tests produce together with it: what their calls of `alarms` name."""
    found: dict[str, set[str]] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "alarms":
                alert, finding = (ast.literal_eval(one) for one in node.args[:2])
                found.setdefault(alert, set()).add(finding.removeprefix("note: ").partition(" ")[0])
    return found
