# SPDX-License-Identifier: Apache-2.0
"""What a feed's history, and the sends around a claim, say of its silence about that claim. Pure.

Times are seconds since 1970 by the database's clock; ages and lags are seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from reconciler.rule.history import SMALL, Curve, Stratum, stratum
from reconciler.rule.policy import Rules, Witness
from reconciler.rule.risk import REPORTED, UNREPORTED, Assessment, Burst, Cause, Recent, assess, nearest
from webhooks.event import Answer

STRETCH: Final = 300.0
"""A longer time to submit is judged in stretches: nobody knows in which one the send left, so the worst counts."""

MOST_STRETCHES: Final = 12

BUCKET: Final = 60.0
"""Claims of one stratum and minute share their recent controls."""


REMEMBERED: Final = 5.0
"""How long it is remembered when the ambiguous sends of a feed were: pages of one pass follow each other in time."""


class Sighting(NamedTuple):
    """A send that was accepted for certain, and how long its feed took to speak of it; None: not yet."""

    at: float
    lag: float | None
    domain: str | None


class Claim(NamedTuple):
    """An ambiguous send of which nothing was heard, and a stretch of time in which it may have been submitted."""

    wire_key: str
    feed: str
    message_class: str
    domain: str | None
    """The recipient's; None where it is unknown."""
    since: float
    """From when on it may have been submitted: its claim, or a later moment of a long time to submit."""
    until: float
    """Until when it may have been, at most STRETCH later."""
    age: float
    """Since `submit_by`."""
    reported: bool
    """Whether its sender said that the call failed."""


class Reach(NamedTuple):
    """How far half of a crowd reaches back from a moment, how far the other half forth, and how many sends both are."""

    back: float
    forth: float
    sends: int


Density = tuple[Reach, ...]
"""Of each size of crowd."""


