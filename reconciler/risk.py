# SPDX-License-Identifier: Apache-2.0
"""What a feed's silence about one send is worth: how likely it was accepted although nothing was heard. Pure, total.

A *control* is a send whose first attempt got the provider's answer; it was accepted for certain, so whether and when
the feed spoke of it measures the feed. A *claim* is an ambiguous send. Ages and lags are seconds; a lag counts from the
claim to the storing of the first event that names the send by wire key, and is None while there is none.

**History** (`Curve`). Of N sends of a stratum that were accepted and have passed age a, K were not heard of within a:
`m_h = (K+1)/(N+2)`, the mean of the miss rate's posterior under a uniform prior. It is taken of controls, and of
ambiguous sends that were proved accepted later, since the node that timed out may be the one that lags; the larger
counts. Of fewer than MANY ambiguous ones the estimate leans on the controls': `(K + MANY*m_h)/(N + MANY)`, times
STRESS, so that nothing known means three times what controls say, and a few late ones count at once.

**Near the claim** (`Recent`). Of n controls k are not heard of yet, k_late were not heard of at the age at which
history misses LATE. `A(s, j, q) = s/(n+1) / ((1-s) Binom(j; n, q))` are the odds of a regime in which any miss rate is
as likely (the integral of Binom(j; n, q) over q is 1/(n+1)) against the healthy one. Two such regimes are told apart:

* *late*: odds `max(A(k_late, LATE), A(k, m_h))` with s = SICK; misses `(k+1)/(n+2)`, and where k = 0 that times
  `min(1, (L/a)^n)`, L the largest lag among the n: n+1 lags of unknown scale, the claim's the longest;
* *loss*: odds `A(k, m_h)` with s = LOSS; misses `(k+1)/(n+2)`, and time heals nothing. Without it six controls that
  were heard of by chance, in a feed that loses half, would speak for a healthy feed the sooner the quicker they came.
  A spell may begin or end at the claim, then only the controls of one side testify: where k = 0, n is the smaller side.

`m = stress * (m_h + late odds * its misses + loss odds * its misses) / (1 + both odds)`, at most 1.

**Bursts** (`Burst`). Where ambiguous sends crowd, no control speaks for them. See `Burst.excess`.

**Prior** (`Cause`). p0 is how likely an ambiguous send was accepted before anybody listened, and by Bayes
`risk = p0*m / (p0*m + 1 - p0)`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from webhooks.event import Answer

Reason = Literal["", "risk", "burst", "no_echo", "few_controls", "silent"]

ENOUGH: Final = 100
"""Controls that a stratum needs, and that must have passed the claim's age."""

SETTLED: Final = 6 * 3600.0
"""An ambiguous send that was heard of promptly counts from this age on, when those that were claimed beside it and come
late are known too; one heard of later than PROMPT counts at once. Otherwise a feed that is late with ambiguous sends
would look punctual until the first of them come."""

PROMPT: Final = 900.0

MANY: Final = 100
"""Ambiguous sends proved accepted from which on their own history speaks alone, and stress ends."""

A_SIDE: Final = 3
"""Recent controls needed on each side of a claim. The design's "none on one side" is read the cautious way, as fewer
than the three that it asks for."""

LATE: Final = 0.02
SICK: Final = 0.05
"""Prior that a feed is late or down around a claim. Claims come when things break, so it is far above the share of
time that a feed is ill; controls that were heard of outweigh it quickly."""

LOSS: Final = 0.02
"""Prior that a feed loses events around a claim and delivers the rest in time."""

STRESS: Final = 3.0
BURST_MISS: Final = 0.5
SURPRISE: Final = 1e-3
EVEN: Final = 0.5
SMALL: Final = "~small"
"""Stands for all domains together that have fewer than ENOUGH controls each."""

_INF: Final = math.inf


# Probabilities


@lru_cache(maxsize=1 << 14)
def _log_choose(n: int, j: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1)


def binomial(j: int, n: int, q: float) -> float:
    """Return the probability of exactly j of n where each has probability q, which lies between 0 and 1."""
    if not 0 <= j <= n:
        return 0.0
    if q <= 0 or q >= 1:
        return float(j == (0 if q <= 0 else n))
    return math.exp(_log_choose(n, j) + j * math.log(q) + (n - j) * math.log1p(-q))


