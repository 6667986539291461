# SPDX-License-Identifier: Apache-2.0
"""The Idempotency-Key header as a middleware for any aiohttp application whose database has this schema.

It keeps draft-ietf-httpapi-idempotency-key-header: a repeated POST or PATCH is answered, not performed again.

    store = Store(pool)  # asyncpg's; or set `store.pool` once there is one
    app = web.Application(middlewares=[who_calls, idempotency(store, caller=lambda request: request["user"])])

    async def order_receipt(request):
        with nothing_queued():  # an error in here, an answer from 500 up raised here, frees the key
            order = await load_order(request)
            key = f"order.receipt:{order.id}"
        sent = await guard.send_once(pool, key, "mailgun-main", submit)
        if sent.outcome in ("waiting", "in_flight", "held"):
            raise Ambiguous(sent.retry_at, key=key)
        return web.json_response({"outcome": sent.outcome})

What becomes of a request, and what its repeats are answered (with `Idempotent-Replayed: true` where nothing ran):

* An answer below 500 is kept with its body and some headers, a refusal too: repeats get the same. 409, 423, 425 and
  429 mean "not now": they are not kept, a repeat is performed. So it is after a failure raised in `nothing_queued`.
* `Ambiguous`, any other exception, an answer of 408 or from 500 up, or a process that died: nobody can tell. Repeats
  get 409 with `state` ambiguous and are never performed, unless the request named its send (`Ambiguous(key=...)`, or
  `names_send` beforehand): then the send log is asked, and answers sent, failed, or, where the send is free to be
  claimed, a repeat is performed. A send that the log doesn't know stays ambiguous: whoever names one before he claims
  it writes it first (`guard.enqueue`).
* While the first one runs: 409 with Retry-After. Other content under the same key: 422. A database away: 503.
* What is safe to repeat in itself (`repeatable`) is never ambiguous: it is performed until an answer is kept.

A key belongs to its caller, method and path. Content is the query and the body; of JSON neither white space nor the
order of names matters. A record is committed before the handler runs; no transaction or connection is held meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, TypeVar

import msgspec
import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from reconciler.problem import Problem, retry_after
from reconciler.sending.idempotency_store import HEADER, Run, Store, delete_old, in_progress

__all__ = ["Ambiguous", "Store", "delete_old", "idempotency", "names_send", "nothing_queued"]

REPLAYED: Final = {"Idempotent-Replayed": "true"}
LONGEST_KEY: Final = 255
NOT_NOW: Final = frozenset({409, 423, 425, 429})
"""Refusals that another time may not meet. They are not kept."""
TIMED_OUT: Final = 408
SERVER_ERROR: Final = 500
NOTHING_QUEUED: Final = "nothing was queued"
"""The note on a failure that frees the key."""

T = TypeVar("T")

RUN: Final = web.RequestKey("idempotency_run", Run)

_QUOTED: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"(?: *;[ -~]*)?')
_BARE: Final = re.compile(r"[A-Za-z0-9!#$%&'*+./:=@^_|~-]+")
_NUMBERS_AS_WRITTEN: Final = msgspec.json.Decoder(float_hook=Decimal)
_CANONICAL: Final = msgspec.json.Encoder(order="sorted", decimal_format="number")

_log: Final = structlog.get_logger()


class Ambiguous(Exception):
    """Raised by a handler that can't tell what it did. `retry_at` is when more will be known, if that is known.

    `key`, a send key or wire key, names the send that it was about: repeats are then answered by what became of that.
    """

    def __init__(self, retry_at: datetime | None = None, *, key: str | None = None) -> None:
        super().__init__("nobody can tell yet whether it was sent")
        self.retry_at, self.key = retry_at, key


@contextmanager
def nothing_queued() -> Iterator[None]:
    """Vouch that nothing was queued where the block raises an error, or an answer from 500 up: the key is freed."""
    try:
        yield
    except Exception as error:
        error.add_note(NOTHING_QUEUED)
        raise


def idempotency(
    store: Store,
    *,
    caller: Callable[[web.Request], str],
    required: bool = False,
    applies: Callable[[web.Request], bool] = lambda _: True,
    repeatable: Callable[[web.Request], bool] = lambda _: False,
) -> Middleware:
    """Return the middleware. `caller` names whose key it is; put what authenticates him before it.

    `required`: a POST or PATCH without the header is refused (400). `applies`: whether a request is this middleware's
    business. `repeatable`: whether performing it twice, even at the same time, does no more than once.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in (hdrs.METH_POST, hdrs.METH_PATCH) or not applies(request):
            return await handler(request)
        key = key_of(request, required=required)
        if key is None:
            return await _unkept(request, handler)
        identity, content = identity_of(caller(request), request, key), await content_of(request)
        anew = repeatable(request)
        found = await store.begin(identity, content, anew=anew)
        if not isinstance(found, Run):
            found = await _repeated(store, identity, content, found)
        if not isinstance(found, Run):
            return found
        return await (_performed_anew if anew else _performed)(found, request, handler)

    return middleware


async def names_send(request: web.Request, key: str) -> None:
    """Let a handler say, before it submits, which send its request is about: so a crash can be resolved.

    `key` is its send key or wire key. Does nothing where the request bears no Idempotency-Key.
    """
    run = request.get(RUN)
    if run is not None:
        await run.store.name(run, key)


