# SPDX-License-Identifier: Apache-2.0
"""What a sender's guards have in common, for one send or many: the claim, and what a send came to. No I/O."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from reconciler.sending.answered import Result

if TYPE_CHECKING:
    from webhooks.provider import Provider, Stamp

Claimed = Literal[
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
Outcome = Claimed | Confirmed | Failed
Told = tuple[Outcome, str | None]
"""What the database answered to how a submission went: the outcome, and of a confirm the reason."""

STORE_SECONDS: Final = 10.0
"""How long it is tried to store how a submission went."""
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
CANCELLED_SECONDS: Final = 1.0
"""And how long where the sender is being cancelled."""
IN_TRANSACTION: Final = (
    "this connection is inside a transaction: a rollback would remove the guard after the message has left. "
    "Call it outside, or write the send with send_enqueue in your transaction and claim it after the commit"
)
_NO_SUCH: Final = frozenset({"42883", "42P01", "3F000"})
"""SQLSTATEs: no such function, table, schema."""


class GuardError(RuntimeError):
    """The guard was called in a way that would make it worthless; the text says what to do instead."""


class NotSent(Exception):
    """Raised by a `submit` that decided not to submit: the send is free again at once. The text is kept as cause."""


class Rejected(Exception):
    """Raised by a `submit` that knows that this message will never be taken: the send has failed."""


def boot_time() -> float:
    """Seconds on a clock that goes on while the machine sleeps and is never set: the only one a deadline may use."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim: the right to submit (`granted`), or why there is none."""

    send_key: str = field(repr=False)
    outcome: Claimed
    wire_key: str
    attempt: int | None
    fence: int | None
    """Names this claim; confirm and fail need it."""
    reason: str | None
    retry_at: datetime | None
    """When it is worth asking again, by the database's clock."""
    deadline: float
    """On `boot_time`: after it nothing may be written to the provider any more. 0 where nothing was granted."""
    provider: str | None = None

    @property
    def granted(self) -> bool:
        """True if the caller, and nobody else, may submit now."""
        return self.outcome == "claimed"

    def seconds_left(self) -> float:
        """Seconds in which the submission must be over, counted from before the claim was asked for.

        Raises NotSent where none is left, or nothing was granted: a client takes a time-out of 0 for none at all.
        """
        left = self.deadline - boot_time()
        if left <= 0:
            raise NotSent("the time to submit is over" if self.granted else "the claim was not granted")
        return left

    @property
    def stamp(self) -> Stamp:
        """What to merge into the provider's API call so that the wire key comes back in its events."""
        if not self.granted:
            raise GuardError("the claim was not granted: ask `granted` before you submit")
        if self.provider is None:
            raise GuardError("what to stamp depends on the provider: give provider=... with the claim")
        return stamp(self.provider, self.wire_key)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a send came to, now or before."""

    outcome: Outcome
    """Of this submission: `sent`, `sent_late` or `duplicate` (taken by the provider), `failed` (it never will be),
    `released` (it did not leave and may be sent again at once), `waiting` (nobody can tell: passes will find out).
    Without one: `already_sent`, `in_flight`, `failed`, `held`, `expired`, `capped`, `key_reused` (another content under
    this key), `other_feed`, `beyond_memory`.
    Seldom: `not_yours` (it failed after its claim had ended), `unknown_key` (taken, but its row is gone)."""
    claim: Claim
    reason: str | None = None
    """Why it was not given out, failed or is open; of one that was taken, what the answer was (`HTTP 200`), unless the
    database has more to say: why it is late or a duplicate, or, though it is `sent`, that another's word had made it so
    before, so that an earlier attempt may have been accepted, too."""
    message_id: str | None = None
    recorded: bool = True
    """False where the database could not be told how it went. If it was taken, repeat `confirm` with `claim` and
    `message_id`; whatever is repeated later, no other attempt is made before the silence has been judged."""
    error: Exception | None = field(default=None, repr=False)
    """What `submit` raised; it may name a recipient."""

    @property
    def taken(self) -> bool:
        """True if the provider has it: of this submission or an earlier one."""
        return self.outcome in {"sent", "sent_late", "duplicate", "unknown_key", "already_sent"}

    @property
    def retry_at(self) -> datetime | None:
        """When it is worth asking again, by the database's clock."""
        return self.claim.retry_at


@dataclass(frozen=True, slots=True)
class Released:
    """A released send that was claimed for another attempt, with what its row knows of the message."""

    claim: Claim
    message_class: str
    recipient: str | None = field(repr=False)
    fingerprint: str | None
    payload: Any = field(repr=False)


