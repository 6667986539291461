# SPDX-License-Identifier: Apache-2.0
"""What the demo concludes: in sentences and tables for a person, and as one document for a program. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from reconciler.configuration.tables import RuleSettings
from reconciler.demo.counting import Counted, Figures
from reconciler.demo.ways import CALM
from reconciler.insight.why import Story
from reconciler.rule.history import ENOUGH, STRESS
from reconciler.rule.in_words import GIVEN_UP, WAITS_FOR, percent
from reconciler.rule.limits import LEAST_CANARY
from reconciler.rule.risk import A_SIDE, REPORTED
from reconciler.units import format_duration


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
    "naive retry": "calls again, three calls at most",
    "never retry": "leaves it",
    "reconciler": "waits for evidence, then decides",
}
"""What each sender does after a call that had no usable answer."""

NEXT: Final = (
    ('README, "Try it"', "begin here: by hand, with a server that stays (this demo's database is gone)"),
    ("reconciler why KEY", "there: the story of any send, as above, and what happens to it next"),
    ("reconciler status --check", "there: what needs a person: held sends, refused webhooks, a feed that fell silent"),
    ("docs/sending.md", "send_once in your code, or the same from any language over SQL or HTTP"),
    ("docs/begin.md", "beside what you have, in shadow mode: it decides and records, and changes nothing"),
    ("reconciler selftest", "kills senders, passes and receivers at each step; a schema of its own, not your data"),
    ("reconciler demo --seed 2", "other faults; --sends, --json"),
)
"""What to look at next, in this order, and why."""


def parts(figures: Figures, stories: Sequence[Story]) -> Iterator[Part]:
    """Give the summary, part by part."""
    yield Part("What was compared", [*_compared(figures)])
    if figures.unanswered:
        yield Part(f"What became of the {figures.unanswered:,} at the reconciler", [*_decided(figures)])
    if figures.ledger.held:
        yield Part(f"Why {len(figures.ledger.held)} are held", [*_held(figures)])
    if figures.ledger.released:
        yield Part("What the releases risked", [*_risked(figures)])
    for story in stories:
        which = "held" if story.wire_key in figures.ledger.held else "released"
        yield Part(f"One {which} message: $ reconciler why {story.wire_key}", [*_told(story)])
    yield Part("What to look at next", [*_next(figures)])


def _compared(figures: Figures) -> Iterator[str | Table]:
    share = percent(figures.unanswered / max(1, figures.made))
    yield (
        f"Three senders sent the same {figures.made:,} messages, each meant to arrive once, over the same faults of a "
        f"provider on this machine (seed {figures.seed}). {figures.unanswered:,} first calls ({share}) ended in a "
        "time-out, a reset or an error 500, which don't say whether the message was taken: the provider had taken "
        f"{figures.unanswered_taken:,} all the same, {figures.unanswered_missing:,} it never got. At that moment no "
        "sender can tell which."
    )
    if figures.made < figures.wanted:
        yield f"{figures.wanted:,} were wanted: this machine is too slow, or too busy, for so many in the time."
    yield ""
    yield ways_table(figures)
    yield ""
    yield (
        f"DUPLICATES: copies too many, naive retry's of {figures.naive.repeated:,} messages. LOST: nobody got it or "
        "ever will. OPEN: nobody got it yet, but it may still be sent (held, below). All as the provider counted."
    )
    yield _comparison(figures)


def _comparison(figures: Figures) -> str:
    naive, _, ours = _counts(figures)
    if not figures.unanswered:
        return (
            "No call was left unanswered, so that there was nothing to decide: the first and the last "
            f"{CALM} messages are always answered, and of so few others none met a fault; use more --sends."
        )
    if not figures.unanswered_missing:
        return (
            f"The provider had got all of them: naive retry made {naive.duplicates:,} duplicates of it, the reconciler "
            f"{ours.duplicates:,}."
        )
    return (
        f"Of the {figures.unanswered_missing:,} that the provider had not got, naive retry delivered "
        f"{figures.rescued(naive):,}, at the price of {naive.duplicates:,} duplicates; never retry none; the "
        f"reconciler {figures.rescued(ours):,} by the end of the demo, with {ours.duplicates:,} duplicates, and "
        f"{ours.open:,} are not delivered yet."
    )


def ways_table(figures: Figures) -> Table:
    """Return the three ways side by side."""
    return Table(
        ("SENDER", "AFTER SUCH A CALL IT", "CALLS", "ARRIVED ONCE", "DUPLICATES", "LOST", "OPEN"),
        [
            (name, does, n.calls, n.once, n.duplicates, n.lost, n.open)
            for (name, does), n in zip(WAYS.items(), _counts(figures), strict=True)
        ],
    )


def _counts(figures: Figures) -> tuple[Counted, Counted, Counted]:
    return figures.naive, figures.never, figures.ours


def _decided(figures: Figures) -> Iterator[str | Table]:
    ledger = figures.ledger
    ceiling = percent(figures.rules.max_risk)
    all_taken = ": all that the provider had taken" if ledger.proved == figures.unanswered_taken else ""
    rows = [
        ("proved sent", ledger.proved, f"a webhook spoke of it, so it is never sent again{all_taken}"),
        (
            "released",
            len(ledger.sent_again),
            f"so long without a webhook that the risk of a duplicate was {ceiling} at most: sent again",
        ),
        ("held", len(ledger.held), "nobody can tell yet: not sent again before somebody can"),
        ("undecided", len(ledger.waiting), "the demo ended before a pass had decided"),
    ]
    yield Table(("VERDICT", "SENDS", "BECAUSE"), [row for row in rows if row[1]])
    if again := len(ledger.released) - len(ledger.sent_again):
        twice = "" if figures.released_duplicates else " None arrived twice."
        yield f"{again} of those not settled had been sent again, but that call had no usable answer either.{twice}"
    if (placed := sum(n for _, n, _ in rows)) != figures.unanswered:
        yield f"{placed} and not {figures.unanswered}: on a busy machine an answer may be late for one sender only."


def _held(figures: Figures) -> Iterator[str | Table]:
    reasons, rules = figures.ledger.reasons, figures.rules
    yield Table(
        ("REASON", "SENDS", "ARRIVED", "WHAT IT WAITS FOR"),
        [(reason, n, figures.held_arrived.get(reason, 0), waits_for(reason)) for reason, n in reasons.most_common()],
    )
    yield ""
    yield (
        "ARRIVED only this provider knows. Held sends are looked at again: a webhook may still come; with an api_key "
        "the provider's API is asked (not here); after give_up_after "
        f"({format_duration(rules.give_up_after)}) its message class decides: here {GIVEN_UP[rules.on_unknown]}; and "
        "you at any time: reconciler release (send again), confirm (it arrived) or fail (never send it)."
    )
    if reasons.keys() & {"risk", "few_controls"}:
        yield (
            f"Mostly the feed is too young: it takes some {_enough(rules):,} answered sends before a send, and "
            f"{A_SIDE} after it, to know what silence (no webhook) is worth. This one began and ended with the demo: "
            "its first sends will never have them, its last ones had too few when it ended. A feed of yours has them "
            "after a while, or at once if you bring in earlier sends (docs/begin.md); then it releases at the first "
            f"look after the grace ({format_duration(RuleSettings().grace)} in production)."
        )
    if "canary" in reasons:
        yield (
            f"Releases begin with {LEAST_CANARY}, or a tenth of many; the rest (canary) follow after a grace, here "
            f"{format_duration(rules.grace)}, in production {format_duration(RuleSettings().grace)}: the demo ended "
            "before."
        )


def _enough(rules: RuleSettings) -> int:
    """Return how many answered sends, all heard of, bring the risk of a send that timed out below its ceiling."""
    odds = (1 - rules.max_risk) / rules.max_risk * REPORTED.start / (1 - REPORTED.start)
    return max(ENOUGH, math.ceil(STRESS * odds) - 2)


def waits_for(reason: str) -> str:
    """Return what decides a send that is held for a reason."""
    return WAITS_FOR.get(reason, "evidence")


def _risked(figures: Figures) -> Iterator[str]:
    risks, sends = figures.ledger.risks, len(figures.ledger.released)
    of_sends = f" (of {sends:,} sends)" if sends != len(risks) else ""
    span = percent(risks[0]) if risks[0] == risks[-1] else f"{percent(risks[0])} to {percent(risks[-1])}"
    yield (
        f"Each of {len(risks):,} releases{of_sends} stated how likely it was to duplicate: {span}, never above "
        f"max_risk ({percent(figures.rules.max_risk)}). These are meant as upper bounds: together at most "
        f"{figures.ledger.risk:.2g} duplicates; the provider counted {figures.released_duplicates:,}. So few releases "
        "don't test the figure; docs/calibration.md does."
    )


def _told(story: Story) -> Iterator[str | Table]:
    begun = story.timeline[0].at if story.timeline else story.now
    yield story.standing
    yield Table(
        ("AFTER", "WHAT", "STORY"),
        [(f"{(e.at - begun).total_seconds():.1f} s", e.what, e.text) for e in story.timeline],
    )
    kinds = [e.details.get("kind") for e in story.timeline]
    if "queued" in kinds and "delivered" in kinds[: kinds.index("queued")]:
        yield "(Webhooks come in any order: queued was told after delivered.)"


def _next(figures: Figures) -> Iterator[str | Table]:
    grace, usual = figures.rules.grace, RuleSettings().grace
    yield Table(("", "WHERE", "WHAT FOR"), [(f"{n}.", *row) for n, row in enumerate(NEXT, 1)])
    yield ""
    yield (
        f"Not as in production: silence is judged after a grace of {format_duration(grace)}, not "
        f"{format_duration(usual)}, and passes run more often. All else is as you would get it, above all the limits "
        f"on releases. The provider answered all of the first and the last {CALM} messages. Its webhooks came late, "
        "twice and in any order, but they came: of a feed that loses some, silence is worth less, and more is held."
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
            "not_taken": figures.unanswered_missing,
        },
        "senders": {name: asdict(n) for name, n in zip(WAYS, _counts(figures), strict=True)},
        "proved_sent": ledger.proved,
        "released": {
            "sends": len(ledger.released),
            "releases": len(ledger.risks),
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
