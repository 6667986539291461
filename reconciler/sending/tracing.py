# SPDX-License-Identifier: Apache-2.0
"""What of a send becomes a trace: which spans there are, and what senders note. Imports no OpenTelemetry.

Nothing is noted until somebody takes the notes: `reconciler.otel`. One send is one trace, whoever works at it and when:
the id of the trace is a hash of the wire key, so that nobody has to hand it on. See docs/tracing.md.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol

from reconciler.sending.answered import Result
from reconciler.sending.claims import NOT_SENT_BY, Claim, Told

Attributes = Mapping[str, Any]
"""Texts, numbers, and lists of texts, by the names of ATTRIBUTES."""


class Span(NamedTuple):
    """A sort of span: its kind, what it tells of, and the attributes that it may have."""

    kind: Literal["client", "internal", "server"]
    meaning: str
    attributes: tuple[str, ...]


ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "db.collection.name": "`provider_event`",
        "db.stored_procedure.name": "the SQL function that was called",
        "db.system.name": "`postgresql`",
        "error.type": "what failed: a class of error, a status, or a word of the code; then the span's status is error",
        "http.request.method": "as the provider or caller sent it",
        "http.response.status_code": "what was answered",
        "http.route": "the path, without what was filled into it",
        "reconciler.attempt": "which attempt of the send it is, from 1",
        "reconciler.event.kinds": "what was said of the send, as kinds of events",
        "reconciler.event.testimonies": "what that proves: accepted, rejected, none",
        "reconciler.events": "how many events the delivery held",
        "reconciler.feed": "the feed, as the settings or the sender name it",
        "reconciler.meaning": "what the provider's answer or the client's error means: accepted, rejected, not_sent, "
        "ambiguous",
        "reconciler.outcome": "what the guard answered",
        "reconciler.pass": "the number of the pass, as in the table `pass`",
        "reconciler.provider": "the feed's provider",
        "reconciler.reason": "why, in a word of the code",
        "reconciler.repeated": "how many events of the delivery were there before",
        "reconciler.risk": "of a release: how likely it is to duplicate",
        "reconciler.seconds_since_claim": "from the claim to the verdict, by the database's clock",
        "reconciler.sends": "of how many sends the delivery spoke",
        "reconciler.source": "of an event: the road it came by; of a verdict: who knew it",
        "reconciler.verdicts": "how many verdicts of the pass are in the sample, 1,000 at most",
        "reconciler.wire_key": "the wire key, where it is a hash",
        "url.path": "the path of the feed",
        "url.scheme": "`http` or `https`",
    }
)
"""What each attribute means. None ever holds a send key, a recipient, a message, a secret, or words of a person."""

_SENDERS: Final = ("db.stored_procedure.name", "db.system.name", "reconciler.attempt", "reconciler.outcome")
_CALLED: Final = ("http.request.method", "http.route", "reconciler.outcome", "reconciler.wire_key")

SPANS: Final[Mapping[str, Span]] = MappingProxyType(
    {
        "claim": Span(
            "client",
            "A sender asked for the right to submit.",
            (*_SENDERS, "reconciler.feed", "reconciler.reason", "reconciler.wire_key"),
        ),
        "submit": Span(
            "client",
            "It called the provider.",
            ("error.type", "reconciler.attempt", "reconciler.meaning", "reconciler.provider", "reconciler.wire_key"),
        ),
        "confirm": Span("client", "It told that the provider took the message.", (*_SENDERS, "reconciler.wire_key")),
        "fail": Span(
            "client", "It told how the submission failed.", (*_SENDERS, "reconciler.meaning", "reconciler.wire_key")
        ),
        "POST /v1/sends": Span(
            "server",
            "A claim over HTTP.",
            (*_CALLED, "reconciler.attempt", "reconciler.feed", "reconciler.reason"),
        ),
        "POST /v1/sends/{key}/confirm": Span("server", "A confirm over HTTP.", _CALLED),
        "POST /v1/sends/{key}/fail": Span("server", "A fail over HTTP.", _CALLED),
        "POST /webhooks/{feed}": Span(
            "server",
            "A provider's verified delivery, until it was answered.",
            (
                *("error.type", "http.request.method", "http.response.status_code", "http.route"),
                *("reconciler.events", "reconciler.feed", "reconciler.provider", "reconciler.repeated"),
                *("reconciler.sends", "url.path", "url.scheme"),
            ),
        ),
        "store": Span(
            "client",
            "Its events of the send were stored: from the queue to the commit.",
            (
                *("db.collection.name", "db.system.name", "error.type", "reconciler.event.kinds"),
                *("reconciler.event.testimonies", "reconciler.feed", "reconciler.source", "reconciler.wire_key"),
            ),
        ),
        "verdict": Span(
            "internal",
            "A pass decided, from the pass's beginning: `verdict sent`, `failed`, `released`, `held`.",
            (
                *("reconciler.attempt", "reconciler.feed", "reconciler.reason", "reconciler.risk"),
                *("reconciler.seconds_since_claim", "reconciler.source", "reconciler.wire_key"),
            ),
        ),
        "pass": Span(
            "internal", "A pass that came to verdicts of the sample.", ("reconciler.pass", "reconciler.verdicts")
        ),
    }
)
"""Every sort of span. A test holds docs/tracing.md and all that is exported against it."""


class Noted(NamedTuple):
    """What somebody did for a send, once it is over."""

    span: str
    wire_key: str
    began: int
    """In nanoseconds since the epoch, as `ended`."""
    ended: int
    attributes: Attributes
    error: str | None
    caller: str | None
    """The W3C traceparent that the caller gave; None: his span is the current one, if there is any."""


class Recorder(Protocol):
    """Takes the notes. Must not wait."""

    def note(self, noted: Noted) -> None:
        """Take one."""


RECORDERS: Final[list[Recorder]] = []
"""Who takes notes in this process."""

_HASHED: Final = re.compile(r"[0-9a-f]{48}")
_WORD: Final = re.compile(r"[a-z_]{1,40}")


def trace_id(wire_key: str) -> str:
    """Return the id of a send's trace: 32 hex digits, the first of SHA-256 over its wire key."""
    return f"{trace_number(wire_key):032x}"


