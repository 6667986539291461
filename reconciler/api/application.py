# SPDX-License-Identifier: Apache-2.0
"""`/v1/sends`: claim, confirm, fail and look over HTTP, for senders in any language. The application and its rules.

Served by whichever process runs passes. What meets a request, in this order: errors become problem documents, the token
(401) and its scopes (403), the body (408, 413, 415), the Idempotency-Key, the database's own faults (503: nothing was
performed, or repeating it is safe), the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, NamedTuple

import asyncpg
import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from reconciler import metrics
from reconciler.api.openapi import document
from reconciler.api.requests import LARGEST_BODY
from reconciler.api.routes import CALLER, OUTCOME, Routes, Within
from reconciler.configuration.tables import ApiSettings
from reconciler.idempotency import idempotency, nothing_queued
from reconciler.problem import Problem, retry_after
from reconciler.sending.idempotency_store import Store, unavailable
from reconciler.tokens import Caller, Scope, Tokens
from webhooks.database import FAILURES
from webhooks.provider import Provider
from webhooks.quiet import Quiet

API_LOCK_SECONDS: Final = 2.0
"""How long a request waits for a send that somebody's open transaction holds."""
BODY_SECONDS: Final = 10.0
SMALL_BODY: Final = 16 * 1024
LARGE_AT_ONCE: Final = 16
"""How many larger ones are held at a time: each becomes many times its size while it is read as JSON."""
DOCUMENT: Final = "/v1/openapi.json"
SEND: Final = frozenset[Scope]({"send"})
OPERATE: Final = frozenset[Scope]({"operate"})
READ: Final = frozenset[Scope]({"read"})
_TELLING: Final = frozenset({400, 401, 403, 408, 413, 415, 422})
"""Refusals that hint at a wrong set-up of the caller: they are logged, as failures are."""

_log: Final = structlog.get_logger()


class Route(NamedTuple):
    """One route: who may ask, and what answers."""

    method: str
    path: str
    scopes: frozenset[Scope]
    handler: Handler


def callers(settings: ApiSettings) -> Iterator[tuple[str, Caller]]:
    """Give the hash of each token with whom it stands for."""
    for name, token in settings.tokens.items():
        yield from ((hashed, Caller(name, frozenset(token.scopes))) for hashed in token.hash)


def add_api(
    app: web.Application, settings: ApiSettings, feeds: Mapping[str, Provider], store: Store, within: Within
) -> Tokens:
    """Serve `/v1/sends` and its description; return the tokens that it knows.

    `store.pool` is the database, None until it was reached. `feeds` may change while it is served.
    """
    routes = Routes(store, feeds, within)
    table = (
        Route(hdrs.METH_POST, "/v1/sends", SEND, routes.claim),
        Route(hdrs.METH_POST, "/v1/enqueue", SEND, routes.enqueue),
        Route(hdrs.METH_GET, "/v1/sends/{key}", SEND | OPERATE | READ, routes.look),
        Route(hdrs.METH_POST, "/v1/sends/{key}/confirm", SEND, routes.confirm),
        Route(hdrs.METH_POST, "/v1/sends/{key}/fail", SEND, routes.fail),
        Route(hdrs.METH_POST, "/v1/sends/{key}/operator/release", OPERATE, routes.release),
        Route(hdrs.METH_POST, "/v1/sends/{key}/operator/sent", OPERATE, routes.sent),
        Route(hdrs.METH_POST, "/v1/sends/{key}/operator/failed", OPERATE, routes.failed),
    )

    async def openapi(_: web.Request) -> web.Response:
        return web.json_response(document(sorted(feeds)))

    tokens = Tokens(callers(settings))
    # A claim's answer is never kept: it uses the key itself. What a sender says is safe to repeat by its fence, and has
    # to be stored in the end, whatever died meanwhile; an operator's word, repeated, may decide about the next attempt.
    once = idempotency(
        store,
        caller=lambda request: request[CALLER].name,
        applies=lambda request: request.match_info.handler != routes.claim,
        repeatable=lambda request: request.match_info.handler in (routes.enqueue, routes.confirm, routes.fail),
    )
    api = web.Application(middlewares=[_errors(table), _authenticated(tokens, table), _reading(), once, _database])
    for route in table:
        methods = (hdrs.METH_GET, hdrs.METH_HEAD) if route.method == hdrs.METH_GET else (route.method,)
        for method in methods:
            path = route.path.removeprefix("/v1").replace("{key}", "{key:[^/]+}")  # which may hold braces
            api.router.add_route(method, path, route.handler)
    api.router.add_get(DOCUMENT.removeprefix("/v1"), openapi)
    app.add_subapp("/v1", api)
    return tokens


