# SPDX-License-Identifier: Apache-2.0
"""People: they release, confirm and fail sends, pause feeds and resume them."""

from __future__ import annotations

from typing import Any, Final

import kit
from hypothesis import strategies as st
from hypothesis.stateful import rule
from state_machine_base import KEYS, Base
from state_machine_truth import NOTHING
from state_machine_world import FEEDS

from reconciler.passes.feeds import ALL_FEEDS, pause, resume

HELD: Final = st.sampled_from([*FEEDS, *2 * [ALL_FEEDS]])


class Operators(Base):
    """The operator's verbs."""

    @rule(verb=st.sampled_from(["released", "released", "sent", "failed", pause, resume, resume]), key=KEYS, feed=HELD)
    def an_operator_acts(self, verb: Any, key: str, feed: str) -> None:
        self.do(self.acted(key, verb) if isinstance(verb, str) else self.on_one_connection(verb, feed))

    async def acted(self, key: str, verb: str) -> None:
        said, row = await self.said(key), self.seen.rows.get(key)
        function, *args = ["operator_release"] if verb == "released" else ["operator_decide", verb]
        outcome = (await kit.call(self.db, function, key, *args, "note", "ann"))["outcome"]
        assert (outcome == "unknown_key") == (row is None)
        assert outcome != "failed" or "accepted" not in said, "an operator failed what was accepted"
        if outcome == "failed" and row["state"] == "claimed":
            attempt = self.truth.attempts[key][-1]
            assert attempt.left <= NOTHING, "an operator failed a send that may still be submitted"
        if verb == outcome == "sent":
            self.truth.said_sent.add(key)

    async def on_one_connection(self, verb: Any, feed: str) -> None:
        async with self.db.acquire() as connection:
            await verb(connection, feed, "incident", "ann")
