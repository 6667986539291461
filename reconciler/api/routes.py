# SPDX-License-Identifier: Apache-2.0
"""What each route of `/v1/sends` does: thin over the SQL functions, as the Python guard is.

Every answer has an `outcome`, the functions' own word for it, and where it is known the send's `state`: pending,
claimed, ambiguous (claimed, and the time to submit has passed or its sender said that it can't tell), sent, failed.
Nobody is shown a send key, a recipient or a payload: who asks has the key, and people have `reconciler why`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

import asyncpg
from aiohttp import web

from reconciler import guard
from reconciler.api.requests import Claim, Confirm, Decide, Enqueue, Fail, checked_key, read_body
from reconciler.database.connection import as_wire_key
from reconciler.idempotency import REPLAYED, Ambiguous, content_of, identity_of, key_of, require_same
from reconciler.passes import by_hand
from reconciler.problem import Problem, retry_after
from reconciler.sending import tracing
from reconciler.sending.claims import claim_options, confirm_options, storable
from reconciler.sending.idempotency_store import ACQUIRE_SECONDS, STATEMENTS_SECONDS, Run, Store, unavailable
from reconciler.tokens import Caller
from webhooks.database import FAILURES
from webhooks.provider import Provider, Stamp

CALLER: Final = web.RequestKey("api_caller", Caller)
OUTCOME: Final = web.RequestKey("api_outcome", str)
"""What an answer's metric is counted under."""

API_CONNECTIONS: Final = 5
"""Of a pool of its own, so that a flood of claims never takes those of passes or deliveries."""
CLAIMS_AT_ONCE: Final = API_CONNECTIONS - 2
CLAIM_LOCK: Final = "200ms"
"""How long a claim waits on its connection for another transaction at the same send."""
LOCK_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""After how many seconds, without a connection, it asks again."""
HELD_SECONDS: Final = 15.0
"""When to ask again about a send that is held: passes look at it every so often."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an outcome of a claim is answered: status, the send's state, and a line for whoever reads it."""

    status: int
    state: str | None
    detail: str = ""


# 409: ask again, or look; 410: this key is over; 422: the caller's mistake; 429: later.
CLAIM_ANSWERS: Final[Mapping[str, Answer]] = {
    "claimed": Answer(201, "claimed"),
    "already_sent": Answer(200, "sent"),
    "in_flight": Answer(409, "claimed", "another attempt may still submit it"),
    "ambiguous": Answer(409, "ambiguous", "nobody can tell yet whether an earlier attempt was accepted"),
    "failed": Answer(409, "failed", "it has failed for good, unless an operator releases it"),
    "held": Answer(409, "pending", "it may not be given out now: see reason"),
    "other_feed": Answer(409, "pending", "an attempt on another feed may have been accepted"),
    "expired": Answer(410, "pending", "its time has passed"),
    "beyond_memory": Answer(410, None, "the job is older than the guard's memory"),
    "key_reused": Answer(422, None, "this key stands for another send: see reason"),
    "capped": Answer(429, "pending", "the recipient has had enough for now"),
}
FAIL_STATES: Final = {"failed": "failed", "released": "pending", "waiting": "ambiguous", "sent": "sent"}

STANDING: Final = """
SELECT wire_key, feed, message_class, attempt, created_at, claimed_at, submit_by, next_check_at, capped_until,
       released_at, release_basis, held_reason, sent_at, failed_at, verdict_source, verdict_reason,
       provider_message_id AS message_id, delivery, delivery_at, t AS now, send_shown_state(l, t) AS state
FROM send_log l, clock_timestamp() AS t WHERE wire_key = wire_key($1)
"""


async def standing(connection: Any, key: str) -> Any:
    """Return how a send stands, with the database's clock; None where no row has the key."""
    return await connection.fetchrow(STANDING, key)


# What the claim itself would look at first, without a lock: most calls for a send that is taken end here, unwritten.
PEEK: Final = """
SELECT i.fingerprint, s.outcome, k.wire_key, s.attempt, s.fence, s.seconds_left, s.reason, s.retry_at,
       l.submit_by, l.next_check_at, t AS now, send_shown_state(l, t) AS state
FROM clock_timestamp() AS t CROSS JOIN wire_key($1) AS k(wire_key)
LEFT JOIN idempotency i ON i.id = $4
LEFT JOIN send_log l ON l.wire_key = k.wire_key
LEFT JOIN LATERAL send_standing(l, $1, $2, $3::jsonb, t) AS s ON true
"""


