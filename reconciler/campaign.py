# SPDX-License-Identifier: Apache-2.0
"""Campaigns: many sends that are loaded together, given out in batches to any number of workers, paused and resumed.

    async for batch in campaign.batches(pool, "spring", size=100, provider="postmark"):
        messages = {one.claim.send_key: message_for(one.recipient, one.payload) for one in batch}

        async def submit(claims):
            return await session.post(URL, json=[messages[c.send_key] | c.stamp.body for c in claims])

        await guard_many.submit_claimed_many(pool, [one.claim for one in batch], submit)

There is no bookmark: what is pending is what is left, so that after a crash a worker is simply started again.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from reconciler.errors import UserError
from reconciler.guard import BatchExecutor, refuse_transaction
from reconciler.sending import tracing
from reconciler.sending.claims import Released, as_released, boot_time, claim_options

Standing = Literal["active", "finished", "cancelled", "paused", "loading", "scheduled", "late"]
"""`active`: it gives out what is pending. `finished`: every file was loaded to its end, and nothing is pending or
claimed. `late`: its time is long over and nothing was given out: a person has to confirm that it may start."""

ENDED: Final = ("finished", "cancelled", None)

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a campaign's name is made of; the table holds no other."""


class UnknownCampaign(UserError):
    """There is no campaign of that name. The text holds it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no campaign is named {name!a}: see reconciler campaign list")


CLAIM: Final = "CALL send_claim_campaign_commit($1, $2, $3::text::jsonb)"


async def batches(
    executor: BatchExecutor,
    name: str,
    *,
    size: int = 100,
    provider: str | None = None,
    every: float | None = None,
    **options: Any,
) -> AsyncIterator[list[Released]]:
    """Claim a campaign's sends, `size` of them (at most 1,000) at a time, until nothing may be given out now.

    Give each to `guard.submit_claimed`, or all to `guard_many.submit_claimed_many`. Their time to submit runs from the
    claim of their batch: take as many as can be submitted within it. With `every` (seconds) it is then asked again so
    often, until the campaign has finished or was cancelled: what a pass releases is given out, too. Options:
    submit_within, claimed_by. Raises UnknownCampaign, GuardError inside a transaction, and asyncpg's errors.
    """
    await _refuse_unknown(executor, name)
    after = ""
    while True:
        refuse_transaction(executor)
        asked_at, began = boot_time(), tracing.begin()
        rows = await executor.fetch(CLAIM, name, size, claim_options({**options, "after": after}))
        claims = _parsed(rows[0]["claims"])
        if granted := [one for one in claims if one["outcome"] == "claimed"]:
            released = as_released(granted, asked_at, provider)
            tracing.claimed_all([one.claim for one in released], None, began, "send_claim_campaign_commit")
            yield released
        if claims:
            after = claims[-1]["wire_key"]
        elif after:
            after = ""  # from the start: what was released meanwhile, or locked by another worker
        elif every is None or await standing(executor, name) in ENDED:
            return
        else:
            await asyncio.sleep(every)


def _parsed(claims: Any) -> list[dict[str, Any]]:
    """Return JSON as it is meant, whatever the connection's own codec makes of it."""
    found: list[dict[str, Any]] = json.loads(claims) if isinstance(claims, str) else claims
    return found


STANDING: Final = "SELECT campaign_standing($1) AS standing"


async def standing(executor: BatchExecutor, name: str) -> Standing | None:
    """Return how a campaign stands; None: there is none of that name."""
    if not NAME.fullmatch(name):
        return None
    rows = await executor.fetch(STANDING, name)
    found: Standing | None = rows[0]["standing"]
    return found


async def _refuse_unknown(executor: BatchExecutor, name: str) -> None:
    """Raise UnknownCampaign where there is none of that name: nobody may believe that he has paused another one."""
    if await standing(executor, name) is None:  # a sender may ask this, and not read the table
        raise UnknownCampaign(name)


# The pause is committed first, so that it works at once; then whoever pauses waits for the claims under way (they share
# this lock, and look at the campaign after they got it).
PAUSE: Final = """
UPDATE campaign SET state = 'paused', reason = $2, who = $3, updated_at = clock_timestamp()
WHERE name = $1 AND state = 'active' RETURNING name
"""
MEET_CLAIMS: Final = "SELECT FROM campaign WHERE name = $1 FOR UPDATE"


async def pause(executor: BatchExecutor, name: str, reason: str, who: str) -> bool:
    """Let a campaign give out nothing; False where it was not active. Once this has returned nothing is given out.

    What was given out before may still be submitted, and is looked after as ever. Raises UnknownCampaign.
    """
    refuse_transaction(executor)
    await _refuse_unknown(executor, name)
    changed = await executor.fetch(PAUSE, name, reason, who)
    await executor.fetch(MEET_CLAIMS, name)
    return bool(changed)


RESUME: Final = """
UPDATE campaign SET state = 'active', reason = $2, who = $3, updated_at = clock_timestamp(),
    confirmed_at = CASE WHEN $4 THEN clock_timestamp() ELSE confirmed_at END
WHERE name = $1 AND (state = 'paused' OR $4 AND state = 'active' AND confirmed_at IS NULL) RETURNING name
"""


async def resume(executor: BatchExecutor, name: str, reason: str, who: str, *, late: bool = False) -> bool:
    """Let a paused campaign go on; False where there was nothing to change. A cancelled one stays so.

    `late` confirms that it may start although its time is over by more than its `max_lateness`. Raises UnknownCampaign.
    """
    await _refuse_unknown(executor, name)
    return bool(await executor.fetch(RESUME, name, reason, who, late))