@lru_cache(maxsize=1 << 14)
def at_least(j: int, n: int, q: float) -> float:
    """Return the probability of j or more of n where each has probability q."""
    return min(1.0, math.fsum(binomial(i, n, q) for i in range(max(j, 0), n + 1)))


# Strata


@dataclass(frozen=True, slots=True)
class Stratum:
    """Where history and recent controls of a claim are taken. None: all classes, or all domains."""

    feed: str
    message_class: str | None = None
    domain: str | None = None


def stratum(counts: Mapping[Stratum, int], feed: str, message_class: str, domain: str | None = None) -> Stratum:
    """Return the narrowest stratum of a claim that holds ENOUGH controls, the feed where none does.

    `counts` are controls by feed, class and domain, each counted once, in its narrowest stratum; `domain` is given on
    feeds only whose first event is a delivery. The order: the domain, all domains of the class that are too small, the
    class, the feed.
    """
    of_class = {s.domain: n for s, n in counts.items() if (s.feed, s.message_class) == (feed, message_class)}
    if domain is not None:
        if of_class.get(domain, 0) >= ENOUGH:
            return Stratum(feed, message_class, domain)
        if sum(n for of, n in of_class.items() if of is not None and n < ENOUGH) >= ENOUGH:
            return Stratum(feed, message_class, SMALL)
    if sum(of_class.values()) >= ENOUGH:
        return Stratum(feed, message_class)
    return Stratum(feed)


# History


@dataclass(frozen=True, slots=True)
class Counts:
    """How many sends have passed an age (n), and how many of them were not heard of within it (k)."""

    n: int = 0
    k: int = 0
    ambiguous_n: int = 0
    ambiguous_k: int = 0

    def miss_rate(self) -> float:
        """Return m_h over controls."""
        return (self.k + 1) / (self.n + 2)

    def ambiguous_miss_rate(self) -> float:
        """Return m_h over ambiguous sends, which leans on the controls' while few are known."""
        if self.ambiguous_n >= MANY:
            return (self.ambiguous_k + 1) / (self.ambiguous_n + 2)
        return (self.ambiguous_k + MANY * self.miss_rate()) / (self.ambiguous_n + MANY)


@dataclass(frozen=True, slots=True)
class _Passed:
    """Sends by age and lag, sorted three ways, so that an age is asked in three bisections.

    A send that has passed age a and was heard within a is one with lag <= a that is not younger than a; one that is
    younger and heard of has lag <= age < a. So: heard within = (lags <= a) - (ages of heard ones < a).
    """

    ages: Sequence[float]
    heard_ages: Sequence[float]
    lags: Sequence[float]

    @classmethod
    def of(cls, sends: Iterable[tuple[float, float]]) -> _Passed:
        pairs = list(sends)
        heard = [pair for pair in pairs if pair[1] < _INF]
        return cls(sorted([a for a, _ in pairs]), sorted([a for a, _ in heard]), sorted([lag for _, lag in heard]))

    def at(self, age: float) -> tuple[int, int]:
        n = len(self.ages) - bisect_left(self.ages, age)
        heard = bisect_right(self.lags, age) - bisect_left(self.heard_ages, age)
        return n, max(0, n - heard)