class Sending:
    """One send inside `sending`: submit if `granted`, and set `answer`. Afterwards `sent` says what it came to."""

    def __init__(self, claimed: Claim) -> None:
        self.claim = claimed
        self.answer: object = None
        """What the provider answered: a response, an SDK's result, or a message id (empty where it named none)."""
        self.sent = refused(claimed)

    @property
    def granted(self) -> bool:
        """True if the caller, and nobody else, may submit now."""
        return self.claim.granted


NOT_SENT_BY: Final[Mapping[str, bool | None]] = MappingProxyType(
    {"rejected": False, "not_sent": True, "ambiguous": None}
)
"""What `send_fail` is told of each meaning but `accepted`."""
_UNRECORDED: Final[Mapping[str, Outcome]] = MappingProxyType(
    {"accepted": "sent", "rejected": "failed", "not_sent": "waiting", "ambiguous": "waiting"}
)


def refused(claim: Claim) -> Sent:
    """Return the outcome of a send that was not claimed."""
    return Sent(claim.outcome, claim, claim.reason)


def concluded(claim: Claim, result: Result, stored: Told | None, error: Exception | None) -> Sent:
    """Return the outcome of a submission. `stored` is what the database answered; None: it could not be told."""
    outcome, reason = stored or (_UNRECORDED[result.meaning], None)
    return Sent(outcome, claim, reason or result.reason, result.message_id, recorded=stored is not None, error=error)


def results_of(claims: Sequence[Claim], replies: Sequence[Result]) -> list[Result]:
    """Return what became of each message of a batch: an answer speaks of each in their order, or of all at once.

    Where it speaks of another number of messages, or of some, nobody can tell which: each is ambiguous.
    """
    if len(replies) == len(claims):
        return list(replies)
    if len(replies) == 1 and replies[0].for_all:
        return [*replies] * len(claims)
    return [Result("ambiguous", f"{len(replies)} answers for {len(claims)} messages")] * len(claims)


def to_confirm(claims: Sequence[Claim], results: Sequence[Result]) -> list[list[Any]]:
    """Return keys, fences and message ids of those that the provider took, as columns."""
    taken = [(c, r) for c, r in zip(claims, results, strict=True) if r.meaning == "accepted"]
    return [
        [claim.send_key for claim, _ in taken],
        [claim.fence for claim, _ in taken],
        [as_message_id(result.message_id) for _, result in taken],
    ]


def to_fail(claims: Sequence[Claim], results: Sequence[Result]) -> list[list[Any]]:
    """Return keys, fences, reasons, and whether they were not sent, of the others, as columns."""
    others = [(c, r) for c, r in zip(claims, results, strict=True) if r.meaning != "accepted"]
    return [
        [claim.send_key for claim, _ in others],
        [claim.fence for claim, _ in others],
        [storable(result.reason) for _, result in others],
        [NOT_SENT_BY[result.meaning] for _, result in others],
    ]


def is_mistake(error: Exception) -> bool:
    """Say whether an error is the application's own (KeyError ...), which it has to see, and no client's."""
    if isinstance(error, ExceptionGroup):
        return any(map(is_mistake, error.exceptions))
    own = isinstance(error, GuardError) or type(error).__module__ == "builtins"
    return own and not isinstance(error, OSError | EOFError)


def check_call(key: str, provider: str | None, options: Mapping[str, Any]) -> None:
    """Raise GuardError where a claim would be worthless: it says what to do instead."""
    if storable(key) != key:  # whatever the driver raised would repeat the key, and the address in it
        raise GuardError("a send key can't hold a zero byte or half a surrogate pair: take it out")
    if provider is None or options.get("known_message_id"):
        return
    if stamp(provider, "any").message_id is not None:
        raise GuardError(
            f"events of {provider} bear no key of ours, only the message id that we choose: claim with "
            f"known_message_id=guard.known_message_id({provider!r}, key)"
        )


def refuse_fingerprint(provider: str | None, options: Mapping[str, Any]) -> None:
    """Raise GuardError where a send of several would be retried under a key that its provider never had.

    Beside a fingerprint a claim allows a retry with the same idempotency key, but in a batch that key is the call's.
    """
    if provider is not None and options.get("fingerprint") is not None and stamp(provider, "any").headers:
        raise GuardError(
            f"{provider} keeps one idempotency key for a whole call, so that a send of a batch can't be retried with "
            "its own: leave out fingerprint here, or send each by itself"
        )


