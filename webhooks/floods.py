# SPDX-License-Identifier: Apache-2.0
"""Slows down whoever is refused all the time. What is proved to be the provider's never meets any of it.

Who sends can't be told before his delivery is read and verified, so nobody is turned away by how often he comes: only
the answers to what was refused are held back, once there are too many, and each then costs a connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

REFUSALS_A_SECOND: Final = 20.0
"""How many refused deliveries of one feed are answered at once, in the long run ..."""

BURST: Final = 200.0
"""... and how many in a row: a provider whose secret was rotated is told so at its own pace."""

HELD_BACK: Final = 1.0
"""Seconds for which the answer to each further one is held back."""

HELD_AT_ONCE: Final = 256
"""How many answers of one feed are held back at a time; beyond, they go out at once: a held one costs memory."""


class Floods:
    """Counts what each feed refuses. `seconds` is a clock that never goes back."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._left: dict[str, tuple[float, float]] = {}
        self._held: dict[str, int] = {}

    def note(self, feed: str) -> bool:
        """Note a refused delivery; say whether it is one too many."""
        now = self._seconds()
        left, since = self._left.get(feed, (BURST, now))
        left = min(BURST, left + (now - since) * REFUSALS_A_SECOND)
        self._left[feed] = max(0.0, left - 1), now
        return left < 1

    async def hold_back(self, feed: str) -> None:
        """Return after a while, unless too many wait already."""
        held = self._held.get(feed, 0)
        if held >= HELD_AT_ONCE:
            return
        self._held[feed] = held + 1
        try:
            await asyncio.sleep(HELD_BACK)
        finally:
            self._held[feed] -= 1
