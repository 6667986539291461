# SPDX-License-Identifier: Apache-2.0
"""The second witness of a pass: providers' APIs, asked about claims of which their feeds said nothing.

Bounded in number (a budget a minute and feed, which all processes share through the table `look_up`), in time, and in
how often one send is asked about. No connection of the pool is held while a provider is asked.

A send is asked about once when its claim is past the grace, since acceptance can show early, and then, where its
provider may not show it yet (`not_settled`), not before it must.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, NoReturn

import asyncpg
import structlog

from reconciler.database.connection import BEGINNING, Connection, read_namespace
from reconciler.passes.feeds import lock_feeds
from reconciler.passes.lookup import Asked, Question, keep, read_controls, read_questions
from reconciler.rule.policy import Witness
from webhooks.api import open_api
from webhooks.asking import Api, ApiError
from webhooks.event import Answer
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

BUDGET: Final = 60
"""Questions a minute and feed, unless the rules say another number."""

SECONDS: Final = 20.0
"""How long the providers may take, all together."""

LAST_START: Final = 0.75
"""The part of that time in which questions begin, so that the last ones have time to be answered too."""

AT_ONCE: Final = 4
"""Questions to one feed's provider at a time, of one process."""

FRESH: Final = timedelta(minutes=1)
"""How long an ABSENT counts; then it is asked for again."""

SOONEST: Final = timedelta(minutes=1)
LATEST: Final = timedelta(minutes=15)
"""A send is asked about again after a tenth of the age that it had, within these bounds."""

_log: Final = structlog.get_logger()

Said = dict[tuple[str, str], Witness]
"""What is known, by wire key and feed."""


class _Turn(NamedTuple):
    """What one feed's provider is asked in this call."""

    feed: Feed
    questions: Sequence[tuple[Question, Sought | None]]
    """Each with its control."""
    namespace: str
    budget: int
    who: str


@dataclass(frozen=True, slots=True)
class SecondWitness:
    """Asks feeds' providers about sends, for a pass. Holds no state: what was asked is in the database."""

    feeds: Mapping[str, Feed]
    """Those whose provider can be asked about single sends, with our credential."""
    budget_of: Callable[[str], int] = lambda _: BUDGET
    """How many questions a feed's provider may be asked in a minute, by all processes together."""

    def can_ask(self, feed: str) -> bool:
        """Say whether a feed's provider is asked. Else `ask` knows of its sends what another attempt's feed says."""
        return feed in self.feeds

    async def ask(
        self, pool: asyncpg.Pool, wire_keys: Sequence[str], *, who: str = "pass", seconds: float = SECONDS
    ) -> dict[str, Witness]:
        """Return what providers' APIs say of claims past their grace, by wire key. Events that they show are stored.

        Missing is a send whose feed can't be asked (`can_ask`), or that was not asked yet: the budget is used up, the
        time is over, or somebody asked a moment ago and waits for the answer. An ABSENT is a minute old at most. A
        SILENT stands until its send is asked about again; a word for the provider's trouble (`unauthorized`, `timeout`)
        stands for all sends of the feed while its API is left alone. Where attempts went to several feeds, ABSENT is
        what all of them say. Raises what asyncpg raises, and UserError where events can't be stored.
        """
        async with pool.acquire() as connection:
            questions = await read_questions(connection, sorted(set(wire_keys)))
            rests = await _read_rests(connection, {question.feed for question in questions})
            said, due = await self._known(questions, rests)
            turns = [await self._turn(connection, feed, of_feed, who) for feed, of_feed in sorted(due.items())]
        tasks = [asyncio.create_task(_take(pool, turn, seconds)) for turn in turns]
        await _ended(tasks)
        for task in tasks:
            said |= task.result()
        return _by_send(questions, said, self.can_ask)

    async def _known(
        self, questions: Iterable[Question], rests: Mapping[str, str]
    ) -> tuple[Said, dict[str, list[Question]]]:
        """Return what can be said without asking, and what there is to ask, by feed."""
        said: Said = {}
        due: dict[str, list[Question]] = {}
        for question in questions:
            place = question.sought.wire_key, question.feed
            if not self.can_ask(question.feed):
                said[place] = Witness(Answer.SILENT, "unsupported")
            elif question.last and question.now < _due_at(question, self.feeds[question.feed]):
                if question.last.answer:
                    said[place] = Witness(question.last.answer, question.last.reason)
            elif reason := rests.get(question.feed) or await _futile(question, self.feeds[question.feed]):
                said[place] = Witness(Answer.SILENT, reason)
            else:
                due.setdefault(question.feed, []).append(question)
        return said, due

    async def _turn(self, connection: Connection, feed: str, due: list[Question], who: str) -> _Turn:
        """Return what a feed's provider is asked now: what was never or longest ago asked comes first."""
        budget = self.budget_of(feed)
        first = sorted(due, key=lambda q: (q.last.asked_at if q.last else BEGINNING.at, q.sought.wire_key))[:budget]
        controls = await read_controls(connection, first, self.feeds)
        pairs = list(zip(first, controls, strict=True))
        return _Turn(self.feeds[feed], pairs, await read_namespace(connection), budget, who)


