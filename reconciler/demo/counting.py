# SPDX-License-Identifier: Apache-2.0
"""What became of the messages of each way: the provider's own count, and of the reconciler what its ledger says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from reconciler.configuration.tables import RuleSettings
from webhooks.database import BoundedPool


@dataclass(frozen=True, slots=True)
class Counted:
    """What recipients got of one way's messages, of which each was meant to arrive once."""

    calls: int
    once: int
    """Messages that arrived once."""
    repeated: int
    """Messages that arrived more than once."""
    duplicates: int
    """Copies that were too many."""
    lost: int
    """Messages that never arrived, and of which nobody thinks any more."""
    open: int = 0
    """Messages that never arrived, and that somebody still has to decide about."""


def counted(taken: Mapping[str, int], through: Collection[str], calls: int, undecided: Collection[str] = ()) -> Counted:
    """Count one way. `taken` is how often the provider took each message, `through` are those whose sender is done."""
    copies = [taken[key] for key in through if taken.get(key)]
    missing = [key for key in through if not taken.get(key)]
    still_open = sum(key in undecided for key in missing)
    return Counted(
        calls=calls,
        once=sum(n == 1 for n in copies),
        repeated=sum(n > 1 for n in copies),
        duplicates=sum(copies) - len(copies),
        lost=len(missing) - still_open,
        open=still_open,
    )


@dataclass(frozen=True, slots=True)
class Ledger:
    """How the reconciler's own sends stand that are not sent, and what it released."""

    held: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by key."""
    waiting: Collection[str] = ()
    """Keys of those that no pass has decided yet, or that were released and are being sent again."""
    released: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What each of its releases said of the risk of a duplicate, 0 to 1, by key.

    Without those whose call never left, for want of time: they risk nothing.
    """
    proved: int = 0
    """Sends whose call had no answer, and that a webhook proved taken."""

    @property
    def undecided(self) -> set[str]:
        """Keys that somebody still has to decide about."""
        return {*self.held, *self.waiting}

    @property
    def sent_again(self) -> set[str]:
        """Keys of those that were released, and that nobody has to decide about any more."""
        return self.released.keys() - self.undecided

    @property
    def reasons(self) -> Counter[str]:
        """How many are held, by reason."""
        return Counter(self.held.values())

    @property
    def risks(self) -> list[float]:
        """What the releases said of the risk of a duplicate, the least first."""
        return sorted(chain.from_iterable(self.released.values()))

    @property
    def risk(self) -> float:
        """How many duplicates all releases together said to expect."""
        return sum(self.risks)


UNDECIDED: Final = """
SELECT wire_key, held_reason FROM send_log WHERE state IN ('pending', 'claimed') ORDER BY first_claimed_at
"""
RELEASES: Final = """
SELECT wire_key, array_agg(risk ORDER BY id) AS risks FROM verdict WHERE action = 'released' AND risk IS NOT NULL
GROUP BY wire_key ORDER BY min(id)
"""
PROVED: Final = """
SELECT count(*) FROM send_log
WHERE state = 'sent' AND verdict_source = 'feed' AND answered_at IS NULL AND attempt - not_sent_attempts = 1
"""


async def read_ledger(pool: BoundedPool) -> Ledger:
    """Read how the reconciler's sends stand now."""
    async with pool.acquire() as connection:
        undecided = await connection.fetch(UNDECIDED)
        releases = await connection.fetch(RELEASES)
        proved = await connection.fetchval(PROVED)
    return Ledger(
        held={row["wire_key"]: row["held_reason"] for row in undecided if row["held_reason"]},
        waiting=[row["wire_key"] for row in undecided if not row["held_reason"]],
        released={row["wire_key"]: row["risks"] for row in releases},
        proved=proved,
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that the demo knows at one moment."""

    seed: int
    rules: RuleSettings
    """By which passes decide."""
    wanted: int
    """Messages that each sender is to send."""
    naive: Counted
    never: Counted
    ours: Counted
    unanswered: int
    """Messages whose first call had no answer that says whether it was taken."""
    unanswered_taken: int
    """Those of them that the provider took all the same."""
    undecided: int
    """Those of them that the reconciler has not decided yet, or is sending again."""
    ledger: Ledger
    held_arrived: Mapping[str, int]
    """How many of the held sends arrived, by reason."""
    released_duplicates: int
    """Copies too many of the sends that were released."""

    @property
    def unanswered_missing(self) -> int:
        """Messages whose first call the provider never got."""
        return self.unanswered - self.unanswered_taken

    def rescued(self, way: Counted) -> int:
        """Count those of them that one way's sender brought to their recipients after all."""
        return self.unanswered_missing - way.lost - way.open

    @property
    def made(self) -> int:
        """Messages that each sender has sent by now."""
        return self.never.calls


def held_arrived(held: Mapping[str, str], taken: Mapping[str, int]) -> Counter[str]:
    """Count the held sends that arrived, by the reason for which they are held."""
    return Counter(reason for key, reason in held.items() if taken.get(key))


def duplicates_among(keys: Collection[str], taken: Mapping[str, int]) -> int:
    """Count the copies too many of some messages."""
    return sum(max(0, taken.get(key, 0) - 1) for key in keys)
