# SPDX-License-Identifier: Apache-2.0
"""What all share that speak to the database: connection, clock, keys, where a walk stands, and what its errors mean."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import asyncpg

Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy


@dataclass(frozen=True, slots=True)
class Place:
    """Where a walk over rows stands: they are ordered by time and wire key."""

    at: datetime
    wire_key: str


BEGINNING: Final = Place(datetime(1, 1, 1, tzinfo=UTC), "")

TRY_AGAIN: Final = (asyncpg.DeadlockDetectedError, asyncpg.InvalidCachedStatementError)
"""A deadlock, or a plan that a migration made invalid: the same statement is tried once more, as a whole."""

BAD_DATA: Final = (
    asyncpg.DataError,  # class 22
    asyncpg.IntegrityConstraintViolationError,  # class 23
    asyncpg.ProgramLimitExceededError,  # class 54: longer than an index takes
)
"""The database can't store one of the rows of a statement, however often it is tried."""

DATABASE_CLOCK: Final = "SELECT clock_timestamp()"


async def database_clock(database: Connection | asyncpg.Pool) -> datetime:
    """Return the time by which ages are told."""
    now: datetime = await database.fetchval(DATABASE_CLOCK)
    return now


NAMESPACE: Final = "SELECT namespace FROM installation"


async def read_namespace(database: Connection | asyncpg.Pool) -> str:
    """Return what tells this installation's keys apart from another's."""
    return str(await database.fetchval(NAMESPACE))


WIRE_KEY: Final = "SELECT wire_key($1)"


async def as_wire_key(connection: Connection, key: str) -> str:
    """Return the wire key of a send key, or a wire key as it is."""
    return str(await connection.fetchval(WIRE_KEY, key))