def slot(at: float) -> int:
    """Return in which five minutes a moment lies: sends lie equally dense for so long."""
    return int(at // 300)


class Spell(NamedTuple):
    """When a feed's ambiguous sends were, of a stretch of time."""

    since: float
    until: float
    at: float
    """When that was asked."""
    times: Sequence[float]
    """Sorted."""

    def reaches(self, moment: float, now: float) -> bool:
        """Say whether it holds a moment, and was asked so lately that it may be used again."""
        return self.since <= moment <= self.until and 0 <= now - self.at < REMEMBERED

    def onwards(self, since: float, until: float, times: Sequence[float]) -> Spell:
        """Return it from a moment on that it holds, with the later times until another."""
        return Spell(since, max(until, self.until), self.at, [*self.times[bisect_left(self.times, since) :], *times])


class Attempt(NamedTuple):
    """An attempt that may have been accepted: from its claim to its `submit_by` the send may have left."""

    feed: str
    claimed_at: float
    submit_by: float

    @property
    def is_long(self) -> bool:
        """Whether it lasts so long that its stretches would be too many."""
        return self.submit_by - self.claimed_at > MOST_STRETCHES * STRETCH

    def stretches(self) -> list[tuple[float, float]]:
        """Cut it into equal stretches of at most STRETCH."""
        begun, long = self.claimed_at, self.submit_by - self.claimed_at
        if long <= STRETCH:
            return [(begun, begun + long)]
        n = math.ceil(long / STRETCH)
        step = long / n
        return [(begun + i * step, begun + (i + 1) * step) for i in range(n)]


@dataclass(slots=True)
class FeedHistory:
    """What is known of a feed from the sends that are behind it, as of one moment."""

    feed: str
    at: float
    by_domain: bool
    """Whether its first event comes from the recipient's server, so that domains differ."""
    controls: Mapping[str, Sequence[Sighting]] = field(default_factory=dict)
    """A sample by message class."""
    proved: Mapping[str, Sequence[Sighting]] = field(default_factory=dict)
    """Ambiguous sends that were proved accepted, by message class."""
    share: float = 0.0
    """How large a part of its sends is usually ambiguous."""
    causes: Mapping[bool, Cause] = field(default_factory=dict)
    """Priors, by whether the sender reported the failure."""
    newest: Sequence[str] = ()
    """The classes that stand for the whole feed."""
    density: dict[int, Density] = field(default_factory=dict)
    """How dense its sends lay, by slot, as far as that was asked."""
    ambiguous: Spell | None = None
    """When its ambiguous sends were, of the stretch of time that was asked about last."""
    _counts: dict[str, dict[Stratum, int]] = field(default_factory=dict)
    _strata: dict[tuple[str, str | None], Stratum] = field(default_factory=dict)
    _curves: dict[tuple[Stratum, str | None], Curve] = field(default_factory=dict)

    def prior(self, *, reported: bool) -> float:
        """Return p0 of an ambiguous send."""
        return self.causes.get(reported, REPORTED if reported else UNREPORTED).p0()

    def stratum_of(self, message_class: str, domain: str | None) -> Stratum:
        """Return where history and recent controls of a send are taken."""
        key = (message_class, domain if self.by_domain else None)
        if key not in self._strata:
            self._strata[key] = stratum(self._count(message_class), self.feed, *key)
        return self._strata[key]

    def _count(self, message_class: str) -> dict[Stratum, int]:
        if message_class not in self._counts:
            domains = Counter(seen.domain if self.by_domain else None for seen in self.controls.get(message_class, ()))
            self._counts[message_class] = {Stratum(self.feed, message_class, of): n for of, n in domains.items()}
        return self._counts[message_class]

    def curve(self, of: Stratum, message_class: str) -> Curve:
        """Return the lags of a stratum, for a claim of this class."""
        key = (of, message_class)
        if key not in self._curves:
            self._curves[key] = replace(self._curve(of), no_echo=not self._echoes(message_class))
        return self._curves[key]

    def _curve(self, of: Stratum) -> Curve:
        if (of, None) not in self._curves:
            controls = [s for name in self.classes(of) for s in self._chosen(self.controls.get(name, ()), of)]
            classes = self.proved if of.message_class is None else [of.message_class]
            proved = [seen for name in classes for seen in self._chosen(self.proved.get(name, ()), of)]
            self._curves[of, None] = Curve.of(
                [self.at - seen.at for seen in controls],
                [seen.lag for seen in controls],
                [self.at - seen.at for seen in proved],
                [seen.lag for seen in proved],
                class_ever_heard=True,
            )
        return self._curves[of, None]

    def _echoes(self, message_class: str) -> bool:
        """Say whether the feed ever spoke of a class: of one without controls it did not, though of others it may."""
        own = self.controls.get(message_class)
        return any(seen.lag is not None for seen in own) if own else not any(self.controls.values())

    def _chosen(self, sightings: Sequence[Sighting], of: Stratum) -> Iterable[Sighting]:
        return sightings if of.domain is None else (seen for seen in sightings if self.belongs(seen.domain, of))

    def belongs(self, domain: str | None, of: Stratum) -> bool:
        """Say whether a recipient's domain belongs to a stratum of which the class is known to fit."""
        if of.domain is None:
            return True
        if of.domain != SMALL:
            return domain == of.domain
        return self.stratum_of(of.message_class or "", domain) == of

    def classes(self, of: Stratum) -> Sequence[str]:
        """Return the message classes whose controls a stratum holds."""
        return self.newest if of.message_class is None else [of.message_class]

    def with_classes(self, controls: Mapping[str, Sequence[Sighting]]) -> FeedHistory:
        """Return it with the controls of more message classes."""
        return replace(self, controls={**self.controls, **controls}, _counts={}, _strata={}, _curves={})


class Bucket(NamedTuple):
    """The claims of one stratum and minute, oldest first."""

    stratum: Stratum
    claims: Sequence[Claim]
    until: float
    """Until when any may have been submitted: of the controls after the last claim those nearest to it count."""

    @property
    def oldest(self) -> float:
        """When the first of them was claimed.

        Controls before it, and after the last, are those of all: a spell that begins or ends within the minute then
        lies on one side.
        """
        return self.claims[0].since

    @property
    def youngest(self) -> float:
        """When the last of them was claimed."""
        return self.claims[-1].since


def buckets(claims: Iterable[Claim], histories: Mapping[str, FeedHistory]) -> list[Bucket]:
    """Return claims by stratum and minute."""
    found: dict[tuple[Stratum, int], list[Claim]] = {}
    for claim in sorted(claims, key=attrgetter("since")):
        of = histories[claim.feed].stratum_of(claim.message_class, claim.domain)
        found.setdefault((of, int(claim.since // BUCKET)), []).append(claim)
    return [Bucket(of, own, max(claim.until for claim in own)) for (of, _), own in found.items()]


@dataclass(frozen=True, slots=True)
class Crowd:
    """How dense the sends of a feed lie around a claim, and when its ambiguous ones were."""

    density: Density
    ambiguous: Sequence[float]
    """Times of the feed's ambiguous sends, sorted; at least those within reach, the claim's own among them."""

    def around(self, at: float) -> tuple[tuple[int, int], ...]:
        """Return for each size how many lie beside the ambiguous send claimed then, and of how many sends."""
        pairs, times = [], self.ambiguous
        for back, forth, sends in self.density:
            found = bisect_right(times, at + forth) - bisect_left(times, at - back)
            pairs.append((found - 1 if found else 0, sends))
        return tuple(pairs)


def silent_witness(silence: Assessment) -> Witness:
    """Return what a feed's silence answers."""
    return Witness(silence.answer, silence.reason or "absent", silence.risk)


@dataclass(frozen=True, eq=False)
class Judged:
    """What silence about a claim is worth, and the ceiling that its risk stands against. Claims share it."""

    assessment: Assessment
    max_risk: float
    reported: bool

    @cached_property
    def witness(self) -> Witness:
        """The feed's answer."""
        return silent_witness(self.assessment)

    @cached_property
    def text(self) -> str:
        """What a verdict keeps of it, as JSON; written once for all claims that share it."""
        kept = {**self.assessment.stored(), "max_risk": self.max_risk, "reported": self.reported}
        return msgspec.json.encode(kept).decode()


@dataclass(slots=True)
class Around:
    """A bucket, its feed's history, and the sends around it: judges its claims."""

    history: FeedHistory
    bucket: Bucket
    before: Sequence[tuple[float, float | None]]
    """(age, lag) of the controls before the first claim of the bucket, the nearest first."""
    after: Sequence[tuple[float, float | None]]
    """Of those after its last claim, the nearest to the time until which its claims may have been submitted first."""
    crowd: Crowd
    now: float
    rules_for: Callable[[str, str], Rules]
    _recent: dict[str, Recent] = field(default_factory=dict)
    _judged: dict[tuple[object, ...], Judged] = field(default_factory=dict)

    def judge(self, claim: Claim) -> Judged:
        """Return what silence about a claim is worth. Claims that differ in nothing that counts share the answer."""
        age, crowd = rounded(claim.age), self.crowd.around(claim.since)
        key = (claim.message_class, claim.reported, age, crowd)
        found = self._judged.get(key)
        if found is None:
            found = self._judged[key] = self._assess(claim, age, Burst(crowd, self.history.share))
        return found

    def _assess(self, claim: Claim, age: float, burst: Burst) -> Judged:
        rules = self.rules_for(claim.feed, claim.message_class)
        prior = max(self.history.prior(reported=claim.reported), rules.prior_floor)
        curve = self.history.curve(self.bucket.stratum, claim.message_class)
        recent = self._recent_of(claim.message_class, curve)
        found = assess(age, curve, recent, burst, prior, rules.stress, rules.max_risk)
        return Judged(found, rules.max_risk, claim.reported)

    def _recent_of(self, message_class: str, curve: Curve) -> Recent:
        if message_class not in self._recent:
            before = nearest(self.now - self.bucket.oldest, self.before, curve.late_after)
            after = nearest(self.now - self.bucket.until, self.after, curve.late_after)
            self._recent[message_class] = Recent.of(before, after, curve.late_after)
        return self._recent[message_class]


def rounded(age: float) -> float:
    """Return an age with six binary digits that count, rounded down: no send is judged as older than it is."""
    fraction, exponent = math.frexp(age)
    return math.ldexp(math.floor(fraction * 64), exponent - 6)


def worse(one: Judged, other: Judged) -> Judged:
    """Return that of two judgements on one send that speaks more against its release."""
    return max(one, other, key=lambda judged: (judged.assessment.answer is not Answer.ABSENT, judged.assessment.risk))
