# SPDX-License-Identifier: Apache-2.0
"""Connections to PostgreSQL for both halves: no wait for one is unbounded, and a transaction pooler is noticed."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import asyncpg

ACQUIRE_SECONDS: Final = 5.0
"""Longest wait for a free connection of a pool (asyncpg itself would wait for ever)."""

FAILURES: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All that asyncpg raises where a database is away, slow or unwilling (a TimeoutError is an OSError)."""

CONNECT_SECONDS: Final = 10.0
COMMAND_SECONDS: Final = 60.0
PREPARED_STATEMENTS: Final = 100
PLANS_SECONDS: Final = 5.0
"""How old the plans of a connection may become."""

ABANDONED_SECONDS: Final = 60.0
"""How long the server waits within a transaction for us, who may be gone without a word; by itself it waits for hours,
and so does whoever wants what the transaction has locked."""
KEEPALIVE: Final = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "60000",
}
"""How it notices over TCP, within a minute, that our machine or the way to it is gone."""


class BoundedPool(asyncpg.Pool):
    """A pool whose `acquire`, and so each of its short cuts, raises TimeoutError instead of waiting for ever."""

    def acquire(self, *, timeout: float | None = ACQUIRE_SECONDS) -> Any:
        """Return a free connection, as a context manager or awaitable."""
        return super().acquire(timeout=timeout)


async def connect_pool(
    dsn: str,
    *,
    size: int,
    application: str,
    min_size: int = 1,
    lock_seconds: float | None = None,
    class_for: Callable[[asyncpg.Connection], Awaitable[type[asyncpg.Connection]]] | None = None,
) -> BoundedPool:
    """Return an open pool of at most `size` connections. Raises OSError, TimeoutError or asyncpg's errors.

    A statement that waits for a lock for more than `lock_seconds` fails (None: as the server is set). Behind a
    transaction pooler that is not asked for, since poolers refuse it, and statements are not kept prepared, since each
    transaction may meet another server. `class_for` chooses what its connections are, by looking at the database.
    """
    settings = {"application_name": application}
    probe = await asyncpg.connect(dsn, statement_cache_size=0, timeout=CONNECT_SECONDS, server_settings=settings)
    try:
        pooled = await is_behind_pooler(probe)
        connections = await class_for(probe) if class_for else asyncpg.Connection
    finally:
        await probe.close(timeout=CONNECT_SECONDS)
    if not pooled:
        # Whatever the database's default is: a guard looks with a snapshot from after its lock.
        settings["default_transaction_isolation"] = "read committed"
        settings["idle_in_transaction_session_timeout"] = str(round(ABANDONED_SECONDS * 1000))
        settings |= KEEPALIVE
    if lock_seconds is not None and not pooled:
        settings["lock_timeout"] = str(round(lock_seconds * 1000))
    pool = BoundedPool(
        dsn,
        min_size=min(min_size, size),
        max_size=size,
        max_queries=50_000,
        max_inactive_connection_lifetime=300.0,
        loop=None,
        connection_class=connections,
        record_class=asyncpg.Record,
        timeout=CONNECT_SECONDS,
        command_timeout=COMMAND_SECONDS,
        server_settings=settings,
        statement_cache_size=0 if pooled else PREPARED_STATEMENTS,
        setup=None if pooled else _forgetting_plans(),
        reset=_nothing_to_reset,
    )
    return await pool


async def _nothing_to_reset(_connection: object) -> None:
    """Spare a round trip each time a connection comes back: an open transaction is ended, we set nothing else."""


FORGET_PLANS: Final = "DISCARD PLANS"


def _forgetting_plans() -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return what lets each connection, as it is given out, forget plans that have grown old.

    One that was made while a month was empty reads it from end to end for each of a page's rows when thousands have
    come into it a minute later. The server itself forgets it only after its next ANALYZE.
    """
    forgotten: dict[int, float] = {}

    async def setup(connection: Any) -> None:
        server, now = connection.get_server_pid(), time.monotonic()
        if now - forgotten.get(server, -math.inf) < PLANS_SECONDS:
            return
        try:
            await connection.execute(FORGET_PLANS)
        except BaseException as error:
            connection.terminate()  # or asyncpg would wait for an answer to its goodbye
            if isinstance(error, asyncpg.InternalClientError):  # no kind of error that anybody expects
                raise asyncpg.InterfaceError("the pool was closed meanwhile") from error
            raise
        for gone in [one for one, at in forgotten.items() if now - at >= PLANS_SECONDS]:
            del forgotten[gone]
        forgotten[server] = now

    return setup


SERVER_PROCESS: Final = "SELECT pg_backend_pid()"


async def is_behind_pooler(connection: Any) -> bool:
    """Say whether the server that answers is another one than the connection was made to."""
    async with connection.transaction():
        return bool(await connection.fetchval(SERVER_PROCESS) != connection.get_server_pid())
