# SPDX-License-Identifier: Apache-2.0
"""Feeds in shadow mode: what passes would do with their sends is recorded, and nothing is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from reconciler.database.connection import Connection
from reconciler.passes.ledger import Decided, counted
from reconciler.rule.policy import LATEST_LOOK, Action

SHADOW: Final = """
WITH v AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::timestamptz[],
                         $8::float8[], $9::text[], $10::text[])
        AS v(wire_key, state, fence, action, reason, source, look_at, risk, witnesses, inputs)
    ORDER BY wire_key
), seen AS (
    UPDATE send_log s SET next_check_at = v.look_at FROM v
    WHERE s.wire_key = v.wire_key AND s.state = v.state AND s.fence IS NOT DISTINCT FROM v.fence
    RETURNING s.wire_key, s.attempt, s.fence, s.feed, s.claimed_at, s.submit_by, s.provider_message_id,
              v.action, v.reason, v.source, v.risk, v.witnesses, v.inputs
), noted AS (
    INSERT INTO shadow_verdict (wire_key, attempt, fence, pass, action, reason, source, who, witnesses, risk, inputs,
                                feed, claimed_at, submit_by, message_id)
    SELECT wire_key, attempt, fence, $11, action, reason, source, $12, witnesses::jsonb, risk, inputs::jsonb, feed,
           claimed_at, submit_by, provider_message_id
    FROM seen n
    WHERE action <> 'waiting' AND NOT EXISTS (
        SELECT FROM (SELECT * FROM shadow_verdict WHERE wire_key = n.wire_key ORDER BY id DESC LIMIT 1) AS o
        WHERE (o.action, o.reason, o.fence) IS NOT DISTINCT FROM (n.action, n.reason, n.fence))
    RETURNING action, reason
)
SELECT action || ':' || reason AS reason, count(*) AS n FROM noted GROUP BY 1
"""


async def note_shadow(
    connection: Connection, decided: Sequence[Decided], decided_at: datetime, pass_id: int, who: str
) -> Counter[str]:
    """Record verdicts on rows of feeds in shadow mode where they are new, and when the rows are looked at next."""
    columns = [
        [d.wire_key for d in decided],
        [d.state for d in decided],
        [d.fence for d in decided],
        [d.verdict.action for d in decided],
        [d.verdict.reason for d in decided],
        [d.verdict.source for d in decided],
        [_next_look(d, decided_at) for d in decided],
        [d.verdict.risk for d in decided],
        [d.witnesses_text for d in decided],
        [d.inputs for d in decided],
    ]
    return counted(await connection.fetch(SHADOW, *columns, pass_id, who))


def _next_look(d: Decided, decided_at: datetime) -> datetime | None:
    """A send that was not moved stays as it is, and is looked at again: a later look may say otherwise."""
    undecided = d.verdict.action in (Action.HELD, Action.WAITING)
    return d.verdict.next_check_at if undecided else decided_at + LATEST_LOOK
