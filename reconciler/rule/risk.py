# SPDX-License-Identifier: Apache-2.0
"""What a feed's silence about one send is worth: how likely it was accepted although nothing was heard. Pure, total.

A *control* is a send whose first attempt got the provider's answer; it was accepted for certain, so whether and when
the feed spoke of it measures the feed. A *claim* is an ambiguous send. Ages and lags are seconds; a lag counts from the
claim to the storing of the first event that names the send by wire key, and is None while there is none.

**History** (`Curve`). Of N sends of a stratum that were accepted and have passed age a, K were not heard of within a:
`m_h = (K+1)/(N+2)`, the mean of the miss rate's posterior under a uniform prior. It is taken of controls, and of
ambiguous sends that were proved accepted later, since the node that timed out may be the one that lags; the larger
counts. Of ambiguous ones it leans on what controls say, times STRESS, with the weight of MANY sends:
`(K + MANY*STRESS*m_h)/(N + MANY)`, and STRESS multiplies all while N is below MANY. So nothing known means three times
what controls say, a few late ones count at once, and punctual ones end the stress gently: under a uniform prior the
hundredth punctual one would raise m_h to 1 %, and a healthy feed would state far more than it does.

**Near the claim** (`Recent`). Of n controls k are not heard of yet, k_late were not heard of at the age at which
history misses LATE. `A(s, j, q) = s/(n+1) / ((1-s) Binom(j; n, q))` are the odds of a regime in which any miss rate is
as likely (the integral of Binom(j; n, q) over q is 1/(n+1)) against the healthy one. Two such regimes are told apart:

* *late*: odds `max(A(k_late, LATE), A(k, m_h))` with s = SICK; misses `(k+1)/(n+2)`, and where k = 0 that times
  `min(1, (L/a)^n)`, L the largest lag among the n: n+1 lags of unknown scale, the claim's the longest;
* *loss*: odds `A(k, m_h)` with s = LOSS; misses `(k+1)/(n+2)`, and time heals nothing. Without it six controls that
  were heard of by chance, in a feed that loses half, would speak for a healthy feed the sooner the quicker they came.
  A spell may begin or end at the claim, then only the controls of one side testify: where k = 0, n is the smaller side.

`m = stress * (m_h + late odds * its misses + loss odds * its misses) / (1 + both odds)`, at most 1.

Where controls are many and punctual both odds vanish and m is m_h. The design has the first regime only.

**Bursts** (`Burst`). Where ambiguous sends crowd, no control speaks for them; more than half of any crowd: SILENT. A
crowd that may still be chance multiplies the odds of both ill regimes instead (`Burst.crowding`).

**Prior** (`Cause`). p0 is how likely an ambiguous send was accepted before anybody listened, and by Bayes
`risk = p0*m / (p0*m + 1 - p0)`.

What can't be told from health by any of these is not in the stated risk: ambiguous sends of which only the ambiguous
ones are late, until MANY are known (of which only they are lost, for ever); a shard so small, or a feed so slow, that
its ambiguous sends stand alone among well ones; the first spell of a feed that loses a part of its events at some ten
sends an hour.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from reconciler.rule.history import ENOUGH, LATE, MANY, STRESS, Counts, Curve, at_least, binomial
from webhooks.event import Answer

Reason = Literal["", "risk", "burst", "no_echo", "few_controls", "silent"]

SICK: Final = 0.05
"""Prior that a feed is late or down around a claim. Claims come when things break, so it is far above the share of time
that a feed is ill; six punctual controls outweigh it, and at 0.05 a healthy feed of 10 sends an hour still states less
than thirty times what it does."""

LOSS: Final = 0.02
"""Prior that a feed loses events around a claim and delivers the rest in time; no age outweighs it, only controls."""

EVEN: Final = 0.5


# Near the claim

NEAR: Final = 300.0
MOST: Final = 25
"""Recent controls are those submitted within NEAR seconds of the claim, the MOST nearest on each side ..."""

FAR: Final = 3600.0
WANTED: Final = 10
"""... and where a side has fewer than WANTED, the WANTED nearest of that side within FAR. The design's three would
miss a feed that loses half of its events with probability 1/8, once for each claim at the beginning of a spell."""

A_SIDE: Final = 4
"""Recent controls needed on each side: the first three after a claim are heard of by chance with probability 1/8 where
a feed has just begun to lose half of its events. The design asks for one on each side, or three."""


def nearest(
    claimed: float, side: Iterable[tuple[float, float | None]], late_after: float | None
) -> list[tuple[float, float | None]]:
    """Return the recent controls of one side of a claim, from (age, lag) of those submitted there, nearest first.

    `claimed` is the claim's age since it was claimed. Controls younger than `late_after` say nothing yet and are left
    out. Claims that lie close together may share their controls: those before the first of them, at its age, and those
    after the last, at its. An illness that lasts longer than they lie apart then reaches one side for each of them;
    the controls around one in the middle of them would not tell of it, on a busy feed.
    """
    old = [(abs(age - claimed), (age, lag)) for age, lag in side if age >= (late_after or 0.0)]
    near = [control for away, control in old[:MOST] if away <= NEAR]
    if len(near) >= WANTED:
        return near
    return [control for away, control in old[:WANTED] if away <= FAR]


@dataclass(frozen=True, slots=True)
class Recent:
    """The controls submitted nearest to a claim that are old enough to have been heard of."""

    before: int
    after: int
    k: int
    """Not heard of yet."""
    k_late: int
    """Not heard of at the age at which history misses LATE."""
    longest: float
    """Largest lag among those heard of."""

    @property
    def n(self) -> int:
        """How many there are."""
        return self.before + self.after

    @classmethod
    def of(
        cls,
        before: Sequence[tuple[float, float | None]],
        after: Sequence[tuple[float, float | None]],
        late_after: float | None,
    ) -> Recent:
        """Count from (age, lag) of the controls before and after a claim, as `nearest` picks them.

        Controls younger than `late_after` say nothing yet and are left out; where history has no such age, whoever
        isn't heard of is late.
        """
        old = late_after or 0.0
        then, since = [lag for age, lag in before if age >= old], [lag for age, lag in after if age >= old]
        heard = [lag for lag in then + since if lag is not None]
        k = len(then) + len(since) - len(heard)
        heard.sort()
        late = 0 if late_after is None else len(heard) - bisect_right(heard, late_after)
        return cls(len(then), len(since), k, k + late, heard[-1] if heard else 0.0)


@lru_cache(maxsize=1 << 16)
def _odds(prior: float, j: int, n: int, q: float) -> float:
    """Return A: the odds that any miss rate is as likely, against that each misses with q.

    One-sided: fewer misses than usual are no sign of illness.
    """
    usual = (1 - prior) * binomial(max(j, int((n + 1) * q)), n, q)
    return prior / (n + 1) / usual if usual > 0 else math.inf


def _miss_rate(age: float, recent: Recent, of_controls: float, history: float, crowding: float) -> tuple[float, float]:
    """Return m without stress, and the weight of the regimes that are ill.

    How usual the recent controls are is judged by the controls' own miss rate; what is missed in health, by m_h.
    """
    n, k = recent.n, recent.k
    unheard = (k + 1) / (n + 2)
    late = max(_odds(SICK, recent.k_late, n, LATE), _odds(SICK, k, n, of_controls)) * crowding
    lateness = unheard if k else unheard * min(1.0, recent.longest / age if age > 0 else 1.0) ** n
    few = n if k else min(recent.before, recent.after)
    loss = _odds(LOSS, k, few, of_controls) * crowding
    lost = (k + 1) / (few + 2)
    if math.inf in (late, loss):
        return max(history, unheard), 1.0
    total = 1 + late + loss
    return (history + late * max(history, lateness) + loss * max(history, lost)) / total, (late + loss) / total


# Bursts

CROWDS: Final = (20, 100, 500)
"""How many of the nearest sends are looked at for ambiguous ones. 500 are more than the design asks for: a sick shard
of ten adds some 6 to 2 in 100, which the test misses every second time, but 30 to 10 in 500."""

SURPRISE: Final = 1e-3
BURST_MISS: Final = 0.5
"""How often an accepted send of a burst is not heard of. May be learned from look-ups only."""


class Burst(NamedTuple):
    """How many of the sends nearest to a claim on its feed are ambiguous too, the claim itself not counted."""

    crowd: tuple[tuple[int, int], ...]
    """For each size of CROWDS: the ambiguous ones, and how many sends were looked at: fewer at the edges of the log.

    A product may look at a stretch of time in which so many sends usually lie; then the first may exceed the second.
    """
    share: float
    """The feed's usual share of ambiguous sends."""

    @property
    def majority(self) -> bool:
        """Whether more than half of any are ambiguous."""
        return any(2 * x > size for x, size in self.crowd)

    @property
    def excess(self) -> float:
        """The share x of them that is a fault: `1 - usual share * size / count`, the largest of the sizes.

        It counts only where the usual share would give so many, or more, less often than SURPRISE. For that part no
        control speaks: `m := x * BURST_MISS + (1 - x) * m`.
        """
        share = _rounded(self.share, 3)
        return max((_excess(x, size, share) for x, size in self.crowd), default=0.0)

    @property
    def crowding(self) -> float:
        """How many times likelier they are while something is broken than usually, 1 to 1 / SURPRISE.

        Sends become ambiguous when things break, so a crowd that may still be chance raises the odds that the feed is
        ill too, which recent controls, if there are enough, outweigh. `1/(size+1) / Binom(count; size, usual share)`:
        any share is as likely while something is broken; the largest of the sizes.
        """
        share = _rounded(self.share, 3)
        return max((_crowding(x, size, share) for x, size in self.crowd), default=1.0)


