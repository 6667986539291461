# SPDX-License-Identifier: Apache-2.0
"""Compares what the product believes with the truth: the laws, the duplicates and their causes, the stated risks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from reconciler.rule.history import at_least

from .course import BY_ITSELF
from .world import GRACE, PLACES

FAR_BEYOND_CHANCE: Final = 1e-4
SHOWN: Final = 3
"""Rows that are named of a broken promise."""

BY_A_PASS: Final = ("absent", "looked_up", "gave_up", "same_key_retry")
STATED: Final = ("absent", "looked_up", "gave_up")
"""Releases that state a risk."""

NAMED: Final = (*STATED, "operator", *BY_ITSELF)
"""Causes of the duplicates that may remain."""

# Each names the sends with which a promise was broken. Of a tick everything is over when the next one begins.

TWICE_WITHOUT_RELEASE: Final = """
SELECT g.wire_key FROM truth.granted g
JOIN truth.granted later ON later.wire_key = g.wire_key AND later.attempt > g.attempt
WHERE NOT EXISTS (SELECT FROM verdict v WHERE v.wire_key = g.wire_key AND v.fence = g.fence AND v.action = 'released')
UNION
SELECT wire_key FROM truth.granted GROUP BY wire_key, attempt HAVING count(*) > 1
ORDER BY 1
"""
OVER_EVIDENCE: Final = """
SELECT DISTINCT g.wire_key FROM truth.granted g
JOIN truth.tick t ON t.n = g.tick
JOIN provider_event e ON e.wire_key = g.wire_key AND e.testimony = 'accepted' AND e.received_at < t.began
WHERE g.attempt > 1 ORDER BY 1
"""
RELEASED_THOUGH_HEARD: Final = """
SELECT DISTINCT v.wire_key FROM verdict v
JOIN LATERAL (SELECT max(began) AS began FROM truth.tick WHERE began <= v.decided_at) AS t ON true
JOIN provider_event e ON e.wire_key = v.wire_key AND e.received_at < t.began
WHERE v.action = 'released' AND v.reason = ANY ($1::text[]) ORDER BY 1
"""
RELEASED_WHILE_PAUSED: Final = """
SELECT DISTINCT v.wire_key FROM verdict v
JOIN truth.paused p ON p.feed = v.feed AND v.decided_at > p.since AND v.decided_at < coalesce(p.until, 'infinity')
WHERE v.action = 'released' AND v.reason = ANY ($1::text[]) ORDER BY 1
"""
GIVEN_OUT_WHILE_PAUSED: Final = """
SELECT DISTINCT g.wire_key FROM truth.granted g
JOIN truth.tick t ON t.n = g.tick JOIN truth.tick after ON after.n = g.tick + 1
JOIN truth.paused p ON p.feed = g.feed AND t.began > p.since AND after.began < coalesce(p.until, 'infinity')
JOIN LATERAL (SELECT fence FROM truth.granted WHERE wire_key = g.wire_key AND attempt = g.attempt - 1) AS before ON true
JOIN verdict v ON v.wire_key = g.wire_key AND v.fence = before.fence AND v.action = 'released'
WHERE v.reason = ANY ($1::text[]) ORDER BY 1
"""
SILENCE_OF_THE_DEAF: Final = """
SELECT wire_key FROM verdict WHERE action = 'released' AND reason = 'absent' AND feed = ANY ($1::text[]) ORDER BY 1
"""
OVER_BUDGET: Final = """
SELECT v.wire_key FROM verdict v
JOIN unnest($1::text[], $2::bigint[]) AS allowed(feed, n) ON allowed.feed = v.feed
CROSS JOIN LATERAL (SELECT max(at) AS at FROM truth.resumed r WHERE r.feed = v.feed AND r.at <= v.decided_at) AS resumed
CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM verdict o
    WHERE o.feed = v.feed AND o.action = 'released' AND o.reason IN ('absent', 'looked_up', 'gave_up')
      AND o.decided_at > greatest(v.decided_at - interval '1 hour', resumed.at) AND o.decided_at <= v.decided_at
) AS used
WHERE v.action = 'released' AND v.reason IN ('absent', 'looked_up', 'gave_up') AND used.n > allowed.n ORDER BY 1
"""

# These hold once all is over.

SENT_AND_NOT_TAKEN: Final = """
SELECT s.wire_key FROM send_log s
WHERE s.state = 'sent' AND NOT EXISTS (SELECT FROM truth.message m WHERE m.wire_key = s.wire_key) ORDER BY 1
"""
IGNORED_EVIDENCE: Final = """
SELECT s.wire_key FROM send_log s
WHERE s.state <> 'sent'
  AND EXISTS (SELECT FROM provider_event e WHERE e.wire_key = s.wire_key AND e.testimony = 'accepted') ORDER BY 1
