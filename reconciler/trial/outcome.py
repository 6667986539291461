# SPDX-License-Identifier: Apache-2.0
"""What became of a promise that was put to the test, and what was counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Result = Literal["kept", "broken", "not tried"]


class NotTried(Exception):
    """The promise could not be put to the test; the text says why. That is no pass."""


@dataclass(frozen=True, slots=True)
class Count:
    """One thing that was counted or seen."""

    what: str
    found: object
    wanted: object = None
    """What the promise says it is; None: it says nothing of it."""

    @property
    def holds(self) -> bool:
        """Whether it is as promised."""
        return self.wanted is None or self.found == self.wanted

    def __str__(self) -> str:
        """Return it as the table shows it."""
        shown = f"{self.what} {self.found}"
        return shown if self.holds else f"{shown} (NOT {self.wanted})"


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a promise."""

    name: str
    promise: str
    result: Result
    counted: Sequence[Count]
    reason: str | None
    """Why it was not tried."""
    seconds: float
