# SPDX-License-Identifier: Apache-2.0
"""The sender's side on asyncio: claim once, submit, say how it went. Thin over the SQL functions.

    async def submit(claim):
        form = claim.stamp.into({"from": ..., "to": ..., "text": ...})
        return await session.post(URL, data=form, timeout=aiohttp.ClientTimeout(total=claim.seconds_left()))

    sent = await guard.send_once(pool, key, "mailgun-main", submit, provider="mailgun", submit_within=30)

`send_once` is `claim`, `submit`, then `confirm` or `fail`; each can be called alone. A claim is committed before it is
returned, so these calls refuse a connection that is inside a transaction. Where a pool is given no connection is held
while `submit` runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol, TypeVar

from reconciler.claims import (
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
    Sending,
    Sent,
    as_claim,
    boot_time,
    claim_options,
    concluded,
    confirm_options,
    is_mistake,
    known_message_id,
    require_known_id,
    stamp,
    storable,
)
from reconciler.classify import Result, failure, read_answer

__all__ = [
    "Claim",
    "Claimed",
    "Confirmed",
    "Failed",
    "GuardError",
    "NotSent",
    "Outcome",
    "Rejected",
    "Sending",
    "Sent",
    "boot_time",
    "claim",
    "confirm",
    "enqueue",
    "fail",
    "known_message_id",
    "send_once",
    "sending",
    "stamp",
]

_T = TypeVar("_T")


class Executor(Protocol):
    """An asyncpg connection or pool."""

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        """Run one statement and return its first row."""
        ...


CLAIM: Final = "CALL send_claim_commit($1, $2, $3::jsonb)"


async def claim(executor: Executor, key: str, feed: str, *, provider: str | None = None, **options: Any) -> Claim:
    """Ask for the exclusive right to submit a send, and commit it.

    Options are those of the SQL function: message_class, recipient, campaign, source, submit_within (seconds, or text
    such as "60s"), not_before, expires_at, intended_at (datetimes), fingerprint, payload, claimed_by, known_message_id,
    nonce. None means: not given. `provider` is what `claim.stamp` is made for. Raises GuardError inside a transaction,
    asyncpg's errors otherwise.
    """
    refuse_transaction(executor)
    require_known_id(provider, options)
    asked_at = boot_time()
    row = await executor.fetchrow(CLAIM, key, feed, claim_options(options))
    return as_claim(key, row, asked_at, provider)


CONFIRM: Final = "SELECT outcome, reason FROM send_confirm($1, $2, $3, $4::jsonb)"


async def confirm(executor: Executor, claimed: Claim, message_id: str | None, response: Any = None) -> Confirmed:
    """Say that the provider took the message. Repeat it until it is stored: it is the best proof there is.

    `message_id` is the provider's, as its answer gave it. `duplicate` means that another attempt was accepted too.
    """
    refuse_transaction(executor)
    row = await executor.fetchrow(
        CONFIRM, claimed.send_key, claimed.fence, storable(message_id), confirm_options(response)
    )
    outcome: Confirmed = row["outcome"]
    return outcome


FAIL: Final = "SELECT outcome, reason FROM send_fail($1, $2, $3, $4)"


async def fail(executor: Executor, claimed: Claim, reason: str, *, not_sent: bool | None) -> Failed:
    """Say how a submission failed. `reason` is kept and must not hold personal data.

    not_sent=True: nothing left this machine (connection refused), the send is free again at once. False: the provider
    answered that it will not send. None: can't tell (time-out, reset, 5xx); the claim stays and is reconciled.
    """
    refuse_transaction(executor)
    row = await executor.fetchrow(FAIL, claimed.send_key, claimed.fence, storable(reason), not_sent)
    outcome: Failed = row["outcome"]
    return outcome


ENQUEUE: Final = "SELECT outcome FROM send_enqueue($1, $2, $3::jsonb)"


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
    """
    send = Sending(await claim(executor, key, feed, provider=provider, **options))
    if not send.granted:
        yield send
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
    send = Sending(await claim(executor, key, feed, provider=provider, **options))
    if send.granted:
        try:
            async with _recorded(executor, send):
                send.answer = await _submitted(submit, send.claim)
        except Exception as error:
            if is_mistake(error):
                raise
    return send.sent


async def _submitted(submit: Callable[[Claim], Awaitable[object]], claimed: Claim) -> Result:
    left = claimed.seconds_left()
    if left <= 0:  # this worker was frozen: whoever is given the send next may be submitting it already
        raise NotSent("the time to submit was over")
    async with asyncio.timeout(left):
        return await read_answer(await submit(claimed), claimed.provider)


@asynccontextmanager
async def _recorded(executor: Executor, send: Sending) -> AsyncIterator[None]:
    """Store how the block went: by the answer that it sets, or by what it raises, which goes on."""
    try:
        yield
        result = await read_answer(send.answer, send.claim.provider)
    except asyncio.CancelledError as error:
        with suppress(TimeoutError):  # whoever cancels doesn't wait long; a cause makes the send easier to decide
            async with asyncio.timeout(CANCELLED_SECONDS):
                await _stored(executor, send.claim, failure(error))
        raise
    except Exception as error:
        send.sent = await _stored(executor, send.claim, failure(error, send.claim.provider), error)
        raise
    send.sent = await _stored(executor, send.claim, result)


async def _stored(executor: Executor, claimed: Claim, result: Result, error: Exception | None = None) -> Sent:
    outcome = await until_told(lambda: _report(executor, claimed, result))
    return concluded(claimed, result, outcome, error)


async def until_told(report: Callable[[], Awaitable[_T]]) -> _T | None:
    """Tell the database how a submission went, again and again for a while. None: it could not be told."""
    pause = FIRST_PAUSE
    with suppress(TimeoutError):
        async with asyncio.timeout(STORE_SECONDS):
            while True:
                try:
                    return await report()
                except GuardError:
                    raise
                except Exception:  # noqa: BLE001 - whatever the driver raises: the answer must not be lost
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
    return None


async def _report(executor: Executor, claimed: Claim, result: Result) -> Outcome:
    if result.meaning == "accepted":
        return await confirm(executor, claimed, result.message_id)
    return await fail(executor, claimed, result.reason, not_sent=NOT_SENT_BY[result.meaning])


def refuse_transaction(executor: object) -> None:
    """Raise GuardError where a connection is inside a transaction."""
    in_transaction = getattr(executor, "is_in_transaction", None)
    if in_transaction is not None and in_transaction():
        raise GuardError(IN_TRANSACTION)
