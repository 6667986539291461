# SPDX-License-Identifier: Apache-2.0
"""The feed: what the provider says of what it took, late, again, in any order, and what else a receiver stores."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import asyncpg
import kit
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from state_machine_base import FOREIGN, SENDS, Base
from state_machine_truth import Message
from state_machine_world import FEEDS

MESSAGES: Final = st.runner().flatmap(lambda machine: st.sampled_from(machine.truth.messages))
"""Those that the provider took until now."""

KINDS: Final = st.sampled_from(["queued", "delivered", "bounced", "complained"])
NO_PARTITION: Final = datetime(1999, 1, 1, tzinfo=UTC)
TIMES: Final = st.sampled_from([None, NO_PARTITION])
"""The provider's times: each event has its own, or one in a month that has no partition, the same each time."""


class Feed(Base):
    """The receiver's side. An event is what the provider says of a message by which it is known what became of it."""

    def __init__(self) -> None:
        super().__init__()
        self.open_event: asyncpg.transaction.Transaction | None = None

    @precondition(lambda self: self.truth.messages)
    @rule(
        message=MESSAGES,
        kind=KINDS,
        at=TIMES,
        strange=st.sampled_from([False, False, True]),
        stamped=st.sampled_from([True, True, False]),
        commits=st.sampled_from([True, True, False]),
    )
    def an_event_arrives_perhaps_again(
        self, message: Message, stamped: bool, strange: bool, commits: bool, **told: Any
    ) -> None:
        """`strange`: through a feed that nothing was given to. `commits`: soon, or not yet."""
        key, feed = message.key if stamped else None, "another" if strange else message.attempt.feed
        self.do(self.stored(key, commits or self.open_event is not None, message_id=message.id, feed=feed, **told))

    async def stored(self, key: str | None, commits: bool, *, at: datetime | None, **told: Any) -> None:
        if not commits:
            self.open_event = self.world.slow.transaction()
            await self.open_event.start()
            told["event_id"] = "slow"  # or the same event would wait for it
        await kit.event(self.db if commits else self.world.slow, key, occurred_at=at, **told)

    @rule(key=st.sampled_from([*SENDS, *2 * [FOREIGN]]), testimony=st.sampled_from(["rejected", "none"]), at=TIMES)
    def a_contradictory_unknown_or_foreign_event_arrives(self, key: str, testimony: str, at: datetime | None) -> None:
        said = "accepted" if key == FOREIGN else testimony
        self.do(kit.event(self.db, key, said, kind="failed", message_id="m-x", event_id=testimony, occurred_at=at))

    @precondition(lambda self: not self.passing)
    @rule(feed=st.sampled_from(FEEDS), speaks=st.booleans())
    def what_a_feed_delivers_is_refused_or_stored_again(self, feed: str, speaks: bool) -> None:
        """Its secret was changed. Then its silence means nothing."""
        self.do(kit.stored_delivery(self.db, feed, "stored" if speaks else "refused:signature"))
        (self.truth.mute.discard if speaks else self.truth.mute.add)(feed)

    @precondition(lambda self: self.open_event is not None)
    @rule(receiver_dies=st.sampled_from([False, False, True]))
    def the_slow_event_commits_or_its_receiver_dies(self, receiver_dies: bool) -> None:
        self.do(self.end_slow_event(receiver_dies=receiver_dies))

    async def end_slow_event(self, *, receiver_dies: bool = False) -> None:
        if self.open_event is not None:
            await (self.open_event.rollback() if receiver_dies else self.open_event.commit())
            self.open_event = None

    async def all_die(self) -> None:
        await self.end_slow_event(receiver_dies=True)
        await super().all_die()
