# SPDX-License-Identifier: Apache-2.0
"""How long the sends of a feed take to be heard of: its strata and their history. Pure and total.

Ages and lags are seconds. A lag counts from the claim to the storing of the first event that names the send by its wire
key; None while there is none. What the figures are for: `reconciler.rule.risk`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Final, NamedTuple

ENOUGH: Final = 100
"""Controls that a stratum needs, and that must have passed the claim's age."""

MANY: Final = 100
"""Ambiguous sends proved accepted, from which on their own history speaks, and stress ends."""

STRESS: Final = 3.0
"""How many times more than controls ambiguous sends may be missed, while MANY of them aren't known."""

SETTLED: Final = 6 * 3600.0
"""Ambiguous sends count among the N from this age on, or from twice the age asked for, when those that were claimed
beside them and come late are known too; late ones count among the K at once. Otherwise a feed that is late with
ambiguous sends only would look punctual until the first of them come."""

LATE: Final = 0.02
"""The share that history misses at the age from which on a control is late."""

SMALL: Final = "~small"
"""Stands for all domains together that have fewer than ENOUGH controls each."""

FADED: Final = 1e-16
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
    """Return the probability of j or more of n where each has probability q: the tail, summed until it fades."""
    if j <= 0 or q >= 1:
        return float(j <= n)
    term = total = binomial(j, n, q)
    for i in range(j, n):
        term *= (n - i) / (i + 1) * q / (1 - q)
        total += term
        if term < total * FADED and i > n * q:
            break
    return min(1.0, total)


# Strata


class Stratum(NamedTuple):
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


class Counts(NamedTuple):
    """How many sends have passed an age (n), and how many of them were not heard of within it (k)."""

    n: int = 0
    k: int = 0
    ambiguous_n: int = 0
    ambiguous_k: int = 0

    def miss_rate(self) -> float:
        """Return m_h over controls."""
        return (self.k + 1) / (self.n + 2)

    def ambiguous_miss_rate(self) -> float:
        """Return m_h over ambiguous sends: `(K + MANY*q)/(N + MANY)`.

        It leans, with the weight of MANY sends, on q: what controls say, times STRESS. While N is below MANY q is what
        controls say, because stress multiplies all of it (`reconciler.rule.risk.assess`).
        """
        lean = self.miss_rate() * (STRESS if self.ambiguous_n >= MANY else 1.0)
        return (self.ambiguous_k + MANY * lean) / (self.ambiguous_n + MANY)


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
class _Proved:
    """Ambiguous sends that were proved accepted: their ages and lags, each sorted."""

    ages: Sequence[float]
    lags: Sequence[float]

    def at(self, age: float) -> tuple[int, int]:
        k = len(self.lags) - bisect_right(self.lags, age)
        return max(k, len(self.ages) - bisect_left(self.ages, max(SETTLED, 2 * age))), k


@dataclass(frozen=True, slots=True)
class Curve:
    """The history of one stratum: how long its sends take to be heard of."""

    controls: _Passed
    ambiguous: _Proved
    no_echo: bool
    """There are controls in the claim's class, and none was ever heard of."""
    late_after: float | None
    """The age at which history misses LATE; None: it misses more at every age."""
    patchy: bool = False
    """The feed is known to lose events: of some span PATCHY or more were not heard of within SETTLED."""
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
        unclear = sorted([_INF if lag is None else lag for lag in ambiguous_lags])
        ambiguous = _Proved(sorted(ambiguous_ages), unclear)
        if class_ever_heard is None:
            class_ever_heard = not pairs or any(lag < _INF for _, lag in pairs)
        controls = _Passed.of(healthy)
        return cls(
            controls,
            ambiguous,
            not class_ever_heard,
            _age_of_share(controls, LATE),
            _loses(pairs),
            len(pairs) - len(healthy),
        )

    def heard_after(self, share: float) -> float | None:
        """Return the age at which all controls but this share are heard of; None: more are missed at every age."""
        return _age_of_share(self.controls, share)

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
MOST_ILL: Final = 0.4
PATCHY: Final = 3
"""Controls of SPAN in a row not heard of within SETTLED, from which on a feed is known to lose events."""


class _Span(NamedTuple):
    pairs: Sequence[tuple[float, float]]
    lags: Sequence[float]
    """Sorted."""


def _without_ill_spans(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return controls, sorted by age, without the spans whose miss rate lies above the usual beyond chance.

    A span is SPAN controls in a row. It leaves where so many of it were not heard of at the usual age for a share q as
    a usual span has with probability SPAN_SURPRISE at most (one-sided binomial test): first for q = 10 %, the usual
    age being the median over spans of the age at which a span misses 10 %; then for 5 % and LATE, whose usual ages are
    those of what is left. A history of which more than MOST_ILL would leave stays as it is, for that is how the feed
    is; so does a partly lossy one, where no age has such a share.
    """
    if len(pairs) < ENOUGH:
        return pairs
    pieces = [pairs[i : i + SPAN] for i in range(0, len(pairs), SPAN)]
    spans = [_Span(piece, sorted([lag for _, lag in piece])) for piece in pieces]
    tenth = sorted([span.lags[(len(span.lags) * 9) // 10] for span in spans])[len(spans) // 2]
    spans = _usual_spans(spans, tenth, 0.1)
    for share in (0.05, LATE):
        lags = sorted(chain.from_iterable([span.lags for span in spans]))
        spans = _usual_spans(spans, lags[int(len(lags) * (1 - share))], share) if lags else spans
    kept = list(chain.from_iterable([span.pairs for span in spans]))
    return kept if len(kept) >= (1 - MOST_ILL) * len(pairs) else pairs


def _loses(pairs: Sequence[tuple[float, float]]) -> bool:
    lost = [i for i, (age, lag) in enumerate(pairs) if lag == _INF and age >= SETTLED]
    return any(last - first < SPAN for first, last in zip(lost, lost[PATCHY - 1 :], strict=False))


def _usual_spans(spans: list[_Span], age: float, share: float) -> list[_Span]:
    if age == _INF:
        return spans
    return [s for s in spans if at_least(len(s.lags) - bisect_right(s.lags, age), len(s.lags), share) > SPAN_SURPRISE]
