# SPDX-License-Identifier: Apache-2.0
"""Other rules over recorded history: what they would have made of sends that were ambiguous. Changes nothing.

Each send is decided again at the times at which a pass would have looked at it, on what was stored by then, for its
first attempt that may have reached the provider. Not replayed: holds, refused deliveries, queues and fills, budgets and
canaries, questions to providers' APIs (what they answered then is evidence from then on), whether a retry came at all
(it is taken to leave at once), and what retention dropped. A send that was answered after `submit_by` is replayed only
where a pass had judged it before, or it was claimed again. What passes had learned of ambiguous sends is what they
learned under the rules of then. Rows beside a send are read as they are today where nothing dates them: those that were
claimed again stand at their last attempt, the density of sends counts those that came only after the look, and priors
count what became of sends since.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import asyncpg

from reconciler.database.connection import database_clock
from reconciler.passes.histories import Histories
from reconciler.passes.judging import UNSTAMPED, starting_prior
from reconciler.passes.neighbours import assess_silence
from reconciler.passes.reconcile import Policies
from reconciler.rule.limits import LIMITED
from reconciler.rule.policy import Action, FeedView, Heard, Row, Rules, Verdict, decide
from reconciler.rule.risk import Assessment
from reconciler.rule.silence import Attempt, Claim, silent_witness

LEAST_TICK: Final = timedelta(minutes=1)
MOST_TICKS: Final = 2000
"""Looks are put off to the next tick, of which a replay has at most so many."""

KEPT_FOR: Final = timedelta(hours=1)
"""How long, in the replayed time, a feed's history is used before it is read anew."""

PAGE: Final = 1000
"""Sends that one statement asks about."""

Tell = Callable[[int, int], None]
"""Hears how many ticks are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Send:
    """The first attempt of a send that was ambiguous, and when what was stored of it."""

    wire_key: str
    feed: str
    message_class: str
    domain: str | None
    claimed_at: datetime
    submit_by: datetime
    first_claimed_at: datetime
    expires_at: datetime | None
    has_fingerprint: bool
    unstamped: bool
    """Whether its message carried no key by which it could be heard of."""
    reported: bool
    """Whether its sender said that the call failed."""
    released_then: datetime | None
    """When a pass released it, or would have in shadow mode, with a risk."""
    accepted_at: datetime | None
    """When its acceptance was proved; of one claimed again only what can be told from the later attempts."""
    rejected_at: datetime | None
    other_at: datetime | None
    """When something was said first that proves neither."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a send in the replay."""

    what: Literal["settled", "released", "failed", "held"]
    """`settled`: by evidence of acceptance. `held`: undecided to the end."""
    reason: str
    at: datetime | None = None
    risk: float = 0.0