async def peek(connection: Any, call: Call) -> Any:
    """Return how a claim of a row that isn't pending is answered, and the content that its Idempotency-Key stands for.

    No outcome: the claim has to be made.
    """
    return await connection.fetchrow(PEEK, call.asked.key, call.asked.feed, claim_options(call.options), call.identity)


# Both for this transaction. A lock timeout of the session's own would not get through a pooler.
HURRY: Final = """
SELECT set_config('lock_timeout', $2, true),
       (SELECT true FROM send_log WHERE wire_key = wire_key($1) FOR UPDATE NOWAIT)
"""
CLAIM: Final = "SELECT * FROM send_claim($1, $2, $3::jsonb)"


async def make_claim(connection: Any, call: Call, store: Store) -> Any:
    """Claim, and commit that with the record of its Idempotency-Key. Raises LockNotAvailableError soon."""
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(HURRY, call.asked.key, CLAIM_LOCK)
        found = await store.begin_on(connection, Run(call.identity, uuid4(), store), call.content, "anew")
        if not isinstance(found, Run):
            require_same(found, call.content)
        return await connection.fetchrow(CLAIM, call.asked.key, call.asked.feed, claim_options(call.options))


@dataclass(frozen=True, slots=True)
class Call:
    """A claim that is asked for, and what names it."""

    asked: Claim
    provider: Provider
    identity: str
    content: str
    options: dict[str, Any]
    began: int
    """See `tracing.begin`."""


Within = Callable[[str, str], timedelta]
"""How long a claim of a feed and message class gets to submit, where it doesn't say."""


