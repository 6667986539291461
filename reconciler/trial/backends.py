# SPDX-License-Identifier: Apache-2.0
"""The server's side of a worker: who stands still in the middle of a statement, and what becomes of a dead client's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from reconciler.trial.outcome import NotTried

PATIENCE: Final = 20.0
"""Seconds that a condition is waited for."""

POLL: Final = 0.03


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Return the first true answer of a condition that is asked again and again. Raises NotTried without one."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not (answer := await condition()):  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(POLL)
            return answer
    except TimeoutError:
        raise NotTried(f"waited {PATIENCE:g} s in vain for {what}") from None


@asynccontextmanager
async def holding(pool: asyncpg.Pool, statement: str, *args: Any) -> AsyncIterator[int]:
    """Keep open a transaction in which this statement has run, and roll it back at the end; gives its process's id.

    Whoever wants what it has locked stands still in the middle of a statement.
    """
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        try:
            await connection.execute(statement, *args)
            yield connection.get_server_pid()
        finally:
            await transaction.rollback()


WAITER: Final = """
SELECT pid FROM pg_stat_activity
WHERE application_name = $1 AND wait_event_type = 'Lock' AND pg_blocking_pids(pid) @> ARRAY[$2::int]
"""


async def waiter(pool: asyncpg.Pool, application: str, holder: int) -> int:
    """Wait until one of an application's server processes waits for the holder, and return its id."""
    found: int = await until(
        lambda: pool.fetchval(WAITER, application, holder), "a statement that stands still half-way"
    )
    return found


END: Final = "SELECT pg_terminate_backend($1)"


async def cut(pool: asyncpg.Pool, pid: int) -> None:
    """End a server process, as an administrator or a fail-over does. Its client sees the connection break."""
    if not await pool.fetchval(END, pid):
        raise NotTried("the connection that was to be cut was not there any more")


END_ALL: Final = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1"


async def cut_all(pool: asyncpg.Pool, application: str) -> int:
    """End the server processes of an application; return how many those were."""
    n: int = await pool.fetchval(END_ALL, application)
    return n


LIVES: Final = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND application_name = $2)"


async def gone(pool: asyncpg.Pool, application: str, pid: int) -> None:
    """Wait until a server process whose client is dead has ended, whatever it still did."""

    async def ended() -> bool:
        return not await pool.fetchval(LIVES, pid, application)

    await until(ended, "the server to notice that its client is dead")
