# SPDX-License-Identifier: Apache-2.0
"""What tests of the inbox say often."""

from __future__ import annotations

import asyncpg
import msgspec

from webhooks.event import Event, Kind, Testimony


def event(n: object, **changes: object) -> Event:
    base = Event(
        kind=Kind.DELIVERED,
        testimony=Testimony.ACCEPTED,
        message_id=f"message-{n}",
        event_id=f"event-{n}",
        send_key=f"order-{n}",
        raw=b"{}",
    )
    return msgspec.structs.replace(base, **changes)


async def count(db: asyncpg.Pool) -> int:
    return await db.fetchval("SELECT count(*) FROM provider_event")