class Routes:
    """The handlers. `store.pool` is the pool that they use, too; `feeds` are the configured ones' providers."""

    def __init__(self, store: Store, feeds: Mapping[str, Provider], within: Within) -> None:
        self._store, self._feeds, self._within = store, feeds, within
        self._claims = asyncio.Semaphore(CLAIMS_AT_ONCE)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        if self._store.pool is None:
            raise unavailable()
        async with (
            self._store.pool.acquire(timeout=ACQUIRE_SECONDS) as connection,
            asyncio.timeout(STATEMENTS_SECONDS),
        ):
            yield connection

    @asynccontextmanager
    async def _place_to_claim(self) -> AsyncIterator[None]:
        """Leave some connections to those who say how it went: they never wait behind a crowd that wants to claim."""
        async with asyncio.timeout(ACQUIRE_SECONDS):
            await self._claims.acquire()
        try:
            yield
        finally:
            self._claims.release()

    async def claim(self, request: web.Request) -> web.Response:
        """Claim a send. What is answered is looked up anew each time: a granted claim is a right that ends.

        So its Idempotency-Key, which two workers at the same job may share, grants nothing twice. A `nonce`, which one
        call makes up for itself, does: where that call's answer was lost, it gets the same claim again.
        """
        call = await self._called(request)
        for pause in LOCK_PAUSES:
            with suppress(asyncpg.LockNotAvailableError):
                return await self._claim(request, call)
            await asyncio.sleep(pause)  # a transaction that lasts holds up nobody else's claims
        return await self._claim(request, call)

    async def _called(self, request: web.Request) -> Call:
        asked, began = await read_body(request, Claim), tracing.begin()
        provider = self._provider(asked.feed)
        checked_key(asked.key)
        caller = f"api:{request[CALLER].name}"
        within = self._within(asked.feed, asked.message_class or "default").total_seconds()
        options = {"claimed_by": caller, "submit_within": within} | asked.options()
        if asked.nonce is not None:
            options["nonce"] = hashlib.sha256(f"{caller}\0{asked.nonce}".encode()).hexdigest()
        identity = identity_of(request[CALLER].name, request, key_of(request, required=True) or "")
        return Call(asked, provider, identity, await content_of(request), options, began)

    async def _claim(self, request: web.Request, call: Call) -> web.Response:
        async with self._place_to_claim(), self._connection() as connection:
            seen = await peek(connection, call)
            if seen["fingerprint"] is not None:
                require_same(seen, call.content)
            if seen["outcome"] is not None:
                return _claim_answer(request, call, seen, seen)
            if (known := call.provider.stamp(seen["wire_key"]).message_id) is not None:
                call.options.setdefault("known_message_id", known)
            row = await make_claim(connection, call, self._store)
            now = None if row["outcome"] == "claimed" else await standing(connection, call.asked.key)
        return _claim_answer(request, call, row, now)

    async def enqueue(self, request: web.Request) -> web.Response:
        """Write a send that is to be claimed later."""
        asked = await read_body(request, Enqueue)
        self._provider(asked.feed)
        async with self._connection() as connection:
            row = await connection.fetchrow(ENQUEUE, checked_key(asked.key), asked.feed, claim_options(asked.options()))
        outcome, wire_key = row["outcome"], row["wire_key"]
        if outcome == "key_reused":
            raise _refusal(422, outcome, "this key stands for another send", wire_key=wire_key)
        return _done(request, outcome, status=201 if outcome == "enqueued" else 200, wire_key=wire_key)

    async def look(self, request: web.Request) -> web.Response:
        """Say how a send stands."""
        key = _key(request)
        async with self._connection() as connection:
            row = await standing(connection, key)
        if row is None:
            raise _refusal(404, "unknown_key", "no send has this key")
        shown = {name: _shown(value) for name, value in row.items() if name != "now"}
        request[OUTCOME] = "found"
        return web.json_response(shown)

    async def confirm(self, request: web.Request) -> web.Response:
        """Store that the provider took the message. It is kept in every case, even where no row has the key."""
        asked, key, began = await read_body(request, Confirm), _key(request), tracing.begin()
        async with self._connection() as connection:
            said = (asked.fence, storable(asked.message_id), confirm_options(asked.response))
            outcome, reason = await connection.fetchrow(guard.CONFIRM, key, *said)
            await _note(request, connection, key, began, outcome)
        if outcome == "unknown_key":
            raise _refusal(404, outcome, "no send has this key; what you said is kept as testimony")
        return _done(request, outcome, state="sent", reason=reason)

    async def fail(self, request: web.Request) -> web.Response:
        """Store how a submission failed."""
        asked, key, began = await read_body(request, Fail), _key(request), tracing.begin()
        async with self._connection() as connection:
            outcome = await connection.fetchval(guard.FAIL, key, asked.fence, asked.reason, asked.not_sent)
            await _note(request, connection, key, began, outcome)
        if outcome == "not_yours":
            raise _refusal(409, outcome, "the claim of this fence is over, or never was")
        return _done(request, outcome, state=FAIL_STATES[outcome])

    async def release(self, request: web.Request) -> web.Response:
        """Give a send free for another attempt."""
        return await self._decide(request, "release")

    async def sent(self, request: web.Request) -> web.Response:
        """Say that a send was sent."""
        return await self._decide(request, "confirm")

    async def failed(self, request: web.Request) -> web.Response:
        """Say that a send never will be sent."""
        return await self._decide(request, "fail")

    async def _decide(self, request: web.Request, verb: str) -> web.Response:
        asked, key, ruled = await read_body(request, Decide), _key(request), None
        try:
            async with self._connection() as connection, connection.transaction(isolation="read_committed"):
                ruled = await by_hand.decide(connection, verb, key, asked.reason.strip(), f"api:{request[CALLER].name}")
        except FAILURES:
            if ruled is None:  # nothing was committed
                raise
            raise Ambiguous from None  # performed again it would decide about the next attempt
        if ruled.outcome == "unknown_key":
            raise _refusal(404, ruled.outcome, "no send has this key")
        if ruled.outcome == "refused":
            raise _refusal(409, ruled.outcome, str(ruled.reason))
        return _done(request, ruled.outcome, state="pending" if ruled.outcome == "released" else ruled.outcome)

    def _provider(self, feed: str) -> Provider:
        if feed not in self._feeds:
            known = ", ".join(sorted(self._feeds)) or "none"
            raise Problem(422, f"feed: no such feed is configured; there is {known}", outcome="invalid")
        return self._feeds[feed]


