# SPDX-License-Identifier: Apache-2.0
"""What tests of alerts share: a daemon that is scraped over HTTP, and Prometheus itself to judge what was scraped."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
import yaml
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families

from reconciler.daemon import Daemon
from reconciler.figures import figures
from reconciler.settings import Settings

ROOT = Path(__file__).parents[1]
RULES = ROOT / "helm/files/alerts.yaml"

SETTINGS = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}}})

BEFORE, RISE, LAST = 70, 20, 150
"""Minutes: so long nothing happens, counters then rise so long, and until then all stays as it was scraped."""

Scrape = dict[str, float]
"""Values by series. Times are counted from the scrape."""

TIMESTAMP = "_timestamp_seconds"


def alerts() -> dict[str, dict[str, object]]:
    """Return the rules by name."""
    return {
        rule["alert"]: rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]
    }


@dataclass
class Watched:
    """A daemon of which a test moves the parts, and its metrics before anything happened."""

    daemon: Daemon
    client: TestClient
    db: asyncpg.Pool
    folder: Path
    before: Scrape

    async def scrape(self) -> Scrape:
        """Let it read its figures, and return what `/metrics` shows."""
        await figures(self.db, SETTINGS, self.daemon.health.note_feeds, reconciles=True)()
        return await scraped(self.client)

    async def fires(self, alert: str, after: Scrape, minute: int = LAST) -> None:
        """Assert that an alert did not fire before, and does at a minute; skips where Prometheus is not installed."""
        went = [_went(name, self.before.get(name), value) for name, value in sorted(after.items())]
        firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0'
        checks = [
            {"expr": firing, "eval_time": f"{BEFORE - 1}m"},
            {"expr": firing, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 1}]},
        ]
        test = {"interval": "1m", "input_series": went, "promql_expr_test": checks}
        path = self.folder / "scraped.yaml"
        path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
        promtool("test", "rules", str(path))


def series(name: str, **labels: str) -> str:
    """Return the name of a series as it is scraped in a cluster."""
    all_labels = sorted({"namespace": "mail", **labels}.items())
    return f"{name}{{{', '.join(f'{key}={json.dumps(value)}' for key, value in all_labels)}}}"


async def scraped(client: TestClient) -> Scrape:
    answer = await client.get("/metrics")
    assert answer.status == 200
    now = time.time()
    found = {}
    for family in text_string_to_metric_families(await answer.text()):
        for sample in family.samples:
            if sample.name.startswith("reconciler_") and not sample.name.endswith("_created"):
                found[series(sample.name, **sample.labels)] = (
                    sample.value - now if TIMESTAMP in sample.name else sample.value
                )
    return found


def _went(name: str, before: float | None, after: float) -> dict[str, str]:
    """Return how a series went, as promtool writes it: gauges jump, counters rise, times are those of the last scrape.

    A process that was scraped before goes on to be scraped, but reads and does nothing more.
    """
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
