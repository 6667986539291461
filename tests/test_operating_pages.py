# SPDX-License-Identifier: Apache-2.0
"""What docs/ tells a person to look at is there: metrics, alerts, findings, reasons of a hold, outcomes of a claim."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import get_args

import pytest
import yaml
from snippets import ROOT, pages, text_of

from reconciler.rule.in_words import WAITS_FOR
from reconciler.sending import claims
from reconciler.serving import self_check

SYMPTOMS = text_of("docs/symptoms.md")
ALERTS = yaml.safe_load((ROOT / "helm/files/alerts.yaml").read_text("utf-8"))


def alerts() -> set[str]:
    return {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"] if "alert" in rule}


@pytest.mark.parametrize("page", pages())
def test_every_metric_and_every_alert_that_a_page_names_is_there(page: str) -> None:
    known = set(re.findall(r"^\| `(reconciler_\w+)` \|", text_of("docs/metrics.md"), re.MULTILINE))
    named = set(re.findall(r"\breconciler_(?!outbox\b)[a-z_]+\b", text_of(page)))
    assert {name for name in named if re.sub("_(bucket|sum|count)$", "", name) not in known} == set()
    assert set(re.findall(r"\bReconciler[A-Z]\w+", text_of(page))) <= alerts()


def findings() -> Iterator[str]:
    """The words with which `status --check` begins its lines."""
    for path in ("findings", "feed_findings"):
        for node in ast.walk(ast.parse((ROOT / f"reconciler/insight/{path}.py").read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name("Finding"), args=[ast.Constant(str(code)), *_]):
                    yield code
    yield from ("breaker", "paused", "suspect", *self_check.CODES)


def in_code(words: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)", words)) | set(re.findall(r"\((\w+)\)`", words))


def test_every_finding_is_a_symptom() -> None:
    assert {code for code in findings() if code not in in_code(SYMPTOMS)} == set()


def test_every_reason_of_a_hold_is_a_symptom_that_says_what_ends_it() -> None:
    assert set(WAITS_FOR) <= in_code(SYMPTOMS)


def test_every_answer_that_gives_a_send_to_nobody_is_a_symptom() -> None:
    refusals = {*get_args(claims.Claimed)} - {"claimed"}
    assert refusals
    assert refusals <= in_code(SYMPTOMS)
