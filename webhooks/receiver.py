# SPDX-License-Identifier: Apache-2.0
"""The HTTP side: a provider's request becomes stored events, and an answer that this provider understands.

Read the body, verify, parse, store, answer. "Done" is only ever said after the commit.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import structlog
from aiohttp import hdrs, web

from webhooks import answers
from webhooks.body import BodiesBusyError, BodyReader, BodyRefusedError
from webhooks.floods import Floods
from webhooks.inbox import InboxBusy, InboxUnavailable, Stored
from webhooks.intake import Intake, place_of
from webhooks.metrics import UNKNOWN_FEED
from webhooks.provider import (
    BadPayload,
    Delivery,
    Feed,
    Fetch,
    FetchError,
    Later,
    Parsed,
    Provider,
    Refused,
)
from webhooks.quiet import Quiet, UnreadableRequests
from webhooks.registry import PROVIDERS

Take = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Watch = Callable[[Feed, Take], Take]
"""Is given what takes a feed's deliveries, and returns what is to take them instead."""

_log: Final = structlog.get_logger()

PROBES: Final = (hdrs.METH_GET, hdrs.METH_HEAD)
"""By these some providers ask whether the endpoint is there."""

LINGER_SECONDS: Final = 2.0
"""How long a refused request is read to its end, so that its sender sees the answer rather than a reset."""

IDLE_SECONDS: Final = 630.0
"""How long a connection may send no whole request head: longer than load balancers keep theirs (up to 600 s)."""

LAST_SECONDS: Final = 0.2
"""How long at shutdown each answer ends its connection, before those are cut off on which nothing came."""

NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""What a feed may be called. No other name is logged: who knows what a stranger writes there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may cost: bytes of its body after inflation, and seconds for that to arrive.

    `retry_after` is when to deliver again what was put off, in seconds.
    """

    max_body: int = 25_000_000
    body_seconds: float = 30.0
    retry_after: int = 30


class NotStored(Exception):
    """Not stored for our reasons: the provider must deliver again. The text is a short stable word."""


class Receiver:
    """Takes deliveries for the configured feeds. Set `draining` to put new ones off while those in flight finish."""

    def __init__(
        self,
        feeds: Mapping[str, Feed],
        intake: Intake,
        fetch: Fetch,
        limits: Limits,
        providers: Mapping[str, Provider],
        watch: Watch | None = None,
    ) -> None:
        self.draining = False
        self.endpoints: dict[tuple[str, str], Take] = {}
        """What takes the deliveries of each feed, by method and path."""
        self._providers, self._watch = providers, watch
        self.replace(feeds)
        self._intake, self._fetch = intake, fetch
        self._bodies = BodyReader(limits.max_body, limits.body_seconds)
        self._retry_after = limits.retry_after
        self._floods = Floods()

    def replace(self, feeds: Mapping[str, Feed]) -> None:
        """Take the deliveries of these feeds from now on. Those that are under way end as they began."""
        self._feeds = {name: (feed, self._providers[feed.provider]) for name, feed in feeds.items()}
        self.endpoints.clear()
        for name, (feed, provider) in self._feeds.items():
            take: Take = partial(self.take, name)
            take = self._watch(feed, take) if self._watch else take
            self.endpoints.update({(method, f"/webhooks/{name}"): take for method in provider.facts.methods})

    async def take(self, name: str, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a provider's delivery to a configured feed. Never raises for what the request holds."""
        feed, provider = self._feeds[name]
        try:
            return await self._taken(request, feed, provider)
        except BodyRefusedError as error:
            self._note_refused(feed.name, error.reason, str(error))
            return await self._in_time(feed, answers.problem(error.status, str(error)))
        except BodiesBusyError:
            return self._put_off(feed, provider, "busy")
        except NotStored as error:
            return self._put_off(feed, provider, str(error))

    async def any(self, request: web.Request) -> web.StreamResponse:
        """Answer whatever comes: a delivery, a probe, a method that its provider doesn't use, a feed nobody knows."""
        name = request.match_info["feed"]
        if (found := self._feeds.get(name)) is None:
            return self._unknown(request, name)
        if request.method in found[1].facts.methods:
            return await self.endpoints[request.method, f"/webhooks/{name}"](request)
        if request.method in PROBES:
            return answers.ok()
        allowed = sorted({*PROBES, *found[1].facts.methods})
        return answers.problem(
            405, f"deliver by {' or '.join(found[1].facts.methods)}", {hdrs.ALLOW: ",".join(allowed)}
        )

    def _unknown(self, request: web.Request, name: str) -> web.Response:
        """Refuse what no feed takes. Only what may be a delivery counts: who asks whether it is there loses nothing."""
        if request.method not in PROBES or request.query_string:
            named = name if NAME.fullmatch(name) else None
            self._note_refused(UNKNOWN_FEED, "unknown_feed", "no feed of the settings has this name", name=named)
        return answers.problem(404, "no such feed")

    async def _taken(self, request: web.BaseRequest, feed: Feed, provider: Provider) -> web.StreamResponse:
        if self.draining:
            raise NotStored("draining")
        delivery = Delivery(
            await self._bodies.read(request, feed.name),
            request.headers,
            request.method,
            request.rel_url.raw_query_string,
        )
        verdict = await self._intake.verdict(feed, provider, delivery)
        if isinstance(verdict, Refused):
            self._note_refused(feed.name, verdict.reason, verdict.hint)
            status = provider.facts.refused_status
            answer = answers.refused(status, verdict.reason, verdict.hint, self._retry_after)
            return await self._in_time(feed, answer)
        if isinstance(verdict, Later):
            raise NotStored(verdict.reason)
        try:
            parsed = self._intake.parsed(feed, provider, delivery)
        except BadPayload as error:
            self._note_refused(feed.name, "format", str(error))
            return answers.problem(400, str(error))
        stored = await self._store(feed, delivery, parsed)
        return answers.handshake(parsed.answer) if parsed.answer else answers.stored(stored, request)

    async def _in_time(self, feed: Feed, answer: web.Response) -> web.Response:
        """Return the answer to what is refused: later, and at the cost of a connection, where too much is."""
        if self._floods.note(feed.name):
            answer.force_close()
            if not self.draining:
                await self._floods.hold_back(feed.name)
        return answer

    async def _store(self, feed: Feed, delivery: Delivery, parsed: Parsed) -> Stored:
        if parsed.confirm_url:
            await self._confirm(feed, parsed.confirm_url)
        try:
            return await self._intake.store(feed, delivery, parsed, "http")
        except InboxBusy:
            raise NotStored("busy") from None
        except InboxUnavailable:
            raise NotStored("database") from None

    async def _confirm(self, feed: Feed, url: str) -> None:
        try:
            await self._fetch(url)
        except FetchError as error:
            _log.warning("confirmation_failed", feed=feed.name, error=str(error))
            raise NotStored("confirmation") from None
        _log.info("subscription_confirmed", feed=feed.name)

    def _note_refused(self, feed: str, reason: str, hint: str, **more: str | None) -> None:
        self._intake.counters.note(feed, f"refused:{reason}")
        if (before := self._intake.quiet.silenced(feed, reason)) is not None:
            _log.warning("delivery_refused", feed=feed, reason=reason, hint=hint, **more, unlogged_before=before)

    def _put_off(self, feed: Feed, provider: Provider, reason: str) -> web.Response:
        self._intake.counters.note(feed.name, f"later:{reason}")
        if (before := self._intake.quiet.silenced(feed.name, f"later:{reason}")) is not None:
            _log.error("delivery_not_stored", feed=feed.name, reason=reason, unlogged_before=before)
        return answers.later(provider.facts.busy_status, reason, self._retry_after)


