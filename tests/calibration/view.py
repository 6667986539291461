# SPDX-License-Identifier: Apache-2.0
"""What a pass sees of a feed at a moment: its strata, histories, recent controls and crowds, gathered anew here.

It shares nothing with the product but the pure rule that it feeds. It gathers as the product does: curves are up to
CURVE_LIVES old, claims of one minute share their recent controls, and a crowd is looked for in the stretch of time in
which so many sends lie around the middle one of these claims.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Final

from reconciler.rule import history, risk

from .worlds import CONTROL, HOUR, LOST, USUAL_AMBIGUOUS, Group, Sends, World

FEED: Final = "feed"
MINUTE: Final = 60
HISTORY: Final = 2_000
HISTORY_SPAN: Final = 24 * HOUR
OLDEST: Final = 30 * 24 * HOUR
CURVE_LIVES: Final = 300.0
NEWS: Final = 0.02
"""On feeds of less than BRISK sends an hour, whose 20,000 claims take weeks, a curve grows older than that, for speed:
until so large a share of its controls or of its proved ambiguous sends is new."""

BRISK: Final = 10_000

BLOCK: Final = 300
STRETCHES: Final = (HOUR / 2, 15 * HOUR)
STRETCHES_OF_EACH: Final = 48
"""The usual share of ambiguous sends is learned from the first BLOCK sends of so many stretches of either length."""

Known = tuple[float, float | None]
Reach = list[tuple[float, float, int]]


class Stratum:
    """The controls of one stratum: all since the start, and the sample of them that makes history."""

    def __init__(self, rate: float, groups: list[Group], settled: float, random: Random) -> None:
        self.settled = settled
        """The age from which on a control belongs to history."""
        self.at: array[float] = array("d")
        self.lag: array[float] = array("d")
        self.stride = max(1, int(rate * HISTORY_SPAN / HOUR / HISTORY))
        self.seen = 0
        self.old_at: array[float] = array("d")
        self.old_lag: array[float] = array("d")
        self.first_heard = LOST
        self.built: dict[str, tuple[float, int, int, history.Curve]] = {}
        self._live_before(rate, groups, random)

    def _live_before(self, rate: float, groups: list[Group], random: Random) -> None:
        """Let the feed have had a healthy history before the world begins."""
        a_sample = rate / self.stride / HOUR
        n = int(min(HISTORY, OLDEST * a_sample))
        weights = [g.weight for g in groups]
        for i in range(n, 0, -1):
            self.old_at.append(-i / a_sample)
            self.old_lag.append(random.choices(groups, weights)[0].lag(random))
            self.first_heard = min(self.first_heard, self.old_at[-1] + self.old_lag[-1])

    def add(self, at: float, lag: float) -> None:
        self.at.append(at)
        self.lag.append(lag)
        self.seen += 1
        self.first_heard = min(self.first_heard, at + lag)
        if self.seen % self.stride == 0:
            self.old_at.append(at)
            self.old_lag.append(lag)

    def near(self, at: float, now: float, after: bool) -> list[Known]:
        """Return (age, lag) of the controls nearest to a time on one side of it, nearest first."""
        middle = bisect_right(self.at, at)
        if after:
            places = range(middle, min(middle + risk.MOST, bisect_right(self.at, min(now, at + risk.FAR), middle)))
        else:
            places = range(middle - 1, max(middle - risk.MOST, bisect_left(self.at, at - risk.FAR, 0, middle)) - 1, -1)
        return [(now - self.at[i], self.lag[i] if self.at[i] + self.lag[i] <= now else None) for i in places]

    def history(self, now: float) -> tuple[int, int]:
        """Return from where to where its sample is history: old enough to have been heard of, and not too old."""
        end = bisect_right(self.old_at, now - self.settled)
        return max(end - HISTORY, bisect_left(self.old_at, now - OLDEST)), end


@dataclass(slots=True)
class Proved:
    """Ambiguous sends of one stratum that were proved accepted, in the order of the proofs; of a busy one a sample."""

    stride: int
    seen: int = 0
    at: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))

    def add(self, at: float, lag: float) -> None:
        self.seen += 1
        if self.seen % self.stride == 0:
            self.at.append(at)
            self.lag.append(lag)


class View:
    """All that a pass can see of one feed."""

    def __init__(self, world: World, sends: Sends, settled: float, known_after: float, random: Random) -> None:
        self.world = world
        self.sends = sends
        self.known_after = known_after
        """A send without an answer is ambiguous from this age on."""
        self.strata: dict[history.Stratum, Stratum] = {}
        self.proved: dict[history.Stratum, Proved] = {}
        self.paths = [self._path(g) for g in world.groups]
        """For each group the strata that its controls belong to, narrowest first."""
        self._open_strata(settled, random)
        self.crowd = array("l", [0])
        """How many of the first sends are ambiguous."""
        for which, kind, at, lag in zip(sends.group, sends.kind, sends.at, sends.lag, strict=True):
            self.crowd.append(self.crowd[-1] + (kind != CONTROL))
            if kind == CONTROL:
                for name in self.paths[which]:
                    self.strata[name].add(at, lag)
        self.usual, self.usual_until = 0.0, 0.0

    def _path(self, group: Group) -> list[history.Stratum]:
        of_class = [history.Stratum(FEED, group.message_class)]
        if len({g.message_class for g in self.world.groups}) > 1:
            of_class.append(history.Stratum(FEED))
        if group.domain is None:
            return of_class
        kept = min(OLDEST / HOUR * self.world.rate, HISTORY)
        counts = {history.Stratum(FEED, g.message_class, g.domain): int(g.weight * kept) for g in self.world.groups}
        return list(dict.fromkeys([history.stratum(counts, FEED, group.message_class, group.domain), *of_class]))

    def _open_strata(self, settled: float, random: Random) -> None:
        for name in {name: None for path in self.paths for name in path}:
            groups = [g for g, path in zip(self.world.groups, self.paths, strict=True) if name in path]
            rate = self.world.rate * sum(g.weight for g in groups)
            self.strata[name] = Stratum(rate, groups, settled, random)
            self.proved[name] = Proved(max(1, int(rate * USUAL_AMBIGUOUS / 2 * HISTORY_SPAN / HOUR / HISTORY)))

    def prove(self, i: int) -> None:
        """Let an ambiguous send be proved accepted."""
        for name in self.paths[self.sends.group[i]]:
            self.proved[name].add(self.sends.at[i], self.sends.lag[i])

    def known(self, now: float) -> int:
        """Return how many ambiguous sends of the feed were proved accepted, and had time to come late."""
        return sum(at <= now - history.SETTLED for at in self.proved[self.paths[0][-1]].at)

    def stratum(self, which: int, now: float) -> history.Stratum:
        """Return the narrowest stratum of a group that holds enough controls."""
        for name in self.paths[which]:
            start, end = self.strata[name].history(now)
            if end - start >= history.ENOUGH:
                return name
        return self.paths[which][-1]

    def _class_heard(self, which: int, now: float) -> bool:
        """Whether any control of the claim's class was ever heard of; of a class without controls too."""
        of_class = self.strata[history.Stratum(FEED, self.world.groups[which].message_class)]
        start, end = of_class.history(now)
        return of_class.first_heard <= now or start == end

    def curve(self, name: history.Stratum, which: int, now: float) -> history.Curve:
        """Return the curve of a stratum, as it was computed lately."""
        here, proved = self.strata[name], self.proved[name]
        start, end = here.history(now)
        known = len(proved.at)
        key = self.world.groups[which].message_class
        if built := here.built.get(key):
            when, last, last_known, curve = built
            few = end - last < NEWS * (end - start) and known - last_known <= NEWS * known
            if now - when < CURVE_LIVES or (few and self.world.rate < BRISK):
                return curve
        at, lag = here.old_at[start:end], here.old_lag[start:end]
        first = max(0, known - HISTORY)
        curve = history.Curve.of(
            [now - t for t in at],
            [g if t + g <= now else None for t, g in zip(at, lag, strict=True)],
            [now - t for t in proved.at[first:]],
            proved.lag[first:],
            self._class_heard(which, now),
        )
        here.built[key] = (now, end, known, curve)
        return curve

    def recent(
        self, name: history.Stratum, first: float, last: float, now: float, late_after: float | None
    ) -> risk.Recent:
        """Return the recent controls of claims of a minute: those before the first and those after the last of them."""
        here = self.strata[name]
        before = risk.nearest(now - first, here.near(first, now, after=False), late_after)
        after = risk.nearest(now - last, here.near(last, now, after=True), late_after)
        return risk.Recent.of(before, after, late_after)

    def reach(self, i: int, now: float) -> Reach:
        """Return for each size of a crowd how far half of it lies before and after a send, and how many sends it is."""
        at, known = self.sends.at, bisect_right(self.sends.at, now)
        found = []
        for size in risk.CROWDS:
            first, last = max(0, i - size // 2), min(known - 1, i + size // 2)
            found.append((at[i] - at[first], at[last] - at[i], last - first))
        return found

    def burst(self, i: int, reach: Reach, now: float) -> risk.Burst:
        """Return how many ambiguous sends lie beside a claim."""
        at = self.sends.at
        known, crowd = bisect_right(at, now - self.known_after), []
        for before, after, size in reach:
            first, end = bisect_left(at, at[i] - before), bisect_right(at, at[i] + after, i, known)
            crowd.append((max(0, self.crowd[end] - self.crowd[first] - 1), size))
        return risk.Burst(tuple(crowd), self._usual_share(now))

    def _usual_share(self, now: float) -> float:
        """Return the usual share of ambiguous sends, by stretches of the last day and of the last month."""
        if now >= self.usual_until:
            known = bisect_right(self.sends.at, now - self.known_after)
            ends = [now - n * stretch for stretch in STRETCHES for n in range(STRETCHES_OF_EACH + 1)]
            places = [bisect_right(self.sends.at, end, 0, known) for end in ends]
            blocks = [(first, min(last, first + BLOCK)) for last, first in pairwise(places) if first < last]
            self.usual = risk.usual_share(
                (last - first, self.crowd[last] - self.crowd[first]) for first, last in blocks
            )
            self.usual_until = now + max(CURVE_LIVES, 30 / self.world.rate * HOUR)
        return self.usual
