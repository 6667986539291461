# SPDX-License-Identifier: Apache-2.0
"""What becomes of one attempt, and what its feed says of it: drawn with dice. Pure. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final, Literal, NamedTuple

from reconciler.breakable.fate import Fate, Fates, Said, Telling
from webhooks.event import Kind, Testimony

from .world import GRACE, Weather

Say = Literal["confirm", "open", "not_sent", "refused"]
"""What the sender reports: the answer; that the call failed and nobody can tell; that nothing left; that the provider
will never take it."""

CALM: Final = Fates(hangs=0.009, reset=0.004, late_error=0.003, lost=0.011, refused=0.008, busy=0.008, down=0.005)
BURST: Final = Fates(hangs=0.4, reset=0.1, lost=0.4, down=0.1)
THROTTLED: Final = Fates(busy=0.95)

DIES_BEFORE: Final = 0.003
DIES_SUBMITTED: Final = 0.003
DIES_ANSWERED: Final = 0.004
FROZEN: Final = 0.0005
HELD_BACK: Final = 0.0005
LONGEST: Final = 2.7
"""What is frozen or held back comes a minute to some eight hours after the grace: so many powers of ten."""

SLOW: Final = 0.001
CONFIRMED_LATE: Final = 0.008
CONFIRMED_TWICE: Final = 0.01
RETRIED_INSIDE: Final = 0.00005
SUPPRESSED: Final = 0.004
"""Of answered sends: the provider took the request, and then says that it will never send."""

TURNED_AWAY: Final = 0.05
"""The same of those whose call was lost."""

TELLING: Final = Telling(
    kinds=("accepted", "delivered"),
    delay=(2.0, 50.0),
    tail=0.01,
    tail_delay=(60.0, 2400.0),
    silent=0.0003,
    lost=0.01,
    twice=0.02,
    bounced=0.02,
    shuffled=True,
)
EARLY: Final = 0.03
"""Share of messages of which the first event is stored before the sender hears the answer."""

UNKEYED: Final = 0.03
CONTRADICTED: Final = 0.002
NOT_UNDERSTOOD: Final = 0.003
KINDS: Final[dict[Said, Kind]] = {
    "accepted": Kind.QUEUED,
    "deferred": Kind.DEFERRED,
    "delivered": Kind.DELIVERED,
    "bounced": Kind.BOUNCED,
    "complained": Kind.COMPLAINED,
}


@dataclass(frozen=True, slots=True)
class Course:
    """What becomes of one attempt. Times count from its claim."""

    how: str
    """In words; an attempt that may duplicate by itself has one of BY_ITSELF."""
    taken: float | None = None
    """When the provider takes it; None: never."""
    copies: int = 1
    """How often it is taken: an SDK may have tried again by itself."""
    says: Say | None = None
    """None: the sender dies without a word."""
    says_at: float = 0.0
    twice: bool = False
    """The sender repeats what it said."""
    suppressed: bool = False
    """The provider says that it will never send it, and doesn't."""


FROZE: Final = "sender frozen before it wrote"
HELD: Final = "request held back by the network"
INSIDE: Final = "retried inside the attempt"
BY_ITSELF: Final = (FROZE, HELD, INSIDE)


class Told(NamedTuple):
    """An event that a feed will deliver."""

    after: float
    """Seconds from the taking."""
    event_id: str
    kind: Kind
    testimony: Testimony
    keyed: bool
    again: bool
    """It was delivered before: the same event once more."""


def fates(weather: Weather | None) -> Fates:
    """Return how a provider treats requests."""
    return {"burst": BURST, "throttled": THROTTLED}.get(weather or "", CALM)


def course(dice: Random, provider: Fates, within: float, longest: float) -> Course:
    """Return what becomes of an attempt that may take `within`; no sender confirms later than `longest`."""
    left, over = dice.random(), within + GRACE.total_seconds()
    for share, one in (
        (DIES_BEFORE, Course("sender died before it submitted")),
        (FROZEN, _late(FROZE, over + 60 * 10 ** dice.uniform(0, LONGEST), "confirm")),
        (HELD_BACK, _late(HELD, over + 60 * 10 ** dice.uniform(0, LONGEST), "open", within)),
        (SLOW, _late("request slow", dice.uniform(within, 0.6 * over), "open", within)),
    ):
        left -= share
        if left < 0:
            return one
    fate = provider.draw(dice)
    if left < DIES_SUBMITTED:
        return Course("sender died after it submitted", taken=0.0 if fate.taken else None)
    return _answered(dice, longest) if fate is Fate.ANSWERED else _unanswered(dice, fate, within)


def _late(how: str, taken: float, says: Say, says_at: float | None = None) -> Course:
    return Course(how, taken=taken, says=says, says_at=taken if says_at is None else says_at)


def _answered(dice: Random, longest: float) -> Course:
    left = dice.random()
    for share, one in (
        (DIES_ANSWERED, Course("sender died after the answer", taken=0.0)),
        (CONFIRMED_LATE, Course("confirmed late", 0.0, says="confirm", says_at=dice.uniform(120, longest))),
        (CONFIRMED_TWICE, Course("confirmed twice", 0.0, says="confirm", twice=True)),
        (RETRIED_INSIDE, Course(INSIDE, 0.0, copies=2, says="confirm")),
        (SUPPRESSED, Course("answered, then rejected", 0.0, says="confirm", suppressed=True)),
    ):
        left -= share
        if left < 0:
            return one
    return Course("answered", 0.0, says="confirm")


def _unanswered(dice: Random, fate: Fate, within: float) -> Course:
    match fate:
        case Fate.HANGS:
            return Course("timed out, taken", 0.0, says="open", says_at=within)
        case Fate.RESET | Fate.LATE_ERROR:
            return Course(f"{fate.value.replace('_', ' ')}, taken", 0.0, says="open")
        case Fate.REFUSED:
            return Course("refused", says="refused")
        case Fate.BUSY:
            return Course("429", says="not_sent", twice=dice.random() < 0.05)
        case Fate.LOST if dice.random() < TURNED_AWAY:
            return Course("timed out, then rejected", 0.0, says="open", says_at=within, suppressed=True)
        case Fate.LOST:
            return Course("timed out, not taken", says="open", says_at=within)
    return Course("reset, not taken", says="open")


def tell(dice: Random, *, suppressed: bool) -> list[Told]:
    """Return what a feed delivers about a message that was taken, in any order."""
    if suppressed:
        return [Told(dice.uniform(2, 50), "rejected", Kind.REJECTED, Testimony.REJECTED, keyed=True, again=False)]
    seen: set[Said] = set()
    told = []
    for after, said in TELLING.tell(dice):
        told.append(Told(after, said, KINDS[said], Testimony.ACCEPTED, keyed=True, again=said in seen))
        seen.add(said)
    for share, event_id, kind, testimony, keyed in (
        (UNKEYED, "opened", Kind.OPENED, Testimony.ACCEPTED, False),
        (CONTRADICTED, "contradiction", Kind.REJECTED, Testimony.REJECTED, True),
        (NOT_UNDERSTOOD, "riddle", Kind.UNKNOWN, Testimony.NONE, True),
    ):
        if told and dice.random() < share:
            told.append(Told(dice.uniform(2, 600), event_id, kind, testimony, keyed=keyed, again=False))
    return told