RECEIVER: Final = web.AppKey("receiver", Receiver)
"""Where an application keeps its receiver: `app[RECEIVER].draining = True` puts new deliveries off."""


def add_receiver(
    app: web.Application,
    feeds: Mapping[str, Feed],
    intake: Intake,
    fetch: Fetch,
    limits: Limits | None = None,
    providers: Mapping[str, Provider] = PROVIDERS,
    watch: Watch | None = None,
) -> None:
    """Let an application take deliveries at `/webhooks/{feed}`; run it with `make_runner`."""
    receiver = Receiver(feeds, intake, fetch, limits or Limits(), providers, watch)
    app[RECEIVER] = receiver
    app.router.add_route("*", "/webhooks/{feed:.*}", receiver.any)  # a slash too many loses deliveries as well


def make_runner(app: web.Application, shutdown_seconds: float = 60.0) -> Runner:
    """Return what runs the application as it must be run.

    Bodies come as they were sent, since we inflate them in bounded pieces; a handler runs to its end though the client
    hung up, since its event is to be stored; an access log would halve the speed.
    """
    logging.getLogger("aiohttp.server").addFilter(UnreadableRequests())
    return Runner(
        app,
        keepalive_timeout=IDLE_SECONDS,
        auto_decompress=False,
        handler_cancellation=False,
        access_log=None,
        lingering_time=LINGER_SECONDS,
        shutdown_timeout=shutdown_seconds,
    )


class _Request(web.Request):
    """Sees to the headers of each answer, of those to what is no HTTP as well: browsers may see them all.

    They guess no type, keep nothing, and are not told what we are made of.
    """

    ATTRS = web.Request.ATTRS | {"_runner"}

    def __init__(self, runner: Runner, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._runner = runner

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may be kept after the answer. It is asked when that is made, not when this came."""
        return not self._runner.ending and super().keep_alive

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
        response.headers.pop(hdrs.SERVER, None)
        await super()._prepare_hook(response)


def _with_problems(routed: Take) -> Take:
    """Answer what nobody serves, and what nobody foresaw, by a problem document, as all else that is refused."""
    quiet = Quiet()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await routed(request)
        except web.HTTPException as error:
            if error.status < HTTPStatus.BAD_REQUEST or error.content_type == answers.PROBLEM:
                raise
            return answers.not_served(error)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is answered, and logged
            if (before := quiet.silenced("", type(error).__name__)) is not None:
                _log.error("request_failed", **place_of(error), unlogged_before=before)
                _log.debug("traceback", of="request_failed", exc_info=error)
            return answers.problem(500, "the server made a mistake, see its log")

    return handle


class Runner(web.AppRunner):
    """Takes deliveries past the application's router, which costs a tenth of a small one; the rest goes through it."""

    ending = False
    """Whether each answer is to be the last one on its connection."""

    async def setup(self) -> None:
        """Prepare the server."""
        await super().setup()
        receiver, server = self.app.get(RECEIVER), self.server
        if server is None:
            return
        server.request_factory = partial(self.app._make_request, _cls=partial(_Request, self))  # type: ignore[arg-type]  # noqa: SLF001 - it takes no class
        endpoints, routed = receiver.endpoints if receiver else {}, _with_problems(server.request_handler)

        def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
            take = endpoints.get((request.method, request.path))
            return routed(request) if take is None or hdrs.EXPECT in request.headers else take(request)

        server.request_handler = handle

    async def wind_down(self) -> None:
        """End connections by answers, for a moment: one that is cut off may hold a request that nobody has read yet."""
        self.ending = True
        if self.server is not None and self.server.connections:
            await asyncio.sleep(LAST_SECONDS)