@dataclass(slots=True)
class Tally:
    """What became of the ambiguous sends of a feed and message class."""

    feed: str
    message_class: str
    ambiguous: int = 0
    settled: int = 0
    """By evidence of acceptance, before a verdict was needed."""
    released: Counter[str] = field(default_factory=Counter)
    """By reason. `same_key_retry` can't duplicate, by the provider's promise."""
    duplicates: Counter[str] = field(default_factory=Counter)
    """Those of them, by reason, whose acceptance was proved later; no same-key retries."""
    stated: float = 0.0
    """Sum of the risks that the releases state: so many duplicates were expected."""
    failed: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    """Undecided to the end, by reason."""
    median: timedelta | None = None
    """Time from `submit_by` to the verdict, of those that have one."""
    most: timedelta | None = None
    """The same for 95 % of them."""
    released_then: int = 0
    """Of the same sends, what passes released in truth, or would have in shadow mode; no same-key retries."""
    duplicates_then: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found, by feed and message class."""

    since: datetime
    until: datetime
    tick: timedelta
    tallies: Sequence[Tally]


async def what_if(
    pool: asyncpg.Pool,
    policies: Policies,
    since: datetime,
    *,
    feed: str | None = None,
    tell: Tell = lambda _done, _all: None,
) -> Replay:
    """Decide the sends that were claimed since then, and were ambiguous, once more by the rules of `policies`."""
    until = await database_clock(pool)
    clock = _Clock(since, until)
    sends = await _read_sends(pool, since, until, feed)
    histories = Histories(policies.rules_for, policies.histories.by_domain, KEPT_FOR)
    endings = await _Replaying(pool, policies, histories, clock).run(sends, tell)
    return Replay(since, until, clock.tick, _tallies(sends, endings))


# Reading

# Rows of one attempt are found in the log, those claimed again or answered at last by the verdicts on their attempts.
# An attempt that never left, or was refused for certain, is not ambiguous. Each send has one first that was.
FIRST_ATTEMPTS: Final = """
WITH judged AS (
    SELECT wire_key, attempt, fence, feed, claimed_at, submit_by, source, decided_at FROM verdict
    UNION ALL
    SELECT wire_key, attempt, fence, feed, claimed_at, submit_by, source, decided_at FROM shadow_verdict
), attempts AS (
    SELECT s.wire_key, s.attempt, s.fence, s.feed, s.claimed_at, s.submit_by, true AS of_row
    FROM ambiguous a JOIN send_log s USING (wire_key)
    WHERE a.claimed_at >= $1 AND a.submit_by < $2 AND a.attempt - a.not_sent_attempts = 1
    UNION ALL
    SELECT wire_key, attempt, fence, feed, claimed_at, submit_by, false FROM judged
    WHERE claimed_at >= $1 AND submit_by < $2 AND source <> 'sender' AND fence IS NOT NULL
      AND decided_at >= $1  -- no verdict comes before its claim
)
SELECT DISTINCT ON (a.wire_key) a.wire_key, a.attempt, a.fence, a.feed, a.claimed_at, a.submit_by
FROM attempts a
WHERE ($3::text IS NULL OR a.feed = $3) AND NOT EXISTS (
    SELECT FROM verdict v WHERE v.wire_key = a.wire_key
      AND CASE WHEN v.fence = a.fence THEN v.reason = 'not_sent' OR v.action = 'failed' AND v.source = 'sender'
               ELSE v.attempt < a.attempt AND v.action = 'released' AND v.reason <> 'not_sent' END)
ORDER BY a.wire_key, of_row DESC
"""

# Of a send that was claimed again only three things speak of its first attempt: what was stored before the next claim,
# the answer to that attempt, and a duplicate that was found. An event without our key counts as `send_heard` counts it.
SENDS: Final = """
SELECT a.wire_key, a.feed, s.message_class, recipient_domain(s.recipient_key) AS domain, s.unstamped, a.claimed_at,
       a.submit_by, s.first_claimed_at, s.expires_at, s.fingerprint IS NOT NULL AS has_fingerprint,
       coalesce(CASE WHEN s.fence = a.fence THEN s.cause IS NOT NULL END, judged.reported, false) AS reported,
       judged.released_then, heard.*
FROM unnest($1::text[], $2::int[], $3::bigint[], $4::text[], $5::timestamptz[], $6::timestamptz[])
    AS a(wire_key, attempt, fence, feed, claimed_at, submit_by)
