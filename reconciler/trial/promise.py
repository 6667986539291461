# SPDX-License-Identifier: Apache-2.0
"""What a promise is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from reconciler.trial.outcome import Count
from reconciler.trial.stage import Stage


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise, and how it is put to the test. `name` is its feed's name, too, and so stays apart from others'."""

    name: str
    words: str
    attempt: Callable[[Stage], Awaitable[Sequence[Count]]]