ENQUEUE: Final = "SELECT outcome, wire_key FROM send_enqueue($1, $2, $3::jsonb)"


def _key(request: web.Request) -> str:
    return checked_key(request.match_info["key"])


async def _note(request: web.Request, connection: Any, key: str, began: int, outcome: str) -> None:
    """Note for a trace what a sender told."""
    if began:
        with suppress(*FAILURES):
            _trace(request, await as_wire_key(connection, key), began, {"reconciler.outcome": outcome})


def _trace(request: web.Request, wire_key: str, began: int, attributes: dict[str, Any]) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource else ""
    given = {"http.request.method": request.method, "http.route": route, **attributes}
    tracing.note(f"POST {route}", wire_key, began, given, caller=request.headers.get("traceparent", ""))


def _claim_answer(request: web.Request, call: Call, row: Any, now: Any) -> web.Response:
    if call.began:
        outcome = row["outcome"]
        answered = {"reconciler.outcome": outcome, "reconciler.attempt": row["attempt"]}
        named = {"reconciler.feed": call.asked.feed, **tracing.reason_of(outcome, row["reason"])}
        _trace(request, row["wire_key"], call.began, {**answered, **named})
    if row["outcome"] == "claimed":
        return _claimed(request, row, call.provider, call.options["submit_within"])
    return _not_claimed(request, row, now)


def _claimed(request: web.Request, row: Any, provider: Provider, submit_within: float) -> web.Response:
    """Grant a claim. One that was granted before has less time left than was asked for."""
    again = row["seconds_left"] < submit_within
    return _done(
        request,
        "claimed",
        status=201,
        headers=REPLAYED if again else None,
        state="claimed",
        wire_key=row["wire_key"],
        attempt=row["attempt"],
        fence=row["fence"],
        seconds_left=row["seconds_left"],
        stamp=_stamp(provider.stamp(row["wire_key"])),
    )


def _stamp(stamp: Stamp) -> dict[str, Any]:
    return {
        "body": stamp.body,
        "headers": stamp.headers,
        "smtp_headers": stamp.smtp_headers,
        "message_id": stamp.message_id,
    }


def _not_claimed(request: web.Request, row: Any, now: Any) -> web.Response:
    """Say why a claim is not granted, and when to ask again. `now` is how the send stands; None: there is no row."""
    ambiguous = row["outcome"] == "in_flight" and now is not None and now["state"] == "ambiguous"
    outcome = "ambiguous" if ambiguous else row["outcome"]
    answer = CLAIM_ANSWERS[outcome]
    retry_at, wait = _when_to_ask_again(outcome, row, now)
    told = {"wire_key": row["wire_key"], "state": answer.state, "reason": row["reason"], "retry_at": _shown(retry_at)}
    if outcome == "already_sent":
        return _done(request, outcome, **told)
    headers = retry_after(wait) if wait is not None else {}
    raise _refusal(answer.status, outcome, answer.detail, headers=headers, **told)


def _when_to_ask_again(outcome: str, row: Any, now: Any) -> tuple[datetime | None, float | None]:
    """Return when it is worth asking again, and how many seconds that is from now; None: never."""
    at = row["retry_at"]
    match outcome:
        case "in_flight":
            at = now and now["submit_by"]
        case "ambiguous":
            at = now["next_check_at"]
        case "held" | "capped":
            pass
        case _:
            return None, None
    if at is None:
        return None, HELD_SECONDS
    return at, (at - now["now"]).total_seconds() if now else HELD_SECONDS


def _done(
    request: web.Request, outcome: str, *, status: int = 200, headers: Mapping[str, str] | None = None, **told: Any
) -> web.Response:
    request[OUTCOME] = outcome
    return web.json_response({"outcome": outcome, **told}, status=status, headers=headers)


def _refusal(
    status: int, outcome: str, detail: str, *, headers: Mapping[str, str] | None = None, **told: Any
) -> Problem:
    return Problem(status, detail, headers=headers, outcome=outcome, **told)


def _shown(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