def refuse_nonce(options: Mapping[str, Any]) -> None:
    """Raise GuardError where whoever submits has a nonce: with it another caller would be granted the same claim."""
    if "nonce" in options:
        raise GuardError("a nonce belongs to one call of `claim` whose answer was lost: leave it out here")


def known_id_problem(claimed: Claim, options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the message id that was claimed with; None: it is the one that the stamp will bear."""
    known = options.get("known_message_id")
    if known is None or claimed.provider is None or not claimed.granted:
        return None
    if claimed.stamp.message_id in (None, known):
        return None
    return (
        "known_message_id is not the one that this message will bear: make it with "
        "guard.known_message_id(provider, key, namespace), with the namespace of the database"
    )


def claim_options(options: Mapping[str, Any]) -> str:
    """Return the options of a call as JSON; None means: not given."""
    given = {name: value for name, value in options.items() if value is not None}
    return json.dumps(given, default=as_text)


def no_function(error: Exception) -> GuardError | None:
    """Return what to raise where the database doesn't know the guard's functions; None: it is another error."""
    if getattr(error, "sqlstate", None) not in _NO_SUCH:
        return None
    return GuardError("the database has no send functions where this connection looks: run reconciler migrate on it")


DEADLOCK_PAUSE: Final = 0.1
"""Seconds before a deadlock is tried again: whoever waited gets the place first, or it would happen once more."""


def is_deadlock(error: Exception) -> bool:
    """Say whether claims ran into a deadlock with others' over the places of a frequency cap: nothing was claimed."""
    return getattr(error, "sqlstate", None) == "40P01"


def as_claim(key: str, row: Mapping[str, Any], asked_at: float, provider: str | None) -> Claim:
    """Return the claim that the database's row is. The deadline counts from before the call, on the sender's clock."""
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
        provider=provider,
    )


def as_released(claims: Any, asked_at: float, provider: str | None) -> list[Released]:
    """Return the released sends that the database's JSON is, as text or as the connection's own codec gives it."""
    return [
        Released(
            claim=as_claim(one["send_key"], one | {"retry_at": None}, asked_at, provider),
            message_class=one["message_class"],
            recipient=one["recipient"],
            fingerprint=one["fingerprint"],
            payload=one["payload"],
        )
        for one in (json.loads(claims) if isinstance(claims, str) else claims)
    ]


def confirm_options(response: Any) -> str:
    """Return what a confirm says besides the message id."""
    return json.dumps({} if response is None else {"response": storable(response)}, default=as_text)


def stamp(provider: str, wire_key: str) -> Stamp:
    """Return what to merge into a provider's API call so that the wire key comes back in its events.

    Raises GuardError for an unknown provider, and where another package named `webhooks` hides ours.
    """
    return known_provider(provider).stamp(wire_key)


def known_provider(name: str) -> Provider:
    """Return all that is known of a provider. Raises GuardError as `stamp` does."""
    try:
        from webhooks.registry import PROVIDERS  # noqa: PLC0415 - senders have folders of that name: only who stamps pays
    except ImportError as error:
        raise GuardError(
            f"another package named 'webhooks' hides the one of esp-reconciler ({error}): put the key into the call by "
            f"hand, `reconciler providers {name}` says where, or start the sender where your folder is not first "
            "on sys.path"
        ) from None
    if name not in PROVIDERS:
        raise GuardError(f"unknown provider {name!r}; known: {', '.join(sorted(PROVIDERS))}")
    return PROVIDERS[name]


def known_message_id(provider: str, key: str, namespace: str = "") -> str | None:
    """Return the message id that a provider lets us choose, for the claim's option of that name; else None.

    It is made of the wire key; `namespace` is that of the database (`migrate --namespace`), if it has one.
    """
    known = known_provider(provider)
    from webhooks.event import wire_key  # noqa: PLC0415 - as above

    return known.stamp(wire_key(key, namespace)).message_id


def as_message_id(value: object) -> str | None:
    """Return a message id as text that can be stored: some SDKs give numbers."""
    return None if value is None else str(storable(str(value)))


def as_text(value: object) -> str:
    """Return a time, or whatever JSON doesn't know, as text."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def storable(value: Any) -> Any:
    """Replace what PostgreSQL refuses in text and JSON: an odd character in an answer must not lose the answer."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode(errors="replace").decode()
    if isinstance(value, dict):
        return {storable(str(name)): storable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [storable(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
