# SPDX-License-Identifier: Apache-2.0
"""Alerts: each fires where Prometheus should, on figures that a real fault has made, and has a runbook that is true.

`/metrics` and `reconciler status --check` tell the same. Without promtool its part is skipped, and counted as that.
"""

from __future__ import annotations

import re

import pytest
from alerts_kit import ROOT, RULES, alerts, produced, promtool
from click.testing import CliRunner

from reconciler.cli.commands import cli

RUNBOOKS = (ROOT / "docs/runbooks.md").read_text("utf-8")
NAMES = sorted(alerts())


def test_promtool_takes_the_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_each_alert_fires_where_it_should_and_not_where_all_is_well() -> None:
    promtool("test", "rules", str(ROOT / "tests/alerts.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_a_time_a_severity_a_summary_a_runbook_and_a_test(name: str) -> None:
    rule = alerts()[name]
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert rule["annotations"].keys() == {"summary", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{name.lower()}"
    fires = re.compile(rf"alertname: {name}\n +eval_time: \w+\n +exp_alerts:")
    assert fires.search((ROOT / "tests/alerts.yaml").read_text("utf-8"))


def test_each_alert_has_one_runbook_which_says_what_it_means_and_what_to_look_at_and_do() -> None:
    _, *parts = RUNBOOKS.split("\n## ")
    assert sorted(part.partition("\n")[0] for part in parts) == NAMES
    for part in parts:
        assert re.findall(r"^\*\*(\w+):\*\*", part, re.MULTILINE) == ["Means", "Status", "Look", "Do"], part


STATUS_FAILS = "ReconcilerDatabaseAway"
"""Where `status` itself can't be read, it ends with 1 and says why."""


def test_each_alert_is_produced_on_the_real_program_together_with_each_finding_that_its_runbook_names() -> None:
    told = dict(re.findall(r"^## (\w+)\n.*?^\*\*Status:\*\* (.*?)\n\n", RUNBOOKS, re.MULTILINE | re.DOTALL))
    codes = {alert: set(re.findall(r"`([a-z_]+)`", text)) or {"any"} for alert, text in told.items()}
    assert told[STATUS_FAILS].startswith("ends with 1 ")
    found = produced((ROOT / "tests").glob("test_alerts*.py"))
    assert found.pop("ReconcilerNeedsPerson"), "whatever it is that needs a person"
    assert found == {name: codes[name] for name in NAMES if name not in ("ReconcilerNeedsPerson", STATUS_FAILS)}


COMMANDS = sorted(set(re.findall(r"(?:`|^)(reconciler [a-z][^`\n]*?)(?:`|$)", RUNBOOKS, re.MULTILINE)))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_runbooks_exist(command: str) -> None:
    words = command.partition(" -- ")[0].partition(' "')[0].split()[1:]
    path = [word for word in words[:2] if word.islower() and not word.startswith("-")]
    shown = CliRunner().invoke(cli, [*path, "--help"])
    if shown.exit_code and len(path) == 2:  # the second word is an argument
        shown = CliRunner().invoke(cli, [path[0], "--help"])
    assert shown.exit_code == 0, shown.output
    for option in (word for word in words if word.startswith("-")):
        assert option in re.split(r"[\s,]+", shown.output), f"{command}: no {option}"


def test_the_runbooks_have_commands_and_their_own_anchors() -> None:
    assert len(COMMANDS) > 20
    anchors = {f"#{name.lower()}" for name in NAMES}
    assert set(re.findall(r"\]\((#\w+)\)", RUNBOOKS)) <= anchors
