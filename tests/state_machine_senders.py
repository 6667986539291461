# SPDX-License-Identifier: Apache-2.0
"""Senders: they claim, submit, say how it went, and may die or be frozen between any two of these steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import kit
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, precondition, rule
from state_machine_base import FEED, KEY_OF, KEYS, RECIPIENT, SENDS
from state_machine_restore import Restores
from state_machine_truth import CAP_SPAN, NOTHING, Attempt, Message
from state_machine_world import CLOCK, FEEDS

from reconciler.campaigns.caps import Cap, keep_caps

HOUR: Final = timedelta(hours=1)
MEMORY: Final = timedelta(days=30)
FEW, MANY = 2, 100
"""Sends that the recipient may be sent in the cap's window: fewer than there are, or so many that none is refused."""
BY_PASS: Final = frozenset({"same_key_retry", "looked_up", "absent", "gave_up"})
RELEASED: Final = "SELECT * FROM send_claim_released($1, 10, '{}')"


class Outcome(NamedTuple):
    """How a submission goes."""

    taken: int
    """How many messages the provider takes of it."""
    answered: bool = False
    not_sent: bool | None = None
    """What its sender can say of it where it was not answered."""
    later: bool = False
    """The network holds the request back."""


OUTCOMES: Final = {
    "never arrives": Outcome(0),
    "is answered": Outcome(1, answered=True),
    "hangs, taken": Outcome(1),
    "is reset, taken": Outcome(1),
    "is an error, taken": Outcome(1),
    "is refused": Outcome(0, not_sent=False),
    "is too many": Outcome(0, not_sent=True),
    "reaches nobody": Outcome(0, not_sent=True),
    "is held back": Outcome(0, later=True),
    "is repeated by its SDK": Outcome(2, answered=True),
}
HOW_IT_GOES: Final = st.sampled_from(sorted(OUTCOMES))
STEPS: Final = st.sampled_from([2, 2, 1, 0])
"""What a worker does after its claim before it is frozen, or dies: submit, and report."""


@dataclass(eq=False, slots=True)
class Worker:
    """A sender that was granted a claim, and the step that it is at."""

    attempt: Attempt
    goes: str
    """How its submission will go."""
    looks: bool
    """Whether it looks at the time that it has left before it writes; else it was frozen after it had looked."""
    submitted: bool = False
    message: Message | None = None
    """What the provider's answer names."""
    not_sent: bool | None = None
    """What it can say where there was no answer."""

    def __repr__(self) -> str:
        return f"the worker of {self.attempt}: {self.goes}{'' if self.looks else ', does not look'}"


