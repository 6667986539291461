# SPDX-License-Identifier: Apache-2.0
"""The queue side: messages of SQS become stored events. Needs the extra `aws`.

A message is deleted only after the commit that holds its events, and one that was stored before is deleted, too. One
that can't be read is kept as an event of kind `unknown` with its exact bytes, and then deleted: it neither comes back
for ever nor is lost. What no secret fits, and what can't be stored for our reasons, is left in the queue.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import structlog
from msgspec.structs import replace

from webhooks import metrics
from webhooks.aws import aws_failure, open_client, region_of
from webhooks.body import ON_LOOP
from webhooks.event import unread
from webhooks.inbox import InboxBusy, InboxUnavailable
from webhooks.intake import Intake, place_of
from webhooks.provider import BadPayload, Feed, Later, Provider, Refused
from webhooks.queue_message import QueueMessage, body_of, carried, read_message
from webhooks.quiet import Quiet

MESSAGES: Final = 10
"""Messages of one receive, so also of one delete: the most that SQS takes [SQS API reference, both actions]."""

COUNTED_EVERY: Final = 5.0
"""Seconds within which a queue that can't be read counts once, however many loops fail at it."""

_log: Final = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pace:
    """How a queue is read. All in seconds."""

    poll: int = 20
    """How long a receive waits for a message: the most that SQS takes [SQS API reference, ReceiveMessage]."""
    hidden: int = 60
    """How long others don't see a message that was received here."""
    renew: float = 20.0
    """How often that is renewed while messages are being stored."""
    again: int = 5
    """When a message comes again that the inbox couldn't take."""
    later: int = 30
    """The same, times how often it was received, where something else is in the way."""
    latest: int = 900
    """The longest such time."""
    first_pause: float = 1.0
    """How long nothing is received after a failure; twice as long after each further one."""
    longest_pause: float = 60.0
    drain: float = 12.0
    """How long what was received may take to be stored and deleted once reading has stopped."""

    def pause(self, failures: int) -> float:
        """Return how long nothing is received after so many failures in a row."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 20))


class _Left(NamedTuple):
    """Why a message stays in the queue: it is seen again after so many seconds."""

    seconds: int
    by_inbox: bool = False


class _InboxTroubleError(Exception):
    """The inbox couldn't take what was received: nothing more is to be received until it can."""