def _due_at(question: Question, feed: Feed) -> datetime:
    """Return when a send may be asked about again."""
    last, submit_by = question.last, question.sought.submit_by
    if last is None or last.asked_at <= submit_by:  # about an earlier attempt, or while this one could still be made
        return BEGINNING.at
    if last.answer is Answer.ABSENT:
        return last.asked_at + FRESH
    again = last.asked_at + min(max((last.asked_at - submit_by) / 10, SOONEST), LATEST)
    if last.reason == "not_settled":
        return max(again, submit_by + PROVIDERS[feed.provider].facts.settles_after)
    return again


FUTILE: Final = frozenset({"hashed_recipient", "no_recipient", "several_recipients", "no_message_id", "unconfigured"})
"""Reasons of a SILENT for which nobody needs to be called."""


class _Nobody:
    """An API that is never called."""

    async def call(self, *_: Any, **__: Any) -> NoReturn:
        raise ApiError("not_called")


async def _futile(question: Question, feed: Feed) -> str | None:
    """Return why the question can't be asked, so that it takes no place in the budget; None: it can."""
    found = await _answer(feed, _Nobody(), question.sought, None, question.now)
    return found.reason if found.reason in FUTILE else None


async def _answer(
    feed: Feed, api: Api, sought: Sought, control: Sought | None, now: datetime, namespace: str = ""
) -> Found:
    try:
        return await look_up(PROVIDERS[feed.provider], feed, api, sought, control, now, namespace)
    except Exception as error:  # noqa: BLE001 - an answer that its adapter stumbles over must not stop the passes
        _log.error("look_up_failed", feed=feed.name, wire_key=sought.wire_key, error=type(error).__name__)
        return Found(Answer.SILENT, "garbage")


READ_RESTS: Final = "SELECT feed, look_up_rest(feed) AS reason FROM unnest($1::text[]) AS asked(feed)"


async def _read_rests(connection: Connection, feeds: Collection[str]) -> dict[str, str]:
    """Return why feeds' APIs are left alone now; those that are not are missing."""
    rows = await connection.fetch(READ_RESTS, sorted(feeds))
    return {row["feed"]: row["reason"] for row in rows if row["reason"]}


# The feed's row is locked first, and the count of the last minute taken in a later statement: of several processes each
# sees what the one before it has taken.
RESERVE: Final = """
INSERT INTO look_up (wire_key, feed, who)
SELECT a.wire_key, $1, $2
FROM unnest($3::text[], $4::bigint[]) AS a(wire_key, last)
WHERE (SELECT look_up_rest($1)) IS NULL
  AND NOT EXISTS (SELECT FROM look_up l WHERE l.wire_key = a.wire_key AND l.feed = $1 AND l.id > a.last)
ORDER BY a.wire_key
LIMIT greatest(0, $5 - (SELECT count(*) FROM look_up
                        WHERE feed = $1 AND asked_at > statement_timestamp() - interval '1 minute'))
RETURNING id, wire_key, asked_at
"""


