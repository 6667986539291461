# SPDX-License-Identifier: Apache-2.0
"""Settings that are read again while the process runs: what of them is taken at once, and what waits for a restart.

Taken are the feeds with their secrets, rules, classes, API tokens, what the application is told, and what is kept how
long. They are taken all together or not at all: new settings that can't be used change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import structlog

from reconciler import logs
from reconciler.configuration.settings import ConfigError, Settings
from reconciler.configuration.tables import FeedSettings
from reconciler.serving.scheduler import reason_of

_SECTIONS: Final = ("rules", "outbox", "retention")
"""Taken whole."""
_OPENED: Final = ("database", "receiver", "reconcile", "archive", "ui", "tracing", "log")
"""What was opened by them stays open."""
_QUEUE: Final = ("queue_url", "region", "endpoint_url", "queue_consumers")

_log: Final = structlog.get_logger()


class Merged(NamedTuple):
    """Settings to go on with, the names of what changed in them, and of what was written and needs a restart."""

    settings: Settings
    changed: list[str]
    waiting: list[str]


async def reload_on(
    wished: asyncio.Event, read: Callable[[], Settings], running: Settings, take: Callable[[Settings], None]
) -> None:
    """Read the settings whenever it is wished, and give `take` what to go on with. Ends by cancellation only.

    `take` must not wait, so that no request sees half of them.
    """
    while True:
        await wished.wait()
        wished.clear()
        try:
            merged = merge(running, await asyncio.to_thread(read))
            logs.hide(merged.settings.secret_values())
            take(merged.settings)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with them, the process goes on as it was
            reason = "; ".join(error.problems) if isinstance(error, ConfigError) else reason_of(error)
            _log.error("settings_refused", reason=reason, hint="those before stay in force")
            continue
        running = merged.settings
        level = _log.warning if merged.waiting else _log.info
        level("settings_reloaded", changed=merged.changed, needs_restart=merged.waiting)


def merge(running: Settings, written: Settings) -> Merged:
    """Return what to go on with. Raises ConfigError where that would not be allowed without a restart."""
    feeds = dict(_feeds(running, written))
    sections = {name: getattr(written, name) for name in _SECTIONS}
    if written.outbox.queue_url != running.outbox.queue_url:
        sections["outbox"] = running.outbox
    api = running.api.model_copy(update={"tokens": written.api.tokens})
    merged = running.model_copy(update={**sections, "feeds": feeds, "classes": written.classes, "api": api})
    if problems := merged.refusals():
        raise ConfigError([f"{problem} (as long as it is not restarted)" for problem in problems])
    return Merged(merged, [*_differing(running, merged)], [*_differing(merged, written)])


def _feeds(running: Settings, written: Settings) -> Iterator[tuple[str, FeedSettings]]:
    """Give each feed as it may be from now on. A queue that is read is not left, nor is another begun to be read."""
    for name, feed in written.feeds.items():
        before = running.feeds.get(name)
        if before is None and feed.queue_url is None:
            yield name, feed
        elif before is not None:
            queue = {field: getattr(before, field) for field in _QUEUE}
            yield name, feed.model_copy(update=queue) if feed.provider == before.provider else before
    yield from ((n, f) for n, f in running.feeds.items() if n not in written.feeds and f.queue_url)


def _differing(one: Settings, other: Settings) -> Iterator[str]:
    """Name what differs: a section, or a feed or class."""
    for section in ("feeds", "classes"):
        mine, theirs = getattr(one, section), getattr(other, section)
        yield from (f"{section}.{n}" for n in sorted({*mine, *theirs}) if mine.get(n) != theirs.get(n))
    sections = (*_SECTIONS, *_OPENED, "api")
    yield from (name for name in sections if getattr(one, name) != getattr(other, name))