"""
LOST: Final = """
SELECT t.wire_key FROM truth.send t LEFT JOIN send_log s USING (wire_key)
WHERE s.wire_key IS NULL OR s.state IN ('pending', 'claimed') AND (s.held_reason IS NULL OR s.next_check_at IS NULL)
ORDER BY 1
"""
NOT_STORED_ONCE: Final = """
SELECT feed, coalesce(a.n, 0) AS acknowledged, coalesce(e.n, 0) AS stored
FROM truth.acknowledged a
FULL JOIN (SELECT feed, count(*) AS n FROM provider_event WHERE source = 'http' GROUP BY feed) AS e USING (feed)
WHERE a.n IS DISTINCT FROM e.n ORDER BY feed
"""


class Law(NamedTuple):
    """A promise, and the statement that names the sends with which it was broken."""

    promise: str
    statement: str
    arguments: tuple[Any, ...] = ()


DEAF: Final = [place.name for place in PLACES if not place.echoes]
BUDGETS: Final = ([place.name for place in PLACES], [place.budget for place in PLACES])
ALWAYS: Final = (
    Law("no send is given out twice without a release between", TWICE_WITHOUT_RELEASE),
    Law("no send is given out over evidence that it was accepted", OVER_EVIDENCE),
    Law("no pass releases a send of which anything was heard", RELEASED_THOUGH_HEARD, (BY_A_PASS,)),
    Law("nothing is released once `pause` has returned", RELEASED_WHILE_PAUSED, (BY_A_PASS,)),
    Law("nothing that a pass released is given out while its feed is paused", GIVEN_OUT_WHILE_PAUSED, (BY_A_PASS,)),
    Law("the silence of a feed that never speaks releases nothing", SILENCE_OF_THE_DEAF, (DEAF,)),
    Law("no more is released within an hour than the budget allows", OVER_BUDGET, BUDGETS),
)
IN_THE_END: Final = (
    Law("nothing is called sent that no provider took", SENT_AND_NOT_TAKEN),
    Law("whatever is proved accepted becomes sent", IGNORED_EVIDENCE),
    Law("every send ends in a verdict, or is held and says why", LOST),
)

DESCRIBE: Final = """
SELECT asked.key AS wire_key, s.feed, s.state, s.attempt, coalesce(s.held_reason, s.verdict_reason) AS reason,
       (SELECT string_agg(g.attempt || ' ' || g.how, ', ' ORDER BY g.fence)
        FROM truth.granted g WHERE g.wire_key = asked.key) AS attempts,
       (SELECT string_agg(v.action || ' (' || v.reason || ')', ', ' ORDER BY v.id)
        FROM verdict v WHERE v.wire_key = asked.key AND v.action <> 'held') AS verdicts
FROM unnest($1::text[]) AS asked(key) LEFT JOIN send_log s ON s.wire_key = asked.key
"""


async def broken(connection: Any, *, over: bool) -> list[str]:
    """Return a sentence for each promise that was broken; `over` says whether nothing is to happen any more."""
    found = []
    for law in (*ALWAYS, *IN_THE_END) if over else ALWAYS:
        rows = await connection.fetch(law.statement, *law.arguments)
        if keys := [row["wire_key"] for row in rows]:
            found.append(f"BROKEN: {law.promise}: {len(keys):,} sends" + await _described(connection, keys))
    unnamed = [one.wire_key for one in await duplicates(connection) if one.cause not in NAMED]
    if unnamed:
        words = f"BROKEN: every duplicate has a cause that is named: {len(unnamed):,} have none"
        found.append(words + await _described(connection, unnamed))
    found += [sentence for risk in await risks(connection) for sentence in untrue(risk)]
    if over:
        found += [
            f"BROKEN: what was acknowledged is stored, and once: {acknowledged:,} events of {feed} were acknowledged, "
            f"{stored:,} are there"
            for feed, acknowledged, stored in await connection.fetch(NOT_STORED_ONCE)
        ]
    return found


async def losses(connection: Any) -> int:
    """Return how many sends are neither decided nor held for a reason."""
    return len(await connection.fetch(LOST))


async def _described(connection: Any, keys: Sequence[str]) -> str:
    """Return the shortest histories of some sends."""
    rows = await connection.fetch(DESCRIBE, keys[:1000])
    lines = [
        f"\n  {row['wire_key']} on {row['feed']}: {row['state']} ({row['reason']}) after {row['attempt']} attempts"
        f"\n    attempts: {row['attempts']}\n    verdicts: {row['verdicts']}"
        for row in rows
    ]
    return "".join(sorted(lines, key=len)[:SHOWN])


# Duplicates: each message that a recipient got beyond the first.

MESSAGES: Final = """
SELECT m.wire_key, m.fence, m.taken_at, g.how, g.feed, g.submit_by,
       released.reason AS released, released.at AS released_at
