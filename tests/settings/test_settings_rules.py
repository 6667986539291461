# SPDX-License-Identifier: Apache-2.0
"""What the rules of release are for a feed and class, and which of them a provider's behaviour speaks against."""

from __future__ import annotations

from datetime import timedelta

import pytest

from reconciler.rule.limits import Limit

MINUTE = timedelta(minutes=1)


def test_the_limits_of_a_feed_are_its_own_and_await_evidence_for_its_grace(load):
    settings = load(
        """
        [rules]
        release_budget = 500
        release_share = 0.3
        [feeds.a]
        provider = "mailgun"
        secrets = "s"
        grace = "1h"
        canary_share = 1
        release_budget = 0
        [feeds.b]
        provider = "mailgun"
        secrets = "s"
        """
    )
    assert settings.limit_for("a") == Limit(0, 0.3, 1.0, 60 * MINUTE)
    assert settings.limit_for("b") == Limit(500, 0.3, 0.1, 15 * MINUTE)
    assert load().limit_for("gone") == Limit(1000, 0.2, 0.1, 15 * MINUTE)


def live(settings):
    return [feed for feed in ("a", "b", "not-configured") if feed in settings.live()]


def test_a_feed_is_in_shadow_mode_by_its_own_or_the_general_rule(load):
    feeds = "[feeds.a]\nprovider = 'mailgun'\nsecrets = 's'\n{}\n[feeds.b]\nprovider = 'mailgun'\nsecrets = 's'"
    general = "[rules]\nmode = 'shadow'\n"
    assert live(load(feeds.format(""))) == ["a", "b", "not-configured"]
    assert live(load(feeds.format("mode = 'shadow'"))) == ["b", "not-configured"]
    assert live(load(general + feeds.format("mode = 'live'"))) == ["a"]
    assert live(load(general + feeds.format(""))) == []


def test_stress_prior_floor_look_up_and_fail_over_are_rules_of_a_class(load):
    settings = load("[classes.news]\nstress = 5\nprior_floor = 0.8\nlook_up = 'before_release'\nfailover = true")
    news, other = settings.rules_for("any", "news"), settings.rules_for("any", "other")
    assert (news.stress, news.prior_floor, news.look_up, news.failover) == (5.0, 0.8, "before_release", True)
    assert (other.stress, other.prior_floor, other.look_up, other.failover) == (None, 0.0, "silent", False)


@pytest.mark.parametrize(
    "line",
    [
        *("rules.stress = 0.5", "rules.prior_floor = 1.5", "rules.release_share = 2", "rules.release_budget = -1"),
        *("rules.release_budget = 1000001", "rules.canary_share = 0.0001", "rules.stress = true"),
        *("rules.look_up_budget = 99999999999999999999",),
        *("rules.canary_share = 0", "rules.look_up = 'always'", "rules.mode = 'dry'", "rules.look_up_budget = -1"),
        *("classes.news.mode = 'shadow'", "classes.news.release_budget = 5", "rules.failover = true"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(problems, line):
    (problem,) = problems(line)
    assert line.partition(" ")[0] in problem


# Against the facts


@pytest.mark.parametrize(
    ("feed", "told"),
    [
        ("provider = 'mailgun'\ngrace = '1m'", None),
        ("provider = 'mailgun'\ngrace = '59s'", "grace"),
        ("provider = 'postmark'\ngrace = '5m'", None),
        ("provider = 'postmark'\ngrace = '4m'", "grace"),  # its first event waits for the recipient's server
        ("provider = 'resend'\nretry_backoff = '1428m'", None),
        (
            "provider = 'resend'\nretry_backoff = '1429m'",
            "retry_backoff",
        ),  # with submit_within ten minutes short of 24 h
        ("provider = 'resend'\nretry_backoff = '25h'\nsame_key_retry = false", None),
        ("provider = 'mailgun'\nretry_backoff = '25h'", None),  # keeps no key
        ("provider = 'mailgun'\nlook_up = 'before_release'", "look_up"),  # no api_key
        ("provider = 'mailgun'\nlook_up = 'before_release'\napi_key = 'key-0'", None),
        ("provider = 'ses'\nlook_up = 'before_release'\napi_key = 'key-0'", "look_up"),  # nothing to ask
        ("provider = 'mailgun'\napi_key = 'key-0'\ngive_up_after = '30m'", None),
        ("provider = 'mailgun'\napi_key = 'key-0'\ngive_up_after = '29m'", "give_up_after"),
        ("provider = 'mailgun'\napi_key = 'key-0'\ngive_up_after = '29m'\nlook_up = 'never'", None),
        ("provider = 'mailgun'\ngive_up_after = '29m'", None),
    ],
)
def test_a_rule_that_a_providers_behaviour_contradicts_is_warned_of(load, feed, told):
    odd = [line for line in load(f"[feeds.a]\n{feed}").warnings() if "every delivery is refused" not in line]
    assert [line.partition(":")[0] for line in odd] == ["feeds.a"] * bool(told)
    assert told is None or told in odd[0]


def test_a_general_rule_is_warned_of_at_each_feed_that_it_does_not_fit(load):
    settings = load(
        """
        [rules]
        grace = "2m"
        [feeds.a]
        provider = "mailgun"
        secrets = "s"
        [feeds.b]
        provider = "postmark"
        secrets = "basic:user:password"
        """
    )
    (warning,) = settings.warnings()
    assert warning.startswith("feeds.b: grace is 2m, and ")
    assert warning.endswith(": set grace to 5m or more")