def _errors(table: tuple[Route, ...]) -> Middleware:
    """Make every error a problem document; count each request, and log those that failed, seldom enough."""
    quiet, paths = Quiet(), {route.path for route in table}

    def note(route: str, answer: web.StreamResponse, outcome: str | None, error: BaseException | None) -> None:
        metrics.API_REQUESTS.labels(route, outcome or str(answer.status)).inc()
        if answer.status not in _TELLING and answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return
        if (before := quiet.silenced(route, str(answer.status))) is not None:
            log = _log.error if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else _log.warning
            reason = type(error).__name__ if error else outcome
            log("api_request_refused", route=route, status=answer.status, reason=reason, unlogged_before=before)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = _path(request)
        route = path if path in paths else "other"
        try:
            response = await handler(request)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is answered, and logged
            answer = _problem_of(error)
            note(route, answer, answer.outcome, answer.__cause__)
            raise answer from None
        note(route, response, request.get(OUTCOME), None)
        return response

    return middleware


def _problem_of(error: Exception) -> Problem:
    """Return the answer to whatever was raised. What nobody foresaw is a mistake of ours: its cause is logged."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, web.HTTPException):
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return Problem(error.status, error.reason, headers=allowed)
    _log.debug("traceback", of="api_request_refused", exc_info=error)
    answer = Problem(500, "the server made a mistake, see its log; whether anything was done is not known")
    answer.__cause__ = error
    return answer


def _path(request: web.Request) -> str | None:
    """Return the path of a request's route as the table has it, None where there is none."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else None


def _authenticated(tokens: Tokens, table: tuple[Route, ...]) -> Middleware:
    """Let nobody in but callers that are known, and each only where his scopes lead."""
    scopes = {route.path: route.scopes for route in table}

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        path = _path(request)
        if path == DOCUMENT:
            return await handler(request)
        caller = tokens.caller(request.headers.get(hdrs.AUTHORIZATION))
        if caller is None:
            raise Problem(
                401,
                "a bearer token that is known here is needed",
                headers={"WWW-Authenticate": "Bearer"},
                outcome="unauthenticated",
            )
        if path in scopes and not caller.scopes & scopes[path]:
            needed = " or ".join(sorted(scopes[path]))
            raise Problem(403, f"this token lacks the scope {needed}", outcome="forbidden")
        request[CALLER] = caller
        return await handler(request)

    return middleware


def _reading() -> Middleware:
    """Read the body, which has to be small, plain and soon there. Of those that aren't tiny only so many are held."""
    places = asyncio.Semaphore(LARGE_AT_ONCE)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        encodings = ",".join(request.headers.getall(hdrs.CONTENT_ENCODING, [])).split(",")
        if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
            raise Problem(415, "send the body without a content encoding", outcome="encoding")
        if not request.body_exists or (request.content_length or LARGEST_BODY) <= SMALL_BODY:
            await _read(request)
            return await handler(request)
        async with _place(places):
            await _read(request)
            return await handler(request)

    return middleware


@asynccontextmanager
async def _place(places: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            await places.acquire()
    except TimeoutError:
        headers = retry_after(BODY_SECONDS)
        raise Problem(503, "too many large bodies at once: repeat it", headers=headers, outcome="busy") from None
    try:
        yield
    finally:
        places.release()


async def _read(request: web.Request) -> None:
    too_large = Problem(413, f"the body is larger than {LARGEST_BODY // 1024} KiB", outcome="too_large")
    if (request.content_length or 0) > LARGEST_BODY:
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise Problem(408, f"the body did not arrive within {BODY_SECONDS:g} s", outcome="slow") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except (web.RequestPayloadError, ConnectionError):
        raise Problem(400, "the body did not arrive whole", outcome="cut_off") from None
    if len(body) > LARGEST_BODY:
        raise too_large


@web.middleware
async def _database(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell what the database refuses for the request's sake from what it can't do now."""
    try:
        return await handler(request)
    except (asyncpg.DataError, asyncpg.ProgramLimitExceededError) as error:
        raise Problem(422, " ".join(str(error.args[0]).split()), outcome="invalid") from None
    except FAILURES as error:
        with nothing_queued():
            raise unavailable() from error
