# SPDX-License-Identifier: Apache-2.0
"""Finds sends that were accepted twice, records each once, and stops the releases of its feed.

It is a *duplicate* where two attempts were accepted (answers to two claims, unless both name one message: a
provider that honours its key answers a repetition with the first message), or where one kind of id names two
messages for the same recipient: two answers, or two events, whatever these say. Anything less about a send that was
given out more than once is `ids_differ`: an answer's id and an event's are not the same thing at every provider, and a
send to several recipients has an id for each at some. Of one that was given out once such a difference says nothing.

Candidates come from the events of the last minutes (by time of storing, walked again by OVERLAP) and, once in a while,
from all sends that were lately given out again: an answer that a sender stores in a long transaction of its own is
older than its commit, and only the second way finds it. Neither scans the log.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from reconciler import metrics
from reconciler.database.connection import Connection, Place
from reconciler.passes.feeds import meet_releases, set_breaker

OVERLAP: Final = timedelta(minutes=2)
"""How much of the events' time is walked again: the longest transaction of the receiver, and how far apart the events
of two messages may lie whose send was given out once (an SDK's hidden retry). Of others any distance is seen."""
FIRST_LOOK: Final = timedelta(hours=1)
"""How far back the first walk begins."""
SLICE: Final = timedelta(minutes=10)
"""Most of the events' time that one statement covers."""
PAGE: Final = 1000

Sort = Literal["duplicate", "ids_differ"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One thing that proved acceptance: an answer, or events of one kind about one message and recipient."""

    feed: str
    message_id: str
    kind: str
    recipient: str | None
    road: Literal["answer", "told", "asked"]
    """How it came: from the sender, from the provider by itself, or because it was asked (look-up, back-fill)."""
    fence: int | None
    """Of an answer: the claim that it answers."""
    received_at: datetime
    """When the first of them was stored."""

    @property
    def is_named(self) -> bool:
        """Say whether it names a message: answers and events may come without an id."""
        return not self.message_id.startswith("~")


@dataclass(frozen=True, slots=True)
class Send:
    """What the log knows of a send that may be a duplicate, and everything that proved its acceptance."""

    wire_key: str
    feed: str
    recipient: str | None
    """In its comparable form; None where it is unknown, or several."""
    reached: int
    """Attempts that can have reached the provider."""
    same_key: bool
    """It was released for a retry with the provider's own key."""
    acceptances: tuple[Acceptance, ...]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A send that was accepted twice, or may have been."""

    wire_key: str
    sort: Sort
    feed: str
    because: str
    """Of a duplicate `two_attempts` or `two_ids`; else `ids_differ`, or `answer_without_id`: a retry with the key that
    the provider keeps was answered, and which message the answer means is not known."""
    evidence: tuple[Acceptance, ...]


def judge(send: Send) -> Duplicate | None:
    """Say what the acceptances of a send prove. Pure."""
    attempts = list(_of_two_attempts(send.acceptances))
    if attempts and not (send.same_key and any(not one.is_named for one in attempts)):
        return Duplicate(send.wire_key, "duplicate", send.feed, "two_attempts", tuple(attempts))
    for one_kind in _by_kind(send).values():
        if len({one.message_id for one in one_kind}) > 1:
            return Duplicate(send.wire_key, "duplicate", send.feed, "two_ids", tuple(one_kind))
    if attempts:
        return Duplicate(send.wire_key, "ids_differ", send.feed, "answer_without_id", tuple(attempts))
    named = [one for one in send.acceptances if one.is_named]
    if send.reached > 1 and len({one.message_id for one in named}) > 1:
        return Duplicate(send.wire_key, "ids_differ", send.feed, "ids_differ", tuple(named))
    return None


def _of_two_attempts(acceptances: Iterable[Acceptance]) -> Iterator[Acceptance]:
    """Yield the answers to claims of which no two name one message; nothing where there is one such claim only."""
    by_claim = defaultdict(list)
    for one in acceptances:
        if one.fence is not None:
            by_claim[one.fence].append(one)
    apart: list[list[Acceptance]] = []
    for _, answers in sorted(by_claim.items()):
        ids = {one.message_id for one in answers if one.is_named}
        if not any(ids & {other.message_id for other in others} for others in apart):
            apart.append(answers)
    if len(apart) > 1:
        for answers in apart:
            yield from answers


def _by_kind(send: Send) -> Mapping[tuple[str, str], list[Acceptance]]:
    """Return what names a message, by its kind of id and its recipient; an answer is about the send's own recipient."""
    found: dict[tuple[str, str], list[Acceptance]] = defaultdict(list)
    for one in send.acceptances:
        recipient = send.recipient if one.road == "answer" else one.recipient
        if one.is_named and recipient is not None:
            found[one.road, recipient].append(one)
    return found


# Two messages of one kind of id within the slice, or anything about a send that was given out again.
SPOKEN_OF: Final = """
WITH fresh AS MATERIALIZED (
    SELECT wire_key, message_id, recipient, fence,
           CASE source WHEN 'sender' THEN 'answer' WHEN 'look-up' THEN 'asked' WHEN 'back-fill' THEN 'asked'
                ELSE 'told' END AS road
    FROM provider_event
    WHERE received_at > $1 AND received_at <= $2 AND testimony = 'accepted' AND wire_key NOT LIKE '~%'
)
SELECT wire_key FROM fresh
WHERE road = 'answer' OR recipient IS NOT NULL
GROUP BY wire_key, road, recipient
HAVING min(message_id) <> max(message_id) OR min(fence) <> max(fence)
UNION
SELECT f.wire_key FROM (SELECT DISTINCT wire_key FROM fresh) AS f JOIN send_log s USING (wire_key) WHERE s.attempt > 1
ORDER BY 1
"""


async def spoken_of(connection: Connection, since: datetime, until: datetime) -> list[str]:
    """Return the sends of which what was stored between two times may prove a duplicate, sorted."""
    return [row["wire_key"] for row in await connection.fetch(SPOKEN_OF, since, until)]


GIVEN_OUT_AGAIN: Final = """
SELECT wire_key, claimed_at AS at FROM send_log
WHERE attempt > 1 AND (claimed_at, wire_key) > ($1::timestamptz, $2::text)
ORDER BY claimed_at, wire_key
LIMIT 1000
"""


async def given_out_again(connection: Connection, after: Place) -> tuple[list[str], Place | None]:
    """Return a page of sends with more than one attempt by the time of their newest one, and where the next begins."""
    rows = await connection.fetch(GIVEN_OUT_AGAIN, after.at, after.wire_key)
    place = Place(rows[-1]["at"], rows[-1]["wire_key"]) if rows else None
    return [row["wire_key"] for row in rows], place


# A message opened a thousand times is one line of evidence. (OFFSET 0: for each row, lest all verdicts be read.)
ACCEPTANCES: Final = """
SELECT s.wire_key, s.recipient_key, s.attempt - s.not_sent_attempts AS reached,
       coalesce((SELECT v.feed FROM verdict v WHERE v.wire_key = s.wire_key AND v.action = 'released'
                 ORDER BY v.id DESC LIMIT 1), s.feed) AS sent_by,
       EXISTS (SELECT FROM verdict v WHERE v.wire_key = s.wire_key AND v.action = 'released'
               AND v.reason = 'same_key_retry' OFFSET 0) AS same_key, e.*
FROM unnest($1::text[]) AS asked(wire_key)
JOIN send_log s ON s.wire_key = asked.wire_key
CROSS JOIN LATERAL (
    SELECT feed, message_id, kind, recipient, fence, min(received_at) AS received_at,
           CASE source WHEN 'sender' THEN 'answer' WHEN 'look-up' THEN 'asked' WHEN 'back-fill' THEN 'asked'
                ELSE 'told' END AS road
    FROM provider_event WHERE wire_key = s.wire_key AND testimony = 'accepted'
    GROUP BY feed, message_id, kind, recipient, fence, road
    ORDER BY received_at LIMIT 50
) AS e
ORDER BY s.wire_key, e.received_at
"""


async def find_duplicates(connection: Connection, keys: Sequence[str]) -> list[Duplicate]:
    """Return which of these sends are duplicates or may be, sorted by wire key. A key without a row is none."""
    rows = await connection.fetch(ACCEPTANCES, keys)
    sends: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        sends[row["wire_key"]].append(row)
    return [found for of_send in sends.values() if (found := judge(_send(of_send)))]


def _send(rows: Sequence[Any]) -> Send:
    first = rows[0]
    names = tuple(Acceptance.__dataclass_fields__)
    return Send(
        wire_key=first["wire_key"],
        feed=first["sent_by"],
        recipient=first["recipient_key"],
        reached=first["reached"],
        same_key=first["same_key"],
        acceptances=tuple(Acceptance(**{name: row[name] for name in names}) for row in rows),
    )


RECORD: Final = """
INSERT INTO duplicate (wire_key, sort, feed, evidence)
SELECT d.wire_key, d.sort, d.feed, d.evidence::jsonb
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS d(wire_key, sort, feed, evidence)
ORDER BY d.wire_key
ON CONFLICT DO NOTHING
RETURNING wire_key, sort
"""


async def record(connection: Connection, found: Sequence[Duplicate], who: str) -> list[Duplicate]:
    """Record what was not known yet, count it, open the breakers of the feeds concerned, and return it.

    A duplicate and its breaker are committed together, so that each opens it once, whoever finds it how often. Not to
    be called within a transaction.
    """
    if not found:
        return []
    columns = [
        [d.wire_key for d in found],
        [d.sort for d in found],
        [d.feed for d in found],
        [json.dumps({"because": d.because, "acceptances": [*map(_evidence, d.evidence)]}) for d in found],
    ]
    async with connection.transaction(isolation="read_committed"):
        rows = await connection.fetch(RECORD, *columns)
        written = {(row["wire_key"], row["sort"]) for row in rows}
        new = [d for d in found if (d.wire_key, d.sort) in written]
        stopped = {d.feed: d.wire_key for d in new if d.sort == "duplicate"}
        for feed, key in sorted(stopped.items()):
            await set_breaker(connection, feed, f"duplicate of {key}: see reconciler report duplicates", who)
    if stopped:
        await meet_releases(connection)
    for d in new:
        metrics.DUPLICATES.labels(d.feed, d.sort).inc()
    return new


def _evidence(one: Acceptance) -> dict[str, Any]:
    """Return what is kept of an acceptance: no address, which is nobody's business here."""
    kept = {name: value for name, value in asdict(one).items() if name != "recipient"}
    return {**kept, "received_at": one.received_at.isoformat()}


DATABASE_CLOCK: Final = "SELECT clock_timestamp() AS now, duplicates_until FROM feed_state WHERE feed = '*'"
SET_UNTIL: Final = """
UPDATE feed_state SET duplicates_until = $1 WHERE feed = '*' AND (duplicates_until IS NULL OR duplicates_until < $1)
"""


async def look_at_events(connection: Connection, who: str) -> list[Duplicate]:
    """Walk the events stored since the last look of any process, a little of it again; return what was new."""
    clock = await connection.fetchrow(DATABASE_CLOCK)
    assert clock is not None  # noqa: S101 - the row of all feeds is always there
    now, until = clock["now"], clock["duplicates_until"] or clock["now"] - FIRST_LOOK
    new = []
    while until < now:
        since, until = until - OVERLAP, min(until + SLICE, now)
        new += await _look_at(connection, await spoken_of(connection, since, until), who)
        await connection.execute(SET_UNTIL, until)
    return new


async def look_at_retries(connection: Connection, since: datetime, who: str) -> list[Duplicate]:
    """Look at every send that was given out again since then, whatever was stored when; return what was new."""
    place: Place | None = Place(since.astimezone(UTC), "")
    new = []
    while place:
        keys, place = await given_out_again(connection, place)
        new += await _look_at(connection, keys, who)
    return new


async def _look_at(connection: Connection, keys: Sequence[str], who: str) -> list[Duplicate]:
    new = []
    for start in range(0, len(keys), PAGE):
        found = await find_duplicates(connection, keys[start : start + PAGE])
        new += await record(connection, found, who)
    return new
