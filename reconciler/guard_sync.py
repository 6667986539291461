# SPDX-License-Identifier: Apache-2.0
"""The sender's side for threads, over psycopg 3 (the extra `sync`). The same calls as in `guard`.

    pool = psycopg_pool.ConnectionPool(dsn, kwargs={"autocommit": True})

    def submit(claim):
        form = claim.stamp.into({"from": ..., "to": ..., "text": ...})
        return session.post(URL, data=form, timeout=claim.seconds_left() / 2)

    sent = guard_sync.send_once(pool, key, "mailgun-main", submit, provider="mailgun", submit_within=30)

A thread can't be stopped from outside: give the client `claim.seconds_left()` as its time-out, half of it to
`requests`, which counts it anew for connecting and for each read; and the database's connections a `tcp_user_timeout`.
Behind PgBouncer in transaction mode they need `prepare_threshold=None`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

try:
    from psycopg import Connection, RawCursor
    from psycopg.pq import TransactionStatus
    from psycopg.rows import dict_row
except ImportError as missing:
    raise ImportError(f"guard_sync needs an extra ({missing}): install the extra sync of esp-reconciler") from missing

from reconciler.classify import Result, answer, failure
from reconciler.guard import CLAIM, CLAIM_RELEASED, CONFIRM, ENQUEUE, FAIL
from reconciler.sending import tracing
from reconciler.sending.claims import (
    FIRST_PAUSE,
    IN_TRANSACTION,
    LONGEST_PAUSE,
    NOT_SENT_BY,
    STORE_SECONDS,
    Claim,
    Confirmed,
    Failed,
    GuardError,
    NotSent,
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
    "GuardError",
    "NotSent",
    "Rejected",
    "Released",
    "Sending",
    "Sent",
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


class Pool(Protocol):
    """A psycopg_pool.ConnectionPool, or whatever lends connections in that manner."""

    def connection(self) -> AbstractContextManager[Connection[Any]]:
        """Lend a connection for the time of a block."""
        ...


Executor = Connection[Any] | Pool
"""A psycopg 3 connection or pool, in autocommit mode."""


def claim(executor: Executor, key: str, feed: str, *, provider: str | None = None, **options: Any) -> Claim:
    """Ask for the exclusive right to submit a send, and commit it. As `guard.claim`; psycopg's errors pass."""
    check_call(key, provider, options)
    asked_at, began = boot_time(), tracing.begin()
    try:
        row = _row(executor, CLAIM, key, feed, claim_options(options))
    except Exception as error:
        if missing := no_function(error):
            raise missing from error
        raise
    claimed = as_claim(key, row, asked_at, provider)
    tracing.claimed(claimed, feed, began)
    if problem := known_id_problem(claimed, options):
        fail(executor, claimed, "wrong known_message_id", not_sent=True)
        raise GuardError(problem)
    return claimed


def confirm(executor: Executor, claimed: Claim, message_id: str | None, response: Any = None) -> Confirmed:
    """Say that the provider took the message. As `guard.confirm`."""
    return _confirmed(executor, claimed, message_id, response)[0]


def _confirmed(
    executor: Executor, claimed: Claim, message_id: str | None, response: Any = None
) -> tuple[Confirmed, str | None]:
    began, said = tracing.begin(), (as_message_id(message_id), confirm_options(response))
    row = _row(executor, CONFIRM, claimed.send_key, claimed.fence, *said)
    outcome: Confirmed = row["outcome"]
    tracing.confirmed(claimed, outcome, began)
    return outcome, row["reason"]


def fail(executor: Executor, claimed: Claim, reason: str, *, not_sent: bool | None) -> Failed:
    """Say how a submission failed. As `guard.fail`."""
    began = tracing.begin()
    outcome: Failed = _row(executor, FAIL, claimed.send_key, claimed.fence, storable(reason), not_sent)["outcome"]
    tracing.failed(claimed, not_sent, outcome, began)
    return outcome


def enqueue(connection: Connection[Any], key: str, feed: str, **options: Any) -> str:
    """Write a send that is to be claimed later, in the caller's own transaction. As `guard.enqueue`."""
    outcome: str = _run(connection, ENQUEUE, key, feed, claim_options(options))[0]["outcome"]
    return outcome


