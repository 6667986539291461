# SPDX-License-Identifier: Apache-2.0
"""Rules that contradict what is known of a provider: allowed, and told at the start and by `status`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from reconciler.configuration.tables import FeedRuleSettings, FeedSettings
from reconciler.rule.policy import WINDOW_MARGIN
from reconciler.units import format_duration
from webhooks.registry import PROVIDERS

LEAST_GRACE: Final = timedelta(minutes=1)
"""Events of most sends are there by then (SendGrid posts every 30 s); what a feed takes in truth `status` measures."""

LEAST_GRACE_BY_DELIVERY: Final = timedelta(minutes=5)
"""The same where the first event waits for the recipient's server, which may put a first attempt off."""


def against_facts(place: str, feed: FeedSettings, rules: FeedRuleSettings) -> Iterator[str]:
    """Name what of a feed's rules its provider's behaviour speaks against, one line each."""
    provider = PROVIDERS[feed.provider]
    facts = provider.facts
    least = least_grace(feed)
    if rules.grace < least:
        yield (
            f"{place}: grace is {format_duration(rules.grace)}, and {provider.name}'s first event often takes longer, "
            f"so most sends are judged too early and held: set grace to {format_duration(least)} or more"
        )
    window = facts.same_key_window
    if rules.same_key_retry and window and rules.submit_within + rules.retry_backoff >= window - WINDOW_MARGIN:
        yield (
            f"{place}: submit_within and retry_backoff reach past the {format_duration(window)} for which "
            f"{provider.name} keeps a key, so that nothing is retried with the same key: lower them"
        )
    if rules.look_up == "never":
        return
    if rules.look_up == "before_release" and not can_be_asked(feed):
        yield (
            f'{place}: look_up is "before_release", and {provider.name} can\'t be asked: set {place}.api_key, or '
            'look_up to "silent" or "never"; see reconciler providers ' + provider.name
        )
    if can_be_asked(feed) and rules.give_up_after < facts.settles_after:
        yield (
            f"{place}: give_up_after ends before {provider.name}'s API shows every send "
            f"({format_duration(facts.settles_after)}), so that no look-up can answer in time: raise it"
        )


def least_grace(feed: FeedSettings) -> timedelta:
    """Return the shortest grace that makes sense with a feed's provider."""
    return LEAST_GRACE_BY_DELIVERY if PROVIDERS[feed.provider].facts.first_event_is_delivery else LEAST_GRACE


def can_be_asked(feed: FeedSettings) -> bool:
    """Say whether a feed's provider answers questions about single sends, and we have a credential for it."""
    return PROVIDERS[feed.provider].facts.finds_by != "nothing" and bool(feed.api_key)
