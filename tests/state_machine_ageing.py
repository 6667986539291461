# SPDX-License-Identifier: Apache-2.0
"""Time: sends grow old, each by a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from state_machine_base import Base
from state_machine_world import FEEDS

# All times that were written of some sends, but for those in the names of events.
MOVE: Final = """
WITH move AS MATERIALIZED (
    SELECT wire_key(key) AS wire_key, $3::interval AS by,
        ARRAY(SELECT stand_in_key(feed, 'known-' || key) FROM unnest($2::text[]) AS feed) AS stand_ins
    FROM unnest($1::text[]) AS key
), sends AS (
    UPDATE send_log s SET created_at = created_at - by, claimed_at = claimed_at - by,
        first_claimed_at = first_claimed_at - by, submit_by = submit_by - by, answered_at = answered_at - by,
        next_check_at = next_check_at - by, released_at = released_at - by, retry_until = retry_until - by,
        held_since = held_since - by, sent_at = sent_at - by, failed_at = failed_at - by, expires_at = expires_at - by,
        intended_at = intended_at - by, capped_until = capped_until - by
    FROM move WHERE s.wire_key = move.wire_key
), verdicts AS (
    UPDATE verdict v SET decided_at = decided_at - by, claimed_at = claimed_at - by, submit_by = submit_by - by
    FROM move WHERE v.wire_key = move.wire_key
), told AS (
    UPDATE release_outbox o SET created_at = created_at - by, next_try_at = next_try_at - by,
        tried_since = tried_since - by, leased_until = leased_until - by, dead_at = dead_at - by
    FROM move WHERE o.wire_key = move.wire_key
), asked_for AS (
    UPDATE asked_again a SET first_at = first_at - by, asked_at = asked_at - by
    FROM move WHERE a.wire_key = move.wire_key
), places AS (
    UPDATE cap_taken c SET (wire_keys, taken_at) = (
        SELECT array_agg(k ORDER BY at DESC, k), array_agg(at ORDER BY at DESC, k)
        FROM (SELECT p.k, p.at - coalesce((SELECT by FROM move WHERE wire_key = p.k), '0')
              FROM unnest(c.wire_keys, c.taken_at) AS p(k, at)) AS moved(k, at))
    WHERE c.wire_keys <> '{}'
), looked_up AS (
    UPDATE look_up l SET asked_at = asked_at - by, answered_at = answered_at - by
    FROM move WHERE l.wire_key = move.wire_key
)
UPDATE provider_event e SET received_at = received_at - by FROM move WHERE e.wire_key = ANY (stand_ins || move.wire_key)
"""


class Ageing(Base):
    """What time does. Each send has a clock of its own: one grows old while another one is new."""

    async def move(self, keys: Sequence[str], by: timedelta) -> None:
        """Move what was written of sends into the past, or by a negative time into the future."""
        await self.world.clock.execute(MOVE, list(keys), list(FEEDS), by)

    async def let_time_pass(self, keys: Sequence[str], by: timedelta) -> None:
        await self.move(keys, by)
        for key in keys:
            self.truth.time_passes(key, by)
