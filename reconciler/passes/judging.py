# SPDX-License-Identifier: Apache-2.0
"""Puts together what is known of a page of rows, and lets the rule of release decide each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

import asyncpg

from reconciler.database.connection import BEGINNING, Connection
from reconciler.passes import ledger
from reconciler.passes.feeds import Health, feed_health
from reconciler.passes.histories import Histories
from reconciler.passes.ledger import Decided
from reconciler.passes.neighbours import assess_silence
from reconciler.rule.policy import FeedView, Heard, Row, Rules, Verdict, Witness, decide
from reconciler.rule.risk import REPORTED, UNREPORTED, risk_of
from reconciler.rule.silence import Attempt, Claim, Judged
from webhooks.event import Answer

LOOK_UP_MISS: Final = 0.001
"""How often an API doesn't show an accepted send although it had time to, was read to its end and shows a later one. An
assumption that no figure of ours supports yet; what a release on its word states as risk follows from it and p0."""

UNSTAMPED: Final = Witness(Answer.SILENT, "unstamped")
"""What any feed says of a send whose message carried no key by which it could be heard of."""

LONG_WINDOW: Final = Witness(Answer.SILENT, "long_window")
"""What any feed says of a send that had an hour or more to leave: nobody knows beside which others it did."""

RulesFor = Callable[[str, str], Rules]

Kind = tuple[str, str, bool]
"""Feed and message class of a send, and whether its sender reported the failure."""


@dataclass(frozen=True, slots=True)
class Page:
    """Undecided rows, sorted by key, and what was known of them at one moment of the database's clock."""

    rows: Sequence[asyncpg.Record]
    now: datetime
    health: Mapping[str, Health]
    past_grace: Mapping[str, Witness | None]
    """Claims that are past their grace and not known to be accepted, by wire key: what their feeds answer whatever they
    tell of other sends, None where that counts."""
    silence: Mapping[str, Judged]
    """What the silence is worth of those whose feeds' silence counts."""
    priors: Mapping[Kind, float]
    """p0 of the kinds of those that are past their grace."""

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
        """Return the feeds' answer about a row."""
        if judged := self.silence.get(row["wire_key"]):
            return judged.witness
        return self.past_grace.get(row["wire_key"]) or Witness(Answer.SILENT, "silent")


async def read_page(connection: Connection, rules_for: RulesFor, histories: Histories, keys: Sequence[str]) -> Page:
    """Read a page of rows, and what is known of them and their feeds."""
    rows = sorted(await ledger.read_rows(connection, keys), key=lambda row: row["wire_key"])
    if not rows:
        return Page([], BEGINNING.at, {}, {}, {}, {})
    now = max(row["now"] for row in rows)
    past_grace = [row for row in rows if _is_past_grace(row, rules_for, now)]
    attempts = await _attempts(connection, past_grace)
    feeds = {row["feed"] for row in rows} | {attempt.feed for own in attempts.values() for attempt in own}
    health = await feed_health(connection, feeds)
    mute = {row["wire_key"]: _mute(row, attempts[row["wire_key"]], health) for row in past_grace}
    known = await histories.of(connection, {(row["feed"], row["message_class"]) for row in past_grace}, now)
    priors = {
        (feed, name, reported): max(known[feed].prior(reported=reported), rules_for(feed, name).prior_floor)
        for feed, name, reported in {_kind(row) for row in past_grace}
    }
    at = now.timestamp()
    claims = [
        Claim(
            row["wire_key"],
            attempt.feed,
            row["message_class"],
            row["domain"],
            since,
            until,
            at - attempt.submit_by,
            row["reported"],
        )
        for row in past_grace
        if not mute[row["wire_key"]]
        for attempt in attempts[row["wire_key"]]
        for since, until in attempt.stretches()
    ]
    silence = await assess_silence(connection, histories, claims, now) if claims else {}
    return Page(rows, now, health, mute, silence, priors)


def _kind(row: asyncpg.Record) -> Kind:
    return row["feed"], row["message_class"], row["reported"]


def _is_past_grace(row: asyncpg.Record, rules_for: RulesFor, now: datetime) -> bool:
    if row["state"] != "claimed" or row["accepted"]:
        return False
    return bool(now >= row["submit_by"] + rules_for(row["feed"], row["message_class"]).grace)


async def _attempts(connection: Connection, rows: Sequence[asyncpg.Record]) -> dict[str, list[Attempt]]:
    """Return the attempts of each row that may have been accepted and of which no witness said that they were not."""
    found = {row["wire_key"]: [Attempt(row["feed"], row["claimed_at"], row["submit_by"].timestamp())] for row in rows}
    again = [row["wire_key"] for row in rows if row["reached"] > 1]
    if again:
        for earlier in await ledger.unjudged_attempts(connection, again):
            found[earlier["wire_key"]].append(Attempt(earlier["feed"], earlier["claimed_at"], earlier["submit_by"]))
    return found


def _mute(row: asyncpg.Record, attempts: Sequence[Attempt], health: Mapping[str, Health]) -> Witness | None:
    """Return what feeds answer about a send whatever they tell of others; None: that counts."""
    if row["unstamped"]:
        return UNSTAMPED
    for attempt in attempts:
        if reason := health[attempt.feed].cannot_speak:
            return Witness(Answer.SILENT, reason)
    return LONG_WINDOW if any(attempt.is_long for attempt in attempts) else None


def heard_of(row: asyncpg.Record) -> Heard:
    """Return what was said of a row."""
    return Heard(
        accepted=bool(row["accepted"]) or row["said_by_id"] == "accepted",
        rejected=bool(row["rejected"]) or row["said_by_id"] == "rejected",
        other=bool(row["other"]) or row["said_by_id"] == "none",
        reason=row["words"],
        looked_up=bool(row["rejection_looked_up"]),
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
    prior = page.priors.get(_kind(row), UNREPORTED.start)  # before its grace nobody asks for it
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
        judged,
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