@contextmanager
def sending(
    executor: Executor, key: str, feed: str, *, provider: str | None = None, **options: Any
) -> Iterator[Sending]:
    """Claim a send; when the block is left, store how it went. As `guard.sending`."""
    refuse_nonce(options)
    send = Sending(claim(executor, key, feed, provider=provider, **options))
    if not send.granted:
        yield send
        if send.answer is not None:
            raise GuardError("an answer was set for a send that was not granted: ask `granted` before you submit")
        return
    with _recorded(executor, send):
        yield send


def send_once(
    executor: Executor,
    key: str,
    feed: str,
    submit: Callable[[Claim], object],
    *,
    provider: str | None = None,
    **options: Any,
) -> Sent:
    """Submit a send that nobody has submitted, and return what it came to. As `guard.send_once`."""
    refuse_nonce(options)
    claimed = claim(executor, key, feed, provider=provider, **options)
    return submit_claimed(executor, claimed, submit) if claimed.granted else refused(claimed)


def submit_claimed(executor: Executor, claimed: Claim, submit: Callable[[Claim], object]) -> Sent:
    """Submit a send that was granted to this caller, and return what it came to. As `guard.submit_claimed`."""
    send = Sending(claimed)
    try:
        with _recorded(executor, send):
            send.answer = answer(submit(claimed), claimed.provider)
    except Exception as error:
        if is_mistake(error):
            raise
    return send.sent


def claim_released(
    executor: Executor, feed: str, most: int, *, provider: str | None = None, **options: Any
) -> list[Released]:
    """Claim up to so many released sends of a feed, the oldest release first. As `guard.claim_released`."""
    asked_at, began = boot_time(), tracing.begin()
    row = _row(executor, CLAIM_RELEASED, feed, most, claim_options(options))
    released = as_released(row["claims"], asked_at, provider)
    tracing.claimed_all([one.claim for one in released], feed, began, "send_claim_released_commit")
    return released


@contextmanager
def _recorded(executor: Executor, send: Sending) -> Iterator[None]:
    began = tracing.begin()
    try:
        send.claim.seconds_left()  # a worker that was frozen has none: whoever got the send next may be submitting it
        yield
        result = answer(send.answer, send.claim.provider)
    except Exception as error:
        result = failure(error, send.claim.provider)
        tracing.submitted(send.claim, result, began, error)
        send.sent = _stored(executor, send.claim, result, error)
        raise
    tracing.submitted(send.claim, result, began)
    send.sent = _stored(executor, send.claim, result)


def _stored(executor: Executor, claimed: Claim, result: Result, error: Exception | None = None) -> Sent:
    told = until_told(lambda: _report(executor, claimed, result))
    return concluded(claimed, result, told, error)


def until_told(report: Callable[[], _T]) -> _T | None:
    """Tell the database how a submission went, again and again for a while. None: it could not be told."""
    pause, until = FIRST_PAUSE, boot_time() + STORE_SECONDS
    while True:
        try:
            return report()
        except GuardError:  # somebody has begun a transaction on this connection
            return None
        except Exception:  # noqa: BLE001 - whatever the driver raises: the answer must not be lost
            if boot_time() + pause > until:
                return None
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _report(executor: Executor, claimed: Claim, result: Result) -> Told:
    if result.meaning == "accepted":
        return _confirmed(executor, claimed, result.message_id)
    return fail(executor, claimed, result.reason, not_sent=NOT_SENT_BY[result.meaning]), None


def _row(executor: Executor, query: str, *args: object) -> dict[str, Any]:
    return rows(executor, query, *args)[0]


def rows(executor: Executor, query: str, *args: object) -> list[dict[str, Any]]:
    """Run one statement that commits by itself, and return its rows. Raises GuardError where it could not commit."""
    if isinstance(executor, Connection):
        return _committed(executor, query, *args)
    with executor.connection() as connection:
        return _committed(connection, query, *args)


def _committed(connection: Connection[Any], query: str, *args: object) -> list[dict[str, Any]]:
    # A connection that is lost, or at work for another thread, is the driver's to complain of, and is tried again.
    if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        raise GuardError(IN_TRANSACTION)
    if not connection.autocommit:
        raise GuardError(f"{IN_TRANSACTION} (its first statement begins one: psycopg.connect(..., autocommit=True))")
    return _run(connection, query, *args)


def _run(connection: Connection[Any], query: str, *args: object) -> list[dict[str, Any]]:
    with RawCursor(connection, row_factory=dict_row) as cursor:  # its placeholders are $1 ..., as in asyncpg
        # psycopg reads written times in the ISO style only, and the database may write another.
        return cursor.execute(query.encode(), args, binary=True).fetchall()