def key_of(request: web.Request, *, required: bool) -> str | None:
    """Return a request's key, None where it has none: a structured field's string, or the same text bare.

    Raises Problem 400 for one that is missing, empty, too long, or doubled.
    """
    given = request.headers.getall(HEADER, [])
    if not given:
        if required:
            raise Problem(400, f"this request needs the header {HEADER}", outcome="idempotency_key_missing")
        return None
    quoted, bare = _QUOTED.fullmatch(given[0].strip(" ")), _BARE.fullmatch(given[0].strip(" "))
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else bare[0] if bare else ""
    if len(given) > 1 or not 0 < len(key) <= LONGEST_KEY:
        raise Problem(
            400,
            f'{HEADER} is one string of 1 to {LONGEST_KEY} ASCII characters, as in {HEADER}: "8e03978e-40d5"',
            outcome="idempotency_key_invalid",
        )
    return key


def identity_of(caller: str, request: web.Request, key: str) -> str:
    """Return what names the record: callers, methods and paths (however encoded) don't share keys."""
    names = (caller, request.method, request.rel_url.path_safe, key)
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


async def content_of(request: web.Request) -> str:
    """Return the fingerprint of a request's content."""
    body = await request.read()
    try:
        canonical = b"json\0" + _CANONICAL.encode(_NUMBERS_AS_WRITTEN.decode(body))
    except (ValueError, RecursionError):  # no JSON, or none that has just one meaning
        canonical = b"bytes\0" + body
    return hashlib.sha256(request.rel_url.raw_query_string.encode() + b"\0" + canonical).hexdigest()


def require_same(record: Any, content: str) -> None:
    """Raise Problem 422 where a key stands for another content."""
    if record["fingerprint"] != content:
        raise Problem(
            422, f"this {HEADER} was used for a request with another content", outcome="idempotency_key_reused"
        )


async def _repeated(store: Store, identity: str, content: str, record: Any) -> web.Response | Run:
    """Answer a request that was begun before, or return a run where it may be performed again."""
    require_same(record, content)
    if record["state"] == "answered":
        headers = [*json.loads(record["headers"]), *REPLAYED.items()]
        return web.Response(status=record["status"], headers=headers, body=record["body"])
    if record["state"] == "anew":
        return Run(identity, record["run"], store)
    if record["state"] == "begun" and record["running"]:
        raise in_progress()
    wire_key, send = record["wire_key"], record["send"]
    if send in (None, "claimed"):
        raise _ambiguous(record["resolves_at"], record["now"], wire_key)
    if send == "sent":
        return web.json_response({"state": send, "wire_key": wire_key}, headers=REPLAYED)
    if send == "failed":
        raise Problem(409, "the send of this request has failed", state=send, wire_key=wire_key, headers=REPLAYED)
    run = await store.take_over(identity, record["run"])
    if run is None:
        raise in_progress()
    return run


def _ambiguous(retry_at: datetime | None, now: datetime | None, wire_key: str | None) -> Problem:
    headers = retry_after(retry_at - now) if retry_at and now else None
    return Problem(
        409,
        "nobody can tell yet what this request did; it is not performed again",
        headers=headers,
        outcome="ambiguous",
        state="ambiguous",
        retry_at=retry_at.isoformat() if retry_at else None,
        wire_key=wire_key,
    )


async def _performed(run: Run, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Perform a request, and keep what became of it. A cancelled one stays begun, and so becomes ambiguous."""
    request[RUN] = run
    try:
        response = _whole(await handler(request))
        await _keep(run, response)
    except Ambiguous as error:
        now = await _tried(run.store.give_up(run, error.key, error.retry_at))
        raise _ambiguous(error.retry_at, now, run.wire_key) from None
    except web.HTTPException as answer:
        await _keep(run, answer, nothing_queued=_vouched(answer))
        raise
    except Exception as error:
        await _tried(run.store.free(run) if _vouched(error) else run.store.give_up(run))
        raise
    return response


async def _keep(run: Run, response: web.Response, *, nothing_queued: bool = False) -> None:
    """Keep an answer that is one for good. Another one frees the key where certainly nothing was queued."""
    if _is_final(response):
        await _tried(run.store.answer(run, response))
    elif nothing_queued or (response.status in NOT_NOW and run.wire_key is None):
        await _tried(run.store.free(run))
    else:
        await _tried(run.store.give_up(run))


async def _performed_anew(run: Run, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Perform what is safe to repeat, and keep its answer. Until there is one, repeats are performed, too."""
    try:
        response = _whole(await _unkept(request, handler))
    except web.HTTPException as answer:
        if _is_final(answer):
            await _tried(run.store.answer(run, answer))
        raise
    if _is_final(response):
        await _tried(run.store.answer(run, response))
    return response


def _whole(response: web.StreamResponse) -> web.Response:
    if not isinstance(response, web.Response):
        raise TypeError("only a whole answer, no stream, can be kept for an Idempotency-Key")
    return response


def _is_final(response: web.Response) -> bool:
    return response.status < SERVER_ERROR and response.status not in NOT_NOW | {TIMED_OUT}


def _vouched(error: Exception) -> bool:
    return NOTHING_QUEUED in getattr(error, "__notes__", ())


async def _unkept(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Perform a request without a key. A repeat of it is another request."""
    try:
        return await handler(request)
    except Ambiguous as error:
        raise _ambiguous(error.retry_at, None, None) from None


async def _tried(stored: Awaitable[T]) -> T | None:
    """Store if the database is there. What was performed is answered anyhow; a repeat finds it ambiguous."""
    try:
        return await stored
    except Problem as error:
        _log.warning("idempotency_not_stored", reason=type(error.__cause__).__name__)
        return None