class Senders(Restores):
    """The sender's side."""

    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.network: list[Attempt] = []
        """Requests that it holds back."""

    @initialize(
        target=workers,
        keys=st.sampled_from(["none", "none", "kept", "broken"]),
        known_ids=st.booleans(),
        failover=st.booleans(),
        backed_up=st.booleans(),
        cap=st.sampled_from([None, MANY, MANY, FEW]),
        goes=st.sampled_from([len(SENDS), len(SENDS), 2]).flatmap(lambda n: st.tuples(*n * [HOW_IT_GOES])),
        steps=STEPS,
    )
    def a_provider_is_chosen_and_some_are_claimed(
        self, keys: Any, known_ids: bool, failover: bool, backed_up: bool, cap: int | None, goes: Any, steps: int
    ) -> Any:
        """Whatever may go wrong begins with a claim."""
        self.truth.keys, self.truth.known_ids, self.truth.failover, self.truth.cap = keys, known_ids, failover, cap
        if backed_up:
            self.do(self.backed_up())
        if cap:
            self.do(keep_caps(self.db, [Cap("default", cap, CAP_SPAN, None, "UTC")]))
        job: dict[str, Any] = {"fingerprint": "f", "expires": False, "made": True}
        attempts = [
            attempt for key, _ in zip(SENDS, goes, strict=False) for attempt in self.do(self.claimed(key, **job))
        ]
        workers = [Worker(attempt, how, looks=True) for attempt, how in zip(attempts, goes, strict=False)]
        return multiple(*(self.started(worker, steps) for worker in workers))

    @rule(
        target=workers,
        how=st.sampled_from(
            [*4 * ["claimed"], "claimed by two", "claimed in vain", "enqueued", "released", "fails over", "fails over"]
        ),
        key=KEYS,
        feed=FEED,
        fingerprint=st.sampled_from(["f", "f", None]),
        expires=st.sampled_from([False, False, True]),
        made=st.booleans(),
        goes=HOW_IT_GOES,
        looks=st.sampled_from([True, True, False]),
        steps=STEPS,
    )
    def a_job_comes(self, how: str, key: str, feed: str, goes: str, looks: bool, steps: int, **job: Any) -> Any:
        """`made`: it says when it was made. `in vain`: the claim's answer is lost, and the call is repeated."""
        works = {
            "claimed by two": lambda: self.claimed(key, feed, 2, **job),
            "claimed in vain": lambda: self.claimed_in_vain(key, feed),
            "enqueued": lambda: self.enqueued(key, feed, **job),
            "released": self.claimed_released,
            "fails over": self.failed_over,
        }
        attempts = self.do(works.get(how, lambda: self.claimed(key, feed, **job))())
        return multiple(*(self.started(Worker(attempt, goes, looks), steps) for attempt in attempts))

    def started(self, worker: Worker, steps: int) -> Worker:
        for _ in range(steps):
            self.do(self.goes_on(worker))
        return worker

    @precondition(lambda self: any(row["released_at"] for row in self.seen.rows.values()))
    @rule(goes=HOW_IT_GOES, elsewhere=st.booleans())
    def what_was_released_is_sent_again(self, goes: str, elsewhere: bool) -> None:
        """`elsewhere`: through the other feed."""
        for attempt in self.do(self.failed_over() if elsewhere else self.claimed_released()):
            self.started(Worker(attempt, goes, looks=True), 2)

    @rule(worker=workers)
    def a_worker_goes_on(self, worker: Worker) -> None:
        """Perhaps late. One that has reported does so again."""
        self.do(self.goes_on(worker))

    async def goes_on(self, worker: Worker) -> None:
        if worker.submitted:
            await self.reported(worker)
        else:
            self.submitted(worker)

    # Claims

    async def asked(self, key: str, *, fingerprint: str | None, expires: bool, made: bool) -> dict[str, Any]:
        """The options of a job. One that says when it was `made` may be old by now."""
        now = await self.world.clock.fetchval(CLOCK)
        return {
            **self.named(key),
            **({"fingerprint": fingerprint} if fingerprint else {}),
            **({"expires_at": (now + HOUR).isoformat()} if expires else {}),
            **({"intended_at": (now - self.truth.clock[key]).isoformat()} if made else {}),
        }

    def named(self, key: str) -> dict[str, Any]:
        """The recipient, and the message id where the provider lets us choose it."""
        return {"recipient": RECIPIENT, **({"known_message_id": f"known-{key}"} if self.truth.known_ids else {})}

    async def enqueued(self, key: str, feed: str, **job: Any) -> list[Attempt]:
        asked = json.dumps(await self.asked(key, **job))
        outcome = (await kit.call(self.db, "send_enqueue", key, feed, asked))["outcome"]
        assert outcome == ("exists" if key in self.seen.rows else "enqueued")
        return []

    async def claimed(self, key: str, feed: str = kit.FEED, workers: int = 1, **job: Any) -> list[Attempt]:
        said, asked = await self.said(key, feed), await self.asked(key, **job)
        answers = await asyncio.gather(*(kit.claim(self.db, key, feed, **asked) for _ in range(workers)))
        granted = [answer for answer in answers if answer["outcome"] == "claimed"]
        assert len(granted) <= 1, "two workers were granted one send"
        if granted and job["made"] and key not in self.seen.rows:
            assert self.truth.clock[key] < MEMORY, "a job was granted that may have been forgotten"
        return [self.granted(key, feed, answer, said) for answer in granted]

    async def claimed_in_vain(self, key: str, feed: str) -> list[Attempt]:
        nonce = f"{len(self.truth.fences)} were granted before"
        said, asked = await self.said(key, feed), {"nonce": nonce, **self.named(key)}
        lost, again = [await kit.claim(self.db, key, feed, **asked) for _ in range(2)]
        if lost["outcome"] != "claimed":
            return []
        assert (again["outcome"], again["fence"]) == ("claimed", lost["fence"]), "a lost answer can't be had again"
        return [self.granted(key, feed, lost, said)]

    async def claimed_released(self) -> list[Attempt]:
        said = {key: await self.said(key) for key in self.seen.rows}
        answers = [
            (KEY_OF[one["wire_key"]], feed, one) for feed in FEEDS for one in await self.db.fetch(RELEASED, feed)
        ]
        return [self.granted(key, feed, one, said[key]) for key, feed, one in answers]

    async def failed_over(self) -> list[Attempt]:
        job: dict[str, Any] = {"fingerprint": "f", "expires": False, "made": False}
        released = {key: row["feed"] for key, row in self.seen.rows.items() if row["released_at"]}
        ways = [(key, other) for key, feed in released.items() for other in FEEDS if other != feed]
        return [attempt for key, feed in ways for attempt in await self.claimed(key, feed, **job)]

    def granted(self, key: str, feed: str, answer: Any, said: list[str]) -> Attempt:
        before = self.seen.rows.get(key)
        assert not said, f"{key} was given out over committed evidence"
        assert not self.seen.suspect, f"{key} was given out by a database that has gone back"
        if self.truth.cap:
            self.truth.takes_place(key, {other for other in self.seen.rows if self.reached_nobody(other)})
        if before:
            expired = before["expires_at"] and before["expires_at"] <= before["seen_at"]
            assert not expired, f"{key} was given out after it had expired"
            held = self.seen.held(feed) or self.seen.held(before["feed"])
            assert not (held and before["release_basis"] in BY_PASS), f"{key} was given out over a hold"
        return self.truth.given_out(key, feed, answer["fence"], timedelta(seconds=answer["seconds_left"]))

    def reached_nobody(self, key: str) -> bool:
        """Say whether the ledger knew it of a send when it was last looked at, and gave it to nobody since."""
        row = self.seen.rows[key]
        if [one.fence for one in self.truth.attempts[key][-1:]] != [row["fence"]]:
            return False
        may_have = row["attempt"] - row["not_sent_attempts"]
        refused = row["verdict_source"] == "sender" or row["verdict_reason"] == "rejected"
        return bool(row["state"] != "sent" and may_have == (row["state"] == "failed" and refused))

    # Submissions and reports

    def submitted(self, worker: Worker) -> None:
        worker.submitted = True
        if worker.looks and worker.attempt.left <= NOTHING:
            worker.not_sent = True
            return
        outcome = OUTCOMES[worker.goes]
        if outcome.later:
            self.network.append(worker.attempt)
        taken = [self.truth.take(worker.attempt) for _ in range(outcome.taken)]
        worker.message = taken[-1] if outcome.answered else None
        worker.not_sent = outcome.not_sent

    @precondition(lambda self: self.network)
    @rule()
    def the_network_delivers_what_it_held_back(self) -> None:
        self.truth.take(self.network.pop(0))

    async def reported(self, worker: Worker) -> None:
        key, fence, row = worker.attempt.key, worker.attempt.fence, await kit.row(self.db, worker.attempt.key)
        if worker.message:
            outcome = await kit.confirm(self.db, key, fence, worker.message.id)
            assert outcome in ({"sent", "sent_late", "duplicate"} if row else {"unknown_key"})
            assert not row or await kit.state(self.db, key) == "sent", "what a sender knows was lost"
            return
        accepted = "accepted" in await self.said(key)
        outcome = await kit.fail(self.db, key, fence, not_sent=worker.not_sent)
        worker.attempt.over = worker.attempt.over or worker.not_sent is not None
        if row and row["state"] == "claimed" and row["fence"] == fence and not accepted:
            assert outcome == {True: "released", False: "failed", None: "waiting"}[worker.not_sent]
        else:
            assert outcome in {"sent", "not_yours"}
