# SPDX-License-Identifier: Apache-2.0
"""The sender's side: claim once, submit, say how it went. Thin over the SQL functions; the protocol lives there.

    claim = await guard.claim(pool, "order.receipt:1234:a@example.com", feed="sendgrid-main", submit_within=60)
    if claim.granted:
        with_key = guard.stamp("sendgrid", claim.wire_key)      # merge into the API call
        answer = await call_provider(..., timeout=claim.seconds_left())
        await guard.confirm(pool, claim, message_id=answer.id)

A claim is committed before it is returned, so these calls refuse a connection that is inside a transaction. Give the
HTTP client `seconds_left()` as its total time-out, and look once more right before the request is written.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from datetime import datetime

    from webhooks.provider import Stamp

Outcome = Literal[
    "claimed",
    "already_sent",
    "in_flight",
    "failed",
    "capped",
    "expired",
    "key_reused",
    "other_feed",
    "held",
    "beyond_memory",
]
Confirmed = Literal["sent", "sent_late", "duplicate", "unknown_key"]
Failed = Literal["failed", "released", "waiting", "sent", "not_yours"]


class GuardError(RuntimeError):
    """The guard was called in a way that would make it worthless; the text says what to do instead."""


class Executor(Protocol):
    """An asyncpg connection or pool."""

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        """Run one statement and return its first row."""
        ...


def boot_time() -> float:
    """Seconds on a clock that goes on while the machine sleeps and is never set: the only one a deadline may use."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim: the right to submit (`granted`), or why there is none."""

    send_key: str
    outcome: Outcome
    wire_key: str
    attempt: int | None
    fence: int | None
    """Names this claim; confirm and fail need it."""
    reason: str | None
    retry_at: datetime | None
    """When it is worth asking again, by the database's clock."""
    deadline: float
    """On `boot_time`: after it nothing may be written to the provider any more. 0 where nothing was granted."""

    @property
    def granted(self) -> bool:
        """True if the caller, and nobody else, may submit now."""
        return self.outcome == "claimed"

    def seconds_left(self) -> float:
        """Seconds in which the submission must be over, counted from before the claim was asked for; 0: too late."""
        return max(0.0, self.deadline - boot_time())


CLAIM: Final = "CALL send_claim_commit($1, $2, $3::jsonb)"


async def claim(executor: Executor, key: str, feed: str, **options: Any) -> Claim:
    """Ask for the exclusive right to submit a send, and commit it.

    Options are those of the SQL function: message_class, recipient, campaign, source, submit_within (seconds, or text
    such as "60s"), not_before, expires_at, intended_at (datetimes), fingerprint, payload, claimed_by, known_message_id,
    nonce. None means: not given. Raises GuardError inside a transaction, asyncpg's errors otherwise.
    """
    _refuse_transaction(executor)
    asked_at = boot_time()
    given = {name: value for name, value in options.items() if value is not None}
    row = await executor.fetchrow(CLAIM, key, feed, json.dumps(given, default=_as_text))
    left = row["seconds_left"]
    return Claim(
        send_key=key,
        outcome=row["outcome"],
        wire_key=row["wire_key"],
        attempt=row["attempt"],
        fence=row["fence"],
        reason=row["reason"],
        retry_at=row["retry_at"],
        deadline=asked_at + left if left is not None else 0.0,
    )


CONFIRM: Final = "SELECT outcome, reason FROM send_confirm($1, $2, $3, $4::jsonb)"


async def confirm(executor: Executor, claimed: Claim, message_id: str | None, response: Any = None) -> Confirmed:
    """Say that the provider took the message. Repeat it until it is stored: it is the best proof there is.

    `message_id` is the provider's, as its answer gave it. `duplicate` means that another attempt was accepted too.
    """
    _refuse_transaction(executor)
    options = {} if response is None else {"response": _storable(response)}
    row = await executor.fetchrow(
        CONFIRM, claimed.send_key, claimed.fence, _storable(message_id), json.dumps(options, default=_as_text)
    )
    outcome: Confirmed = row["outcome"]
    return outcome


FAIL: Final = "SELECT outcome, reason FROM send_fail($1, $2, $3, $4)"


async def fail(executor: Executor, claimed: Claim, reason: str, *, not_sent: bool | None) -> Failed:
    """Say how a submission failed. `reason` is kept and must not hold personal data.

    not_sent=True: nothing left this machine (connection refused), the send is free again at once. False: the provider
    answered that it will not send. None: can't tell (time-out, reset, 5xx); the claim stays and is reconciled.
    """
    _refuse_transaction(executor)
    row = await executor.fetchrow(FAIL, claimed.send_key, claimed.fence, _storable(reason), not_sent)
    outcome: Failed = row["outcome"]
    return outcome


def stamp(provider: str, wire_key: str) -> Stamp:
    """Return what to merge into a provider's API call so that the wire key comes back in its events.

    Raises GuardError for an unknown provider, and where another package named `webhooks` hides ours.
    """
    try:
        from webhooks.registry import PROVIDERS  # noqa: PLC0415 - senders have folders of that name: only who stamps pays
    except ImportError as error:
        raise GuardError(
            f"another package named 'webhooks' hides the one of esp-reconciler ({error}): put the key into the call by "
            f"hand, `reconciler providers {provider}` says where, or start the sender where your folder is not first "
            "on sys.path"
        ) from None
    if provider not in PROVIDERS:
        raise GuardError(f"unknown provider {provider!r}; known: {', '.join(sorted(PROVIDERS))}")
    return PROVIDERS[provider].stamp(wire_key)


def _refuse_transaction(executor: Executor) -> None:
    in_transaction = getattr(executor, "is_in_transaction", None)
    if in_transaction is not None and in_transaction():
        raise GuardError(
            "this connection is inside a transaction: a rollback would remove the guard after the message has left. "
            "Call it outside, or write the send with send_enqueue in your transaction and claim it after the commit"
        )


def _as_text(value: object) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _storable(value: Any) -> Any:
    """Replace what PostgreSQL refuses in text and JSON: an odd character in an answer must not lose the answer."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_storable(str(name)): _storable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
