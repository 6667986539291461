# SPDX-License-Identifier: Apache-2.0
"""What `[retention]` may not fall below: a send is forgotten only once nothing can bring it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Final, NamedTuple

from reconciler.configuration.tables import ApiSettings, ClassSettings, FeedSettings, RetentionSettings, RuleSettings
from reconciler.units import format_duration
from webhooks.registry import PROVIDERS

HISTORY: Final = timedelta(days=30)
"""How far back answered sends tell what a feed's silence is worth, and `status` looks."""

QUEUE: Final = timedelta(days=23)
"""How long SNS tries to reach a queue; SQS itself keeps a message for 14 days at most."""

LONGEST_WINDOW: Final = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=31)}
"""How long a window of the calendar lasts at most; an hour by which clocks are set back is in a prune's margin."""


class Path(NamedTuple):
    """A way by which something about a send may still come, and for how long after its end."""

    reach: timedelta
    because: str


def paths(
    feeds: Mapping[str, FeedSettings],
    rules: Mapping[str, RuleSettings],
    classes: Mapping[str, ClassSettings],
    api: ApiSettings,
) -> Iterator[Path]:
    """Name every way; `rules` are all that are written, by their place in the settings."""
    yield Path(HISTORY, "what silence is worth is measured on the sends of that time")
    yield Path(api.idempotency_retention, "api.idempotency_retention remembers requests about them for so long")
    for place, rule in rules.items():
        yield Path(rule.late_window, f"{place}.late_window looks for evidence of failed sends for so long")
    for name, own in classes.items():
        window = LONGEST_WINDOW.get(own.cap_window) if isinstance(own.cap_window, str) else own.cap_window
        if own.cap is not None and window is not None:
            yield Path(window, f"classes.{name}.cap_window counts what became of sends for so long")
    for name, feed in feeds.items():
        provider = PROVIDERS[feed.provider]
        yield Path(provider.facts.redelivers_for, f"{provider.name} (feeds.{name}) delivers again for so long")
        if feed.queue_url:
            yield Path(QUEUE, f"the queue of feeds.{name} may bring events for so long")


def refusals(retention: RetentionSettings, every: Iterable[Path]) -> Iterator[str]:
    """Say which ages of `[retention]` are too short, one line each."""
    longest = max(every)
    if retention.rows < longest.reach:
        yield _refusal("rows", retention.rows, longest)
    if retention.events < retention.rows:
        yield _refusal("events", retention.events, Path(retention.rows, "sends are kept for so long (retention.rows)"))
    if retention.passes < HISTORY:
        yield _refusal("passes", retention.passes, Path(HISTORY, "status looks back so far"))


def _refusal(name: str, wanted: timedelta, path: Path) -> str:
    return (
        f"retention.{name} is {format_duration(wanted)}, and {path.because}: set it to "
        f"{format_duration(path.reach)} or more"
    )