def _rounded(figure: float, digits: int = 4) -> float:
    """Return a figure with so many digits that count. Of shares few do, so that tails already summed serve again."""
    return float(f"{figure:.{digits}g}")


@lru_cache(maxsize=1 << 14)
def _excess(x: int, size: int, share: float) -> float:
    if x <= 0 or at_least(x, size, share) >= SURPRISE:
        return 0.0
    return max(0.0, 1 - share * size / x)


@lru_cache(maxsize=1 << 14)
def _crowding(x: int, size: int, share: float) -> float:
    if x <= share * size:
        return 1.0
    usual = binomial(x, size, share) * (size + 1)
    return max(1.0, min(1 / usual, 1 / SURPRISE)) if usual > 0 else 1 / SURPRISE


def usual_share(blocks: Iterable[tuple[int, int]]) -> float:
    """Return a feed's usual share of ambiguous sends, from (sends, ambiguous ones) of stretches of its history.

    `(X+1 + sqrt(X+1))/(N+2)` over the stretches that are no bursts themselves, by the same test, against the median at
    first: its mean and a standard deviation more, or a share that rests on few sends would make bursts of chance. The
    stretches must be spread over a day or more, or a burst of some minutes on a busy feed would be the usual.
    """
    known = [(n, x) for n, x in blocks if n > 0]
    if not known:
        return 0.5 * SURPRISE
    share = sorted(x / n for n, x in known)[len(known) // 2]
    for _ in range(3):
        about = _rounded(share, 2)
        usual = [(n, x) for n, x in known if at_least(x, n, max(about, 1 / n / 10)) >= SURPRISE] or known
        found = sum(x for _, x in usual) + 1
        share = (found + math.sqrt(found)) / (sum(n for n, _ in usual) + 2)
    return min(share, 1.0)


# The prior


@dataclass(frozen=True, slots=True)
class Cause:
    """Ambiguous sends of one cause: reported by the sender (start 0.5), or unreported (start 0.95)."""

    start: float
    accepted: float = 0
    """Proved accepted, whatever was decided."""
    unheard: float = 0
    """Never heard of, whether released or held until given up."""
    risk: float = 0
    """Sum of the risks that were last stated of these."""

    def p0(self) -> float:
        """Return the prior: `(accepted + risk + 1) / (accepted + unheard + 2)`, never below the start.

        The sends counted were claimed longer ago than `give_up_after`, so that quick and slow answers weigh alike. One
        of which nothing was heard counts as accepted with the risk last stated of it, which is p0 itself where silence
        told nothing: held sends neither raise nor lower it (left out, each held send would raise p0, and p0 hold the
        next). Bias: too low where more events are lost than the stated risks know, therefore it never falls below its
        start, and this makes it too high where fewer are accepted. Fewer than MANY sends teach nothing.
        """
        known = self.accepted + self.unheard
        learned = (self.accepted + self.risk + 1) / (known + 2) if known >= MANY else 0.0
        return max(self.start, learned)


REPORTED: Final = Cause(0.5)
UNREPORTED: Final = Cause(0.95)


# The assessment


class Assessment(NamedTuple):
    """What a feed says of one claim of which nothing was heard, with all that it rests on."""

    answer: Answer
    reason: Reason
    risk: float
    """How likely a release duplicates; p0 where silence tells nothing."""
    m: float
    """How likely an accepted send is not heard of; 1 where silence tells nothing."""
    age: float
    p0: float
    stress: float
    weight: float
    """Of the regimes in which the feed is ill, 0 to 1."""
    excess: float
    counts: Counts
    recent: Recent
    burst: Burst

    @property
    def ill(self) -> bool:
        """Whether the neighbourhood, not history, stands against a release."""
        return self.weight >= EVEN or self.excess > 0 or self.burst.majority or self.reason in ("silent", "no_echo")

    @property
    def missing(self) -> int:
        """How many controls are missing in the history."""
        return max(0, ENOUGH - self.counts.n)

    def stored(self) -> dict[str, Any]:
        """Return what a verdict keeps: four digits count, more would be noise and a third of what is written."""
        seen, near, burst = self.counts, self.recent, self.burst
        return {
            "answer": self.answer.value,
            "reason": self.reason,
            "risk": _rounded(self.risk),
            "m": _rounded(self.m),
            "age": _rounded(self.age),
            "p0": _rounded(self.p0),
            "stress": _rounded(self.stress),
            "weight": _rounded(self.weight),
            "ill": self.ill,
            "history": {"n": seen.n, "k": seen.k, "missing": self.missing},
            "ambiguous": {"n": seen.ambiguous_n, "k": seen.ambiguous_k},
            "recent": {
                "n": near.n,
                "before": near.before,
                "after": near.after,
                "k": near.k,
                "k_late": near.k_late,
                "longest": _rounded(near.longest),
            },
            "burst": {
                "crowd": [list(pair) for pair in burst.crowd],
                "share": _rounded(burst.share),
                "excess": _rounded(self.excess),
            },
        }


def assess(
    age: float,
    curve: Curve,
    recent: Recent,
    burst: Burst,
    p0: float,
    stress: float | None = None,
    max_risk: float = 0.01,
) -> Assessment:
    """Return whether silence of `age` seconds about a claim is ABSENT at `max_risk`, and how likely that is wrong.

    `stress` set by the owner counts from the MANYth ambiguous send on; before, it can only raise STRESS.
    """
    counts = curve.at(age)
    if counts.ambiguous_n < MANY:
        stress = max(STRESS, stress or 0.0)
    elif stress is None:
        stress = 1.0
    history = max(counts.miss_rate(), counts.ambiguous_miss_rate())

    def silent(reason: Reason) -> Assessment:
        return Assessment(Answer.SILENT, reason, p0, 1.0, age, p0, stress, 0.0, 0.0, counts, recent, burst)

    if curve.no_echo:
        return silent("no_echo")
    if counts.n < ENOUGH or min(recent.before, recent.after) < A_SIDE:
        return silent("few_controls")
    if curve.patchy and recent.after < WANTED and age < FAR + (curve.late_after or 0.0):
        return silent("few_controls")
    if recent.k == recent.n:
        return silent("silent")
    if burst.majority:
        return silent("burst")
    missed, weight = _miss_rate(age, recent, counts.miss_rate(), history, burst.crowding)
    alone = min(1.0, stress * missed)
    excess = burst.excess
    m = excess * max(BURST_MISS, alone) + (1 - excess) * alone
    risk = risk_of(m, p0)
    if risk <= max_risk:
        return Assessment(Answer.ABSENT, "", risk, m, age, p0, stress, weight, excess, counts, recent, burst)
    calm = missed if burst.crowding == 1 else _miss_rate(age, recent, counts.miss_rate(), history, 1.0)[0]
    reason: Reason = "burst" if risk_of(min(1.0, stress * calm), p0) <= max_risk else "risk"
    return Assessment(Answer.SILENT, reason, risk, m, age, p0, stress, weight, excess, counts, recent, burst)


def risk_of(m: float, p0: float) -> float:
    """Return how likely a send of which nothing was heard was accepted, by Bayes from its prior and the miss rate."""
    accepted = p0 * m
    return accepted / (accepted + 1 - p0) if accepted > 0 else 0.0