@dataclass(frozen=True, slots=True)
class Curve:
    """The history of one stratum: how long its sends take to be heard of."""

    controls: _Passed
    ambiguous: _Passed
    no_echo: bool
    """There are controls in the claim's class, and none was ever heard of."""
    late_after: float | None
    """The age at which history misses LATE; None: it misses more at every age."""
    patchy: bool = False
    """There was a span of which PATCHY or more were never heard of: the feed is known to lose events."""
    left_out: int = 0
    """Controls of spans that were ill and therefore left."""

    @classmethod
    def of(
        cls,
        ages: Sequence[float],
        lags: Sequence[float | None],
        ambiguous_ages: Sequence[float] = (),
        ambiguous_lags: Sequence[float | None] = (),
        class_ever_heard: bool | None = None,
    ) -> Curve:
        """Build a curve from what was observed, in any order. Ages count from the claim to the observation.

        Controls: at most 30 days old and old enough to have been heard of (the grace); the last 2,000, or on busy
        feeds as many spread over a day, or an outage of a minute would be all of history. Ambiguous sends: the last
        2,000 in the order in which they were *proved* accepted (in the order of their claims, late ones would drop out
        before they are known), without those whose neighbourhood was already found ill (`Assessment.ill`) before they
        were heard of: for these the recent controls speak, and they would make all history look as ill as the spell.

        `class_ever_heard` says whether any control of the claim's message class was ever heard of, where the stratum
        is wider than the class or history may have left it behind.
        """
        pairs = [(a, _INF if lag is None else lag) for a, lag in zip(ages, lags, strict=True)]
        pairs.sort(key=itemgetter(0))
        healthy = _without_ill_spans(pairs)
        unclear = zip(ambiguous_ages, ambiguous_lags, strict=True)
        ambiguous = _Passed.of(
            (a, _INF if lag is None else lag) for a, lag in unclear if a >= SETTLED or lag is None or lag > PROMPT
        )
        if class_ever_heard is None:
            class_ever_heard = not pairs or any(lag < _INF for _, lag in pairs)
        controls = _Passed.of(healthy)
        return cls(
            controls,
            ambiguous,
            not class_ever_heard,
            _age_of_share(controls, LATE),
            any(sum(lag == _INF for _, lag in pairs[i : i + SPAN]) >= PATCHY for i in range(0, len(pairs), SPAN)),
            len(pairs) - len(healthy),
        )

    def at(self, age: float) -> Counts:
        """Return what history says of an age."""
        return Counts(*self.controls.at(age), *self.ambiguous.at(age))


def _age_of_share(passed: _Passed, share: float) -> float | None:
    """Return the smallest lag at which (K+1)/(N+2) is at most `share`; bisected, since both fall with age together."""

    def misses_more(age: float) -> bool:
        n, k = passed.at(age)
        return (k + 1) / (n + 2) > share

    low, high = 0, len(passed.lags)
    while low < high:
        middle = (low + high) // 2
        if misses_more(passed.lags[middle]):
            low = middle + 1
        else:
            high = middle
    return passed.lags[low] if low < len(passed.lags) else None


SPAN: Final = 20
"""Controls of one span of history: enough that five late ones, of which 2 % are usual, are no chance."""

SPAN_SURPRISE: Final = 1e-4
PATCHY: Final = 3


class _Span(NamedTuple):
    pairs: Sequence[tuple[float, float]]
    lags: Sequence[float]
    """Sorted."""


