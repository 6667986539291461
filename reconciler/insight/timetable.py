# SPDX-License-Identifier: Apache-2.0
"""What happens when to an ambiguous send of a feed and message class, by the rules that hold for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from reconciler.campaigns.caps import caps_of
from reconciler.configuration.facts import can_be_asked
from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import FeedRuleSettings, FeedSettings
from reconciler.rule.in_words import percent
from reconciler.rule.policy import WINDOW_MARGIN
from reconciler.units import format_duration, roughly
from webhooks.registry import PROVIDERS

Line = tuple[str, str]
"""When, and what happens."""

_GIVEN_UP: Final = {
    "hold": "it stays held until evidence comes, a witness tells of its absence, or a person decides",
    "fail": "it fails",
    "release": "it is released, unless a provider spoke of it; this may duplicate it and counts against the budget",
}


def timetable(settings: Settings, feed: str, message_class: str) -> Iterator[Line]:
    """Name what happens when to an ambiguous send, in order. `feed` is configured."""
    rules = settings.rule_settings_for(feed, message_class)
    configured = settings.feeds[feed]
    yield "at any time", "a provider says that it took it: sent; that it never will send it: failed"
    yield (
        "submit_by",
        "its sender has given up (submit_within of its claim, 60 s without): ages count from here",
    )
    yield from _same_key(rules, configured)
    yield (
        f"+ {format_duration(rules.grace)}",
        (
            f"its silence is judged: released where the risk of a duplicate is at most {percent(rules.max_risk)}, else "
            "held and judged again, less often as it ages"
        ),
    )
    yield from _look_up(rules, configured)
    yield f"+ {format_duration(rules.give_up_after)}", "still undecided: " + _GIVEN_UP[rules.on_unknown]
    yield from _limits(settings, rules, message_class)


def _same_key(rules: FeedRuleSettings, feed: FeedSettings) -> Iterator[Line]:
    window = PROVIDERS[feed.provider].facts.same_key_window
    if window and rules.same_key_retry:
        yield (
            f"+ {format_duration(rules.retry_backoff)}",
            (
                "released for a retry with the same key where its claim gave a fingerprint, then after twice as long "
                f"each time, until {roughly(window - WINDOW_MARGIN)} after the first claim"
            ),
        )


def _look_up(rules: FeedRuleSettings, feed: FeedSettings) -> Iterator[Line]:
    facts = PROVIDERS[feed.provider].facts
    when = f"+ {format_duration(rules.grace)}"
    if not can_be_asked(feed) or rules.look_up == "never":
        why = 'look_up = "never"' if rules.look_up == "never" else "it can't be, or there is no api_key"
        yield "", f"the provider's API is not asked ({why})"
        return
    asked = "before each release" if rules.look_up == "before_release" else "where the feed can't tell"
    settled = format_duration(max(facts.settles_after, timedelta(0)))
    yield (
        when,
        (
            f"the provider's API is asked {asked}, at most {rules.look_up_budget} times a minute; that it does not "
            f"know the send counts from + {settled} on: released"
        ),
    )


def _limits(settings: Settings, rules: FeedRuleSettings, message_class: str) -> Iterator[Line]:
    yield "", f"after {rules.max_attempts} attempts that may have reached the provider it fails and is not released"
    yield (
        "",
        (
            f"the feed releases at most {rules.release_budget} an hour, and at most {percent(rules.release_share)} of "
            f"its claims of that hour; of many {percent(rules.canary_share)} go first"
        ),
    )
    if cap := next((cap for cap in caps_of(settings) if cap.message_class == message_class), None):
        yield "", f"a claim is capped where its recipient had {cap.most} of this class within {cap.window}"
    if settings.failover_for(message_class):
        yield "", "a release by absence may be claimed for another feed"
    if rules.mode == "shadow":
        yield "", "the feed is in shadow mode: all this is recorded, and nothing is done"
