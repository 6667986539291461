# SPDX-License-Identifier: Apache-2.0
"""What a provider's API replies to a submission, and what that proves of each message. Pure.

A reply is read for one question: may the send be tried again? Whatever does not say so plainly is ambiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from webhooks.event import storable

Meaning = Literal["accepted", "rejected", "not_sent", "ambiguous"]
"""Accepted: the provider has it. Rejected: it will never send this message. Not sent: it took nothing, and the same
message may be submitted again (rate limit, wrong API key). Ambiguous: nobody can tell."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What one message's submission came to."""

    meaning: Meaning
    reason: str
    """A short stable text for logs and reports (`HTTP 429`, `inactive_recipient`): no address, no free text."""
    message_id: str | None = None
    """Of an accepted message, where the reply names it: as its events will name it."""
    for_all: bool = field(default=True, compare=False)
    """Whether it speaks of every message of the call, where it stands alone; else of its own, or of some."""


_NOT_TAKEN: Final = frozenset({401, 403, 404, 405, 407, 420, 421, 429})
"""Credentials, place, rate: the request was turned away before anybody looked at the message."""
_UNCLEAR: Final = frozenset({402, 408, 409, 423, 424, 425, 460, 499})
"""The request failed for a reason that two providers do not tell (402), the server or a proxy gave up waiting, or
another request with our key may run."""
_SUCCESS: Final = 2
_REFUSAL: Final = 4


def is_success(status: int) -> bool:
    """Say whether a status is one of success."""
    return status // 100 == _SUCCESS


def is_answer(status: int) -> bool:
    """Say whether a status is the API's own answer, so that its body counts: success or refusal."""
    return status // 100 in (_SUCCESS, _REFUSAL)


def is_some(count: object) -> bool:
    """Say whether a count that a body tells is one, and not zero."""
    return isinstance(count, int) and count > 0


def first_of(value: object) -> Any:
    """Return the first element of a list, None where there is none."""
    return value[0] if isinstance(value, list) and value else None


def by_status(status: int) -> Reply:
    """Return what the status of an answer proves where nothing is known of its body."""
    reason = f"HTTP {status}"
    if is_success(status):
        return Reply("accepted", reason)
    if status in _NOT_TAKEN:
        return Reply("not_sent", reason)
    if status // 100 == _REFUSAL and status not in _UNCLEAR:
        return Reply("rejected", reason)
    return Reply("ambiguous", reason)


def unclear(status: int) -> Reply:
    """Return what a status proves where its body decides and can't be read."""
    return Reply("ambiguous", f"HTTP {status} unclear")


def undecided(status: int) -> Reply:
    """Return what a status proves by itself where bodies decide: a fault, or that the request was turned away."""
    reply = by_status(status)
    return unclear(status) if reply.meaning in ("accepted", "rejected") else reply


def each(replies: Iterable[Reply]) -> list[Reply]:
    """Return the entries of a list, each of which speaks of its own message alone."""
    return [replace(reply, for_all=False) for reply in replies]


def by_ids(status: int, ids: Iterable[str | None], *, for_all: bool = False) -> list[Reply]:
    """Return an accepted reply for each id, under a status that takes all messages; the status's own without one.

    `for_all`: one id stands for all messages of the call, each of which may bear a key of its own.
    """
    reply = by_status(status)
    if reply.meaning != "accepted":
        return [reply]
    taken = replace(reply, for_all=for_all)
    return [replace(taken, message_id=storable(message_id) if message_id else None) for message_id in ids] or [taken]


def all_mean(meaning: Meaning, *codes: str) -> dict[str, Meaning]:
    """Return a part of a table of codes."""
    return dict.fromkeys(codes, meaning)


def by_code(status: int, code: str | None, meanings: Mapping[str, Meaning]) -> Reply:
    """Return what a code of the provider's list proves, else what the status does.

    With a status of success any other code is ambiguous, and so is a refusal without any code: its body was lost, or is
    another's. With a status that tells of a fault (5xx) no code counts.
    """
    if code is not None and code in meanings and is_answer(status):
        return Reply(meanings[code], code, for_all=meanings[code] != "accepted")
    return by_status(status) if code and not is_success(status) else undecided(status)
