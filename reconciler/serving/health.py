# SPDX-License-Identifier: Apache-2.0
"""The answers to `/healthz`, `/readyz` and `/metrics`. They come from memory: a probe never waits for the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Final

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from reconciler.metrics import DATABASE_UP, FeedFigures
from webhooks import answers

STALE: Final = 15.0
"""Seconds after which a check that has not been repeated says nothing any more."""

REFUSALS: Final = 20
"""Deliveries refused in a row that make a feed's silence alarming: most likely a rotated secret."""

_log: Final = structlog.get_logger()


class Health:
    """What the process knows of itself. `seconds` is a clock that never goes back."""

    def __init__(self, feeds: Collection[str], seconds: Callable[[], float] = time.monotonic) -> None:
        self.draining = False
        self.shared_port: int | None = None
        """The port that other processes answer at as well."""
        self._feeds = feeds
        self._seconds = seconds
        self._problem: str | None = "starting"
        self._checked_at = 0.0
        self._figures: Mapping[str, FeedFigures] = {}
        self._alarmed: set[str] = set()

    def watch(self, feeds: Collection[str]) -> None:
        """Tell of these feeds from now on."""
        self._feeds = feeds

    def note_check(self, problem: str | None) -> None:
        """Keep the outcome of a check: None, or why nothing could be stored."""
        self._problem, self._checked_at = problem, self._seconds()
        DATABASE_UP.set(problem is None)

    def note_feeds(self, figures: Mapping[str, FeedFigures]) -> None:
        """Keep how the feeds' deliveries ended; a feed that only refuses is an error in the log, once a streak."""
        self._figures = figures
        refusing = {feed for feed in self._feeds if feed in figures and figures[feed].refused_in_a_row >= REFUSALS}
        for feed in sorted(refusing - self._alarmed):
            _log.error(
                "feed_refuses_everything",
                feed=feed,
                refused=figures[feed].refused_in_a_row,
                hint="every delivery was refused since the newest good one: compare the feed's secrets with the "
                "provider's, which may have been rotated",
            )
        self._alarmed = refusing

    def problem(self) -> str | None:
        """Return why this process should get no requests now, or None."""
        if self.draining:
            return "draining"
        if self._problem is None and self._seconds() - self._checked_at > STALE:
            return "the database was not checked lately"
        return self._problem

    async def alive(self, _request: web.Request) -> web.Response:
        """Answer `/healthz`: the process lives, whatever the database does."""
        return web.json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """Answer `/readyz`: 200 if deliveries can be stored (passes can run), else 503 with the reason."""
        problem = self.problem()
        feeds = {feed: _shown(self._figures.get(feed), refuses=feed in self._alarmed) for feed in self._feeds}
        told = {"ready": problem is None, "problem": problem, "feeds": feeds}
        return web.json_response(told) if problem is None else answers.problem(503, problem, members=told)

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer `/metrics`, but not where each time another process would answer: its counts would jump."""
        at = request.transport and request.transport.get_extra_info("sockname")
        if at and at[1] == self.shared_port:
            text = f"each worker tells its own figures, at the port that lies as many above {at[1]} as its number says"
            return answers.problem(421, text)
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def add_routes(self, app: web.Application) -> None:
        """Serve the three pages, by GET and HEAD only."""
        app.router.add_get("/healthz", self.alive)
        app.router.add_get("/readyz", self.ready)
        app.router.add_get("/metrics", self.metrics)


def _shown(figures: FeedFigures | None, *, refuses: bool) -> dict[str, object]:
    if figures is None:
        return {"stored_at": None, "refused_at": None, "refused_in_a_row": 0, "healthy": True}
    return {
        "stored_at": _time(figures.stored_at),
        "refused_at": _time(figures.refused_at),
        "refused_in_a_row": figures.refused_in_a_row,
        "healthy": not refuses,
    }


def _time(at: datetime | None) -> str | None:
    return at.isoformat() if at else None
