# SPDX-License-Identifier: Apache-2.0
"""The sender's side on asyncio: claim once, submit, say how it went. Thin over the SQL functions.

    async def submit(claim):
        form = claim.stamp.into({"from": ..., "to": ..., "text": ...})
        return await session.post(URL, data=form, timeout=aiohttp.ClientTimeout(total=claim.seconds_left()))

    sent = await guard.send_once(pool, key, "mailgun-main", submit, provider="mailgun", submit_within=30)

`send_once` is `claim`, `submit`, then `confirm` or `fail`; each can be called alone. A claim is committed before it is
returned, so these calls refuse a connection that is inside a transaction. Where a pool is given no connection is held
while `submit` runs. Behind PgBouncer in transaction mode asyncpg needs `statement_cache_size=0`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from reconciler.classify import Result, failure, read_answer
from reconciler.sending import tracing
from reconciler.sending.claims import (
    CANCELLED_SECONDS,
    FIRST_PAUSE,
    IN_TRANSACTION,
    LONGEST_PAUSE,
    NOT_SENT_BY,
    STORE_SECONDS,
    Claim,
    Claimed,
    Confirmed,
    Failed,
    GuardError,
    NotSent,
    Outcome,
    Rejected,
    Released,
    Sending,
    Sent,
    Told,
    as_claim,
    as_message_id,
    as_released,
    boot_time,
    check_call,
    claim_options,
    concluded,
    confirm_options,
    is_mistake,
    known_id_problem,
    known_message_id,
    no_function,
    refuse_nonce,
    refused,
    stamp,
    storable,
)

__all__ = [
    "Claim",
    "Claimed",
    "Confirmed",
    "Failed",
    "GuardError",
    "NotSent",
    "Outcome",
    "Rejected",
    "Released",
    "Sending",
    "Sent",
    "boot_time",
    "claim",
    "claim_released",
    "confirm",
    "enqueue",
    "fail",
    "known_message_id",
    "send_once",
    "sending",
    "stamp",
    "submit_claimed",
]

_T = TypeVar("_T")


class Executor(Protocol):
    """An asyncpg connection or pool."""

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        """Run one statement and return its first row."""
        ...


class BatchExecutor(Protocol):
    """An asyncpg connection or pool."""

    async def fetch(self, query: str, /, *args: Any) -> list[Any]:
        """Run one statement and return its rows."""
        ...


# Options as text first: a connection may have a codec of its own for JSON.
CLAIM: Final = "CALL send_claim_commit($1, $2, $3::text::jsonb)"


async def claim(executor: Executor, key: str, feed: str, *, provider: str | None = None, **options: Any) -> Claim:
    """Ask for the exclusive right to submit a send, and commit it.

    Options are those of the SQL function: message_class, recipient, campaign, source, submit_within (seconds, or text
    such as "60s"), not_before, expires_at, intended_at (datetimes), fingerprint, payload, claimed_by, known_message_id,
    nonce (random, of this one call: the same call with it, its answer having been lost, gets the same claim). None
    means: not given. `provider` is what `claim.stamp` is made for. Raises GuardError inside a transaction, asyncpg's
    errors otherwise.
    """
    refuse_transaction(executor)
    check_call(key, provider, options)
    asked_at, began = boot_time(), tracing.begin()
    try:
        row = await executor.fetchrow(CLAIM, key, feed, claim_options(options))
    except Exception as error:
        if missing := no_function(error):
            raise missing from error
        raise
    claimed = as_claim(key, row, asked_at, provider)
    tracing.claimed(claimed, feed, began)
    if problem := known_id_problem(claimed, options):
        await fail(executor, claimed, "wrong known_message_id", not_sent=True)
        raise GuardError(problem)
    return claimed


CONFIRM: Final = "SELECT outcome, reason FROM send_confirm($1, $2, $3, $4::text::jsonb)"


async def confirm(executor: Executor, claimed: Claim, message_id: str | None, response: Any = None) -> Confirmed:
    """Say that the provider took the message. Repeat it until it is stored: it is the best proof there is.

    `message_id` is the provider's, as its answer gave it. `duplicate` means that another attempt was accepted too.
    """
    return (await _confirmed(executor, claimed, message_id, response))[0]


async def _confirmed(
    executor: Executor, claimed: Claim, message_id: str | None, response: Any = None
) -> tuple[Confirmed, str | None]:
    began = tracing.begin()
    refuse_transaction(executor)
    row = await executor.fetchrow(
        CONFIRM, claimed.send_key, claimed.fence, as_message_id(message_id), confirm_options(response)
    )
    outcome: Confirmed = row["outcome"]
    tracing.confirmed(claimed, outcome, began)
    return outcome, row["reason"]


FAIL: Final = "SELECT outcome FROM send_fail($1, $2, $3, $4)"


async def fail(executor: Executor, claimed: Claim, reason: str, *, not_sent: bool | None) -> Failed:
    """Say how a submission failed. `reason` is kept and must not hold personal data.

    not_sent=True: nothing left this machine (connection refused), the send is free again at once. False: the provider
    answered that it will not send. None: can't tell (time-out, reset, 5xx); the claim stays and is reconciled.
    """
    began = tracing.begin()
    refuse_transaction(executor)
    row = await executor.fetchrow(FAIL, claimed.send_key, claimed.fence, storable(reason), not_sent)
    outcome: Failed = row["outcome"]
    tracing.failed(claimed, not_sent, outcome, began)
    return outcome


ENQUEUE: Final = "SELECT outcome FROM send_enqueue($1, $2, $3::text::jsonb)"


async def enqueue(executor: Executor, key: str, feed: str, **options: Any) -> str:
    """Write a send that is to be claimed later, in the caller's own transaction: it is there if that commits.

    Returns enqueued, exists, or key_reused (another content has this key). Options are those of `claim` but
    submit_within, claimed_by and nonce.
    """
    row = await executor.fetchrow(ENQUEUE, key, feed, claim_options(options))
    outcome: str = row["outcome"]
    return outcome


@asynccontextmanager
async def sending(
    executor: Executor, key: str, feed: str, *, provider: str | None = None, **options: Any
) -> AsyncIterator[Sending]:
    """Claim a send; when the block is left, store how it went. Whatever the block raises is recorded and goes on.

    A block that was granted the claim and sets no answer leaves the send claimed: nobody can tell whether it submitted.
    Raises NotSent where the time to submit is over before the block begins.
    """
    refuse_nonce(options)
    send = Sending(await claim(executor, key, feed, provider=provider, **options))
    if not send.granted:
        yield send
        if send.answer is not None:
            raise GuardError("an answer was set for a send that was not granted: ask `granted` before you submit")
        return
    async with _recorded(executor, send):
        yield send


async def send_once(
    executor: Executor,
    key: str,
    feed: str,
    submit: Callable[[Claim], Awaitable[object]],
    *,
    provider: str | None = None,
    **options: Any,
) -> Sent:
    """Submit a send that nobody has submitted, and return what it came to; else return what is known of it.

    `submit` is given the claim, merges `claim.stamp` into its call, allows it `claim.seconds_left()`, and returns what
    the provider answered (see `Sending.answer`). It is never called after the time to submit, and cancelled at its end.
    What a client raises is classified and becomes the outcome; mistakes (TypeError, KeyError ...) are recorded, and
    raised. Options as in `claim`. Raises GuardError inside a transaction, asyncpg's errors where nothing was claimed.
    """
    refuse_nonce(options)
    claimed = await claim(executor, key, feed, provider=provider, **options)
    return await submit_claimed(executor, claimed, submit) if claimed.granted else refused(claimed)


async def submit_claimed(executor: Executor, claimed: Claim, submit: Callable[[Claim], Awaitable[object]]) -> Sent:
    """Submit a send that was granted to this caller, and return what it came to: the second half of `send_once`."""
    send = Sending(claimed)
    try:
        async with _recorded(executor, send):
            send.answer = await _submitted(submit, claimed)
    except Exception as error:
        if is_mistake(error):
            raise
    return send.sent


CLAIM_RELEASED: Final = "CALL send_claim_released_commit($1, $2, $3::text::jsonb)"


async def claim_released(
    executor: Executor, feed: str, most: int, *, provider: str | None = None, **options: Any
) -> list[Released]:
    """Claim up to so many released sends of a feed, the oldest release first; none where nothing may be sent now.

    Give each to `submit_claimed`. Their time to submit runs from this call: claim as many as can be submitted within
    it. Options: submit_within, claimed_by. Raises as `claim`.
    """
    refuse_transaction(executor)
    asked_at, began = boot_time(), tracing.begin()
    row = await executor.fetchrow(CLAIM_RELEASED, feed, most, claim_options(options))
    released = as_released(row["claims"], asked_at, provider)
    tracing.claimed_all([one.claim for one in released], feed, began, "send_claim_released_commit")
    return released


async def _submitted(submit: Callable[[Claim], Awaitable[object]], claimed: Claim) -> Result:
    async with asyncio.timeout(claimed.seconds_left()):
        return await read_answer(await submit(claimed), claimed.provider)


@asynccontextmanager
async def _recorded(executor: Executor, send: Sending) -> AsyncIterator[None]:
    """Store how the block went: by the answer that it sets, or by what it raises, which goes on."""
    began = tracing.begin()
    try:
        send.claim.seconds_left()  # a worker that was frozen has none: whoever got the send next may be submitting it
        yield
        result = await read_answer(send.answer, send.claim.provider)
    except asyncio.CancelledError as error:  # a cause makes the send easier to decide
        result = failure(error)
        tracing.submitted(send.claim, result, began, error)
        await until_told(partial(_report, executor, send.claim, result), CANCELLED_SECONDS)
        raise
    except Exception as error:
        result = failure(error, send.claim.provider)
        tracing.submitted(send.claim, result, began, error)
        send.sent = await _stored(executor, send.claim, result, error)
        raise
    tracing.submitted(send.claim, result, began)
    send.sent = await _stored(executor, send.claim, result)


async def _stored(executor: Executor, claimed: Claim, result: Result, error: Exception | None = None) -> Sent:
    told = await until_told(partial(_report, executor, claimed, result), STORE_SECONDS)
    return concluded(claimed, result, told, error)


async def until_told(report: Callable[[], Awaitable[_T]], seconds: float) -> _T | None:
    """Tell the database how a submission went, again and again for a while. None: it could not be told.

    Whoever cancels waits a moment for it, too. A driver that hangs, even when it is cancelled, is left alone.
    """
    task = asyncio.create_task(_told(report))
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=CANCELLED_SECONDS)
        task.cancel()
        raise
    if task.done():
        return task.result()
    task.cancel()
    return None


async def _told(report: Callable[[], Awaitable[_T]]) -> _T | None:
    pause = FIRST_PAUSE
    while True:
        try:
            return await report()
        except GuardError:  # somebody has begun a transaction on this connection
            return None
        except Exception:  # noqa: BLE001 - whatever the driver raises: the answer must not be lost
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


async def _report(executor: Executor, claimed: Claim, result: Result) -> Told:
    if result.meaning == "accepted":
        return await _confirmed(executor, claimed, result.message_id)
    return await fail(executor, claimed, result.reason, not_sent=NOT_SENT_BY[result.meaning]), None


def refuse_transaction(executor: object) -> None:
    """Raise GuardError where a connection is inside a transaction."""
    in_transaction = getattr(executor, "is_in_transaction", None)
    if in_transaction is not None and in_transaction():
        raise GuardError(IN_TRANSACTION)
