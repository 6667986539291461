# SPDX-License-Identifier: Apache-2.0
"""What a provider's API replies to a submission, and what that proves of each message. Pure.

A reply is read for one question: may the send be tried again? Whatever does not say so plainly is ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

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


@runtime_checkable
class ReadsReplies(Protocol):
    """A provider whose replies say more than their status."""

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return what became of each message of the call, in the order of the call; one where it had one message.

        `headers` are asked for in lower case. A body that can't be read leaves an accepted status ambiguous. Never
        raises.
        """
        ...


_NOT_TAKEN: Final = frozenset({401, 402, 403, 404, 405, 429})
"""Credentials, plan, place, rate: the request was turned away before anybody looked at the message."""
_UNCLEAR: Final = frozenset({408, 409, 423, 425})
"""The server gave up waiting, or another request with our key may run."""


def by_status(status: int) -> Reply:
    """Return what the status of an answer proves where nothing is known of its body."""
    reason = f"HTTP {status}"
    if 200 <= status < 300:
        return Reply("accepted", reason)
    if status in _NOT_TAKEN:
        return Reply("not_sent", reason)
    if 400 <= status < 500 and status not in _UNCLEAR:
        return Reply("rejected", reason)
    return Reply("ambiguous", reason)