class QueueReader:
    """Reads the queue of one feed with several loops. `start` it when the inbox is open, `finish` it before it closes.

    Deliveries that a gateway wrote down are verified as over HTTP, but for their age: a message may be days old. What a
    provider put there by itself is proved to be the provider's by the queue's policy.
    """

    def __init__(
        self, feed: Feed, provider: Provider, intake: Intake, loops: int = 1, pace: Pace | None = None
    ) -> None:
        self._feed = dataclasses.replace(feed, tolerance=None)
        self._provider, self._intake, self._loops, self._pace = provider, intake, loops, pace or Pace()
        self._stopping = asyncio.Event()
        self._ends_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._polls: set[asyncio.Future[Any]] = set()
        self._failing: set[int] = set()
        self._counted = Quiet(COUNTED_EVERY)

    @property
    def feed(self) -> str:
        """The name of its feed."""
        return self._feed.name

    def replace(self, feed: Feed) -> None:
        """Verify what comes from now on as this feed says. Its queue has to be the same one."""
        self._feed = dataclasses.replace(feed, tolerance=None)

    def start(self) -> None:
        """Begin to read."""
        name = self._feed.name
        self._tasks = [asyncio.create_task(self._run(n), name=f"queue {name} {n}") for n in range(self._loops)]
        _log.info("queue_reading", feed=self._feed.name, region=region_of(self._feed), consumers=self._loops)

    def stop(self) -> None:
        """Receive nothing more; what was received is still stored and deleted. May be called twice."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._ends_at = asyncio.get_running_loop().time() + self._pace.drain
            for poll in self._polls:
                poll.cancel()

    async def finish(self) -> None:
        """Return once what was received is stored and deleted. What takes too long is given up: it comes again."""
        self.stop()
        if self._tasks:
            left = max(0.0, self._ends_at - asyncio.get_running_loop().time())
            _, late = await asyncio.wait(self._tasks, timeout=left)
            for task in late:
                _log.warning("queue_cancelled", feed=self._feed.name, waited_seconds=self._pace.drain)
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, n: int) -> None:
        """Read until stopped. After each failure with a new client, since one may never find its credentials again."""
        failures = 0
        while not self._stopping.is_set():
            try:
                await self._intake.inbox.check()  # what is received in vain comes nearer to the dead-letter queue
                async with open_client("sqs", region_of(self._feed), self._feed.endpoint_url) as sqs:
                    while not self._stopping.is_set():
                        await self._round(sqs)
                        failures = 0
                        self._note_success(n)
            except (_InboxTroubleError, InboxBusy, InboxUnavailable):
                failures += 1  # told where a message was put off, and by the process's own check of the database
            except Exception as error:  # noqa: BLE001 - whatever it is, this loop must never end silently
                failures += 1
                self._note_failure(n, error)
            if failures:
                await self._rest(self._pace.pause(failures))

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _round(self, sqs: Any) -> None:
        messages = await self._receive(sqs)
        if not messages:
            return
        left = await self._settle(sqs, messages)
        await self._delete(sqs, [message for message, why in zip(messages, left, strict=True) if why is None])
        stays = [(message, why) for message, why in zip(messages, left, strict=True) if why is not None]
        await self._hide(sqs, [(message, why.seconds) for message, why in stays])
        metrics.queue_messages(self._feed.name, "left").inc(len(stays))
        if any(why.by_inbox for _, why in stays):
            raise _InboxTroubleError

    async def _receive(self, sqs: Any) -> list[QueueMessage]:
        if self._stopping.is_set():
            return []
        poll = asyncio.ensure_future(
            sqs.receive_message(
                QueueUrl=self._feed.queue_url,
                WaitTimeSeconds=self._pace.poll,
                MaxNumberOfMessages=MESSAGES,
                VisibilityTimeout=self._pace.hidden,
                AttributeNames=["ApproximateReceiveCount"],  # by its old name, which other servers than AWS know, too
                MessageAttributeNames=["All"],
            )
        )
        self._polls.add(poll)
        try:
            await asyncio.wait([poll])
        finally:
            self._polls.discard(poll)
            poll.cancel()
        return [] if poll.cancelled() else [read_message(found) for found in poll.result().get("Messages", [])]

    async def _settle(self, sqs: Any, messages: Sequence[QueueMessage]) -> list[_Left | None]:
        """Take all messages at once, and keep them hidden while that lasts."""
        takes = [asyncio.create_task(self._take(message)) for message in messages]
        try:
            waiting = set(takes)
            while waiting:
                _, waiting = await asyncio.wait(waiting, timeout=self._pace.renew)
                await self._renew(
                    sqs, [message for message, take in zip(messages, takes, strict=True) if take in waiting]
                )
        finally:
            for take in takes:
                take.cancel()
        return [take.result() for take in takes]

    async def _renew(self, sqs: Any, lasting: Sequence[QueueMessage]) -> None:
        try:
            await self._hide(sqs, [(message, self._pace.hidden) for message in lasting])
        except Exception as error:  # noqa: BLE001 - then a message comes too early, and is stored once nevertheless
            self._tell("queue_messages_not_hidden", aws_failure(error).reason)

    async def _hide(self, sqs: Any, until: Sequence[tuple[QueueMessage, int]]) -> None:
        """Let messages be seen again after so many seconds each, from now."""
        if until:
            entries = [
                {"Id": str(n), "ReceiptHandle": message.receipt, "VisibilityTimeout": seconds}
                for n, (message, seconds) in enumerate(until)
            ]
            await sqs.change_message_visibility_batch(QueueUrl=self._feed.queue_url, Entries=entries)

    async def _delete(self, sqs: Any, messages: Sequence[QueueMessage]) -> None:
        """Delete messages; one that SQS doesn't delete comes again, is found to be stored, and is deleted then."""
        if not messages:
            return
        entries = [{"Id": str(n), "ReceiptHandle": message.receipt} for n, message in enumerate(messages)]
        answer = await sqs.delete_message_batch(QueueUrl=self._feed.queue_url, Entries=entries)
        failed = answer.get("Failed", [])
        metrics.queue_messages(self._feed.name, "deleted").inc(len(messages) - len(failed))
        metrics.queue_messages(self._feed.name, "not_deleted").inc(len(failed))
        if failed:
            self._tell("queue_messages_not_deleted", str(failed[0].get("Code")), messages=len(failed))

    async def _take(self, message: QueueMessage) -> _Left | None:
        """Store what a message holds; None: it may be deleted. Raises nothing but a cancellation."""
        try:
            return await self._taken(message)
        except InboxBusy:
            return self._put_off("busy", _Left(self._pace.again, by_inbox=True))
        except InboxUnavailable:
            return self._put_off("database", _Left(self._pace.again, by_inbox=True))
        except Exception as error:  # noqa: BLE001 - our fault: it comes again, ever more rarely
            return self._put_off("failed", self._left(message), **place_of(error))

    async def _taken(self, message: QueueMessage) -> _Left | None:
        large = len(message.raw) > ON_LOOP
        try:
            delivery, by_gateway = await asyncio.to_thread(carried, message) if large else carried(message)
            if by_gateway or not self._provider.facts.fills_queues:
                match await self._intake.verdict(self._feed, self._provider, delivery):
                    case Refused(reason, hint):  # a rotated secret, perhaps: the queue keeps it until that is put right
                        return self._put_off(f"refused:{reason}", self._left(message), hint=hint)
                    case Later(reason):
                        return self._put_off(reason, self._left(message))
            parsed = self._intake.parsed(self._feed, self._provider, delivery)
        except BadPayload as error:
            await self._keep(message, str(error))
            return None
        # A confirmation is never followed: whoever subscribes a queue confirms it by the queue's policy.
        await self._intake.store(self._feed, delivery, parsed, "sqs")
        return None

    async def _keep(self, message: QueueMessage, hint: str) -> None:
        """Store what can't be read as bytes that prove nothing: it neither comes back for ever nor is lost."""
        event = replace(unread(body_of(message)), reason="refused:format")
        await self._intake.inbox.store(self._feed.name, [event], "sqs")
        self._intake.counters.note(self._feed.name, "refused:format")
        self._tell("queue_message_kept", "format", hint=hint)

    def _left(self, message: QueueMessage) -> _Left:
        return _Left(min(self._pace.latest, self._pace.later * message.receives))

    def _put_off(self, reason: str, left: _Left, **details: str) -> _Left:
        outcome = reason if reason.startswith("refused:") else f"later:{reason}"
        self._intake.counters.note(self._feed.name, outcome)
        self._tell("queue_message_not_stored", reason, **details)
        return left

    def _note_failure(self, n: int, error: Exception) -> None:
        self._failing.add(n)
        failure = aws_failure(error)
        if self._counted.silenced(self._feed.name, "queue") is not None:
            self._intake.counters.note(self._feed.name, "later:queue")
        self._tell("queue_failed", failure.reason, hint=failure.hint, region=region_of(self._feed))

    def _note_success(self, n: int) -> None:
        if n in self._failing:
            self._failing.discard(n)
            if not self._failing:
                _log.info("queue_recovered", feed=self._feed.name)

    def _tell(self, event: str, reason: str, **details: object) -> None:
        if (before := self._intake.quiet.silenced(self._feed.name, f"{event}:{reason}")) is not None:
            level = _log.error if event in _ERRORS else _log.warning
            level(event, feed=self._feed.name, reason=reason, **details, unlogged_before=before)


_ERRORS: Final = ("queue_failed", "queue_message_not_stored")
