# SPDX-License-Identifier: Apache-2.0
"""Puts together what is known of a page of rows, and lets the rule of release decide each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg

from reconciler import ledger
from reconciler.feeds import Health, feed_health
from reconciler.histories import Histories
from reconciler.ledger import BEGINNING, Connection, Decided
from reconciler.neighbours import assess_silence
from reconciler.policy import FeedView, Heard, Row, Rules, Verdict, Witness, decide
from reconciler.risk import REPORTED, UNREPORTED, Assessment, risk_of
from reconciler.silence import Claim, Judged
from webhooks.event import Answer

LOOK_UP_MISS: Final = 0.001
"""How often an API doesn't show an accepted send although it had time to, was read to its end and shows a later one. An
assumption that no figure of ours supports yet; what a release on its word states as risk follows from it and p0."""

UNSTAMPED: Final = Witness(Answer.SILENT, "unstamped")
"""What any feed says of a send whose message carried no key by which it could be heard of."""

RulesFor = Callable[[str, str], Rules]


@dataclass(frozen=True, slots=True)
class Page:
    """Undecided rows, sorted by key, and what was known of them at one moment of the database's clock."""

    rows: Sequence[asyncpg.Record]
    now: datetime
    health: Mapping[str, Health]
    past_grace: Collection[str]
    """Wire keys of the claims that are past their grace and not known to be accepted."""
    silence: Mapping[str, Judged]
    """What the feed's silence is worth, of those whose feed may speak at all."""

    def unheard(self, rules_for: RulesFor) -> Iterator[asyncpg.Record]:
        """Name the claims about which the rules let the API be asked: past grace, unheard of, on no hold."""
        for row in self.rows:
            if row["unstamped"] or row["wire_key"] not in self.past_grace:
                continue
            if heard_of(row).anything or self.health[row["feed"]].hold:
                continue
            rule = rules_for(row["feed"], row["message_class"]).look_up
            told = self.witness(row).answer is Answer.ABSENT
            if rule == "before_release" or (rule == "silent" and not told):
                yield row

    def witness(self, row: asyncpg.Record) -> Witness:
        """Return the feed's answer about a row."""
        if row["unstamped"]:
            return UNSTAMPED
        judged = self.silence.get(row["wire_key"])
        return feed_witness(self.health[row["feed"]], judged.assessment if judged else None)


async def read_page(connection: Connection, rules_for: RulesFor, histories: Histories, keys: Sequence[str]) -> Page:
    """Read a page of rows, and what is known of them and their feeds."""
    rows = sorted(await ledger.read_rows(connection, keys), key=lambda row: row["wire_key"])
    if not rows:
        return Page([], BEGINNING.at, {}, (), {})
    now = max(row["now"] for row in rows)
    health = await feed_health(connection, {row["feed"] for row in rows})
    past_grace = [row for row in rows if _is_past_grace(row, rules_for, now)]
    claims = [_claim(row, now) for row in past_grace if not row["unstamped"] and not health[row["feed"]].cannot_speak]
    silence = await assess_silence(connection, histories, claims, now) if claims else {}
    return Page(rows, now, health, {row["wire_key"] for row in past_grace}, silence)


def _is_past_grace(row: asyncpg.Record, rules_for: RulesFor, now: datetime) -> bool:
    if row["state"] != "claimed" or row["accepted"]:
        return False
    return bool(now >= row["submit_by"] + rules_for(row["feed"], row["message_class"]).grace)


def _claim(row: asyncpg.Record, now: datetime) -> Claim:
    return Claim(
        row["wire_key"],
        row["feed"],
        row["message_class"],
        row["domain"],
        row["claimed_at"],
        (now - row["submit_by"]).total_seconds(),
        row["reported"],
    )


def heard_of(row: asyncpg.Record) -> Heard:
    """Return what was said of a row."""
    return Heard(
        accepted=bool(row["accepted"]) or row["said_by_id"] == "accepted",
        rejected=bool(row["rejected"]) or row["said_by_id"] == "rejected",
        other=bool(row["other"]) or row["said_by_id"] == "none",
        reason=row["words"],
    )


def judge_row(
    row: asyncpg.Record,
    page: Page,
    rules: Rules,
    key_window: timedelta | None,
    answer: Witness | None,
    *,
    can_be_asked: bool,
) -> Decided:
    """Return the verdict on one row of a page; `answer` is what its provider's API said, where that was asked."""
    judged, witness = page.silence.get(row["wire_key"]), page.witness(row)
    facts = Row(
        state=row["state"],
        reached=row["reached"],
        submit_by=row["submit_by"],
        first_claimed_at=row["first_claimed_at"],
        expires_at=row["expires_at"],
        has_fingerprint=row["has_fingerprint"],
        released=row["released"],
        told=row["told"],
    )
    prior = judged.assessment.p0 if judged else starting_prior(rules, reported=row["reported"])
    view = FeedView(page.health[row["feed"]].hold, witness, key_window, prior, can_be_asked)
    if answer:
        answer = replace(answer, risk=risk_of(LOOK_UP_MISS, prior))
    verdict = decide(facts, heard_of(row), view, answer, rules, page.now)
    witnesses = {"feed": _shown(witness), **({"look_up": _shown(answer)} if answer else {})}
    return Decided(
        row["wire_key"],
        row["state"],
        row["fence"],
        verdict,
        witnesses,
        row["feed"],
        judged.stored if judged else None,
        may_failover=rules.failover and _is_absence(verdict),
        held_before=row["held_reason"],
    )


def starting_prior(rules: Rules, *, reported: bool) -> float:
    """Return p0 of an ambiguous send where nothing that was learned is asked."""
    return max((REPORTED if reported else UNREPORTED).start, rules.prior_floor)


def _is_absence(verdict: Verdict) -> bool:
    return verdict.reason in ("absent", "looked_up")


def _shown(witness: Witness) -> dict[str, Any]:
    return {"answer": witness.answer, "reason": witness.reason}


def feed_witness(health: Health, silence: Assessment | None) -> Witness:
    """Return the feed's answer about a claim of which nothing was heard.

    ABSENT needs a feed whose newest delivery was stored, and a silence that is worth something (`reconciler.risk`).
    Anything less is silence, with its reason.
    """
    if reason := health.cannot_speak:
        return Witness(Answer.SILENT, reason)
    if silence is None:
        return Witness(Answer.SILENT, "silent")
    return silent_witness(silence)


def silent_witness(silence: Assessment) -> Witness:
    """Return what a feed's silence answers."""
    return Witness(silence.answer, silence.reason or "absent", silence.risk)