CANCEL: Final = """
UPDATE campaign SET state = 'cancelled', reason = $2, who = $3, updated_at = clock_timestamp()
WHERE name = $1 AND state <> 'cancelled' RETURNING name
"""
END_RELEASED: Final = "SELECT campaign_end_released($1, 500, $2, $3) AS ended"


async def cancel(executor: BatchExecutor, name: str, reason: str, who: str) -> bool:
    """End a campaign for good; False where that was done before. Once this has returned nothing is given out.

    Sends that were never claimed stay as they are, and every claim of them is refused. Released ones are failed, unless
    acceptance was heard of; claimed ones are never touched, and are decided as ever. Called again it ends those that
    were released since. Raises UnknownCampaign.
    """
    refuse_transaction(executor)
    await _refuse_unknown(executor, name)
    changed = await executor.fetch(CANCEL, name, reason, who)
    await executor.fetch(MEET_CLAIMS, name)
    while (await executor.fetch(END_RELEASED, name, who, reason))[0]["ended"]:
        pass
    return bool(changed)


@dataclass(frozen=True, slots=True)
class Load:
    """The last load of one file."""

    source: str
    started_at: datetime
    ended_at: datetime | None
    """None: it is under way, or was broken off: load the file again."""
    added: int
    duplicates: int
    suppressed: int
    bad_lines: int


@dataclass(frozen=True, slots=True)
class Status:
    """How a campaign stands, and how many of its sends are in which state."""

    name: str
    standing: Standing
    feed: str
    message_class: str
    starts_at: datetime | None
    max_lateness: timedelta
    reason: str | None
    who: str | None
    pending: int
    """Not given out, those that follow included."""
    released: int
    """Pending again after an attempt."""
    capped: int
    """Pending, and their recipients have had what the cap of the class allows."""
    held: int
    """Pending or claimed, and held by a pass: they are not given out."""
    claimed: int
    running: int
    """Claimed, and their workers may still submit."""
    undecided: int
    """Claimed, and their workers' time is over: evidence or a pass decides them."""
    oldest_claim: datetime | None
    sent: int
    failed: int
    suppressed: int
    """Left out when they were loaded."""
    per_second: float
    """Sends that the provider took within the last minute, by second."""
    loads: list[Load]

    @property
    def total(self) -> int:
        """All of its sends."""
        return self.pending + self.claimed + self.sent + self.failed

    @property
    def done(self) -> int:
        """Sends that came to an end."""
        return self.sent + self.failed

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes at this rate; None where that can't be said."""
        waiting = self.pending - self.capped
        return waiting / self.per_second if self.per_second and self.standing == "active" else None


# Counts come from the campaign's index alone; what is watched is few, and the last minute is a short piece of an index.
STATUS: Final = """
WITH states AS (
    SELECT count(*) FILTER (WHERE state = 'pending') AS pending, count(*) FILTER (WHERE state = 'claimed') AS claimed,
           count(*) FILTER (WHERE state = 'sent') AS sent, count(*) FILTER (WHERE state = 'failed') AS failed
    FROM send_log WHERE campaign = $1
), watched AS (
    SELECT count(*) FILTER (WHERE released_at IS NOT NULL) AS released,
           count(*) FILTER (WHERE held_reason IS NOT NULL) AS held,
           count(*) FILTER (WHERE state = 'claimed' AND submit_by > clock_timestamp()) AS running,
           count(*) FILTER (WHERE state = 'claimed' AND submit_by <= clock_timestamp()) AS undecided,
           min(claimed_at) FILTER (WHERE state = 'claimed') AS oldest_claim
    FROM send_log WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL AND campaign = $1
)
SELECT c.name, campaign_standing(c.name) AS standing, c.feed, c.message_class, c.starts_at, c.max_lateness, c.reason,
       c.who, states.*, watched.*,
       (SELECT count(*) FROM send_log
        WHERE campaign = $1 AND state = 'pending' AND capped_until > clock_timestamp()) AS capped,
       (SELECT coalesce(sum(f.suppressed), 0) FROM campaign_load f WHERE f.campaign = c.name)::bigint AS suppressed,
       (SELECT count(*) / 60.0 FROM send_log l
        WHERE l.feed = c.feed AND l.answered_at IS NOT NULL AND l.attempt = 1
          AND l.first_claimed_at > statement_timestamp() - interval '1 minute'
          AND l.campaign = c.name)::float8 AS per_second
FROM campaign c, states, watched WHERE c.name = $1
"""
LOADS: Final = """
SELECT source, started_at, ended_at, added, duplicates, suppressed, bad_lines
FROM campaign_load WHERE campaign = $1 ORDER BY started_at, source
"""


async def status(executor: BatchExecutor, name: str) -> Status | None:
    """Return how a campaign stands; None: there is none of that name."""
    rows = await executor.fetch(STATUS, name) if NAME.fullmatch(name) else []
    if not rows:
        return None
    return Status(**rows[0], loads=[Load(**row) for row in await executor.fetch(LOADS, name)])


NAMES: Final = "SELECT name FROM campaign ORDER BY created_at DESC, name LIMIT $1"


async def names(executor: BatchExecutor, most: int) -> list[str]:
    """Return the names of so many campaigns, the newest first."""
    return [row["name"] for row in await executor.fetch(NAMES, most)]
