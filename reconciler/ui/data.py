# SPDX-License-Identifier: Apache-2.0
"""Where the page gets what it shows: the settings, and connections that nobody waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import asyncpg

from reconciler import composition
from reconciler.configuration.settings import Settings
from reconciler.database.connection import Connection
from reconciler.insight.status import Status, read_status
from reconciler.insight.why import Story, tell
from webhooks.database import BoundedPool

UI_CONNECTIONS: Final = 3
"""Of a pool of its own: people who look never keep passes, senders or deliveries waiting."""
SECONDS: Final = 20.0
"""How long the looks of one page may take."""


class Data:
    """What pages are made of. `pool` is None until the database was reached."""

    def __init__(self, settings: Settings) -> None:
        self.pool: BoundedPool | None = None
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Go on with other settings, those of `ui` excepted."""
        self.settings, self._policies = settings, composition.policies(settings)

    @asynccontextmanager
    async def connection(self, seconds: float | None = None) -> AsyncIterator[Connection]:
        """Give a connection for as long as a page, or this, may take. Raises TimeoutError, or what asyncpg raises."""
        async with asyncio.timeout(seconds or SECONDS), self._reached().acquire() as connection:
            yield connection

    async def status(self) -> Status:
        """Return how the whole stands."""
        async with self.connection() as connection:
            return await read_status(connection, self.settings, lambda: datetime.now(UTC))

    async def story(self, key: str) -> Story:
        """Return the story of one send, its recipient included."""
        async with asyncio.timeout(SECONDS):
            return await tell(self._reached(), self._policies, key, show_recipient=True)

    def _reached(self) -> BoundedPool:
        if self.pool is None:
            raise asyncpg.InterfaceError("not connected yet")
        return self.pool