JOIN send_log s USING (wire_key)
CROSS JOIN LATERAL (
    SELECT bool_or((v.inputs ->> 'reported')::boolean) FILTER (WHERE v.fence = a.fence) AS reported,
           min(v.decided_at) FILTER (WHERE v.fence = a.fence AND v.action = 'released' AND v.reason = ANY ($7::text[]))
               AS released_then,
           least(min(v.claimed_at) FILTER (WHERE v.attempt > a.attempt),
                 CASE WHEN s.attempt > a.attempt THEN s.claimed_at END) AS again_at
    FROM (SELECT * FROM verdict WHERE wire_key = a.wire_key
          UNION ALL SELECT * FROM shadow_verdict WHERE wire_key = a.wire_key) AS v
) AS judged
CROSS JOIN LATERAL (
    SELECT min(said.at) FILTER (WHERE said.testimony = 'accepted') AS accepted_at,
           min(said.at) FILTER (WHERE said.testimony = 'rejected') AS rejected_at,
           min(said.at) FILTER (WHERE said.testimony = 'none') AS other_at
    FROM (
        SELECT e.testimony, e.received_at AS at FROM provider_event e
        WHERE e.wire_key = a.wire_key
          AND coalesce(e.fence = a.fence, judged.again_at IS NULL OR e.received_at < judged.again_at)
        UNION ALL
        SELECT e.testimony, e.received_at
        FROM (VALUES (s.provider_message_id), (s.known_message_id)) AS known(id)
        JOIN provider_event e ON e.wire_key = stand_in_key(s.feed, known.id)
        WHERE (judged.again_at IS NULL OR e.received_at < judged.again_at)
          AND (e.recipient IS NULL OR s.recipient_key IS NULL OR e.recipient = s.recipient_key)
          AND 1 = (SELECT count(*) FROM send_log l
                   WHERE l.feed = s.feed AND (l.provider_message_id = known.id OR l.known_message_id = known.id)
                     AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient))
        UNION ALL
        SELECT 'accepted', d.found_at FROM duplicate d
        WHERE d.wire_key = a.wire_key AND d.sort = 'duplicate' AND judged.again_at IS NOT NULL
    ) AS said
) AS heard
ORDER BY a.wire_key
"""


async def _read_sends(pool: asyncpg.Pool, since: datetime, until: datetime, feed: str | None) -> list[Send]:
    sends: list[Send] = []
    async with pool.acquire() as connection:
        attempts = await connection.fetch(FIRST_ATTEMPTS, since, until, feed)
        for page in _pages(attempts):
            columns = [list(column) for column in zip(*page, strict=True)]
            sends += [Send(**row) for row in await connection.fetch(SENDS, *columns, LIMITED)]
    return sends


def _pages(rows: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (rows[start : start + PAGE] for start in range(0, len(rows), PAGE))


# Replaying


@dataclass(frozen=True, slots=True)
class _Clock:
    """The replayed time, from `since` on in equal steps, never beyond `until`."""

    since: datetime
    until: datetime

    @property
    def tick(self) -> timedelta:
        return max(LEAST_TICK, (self.until - self.since) / MOST_TICKS)

    @property
    def ticks(self) -> int:
        return (self.until - self.since) // self.tick + 1

    def at(self, n: int) -> datetime:
        return self.since + n * self.tick

    def first_after(self, at: datetime) -> int:
        """Return the first tick that is not before a time."""
        return max(0, math.ceil((at - self.since) / self.tick))


@dataclass(slots=True)
class _Replaying:
    pool: asyncpg.Pool
    policies: Policies
    histories: Histories
    """Of the replayed time, which only goes forward."""
    clock: _Clock
    due: dict[int, list[Send]] = field(default_factory=lambda: defaultdict(list))
    """Undecided sends by the tick at which they are looked at next."""
    endings: dict[str, Ending] = field(default_factory=dict)

    async def run(self, sends: Sequence[Send], tell: Tell) -> Mapping[str, Ending]:
        """Return what becomes of each send, by wire key."""
        for send in sends:
            self.due[self.clock.first_after(send.submit_by)].append(send)
        for n in range(self.clock.ticks):
            for page in _pages(self.due.pop(n, [])):
                await self._look(page, n)
            tell(n + 1, self.clock.ticks)
        for send in (send for left in self.due.values() for send in left):
            last = self.endings.get(send.wire_key, Ending("held", "grace"))
            self.endings[send.wire_key] = _settled(send, self.clock.until) or last
        return self.endings

    async def _look(self, sends: Sequence[Send], n: int) -> None:
        now = self.clock.at(n)
        settled = {send.wire_key: ending for send in sends if (ending := _settled(send, now))}
        self.endings |= settled
        unsettled = [send for send in sends if send.wire_key not in settled]
        past_grace = [send for send in unsettled if now >= send.submit_by + self._rules(send).grace]
        silence = await self._assess(
            [claim for send in past_grace if not send.unstamped for claim in _claims(send, now)], now
        )
        for send in unsettled:
            verdict = self._decide(send, silence.get(send.wire_key), now)
            ending = self.endings[send.wire_key] = _ending(verdict, now)
            if ending.at is None:
                next_look = self.clock.first_after(verdict.next_check_at or now)
                self.due[max(n + 1, next_look)].append(send)

    async def _assess(self, claims: Sequence[Claim], now: datetime) -> Mapping[str, Assessment]:
        if not claims:
            return {}
        async with self.pool.acquire() as connection, connection.transaction(readonly=True):
            judged = await assess_silence(connection, self.histories, claims, now)
        return {wire_key: one.assessment for wire_key, one in judged.items()}

    def _decide(self, send: Send, silence: Assessment | None, now: datetime) -> Verdict:
        row = Row(
            "claimed", 1, send.submit_by, send.first_claimed_at, send.expires_at, has_fingerprint=send.has_fingerprint
        )
        prior = starting_prior(self._rules(send), reported=send.reported)
        view = FeedView(key_window=self.policies.key_window(send.feed), prior=prior)
        if silence:
            view = replace(view, witness=silent_witness(silence), prior=silence.p0)
        elif send.unstamped:
            view = replace(view, witness=UNSTAMPED)
        heard = Heard(other=send.other_at is not None and send.other_at <= now)
        return decide(row, heard, view, None, self._rules(send), now)

    def _rules(self, send: Send) -> Rules:
        return self.policies.rules_for(send.feed, send.message_class)


def _claims(send: Send, now: datetime) -> list[Claim]:
    age = (now - send.submit_by).total_seconds()
    attempt = Attempt(send.feed, send.claimed_at.timestamp(), send.submit_by.timestamp())
    return [
        Claim(send.wire_key, send.feed, send.message_class, send.domain, since, until, age, send.reported)
        for since, until in attempt.stretches()
    ]


def _settled(send: Send, now: datetime) -> Ending | None:
    """Return what the evidence stored by now makes of a send: a pass settles it whenever it comes."""
    if send.accepted_at and send.accepted_at <= now:
        return Ending("settled", "accepted", max(send.accepted_at, send.submit_by))
    if send.rejected_at and send.rejected_at <= now:
        return Ending("failed", "rejected", max(send.rejected_at, send.submit_by))
    return None


def _ending(verdict: Verdict, now: datetime) -> Ending:
    if verdict.action is Action.RELEASED:
        return Ending("released", verdict.reason, now, verdict.risk or 0.0)
    if verdict.action is Action.FAILED:
        return Ending("failed", verdict.reason, now)
    return Ending("held", verdict.reason)


# Counting


def _tallies(sends: Sequence[Send], endings: Mapping[str, Ending]) -> list[Tally]:
    found: dict[tuple[str, str], Tally] = {}
    times: dict[tuple[str, str], list[timedelta]] = defaultdict(list)
    for send in sends:
        key, ending = (send.feed, send.message_class), endings[send.wire_key]
        _count(found.setdefault(key, Tally(*key)), send, ending)
        if ending.at:
            times[key].append(ending.at - send.submit_by)
    for key, tally in found.items():
        tally.median, tally.most = _percentile(times[key], 50), _percentile(times[key], 95)
    return [found[key] for key in sorted(found)]


def _count(tally: Tally, send: Send, ending: Ending) -> None:
    tally.ambiguous += 1
    match ending.what:
        case "settled":
            tally.settled += 1
        case "released":
            tally.released[ending.reason] += 1
            tally.stated += ending.risk
            # What was stored until then is behind it: `_settled` has looked.
            if send.accepted_at and ending.reason in LIMITED:
                tally.duplicates[ending.reason] += 1
        case "failed":
            tally.failed[ending.reason] += 1
        case "held":
            tally.held[ending.reason] += 1
    if send.released_then:
        tally.released_then += 1
        tally.duplicates_then += send.accepted_at is not None and send.accepted_at > send.released_then


def _percentile(times: Sequence[timedelta], percent: int) -> timedelta | None:
    """Return the least time within which so many of a hundred lie."""
    return sorted(times)[math.ceil(len(times) * percent / 100) - 1] if times else None
