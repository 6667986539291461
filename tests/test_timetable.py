# SPDX-License-Identifier: Apache-2.0
"""`config --feed F --class C` says what will happen when, by the rules that hold for both."""

from __future__ import annotations

import pytest

from reconciler.configuration.settings import Settings
from reconciler.insight.timetable import timetable


def told(feed: dict[str, object], message_class: dict[str, object] | None = None) -> dict[str, str]:
    """Return what happens, by when; what has no time of its own is joined."""
    settings = Settings.model_validate(
        {"feeds": {"f": feed}, "classes": {"receipt": message_class or {}}, "rules": {"max_attempts": 4}}
    )
    found: dict[str, str] = {}
    for when, what in timetable(settings, "f", "receipt"):
        found[when] = f"{found[when]}; {what}" if when in found else what
    return found


def test_the_ages_of_a_send_are_those_of_its_rules() -> None:
    lines = told({"provider": "mailgun", "grace": "20m", "give_up_after": "6h"}, {"max_risk": 0.02})
    assert list(lines) == ["at any time", "submit_by", "+ 20m", "", "+ 6h"]
    assert "at most 2 %" in lines["+ 20m"]
    assert "stays held" in lines["+ 6h"]
    assert "after 4 attempts" in lines[""]
    assert "at most 1000 an hour" in lines[""]
    assert "is not asked" in lines[""]


@pytest.mark.parametrize(
    ("on_unknown", "words"), [("hold", "stays held"), ("fail", "it fails"), ("release", "it is released")]
)
def test_a_class_says_what_becomes_of_a_send_that_nobody_can_tell_of(on_unknown: str, words: str) -> None:
    assert words in told({"provider": "mailgun"}, {"on_unknown": on_unknown})["+ 24h"]


def test_same_key_retries_are_told_of_providers_that_keep_keys_only() -> None:
    assert "same key" in told({"provider": "resend"})["+ 30s"]
    assert "+ 30s" not in told({"provider": "resend", "same_key_retry": False})
    assert "+ 30s" not in told({"provider": "mailgun"})


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({}, "is asked where the feed can't tell, at most 60 times a minute"),
        ({"look_up": "before_release", "look_up_budget": 5}, "is asked before each release, at most 5 times a minute"),
    ],
)
def test_when_the_providers_api_is_asked_is_told_where_it_can_be(rules: dict[str, object], words: str) -> None:
    assert words in told({"provider": "mailgun", "api_key": "key", **rules})["+ 15m"]
    assert 'look_up = "never"' in told({"provider": "mailgun", "api_key": "key", "look_up": "never"})[""]


def test_shadow_mode_and_failover_are_told() -> None:
    lines = told({"provider": "mailgun", "mode": "shadow"}, {"failover": True})
    assert "shadow mode" in lines[""]
    assert "another feed" in lines[""]