async def _reserve(pool: asyncpg.Pool, turn: _Turn, questions: Sequence[Question]) -> list[Asked]:
    """Take places in the feed's budget, for as many of the questions as it has left and nobody asked meanwhile."""
    keys = [question.sought.wire_key for question in questions]
    lasts = [question.last.id if question.last else 0 for question in questions]
    async with pool.acquire() as connection, connection.transaction(isolation="read_committed"):
        await lock_feeds(connection, [turn.feed.name])
        return [
            Asked(*row) for row in await connection.fetch(RESERVE, turn.feed.name, turn.who, keys, lasts, turn.budget)
        ]


async def _take(pool: asyncpg.Pool, turn: _Turn, seconds: float) -> Said:
    """Ask one feed's provider, a few questions at a time, until all are asked, its budget is used, or time is over."""
    said: Said = {}
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with open_api() as api:
        for start in range(0, len(turn.questions), AT_ONCE):
            some = turn.questions[start : start + AT_ONCE]
            if loop.time() > begun + seconds * LAST_START:
                break
            asked = await _reserve(pool, turn, [question for question, _ in some])
            if not asked:
                break
            found = await _ask_together(turn, api, some, asked, begun + seconds - loop.time())
            late = {one: Found(Answer.SILENT, "timeout") for one in asked if one not in found}
            await keep(pool, turn.feed.name, found | late)
            said |= {(one.wire_key, turn.feed.name): Witness(f.answer, f.reason) for one, f in found.items()}
    return said


async def _ask_together(
    turn: _Turn, api: Api, some: Iterable[tuple[Question, Sought | None]], asked: Iterable[Asked], seconds: float
) -> dict[Asked, Found]:
    """Return the answers that came in time."""
    about = {question.sought.wire_key: (question.sought, control) for question, control in some}
    calls = {
        one: asyncio.create_task(_answer(turn.feed, api, *about[one.wire_key], one.asked_at, turn.namespace))
        for one in asked
    }
    await _ended(calls.values(), seconds)
    return {one: call.result() for one, call in calls.items() if not call.cancelled()}


async def _ended(tasks: Collection[asyncio.Task[Any]], seconds: float | None = None) -> None:
    """Wait for tasks, at most so long. Those that have not ended then, or when this is cancelled, are cancelled."""
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _by_send(questions: Iterable[Question], said: Said, can_ask: Callable[[str], bool]) -> dict[str, Witness]:
    """Return one answer a send."""
    sends: dict[str, list[Question]] = {}
    for question in questions:
        sends.setdefault(question.sought.wire_key, []).append(question)
    answers = {}
    for key, asked in sends.items():
        parts = {q.feed: said.get((key, q.feed)) for q in asked}
        own = next(q.feed for q in asked if q.own)
        if (answer := together(parts, own)) and (can_ask(own) or answer.answer is not Answer.SILENT):
            answers[key] = answer
    return answers


def together(parts: Mapping[str, Witness | None], own: str) -> Witness | None:
    """Return what the feeds with an attempt out say together, None where that can't be said yet.

    An acceptance by any is one, then a rejection; ABSENT is what all say. `own` is the feed of the running attempt.
    """
    heard = [part for part in parts.values() if part]
    for loud in (Answer.ACCEPTED, Answer.REJECTED):
        if found := next((part for part in heard if part.answer is loud), None):
            return found
    mine = parts[own]
    if mine is None or mine.answer is Answer.SILENT:
        return mine
    if any(part.answer is Answer.SILENT for part in heard):
        return Witness(Answer.SILENT, "other_feed")
    return mine if len(heard) == len(parts) else None


NOBODY: Final = SecondWitness({})
"""Asks no provider."""