FROM (SELECT wire_key FROM truth.message WHERE reached GROUP BY wire_key HAVING count(*) > 1) AS several
JOIN truth.message m ON m.wire_key = several.wire_key AND m.reached
JOIN truth.granted g ON g.fence = m.fence
LEFT JOIN LATERAL (
    SELECT v.reason, v.decided_at AS at FROM verdict v
    WHERE v.wire_key = m.wire_key AND v.fence = m.fence AND v.action = 'released' ORDER BY v.id DESC LIMIT 1
) AS released ON true
ORDER BY m.wire_key, m.fence, m.copy
"""


class Got(NamedTuple):
    """A message that a recipient got, one of several of a send."""

    wire_key: str
    fence: int
    taken_at: datetime
    how: str
    feed: str
    submit_by: datetime
    released: str | None
    """Why the attempt was released, if it was."""
    released_at: datetime | None


class Duplicate(NamedTuple):
    """A message too many."""

    wire_key: str
    feed: str
    cause: str


def cause(first: Got, other: Got) -> str:
    """Return why there are two messages of a send: `first` belongs to the earlier attempt, or to the same."""
    if first.fence == other.fence:
        return first.how
    if first.released is None or first.released_at is None:
        return "no release"
    if first.released == "operator":
        return "operator"
    if first.how in BY_ITSELF and first.taken_at > max(first.released_at, first.submit_by + GRACE):
        return first.how
    return first.released


async def duplicates(connection: Any) -> list[Duplicate]:
    """Return every message too many, with its cause."""
    found, before = [], None
    for one in [Got(**row) for row in await connection.fetch(MESSAGES)]:
        if before and before.wire_key == one.wire_key:
            found.append(Duplicate(one.wire_key, one.feed, cause(before, one)))
        before = one
    return found


# Stated risk: how many releases of attempts that had been accepted by then.

RISKS: Final = """
SELECT v.feed, v.reason, count(*) AS released, sum(coalesce(v.risk, 0))::float8 AS stated,
       count(*) FILTER (WHERE EXISTS (
           SELECT FROM truth.message m
           WHERE m.wire_key = v.wire_key AND m.fence = v.fence AND m.reached AND m.taken_at <= v.decided_at)) AS wrong
FROM verdict v WHERE v.action = 'released' AND v.reason = ANY ($1::text[])
GROUP BY v.feed, v.reason ORDER BY v.feed, v.reason
"""


class Risk(NamedTuple):
    """What the releases of a feed for one reason stated, and how many were wrong."""

    feed: str
    reason: str
    released: int
    stated: float
    wrong: int

    @property
    def chance(self) -> float:
        """How likely so many wrong ones, or more, are where the statements are true; 1 where they are not too many."""
        if self.wrong <= self.stated:
            return 1.0
        return at_least(self.wrong, self.released, self.stated / self.released)


async def risks(connection: Any) -> list[Risk]:
    """Return stated and actual risks by feed and reason, and of all feeds together."""
    rows = [Risk(*row) for row in await connection.fetch(RISKS, STATED)]
    together: dict[str, Risk] = {}
    for one in rows:
        old = together.get(one.reason, Risk("all", one.reason, 0, 0.0, 0))
        sums = old.released + one.released, old.stated + one.stated, old.wrong + one.wrong
        together[one.reason] = Risk("all", one.reason, *sums)
    return [*rows, *together.values()]


def untrue(risk: Risk) -> list[str]:
    """Return a sentence where more releases were wrong than chance makes of what they stated."""
    if risk.chance >= FAR_BEYOND_CHANCE:
        return []
    releases = f"of {risk.released:,} releases ({risk.reason}) on {risk.feed}"
    wrong = f"{risk.wrong:,} were wrong, {risk.stated:.2f} were stated (p = {risk.chance:.1g})"
    return [f"BROKEN: a release states how likely it duplicates: {releases} {wrong}"]