def trace_number(wire_key: str) -> int:
    """Return the same as a number."""
    return int.from_bytes(hashlib.sha256(wire_key.encode()).digest()[:16], "big")


def key_of(wire_key: str) -> dict[str, str]:
    """Return what tells a send's key as an attribute: nothing where it isn't hashed, since it is the send key then."""
    return {"reconciler.wire_key": wire_key} if _HASHED.fullmatch(wire_key) else {}


def reason_of(outcome: str, reason: str | None) -> dict[str, str]:
    """Return why a claim was refused, in a word of the code: of what has failed it may be a sender's own words."""
    if outcome == "failed" or reason is None or not _WORD.fullmatch(reason):
        return {}
    return {"reconciler.reason": reason}


def begin() -> int:
    """Return the time at which something to be noted begins; 0 where nobody takes notes."""
    return time.time_ns() if RECORDERS else 0


def note(
    span: str,
    wire_key: str,
    began: int,
    attributes: Mapping[str, Any],
    *,
    error: str | None = None,
    caller: str | None = None,
) -> None:
    """Note what began at `began` (0: nothing) and is over now. Attributes of None are left out. Never raises."""
    if not began:
        return
    given = {name: value for name, value in attributes.items() if value is not None} | key_of(wire_key)
    noted = Noted(span, wire_key, began, time.time_ns(), given, error, caller)
    for recorder in RECORDERS:
        with suppress(Exception):  # whatever it is: a send must never fail for its trace
            recorder.note(noted)


def claimed(claim: Claim, feed: str | None, began: int, procedure: str = "send_claim_commit") -> None:
    """Note how a claim was answered."""
    if began:
        attributes = {"reconciler.feed": feed, **reason_of(claim.outcome, claim.reason)}
        note("claim", claim.wire_key, began, {**_called(procedure, claim, claim.outcome), **attributes})


def claimed_all(claims: Iterable[Claim], feed: str | None, began: int, procedure: str) -> None:
    """Note how several claims were answered that were asked for in one call."""
    for claim in claims if began else ():
        claimed(claim, feed, began, procedure)


def submitted(claim: Claim, result: Result, began: int, error: BaseException | None = None) -> None:
    """Note what the provider's answer, or the error that came instead, meant."""
    if began:
        attributes = {
            "reconciler.attempt": claim.attempt,
            "reconciler.meaning": result.meaning,
            "reconciler.provider": claim.provider,
        }
        failed = None if result.meaning == "accepted" else type(error).__name__ if error else result.meaning
        note("submit", claim.wire_key, began, attributes, error=failed)


def submitted_all(
    claims: Sequence[Claim], results: Sequence[Result], began: int, error: BaseException | None = None
) -> None:
    """Note what one answer meant for each of several."""
    for claim, result in zip(claims, results, strict=True) if began else ():
        submitted(claim, result, began, error)


def told_all(claims: Sequence[Claim], results: Sequence[Result], told: Mapping[str, Told], began: int) -> None:
    """Note that the database knows how the submission of several went."""
    for claim, result in zip(claims, results, strict=True) if began else ():
        outcome = told[claim.send_key][0] if claim.send_key in told else ""
        if result.meaning == "accepted":
            confirmed(claim, outcome, began)
        else:
            failed(claim, NOT_SENT_BY[result.meaning], outcome, began)


def confirmed(claim: Claim, outcome: str, began: int) -> None:
    """Note that a confirm was stored."""
    if began:
        note("confirm", claim.wire_key, began, _called("send_confirm", claim, outcome))


_MEANINGS: Final = {not_sent: meaning for meaning, not_sent in NOT_SENT_BY.items()}


def failed(claim: Claim, not_sent: bool | None, outcome: str, began: int) -> None:
    """Note that a fail was stored."""
    if began:
        said = {"reconciler.meaning": _MEANINGS[not_sent]}
        note("fail", claim.wire_key, began, {**_called("send_fail", claim, outcome), **said})


def _called(procedure: str, claim: Claim, outcome: str) -> dict[str, Any]:
    return {
        "db.system.name": "postgresql",
        "db.stored_procedure.name": procedure,
        "reconciler.attempt": claim.attempt,
        "reconciler.outcome": outcome,
    }
