# SPDX-License-Identifier: Apache-2.0
"""Metrics: named and documented as Prometheus asks for, bounded, counted where they should be, and drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest
from alerts_kit import ROOT, SETTINGS, alerts, promtool
from kit import FEED, claim, heard_neighbours, old_claim, release_by_pass, stored_delivery
from prometheus_client import REGISTRY

import reconciler.serving.daemon  # noqa: F401 - which imports all that counts
import webhooks.receiver  # noqa: F401
from reconciler import metrics
from reconciler.insight import figures
from reconciler.insight.status import read_status
from webhooks.counters import Counters
from webhooks.event import Event, Kind, Testimony
from webhooks.inbox import Inbox
from webhooks.intake import Intake
from webhooks.provider import Delivery, Feed, Parsed

MG = Feed("mg", "mailgun", ("key-0123456789abcdef",))


class Metric(NamedTuple):
    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str

    def row(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.type} | {labels} | {self.meaning} |"


def registered() -> Iterator[Metric]:
    """All metrics of ours that the registry knows."""
    for collector in set(REGISTRY._names_to_collectors.values()):
        described = list(collector.describe()) if hasattr(collector, "describe") else []
        for family in described:
            if family.name.startswith("reconciler_"):
                labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
                end = "_total" if family.type == "counter" else ""
                yield Metric(family.name + end, family.type, tuple(labels), family.documentation)


METRICS = sorted(set(registered()))
TABLE = (ROOT / "docs/metrics.md").read_text("utf-8")


def test_the_table_of_the_documents_is_that_of_the_registry() -> None:
    written = [line for line in TABLE.splitlines() if line.startswith("| `reconciler_")]
    assert sorted(written) == sorted(metric.row() for metric in METRICS)
    assert len(written) > 40


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_follows_the_conventions_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"reconciler_[a-z]+(_[a-z]+)*", metric.name)
    assert (metric.type == "counter") == metric.name.endswith("_total")
    assert metric.type in ("counter", "gauge", "histogram")
    assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|percent)(_|$)", metric.name)
    assert metric.type != "histogram" or metric.name.endswith("_seconds")
    assert metric.meaning.endswith(".")
    assert set(metric.labels) <= BOUNDED.keys()


BOUNDED = {
    "feed": "configured feeds, * for all, or nothing",
    "outcome": "words of the code",
    "kind": "kinds of events",
    "testimony": "three",
    "what": "words of the code",
    "result": "three",
    "cause": "classes of errors",
    "action": "five",
    "reason": "words of the code",
    "work": "names of workers",
    "state": "four",
    "held": "words of the code",
    "hold": "three",
    "sort": "two",
    "message_class": "20 a feed",
    "quantile": "two",
    "route": "routes",
    "code": "codes of findings",
    "needs_person": "two",
}


# What is counted


def total(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def said(key: str | None, kind: Kind, testimony: Testimony, number: int) -> Event:
    return Event(kind=kind, testimony=testimony, message_id="m", event_id=f"e-{number}", send_key=key, raw=b"{}")


async def test_events_are_counted_by_kind_and_testimony_and_those_without_a_key_and_repeated_ones(
    db: asyncpg.Pool, inbox: Inbox
) -> None:
    async def no_fetch(_url: str) -> bytes:
        raise AssertionError

    intake = Intake(inbox, no_fetch, lambda: datetime.now(UTC), Counters())
    events = [
        said("order-1", Kind.DELIVERED, Testimony.ACCEPTED, 1),
        said("order-2", Kind.DELIVERED, Testimony.ACCEPTED, 2),
        said(None, Kind.REJECTED, Testimony.REJECTED, 3),
        said("", Kind.OPENED, Testimony.ACCEPTED, 4),
    ]
    names = [
        ("reconciler_events_total", {"feed": "mg", "kind": "delivered", "testimony": "accepted"}),
        ("reconciler_events_total", {"feed": "mg", "kind": "rejected", "testimony": "rejected"}),
        ("reconciler_events_total", {"feed": "mg", "kind": "opened", "testimony": "accepted"}),
        ("reconciler_events_unstamped_total", {"feed": "mg"}),
        ("reconciler_events_repeated_total", {"feed": "mg"}),
    ]
    before = [total(name, **labels) for name, labels in names]
    for _ in range(2):
        await intake.store(MG, Delivery(b"{}", {}, "POST", ""), Parsed(events), "http")
    counted = [total(name, **labels) - n for (name, labels), n in zip(names, before, strict=True)]
    assert counted == [4, 2, 2, 4, 4]
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 4


async def test_a_release_adds_its_risk_to_the_duplicates_to_be_expected(db: asyncpg.Pool) -> None:
    before = total("reconciler_released_risk_total", reason="absent")
    await release_by_pass(db, "order:1")
    stated = await db.fetchval("SELECT risk FROM verdict WHERE action = 'released'")
    assert 0 < stated <= 0.01
    assert total("reconciler_released_risk_total", reason="absent") - before == pytest.approx(stated)


async def test_the_backlog_of_passes_is_what_is_due_and_how_long_it_has_been(db: asyncpg.Pool) -> None:
    await claim(db, "fresh")
    await old_claim(db, "order:1")
    await db.execute("UPDATE send_log SET next_check_at = now() - interval '90 s' WHERE wire_key = wire_key('order:1')")
    await metrics.read_undecided(db)
    assert total("reconciler_sends_due") == 1
    assert total("reconciler_oldest_due_seconds") == pytest.approx(90, abs=30)
    await db.execute("DELETE FROM send_log")
    await metrics.read_undecided(db)
    assert (total("reconciler_sends_due"), total("reconciler_oldest_due_seconds")) == (0, 0)


async def test_undecided_sends_whose_counting_takes_long_are_counted_seldom(db: asyncpg.Pool) -> None:
    now = 0.0

    def seconds() -> float:  # a second passes between any two looks at the clock
        nonlocal now
        now += 1
        return now

    read = figures.figures(db, SETTINGS, None, reconciles=True, seconds=seconds)
    await read()
    await old_claim(db, "order:1")
    await read()
    assert total("reconciler_sends", state="claimed", held="") == 0
    now += 100
    await read()
    assert total("reconciler_sends", state="claimed", held="") == 1


async def test_when_a_feed_last_spoke_is_a_time(db: asyncpg.Pool) -> None:
    await stored_delivery(db)
    await metrics.read_feeds(db)
    now = (await db.fetchval("SELECT now()")).timestamp()
    assert total("reconciler_feed_stored_timestamp_seconds", feed="mg") == pytest.approx(now, abs=60)


async def read(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        await figures.read_standing(connection, SETTINGS)


async def test_a_feed_that_speaks_shows_its_lag_its_coverage_and_its_controls(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, timedelta(minutes=50), n=600)
    await read(db)
    labels = {"feed": FEED, "message_class": "default"}
    assert total("reconciler_feed_lag_seconds", **labels, quantile="0.5") == 2
    assert total("reconciler_feed_lag_seconds", **labels, quantile="0.98") == 2
    assert total("reconciler_feed_coverage_ratio", **labels) == 1
    assert total("reconciler_feed_controls", **labels) == 600
    assert total("reconciler_feed_controls_missing", **labels) == 0


async def test_message_classes_are_bounded_however_many_senders_name(db: asyncpg.Pool) -> None:
    for n in range(metrics.MOST_CLASSES + 5):
        await heard_neighbours(db, n=3 + n, message_class=f"class-{n}", name=f"n{n}")
    await read(db)
    (family,) = [family for family in REGISTRY.collect() if family.name == "reconciler_feed_controls"]
    assert len(family.samples) == metrics.MOST_CLASSES


async def test_a_feed_that_only_senders_name_is_no_label(db: asyncpg.Pool) -> None:
    await claim(db, "order:1", feed="somebody-elses")
    await read(db)
    assert total("reconciler_findings", code="unknown_feed", feed="", needs_person="1") == 1
    told = [sample for family in REGISTRY.collect() for sample in family.samples]
    assert [sample for sample in told if "somebody-elses" in sample.labels.values()] == []


async def test_what_is_no_more_is_told_no_more(db: asyncpg.Pool) -> None:
    await claim(db, "order:1", feed="somebody-elses")
    await read(db)
    await db.execute("DELETE FROM send_log")
    await read(db)
    assert total("reconciler_findings", code="unknown_feed", feed="", needs_person="1") == 0


async def test_findings_are_those_of_status(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, heard=0)
    await read(db)
    async with db.acquire() as connection:
        standing = await read_status(connection, SETTINGS, lambda: datetime.now(UTC))
    wanted = sorted((f.code, f.feed or "", str(int(f.needs_person))) for f in figures.judge(standing, SETTINGS))
    (family,) = [family for family in REGISTRY.collect() if family.name == "reconciler_findings"]
    told = sorted((s.labels["code"], s.labels["feed"], s.labels["needs_person"]) for s in family.samples)
    assert told == wanted
    assert ("no_echo", "mg", "1") in told


# The dashboard


def expressions(dashboard: Any) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


DASHBOARD = json.loads((ROOT / "helm/files/dashboard.json").read_text("utf-8"))


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    known = {m.name + end: m for m in METRICS for end in ends.get(m.type, ("",))}
    asked = list(expressions(DASHBOARD))
    assert len(asked) > 20
    for title, expression in asked:
        names = re.findall(r"\breconciler_\w+", expression)
        assert names, title
        assert set(names) <= known.keys(), title
        labels = {label for name in names for label in known[name].labels} | {"namespace", "le", "job"}
        for group in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= labels, title
        for inside in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*=", inside)) <= labels, title


def test_prometheus_understands_the_dashboards_expressions(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{n}", "expr": expression.replace("$namespace", ".*")}
        for n, (_, expression) in enumerate(expressions(DASHBOARD))
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_prometheus_understands_the_questions_of_the_documents(tmp_path: Path) -> None:
    asked = re.findall(r"^\| [a-z].* \| `([^`]*)` \|$", TABLE, re.MULTILINE)
    assert len(asked) > 4
    known = {metric.name for metric in METRICS}
    assert set(re.findall(r"\breconciler_\w+", " ".join(asked))) <= known
    rules = [{"record": f"question:{n}", "expr": expression} for n, expression in enumerate(asked)]
    path = tmp_path / "questions.yaml"
    path.write_text(json.dumps({"groups": [{"name": "questions", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    assert (DASHBOARD["uid"], DASHBOARD["title"]) == ("esp-reconciler", "esp-reconciler")
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_shows_what_alerts_ask_for() -> None:
    shown = " ".join(expression for _, expression in expressions(DASHBOARD))
    missing = {
        name
        for rule in alerts().values()
        for name in re.findall(r"\breconciler_\w+", str(rule["expr"]))
        if name not in shown
    }
    assert missing == set()