def _without_ill_spans(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return controls, sorted by age, without the spans whose miss rate lies above the usual beyond chance.

    A span is SPAN controls in a row. It leaves where so many of it were not heard of at the usual age for a share q as
    a usual span has with probability SPAN_SURPRISE at most (one-sided binomial test): first for q = 10 %, the usual
    age being the median over spans of the age at which a span misses 10 %, which holds while most spans are well; then
    for 5 % and LATE, whose usual ages are those of what is left. A partly lossy history, where no age has such a share,
    stays as it is.
    """
    if len(pairs) < ENOUGH:
        return list(pairs)
    pieces = [pairs[i : i + SPAN] for i in range(0, len(pairs), SPAN)]
    spans = [_Span(piece, sorted([lag for _, lag in piece])) for piece in pieces]
    tenth = sorted([span.lags[(len(span.lags) * 9) // 10] for span in spans])[len(spans) // 2]
    spans = _usual_spans(spans, tenth, 0.1)
    for share in (0.05, LATE):
        lags = sorted(chain.from_iterable([span.lags for span in spans]))
        spans = _usual_spans(spans, lags[int(len(lags) * (1 - share))], share) if lags else spans
    return list(chain.from_iterable([span.pairs for span in spans]))


def _usual_spans(spans: list[_Span], age: float, share: float) -> list[_Span]:
    if age == _INF:
        return spans
    return [s for s in spans if at_least(len(s.lags) - bisect_right(s.lags, age), len(s.lags), share) > SPAN_SURPRISE]


# Near the claim

NEAR: Final = 300.0
FAR: Final = 3600.0
MOST: Final = 25
WANTED: Final = 10


@dataclass(frozen=True, slots=True)
class Recent:
    """The controls submitted nearest to a claim that are old enough to have been heard of.

    At most MOST on each side within NEAR; where these are fewer than 6, the A_SIDE nearest on each side within FAR.
    """

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
        """Count from (age, lag) of the controls before and after a claim.

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
    return prior / (n + 1) / usual if usual > 0 else _INF


def _miss_rate(age: float, recent: Recent, of_controls: float, history: float) -> tuple[float, float]:
    """Return m without stress, and the weight of the regimes that are ill.

    How usual the recent controls are is judged by the controls' own miss rate; what is missed in health, by m_h.
    """
    n, k = recent.n, recent.k
    unheard = (k + 1) / (n + 2)
    late = max(_odds(SICK, recent.k_late, n, LATE), _odds(SICK, k, n, of_controls))
    lateness = unheard if k else unheard * min(1.0, recent.longest / age if age > 0 else 1.0) ** n
    few = n if k else min(recent.before, recent.after)
    loss = _odds(LOSS, k, few, of_controls)
    lost = (k + 1) / (few + 2)
    if _INF in (late, loss):
        return max(history, unheard), 1.0
    total = 1 + late + loss
    return (history + late * max(history, lateness) + loss * max(history, lost)) / total, (late + loss) / total


# Bursts


CROWDS: Final = (20, 100, 500)
"""How many of the nearest sends are looked at for ambiguous ones."""


@dataclass(frozen=True, slots=True)
class Burst:
    """How many of the sends nearest to a claim on its feed are ambiguous too, the claim itself not counted."""

    crowd: tuple[int, ...]
    """Of the nearest sends, for each size of CROWDS."""
    share: float
    """The feed's usual share of ambiguous sends."""

    @property
    def majority(self) -> bool:
        """Whether more than half of any are ambiguous."""
        return any(2 * x > size for x, size in zip(self.crowd, CROWDS, strict=False))

    @property
    def excess(self) -> float:
        """The share of them that the usual share doesn't explain, where chance does so less often than SURPRISE."""
        return max((_excess(x, size, self.share) for x, size in zip(self.crowd, CROWDS, strict=False)), default=0.0)


@lru_cache(maxsize=1 << 14)
def _excess(x: int, size: int, share: float) -> float:
    if x <= 0 or at_least(x, size, share) >= SURPRISE:
        return 0.0
    return max(0.0, 1 - share * size / x)


def usual_share(blocks: Iterable[tuple[int, int]]) -> float:
    """Return a feed's usual share of ambiguous sends, from (sends, ambiguous ones) of stretches of its history.

    `(X+1)/(N+2)` over the stretches that are no bursts themselves, by the same test, against the median at first.
    """
    known = [(n, x) for n, x in blocks if n > 0]
    if not known:
        return 0.5 * SURPRISE
    share = sorted(x / n for n, x in known)[len(known) // 2]
    for _ in range(3):
        usual = [(n, x) for n, x in known if at_least(x, n, max(share, 1 / n / 10)) >= SURPRISE] or known
        share = (sum(x for _, x in usual) + 1) / (sum(n for n, _ in usual) + 2)
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


@dataclass(frozen=True, slots=True)
class Assessment:
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
        """Return what a verdict keeps."""
        seen, near, burst = self.counts, self.recent, self.burst
        return {
            "answer": self.answer.value,
            "reason": self.reason,
            "risk": self.risk,
            "m": self.m,
            "age": self.age,
            "p0": self.p0,
            "stress": self.stress,
            "weight": self.weight,
            "ill": self.ill,
            "history": {"n": seen.n, "k": seen.k, "missing": self.missing},
            "ambiguous": {"n": seen.ambiguous_n, "k": seen.ambiguous_k},
            "recent": {
                "n": near.n,
                "before": near.before,
                "after": near.after,
                "k": near.k,
                "k_late": near.k_late,
                "longest": near.longest,
            },
            "burst": {"crowd": list(burst.crowd), "share": burst.share, "excess": self.excess},
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
    missed, weight = _miss_rate(age, recent, counts.miss_rate(), history)
    alone = min(1.0, stress * missed)
    excess = burst.excess
    m = excess * max(BURST_MISS, alone) + (1 - excess) * alone
    risk = risk_of(m, p0)
    if risk <= max_risk:
        return Assessment(Answer.ABSENT, "", risk, m, age, p0, stress, weight, excess, counts, recent, burst)
    reason: Reason = "burst" if risk_of(alone, p0) <= max_risk else "risk"
    return Assessment(Answer.SILENT, reason, risk, m, age, p0, stress, weight, excess, counts, recent, burst)


def risk_of(m: float, p0: float) -> float:
    """Return how likely a send of which nothing was heard was accepted, by Bayes from its prior and the miss rate."""
    accepted = p0 * m
    return accepted / (accepted + 1 - p0) if accepted > 0 else 0.0
