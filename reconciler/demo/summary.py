# SPDX-License-Identifier: Apache-2.0
"""What the demo concludes: in sentences and tables for a person, and as one document for a program. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from reconciler.demo.counting import Counted, Figures
from reconciler.demo.ways import CALM
from reconciler.in_words import WAITS_FOR, percent
from reconciler.settings_tables import RuleSettings
from reconciler.units import format_duration
from reconciler.why import Story


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below their header."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Part:
    """A titled part of the summary."""

    title: str
    content: Sequence[str | Table]


WAYS: Final = {
    "naive retry": "calls again, three times at most",
    "never retry": "leaves it",
    "reconciler": "waits for evidence, then decides",
}
"""What each sender does where a call had no answer."""

NEXT: Final = (
    ("reconciler demo --seed 2", "other faults; --sends, --json"),
    ('README, "Try it"', "the quick start: the same by hand, with a server that stays"),
    ("reconciler why KEY", "the story of any send, as above, and what happens to it next"),
    ("reconciler status --check", "what needs a person: held sends, refused webhooks, a feed that fell silent"),
    ('README, "Send"', "send_once in your code, or the same from any language over SQL or HTTP"),
    ('README, "Begin"', "beside what you have, in shadow mode: it decides and records, and changes nothing"),
    ("reconciler selftest", "kills and cuts off senders, passes and receivers at each step, on your database"),
)
"""What to look at next, and why."""


def parts(figures: Figures, stories: Sequence[Story]) -> Iterator[Part]:
    """Give the summary, part by part."""
    yield Part("What was compared", [*_compared(figures)])
    yield Part("What became of them at the reconciler", [*_decided(figures)])
    if figures.ledger.held:
        yield Part(f"Why {len(figures.ledger.held)} are held", [*_held(figures)])
    if figures.ledger.released:
        yield Part("What the releases risked", [*_risked(figures)])
    for story in stories:
        yield Part(f"reconciler why {story.wire_key}", [*_told(story)])
    yield Part("What to look at next", [*_next(figures)])


def _compared(figures: Figures) -> Iterator[str | Table]:
    share, missing = figures.unanswered / max(1, figures.made), figures.unanswered - figures.unanswered_taken
    yield (
        f"Three senders sent the same {figures.made:,} messages, each meant to arrive once, over the same faults of a "
        f"provider on this machine (seed {figures.seed})."
    )
    yield (
        f"{figures.unanswered:,} first calls ({percent(share)}) had no answer but a time-out, a reset or an error 500. "
        f"Of these messages the provider had taken {figures.unanswered_taken:,} all the same; {missing:,} it never "
        "got. No sender can tell which."
    )
    if figures.made < figures.wanted:
        yield f"{figures.wanted:,} were wanted: this machine is too slow, or too busy, for so many in the time."
    yield ""
    yield ways_table(figures)
    yield ""
    yield (
        "DUPLICATES are copies too many, LOST are messages that nobody got and nobody will send any more: both as the "
        "provider counted them. OPEN are messages that nobody got yet and that are not forgotten: see below."
    )


def ways_table(figures: Figures) -> Table:
    """Return the three ways side by side."""
    return Table(
        ("SENDER", "WITHOUT AN ANSWER IT", "CALLS", "ARRIVED ONCE", "DUPLICATES", "LOST", "OPEN"),
        [
            (name, does, n.calls, n.once, n.duplicates, n.lost, n.open)
            for (name, does), n in zip(WAYS.items(), _counts(figures), strict=True)
        ],
    )


def _counts(figures: Figures) -> tuple[Counted, Counted, Counted]:
    return figures.naive, figures.never, figures.ours


def _decided(figures: Figures) -> Iterator[str | Table]:
    ledger = figures.ledger
    rows = [
        ("proved sent", ledger.proved, "a webhook spoke of the message: nobody sends it again"),
        ("released", len(ledger.released), "its silence was worth enough: it was sent again"),
        ("held", len(ledger.held), "nobody can tell yet: it is not sent again before somebody can"),
        ("not decided yet", len(ledger.waiting), "the demo ended before a pass had decided"),
    ]
    yield Table(("VERDICT", "SENDS", "BECAUSE"), [row for row in rows if row[1]])
    if again := len(ledger.undecided & ledger.released.keys()):
        yield f"{again} of these were released, and their second call had no answer either: they are there twice."


def _held(figures: Figures) -> Iterator[str | Table]:
    arrived = figures.held_arrived
    yield Table(
        ("REASON", "SENDS", "ARRIVED", "WHAT IT WAITS FOR"),
        [(reason, n, arrived.get(reason, 0), waits_for(reason)) for reason, n in figures.ledger.reasons.most_common()],
    )
    yield ""
    yield (
        "A held send is not lost. Passes look at it again and again, and its webhook may still come; with an api_key "
        "the provider's API is asked (not in this demo); after give_up_after "
        f"({format_duration(figures.rules.give_up_after)}) its message class decides; and you may at any time: "
        "reconciler release, confirm or fail."
    )
    if figures.ledger.reasons.keys() & WANT_OF_HISTORY:
        yield (
            "Here the history by which silence is judged is seconds long: few answered sends are as old as the first "
            f"silent ones. Where a feed has been listened to for days, few are held for {' or '.join(WANT_OF_HISTORY)}."
        )


WANT_OF_HISTORY: Final = ("risk", "few_controls")
"""Reasons that mostly mean: too little is known of the feed."""


def waits_for(reason: str) -> str:
    """Return what decides a send that is held for a reason."""
    return WAITS_FOR.get(reason, "evidence")


def _risked(figures: Figures) -> Iterator[str]:
    risks = sorted(figures.ledger.released.values())
    span = percent(risks[0]) if risks[0] == risks[-1] else f"{percent(risks[0])} to {percent(risks[-1])}"
    yield (
        f"Each of the {len(risks):,} sends was released with a stated risk of a duplicate: {span}, and never above "
        f"max_risk ({percent(figures.rules.max_risk)}). Together that is {figures.ledger.risk:.2g} duplicates to be "
        f"expected; the provider counted {figures.released_duplicates:,} among them."
    )


def _told(story: Story) -> Iterator[str | Table]:
    begun = story.timeline[0].at if story.timeline else story.now
    yield story.standing
    yield Table(
        ("AFTER", "WHAT", "STORY"),
        [(f"{(e.at - begun).total_seconds():.1f} s", e.what, e.text) for e in story.timeline],
    )
    if story.next and story.next.missing:
        yield f"It waits for: {story.next.missing}"


def _next(figures: Figures) -> Iterator[str | Table]:
    grace, usual = figures.rules.grace, RuleSettings().grace
    yield Table(("WHERE", "WHAT FOR"), NEXT)
    yield ""
    yield (
        f"Not as in production: silence is judged after a grace of {format_duration(grace)} instead of "
        f"{format_duration(usual)}, and passes run more often. All else is as you would get it, the limits on releases "
        "and the ceiling of their risk above all. The history by which silence is judged is what this run measured."
    )
    yield (
        f"The provider answered all of the first and the last {CALM} messages. Its webhooks came late, twice and in "
        "any order, but they came: of a feed that loses some, silence is worth less, and more is held."
    )


def document(figures: Figures, stories: Sequence[Story], seconds: float) -> dict[str, Any]:
    """Return all of it for a program. `seconds` is how long the demo took."""
    ledger = figures.ledger
    return {
        "seed": figures.seed,
        "seconds": round(seconds, 1),
        "messages": figures.made,
        "messages_wanted": figures.wanted,
        "unanswered": {
            "first_calls": figures.unanswered,
            "taken": figures.unanswered_taken,
            "not_taken": figures.unanswered - figures.unanswered_taken,
        },
        "senders": {name: asdict(n) for name, n in zip(WAYS, _counts(figures), strict=True)},
        "proved_sent": ledger.proved,
        "released": {
            "sends": len(ledger.released),
            "stated_risk": ledger.risk,
            "duplicates": figures.released_duplicates,
        },
        "held": [
            {
                "reason": reason,
                "sends": n,
                "arrived": figures.held_arrived.get(reason, 0),
                "waits_for": waits_for(reason),
            }
            for reason, n in ledger.reasons.most_common()
        ],
        "not_decided": len(ledger.waiting),
        "stories": [{"key": s.wire_key, "standing": s.standing, "timeline": s.timeline} for s in stories],
        "next": [{"where": where, "what_for": what} for where, what in NEXT],
    }
