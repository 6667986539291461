# SPDX-License-Identifier: Apache-2.0
"""What is printed: a line a fault, then a line a promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .promises import Kept
from .world import Seconds

HEAD = (
    f"{'fault':<48} {'times':>5} {'stored':>7} {'put off':>7} {'no answer':>9}   "
    f"{'ready':>6} {'stores':>6} {'passes':>6} {'sends':>6} {'limit':>6}"
)


@dataclass
class Row:
    """A kind of fault: how often it happened, what deliveries met meanwhile, and the worst times to recover."""

    name: str
    limit: float
    times: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    seconds: list[Seconds] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Seconds:
        """The longest time of each part."""
        return Seconds(*map(max, zip(*self.seconds, strict=True))) if self.seconds else Seconds(0, 0, 0, 0)

    @property
    def kept(self) -> bool:
        """Whether all worked again within the limit, each time."""
        return bool(self.times) and max(self.worst) <= self.limit

    @property
    def line(self) -> str:
        """One line for people."""
        stored = self.answers[200]
        put_off = sum(n for status, n in self.answers.items() if status not in (0, 200))
        worst = " ".join(f"{seconds:6.1f}" for seconds in self.worst)
        notes = f"   {'; '.join(dict.fromkeys(filter(None, self.notes)))}" if any(self.notes) else ""
        return (
            f"{self.name:<48} {self.times:>5} {stored:>7,} {put_off:>7,} {self.answers[0]:>9,}   {worst} "
            f"{self.limit:6.0f} {'' if self.kept else ' BROKEN'}{notes}"
        )


def promises(kept: Iterable[Kept]) -> str:
    """Return a line for each promise."""
    return "\n".join(f"{'kept  ' if one.kept else 'BROKEN'}  {one.promise}: {one.counted}" for one in kept)
