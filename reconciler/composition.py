# SPDX-License-Identifier: Apache-2.0
"""What the daemon and the command line make of the settings: policies, feeds, and a database to work on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import lru_cache
from importlib.util import find_spec
from typing import Final, NamedTuple

import asyncpg

from reconciler.configuration.facts import can_be_asked
from reconciler.configuration.settings import Settings
from reconciler.database import migrate
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.distributed.statements import connection_class
from reconciler.errors import NO_DATABASE_URL, DatabaseUnavailable, UserError, describe_connection_error
from reconciler.passes.histories import Histories
from reconciler.passes.reconcile import Policies
from reconciler.passes.second_witness import SecondWitness
from webhooks.archive import Archive
from webhooks.aws import s3_place
from webhooks.database import ACQUIRE_SECONDS, BoundedPool, connect_pool
from webhooks.provider import Feed, Provider
from webhooks.registry import PROVIDERS


class Database(NamedTuple):
    """Where the tables are."""

    dsn: str
    embedded: EmbeddedPostgres | None
    """The server that keeps them, where it is ours: the one in `database.data_dir`, running while this is open."""


def policies(settings: Settings) -> Policies:
    """Return what a pass has to know of the settings."""

    def key_window(feed: str) -> timedelta | None:
        configured = settings.feeds.get(feed)
        return PROVIDERS[configured.provider].facts.same_key_window if configured else None

    every = [
        settings.rules,
        *(settings.rule_settings_for(feed, "") for feed in settings.feeds),
        *(settings.rule_settings_for("", name) for name in settings.classes),
    ]
    # One window serves all rows: the longest one that somebody asked for loses nobody's late evidence.
    askable = {name: feed for name, feed in feeds(settings).items() if can_be_asked(settings.feeds[name])}
    rules_for = lru_cache(maxsize=10_000)(settings.rules_for)  # asked for each row
    return Policies(
        rules_for,
        key_window,
        late_window=max(rules.late_window for rules in every),
        histories=Histories(rules_for, settings.waits_for_delivery),
        limit_for=settings.limit_for,
        live=settings.live(),
        second_witness=SecondWitness(askable, settings.look_up_budget_for),
    )


def feeds(settings: Settings) -> dict[str, Feed]:
    """Return every configured feed as the receiver and its provider's file need it."""
    return {
        name: settings.webhook_feed(name, PROVIDERS[feed.provider].facts.tolerance)
        for name, feed in settings.feeds.items()
    }


def providers(settings: Settings) -> dict[str, Provider]:
    """Return the provider of every configured feed."""
    return {name: PROVIDERS[feed.provider] for name, feed in settings.feeds.items()}


def archive(settings: Settings) -> Archive | None:
    """Return the archive of raw deliveries, None where none is configured."""
    wanted = settings.archive
    if wanted.url is None:
        return None
    place = s3_place(wanted.url, wanted.region, wanted.endpoint_url)
    spool = wanted.spool or settings.database.data_dir / "archive"
    return Archive(spool, place, wanted.every, wanted.spool_max)


def embedded_exists(settings: Settings) -> bool:
    """Say whether the embedded database of the settings was made before."""
    return EmbeddedPostgres(settings.database.data_dir).data.exists()


@asynccontextmanager
async def open_database(settings: Settings, *, check_schema: bool = True) -> AsyncIterator[Database]:
    """Give the database of the settings: the one that `database.url` names, or else the embedded one, started.

    The embedded one is shared with every other program on this machine that names the same directory, and the last one
    stops it. It is migrated here; at a `database.url` a schema older than this program is refused. Neither happens
    where `check_schema` is False. Raises UserError.
    """
    if settings.database.url:
        if check_schema:
            await _refuse_old_schema(settings.database.direct_url or settings.database.url)
        yield Database(settings.database.url, None)
        return
    # Blocks the loop, on which nothing runs yet or any more; in a thread Ctrl-C would leave a start half-way.
    with EmbeddedPostgres(settings.database.data_dir) as embedded:
        if check_schema:
            await migrate.migrate(embedded.dsn())
        yield Database(embedded.dsn(), embedded)


async def _refuse_old_schema(dsn: str) -> None:
    if missing := await migrate.pending(dsn):
        if len(missing) == len(migrate.load()):
            raise UserError("the database has no schema yet: run reconciler migrate")
        raise UserError(
            f"the database's schema is older than this program ({len(missing)} of its migrations missing, first "
            f"{missing[0]}): run reconciler migrate"
        )


LOCK_SECONDS: Final = 10.0
"""How long a pass or a command waits for a row that somebody's open transaction holds, before it says so in a line."""


def require_aws(setting: str) -> None:
    """Raise UserError where a setting needs AWS's client and it is not installed."""
    if find_spec("aiobotocore") is None:
        raise UserError(f"{setting} needs AWS's client: install the extra aws of esp-reconciler")


async def close_pool(pool: BoundedPool) -> None:
    """Close a pool, in the hard way where the database doesn't answer soon."""
    try:
        await asyncio.wait_for(pool.close(), ACQUIRE_SECONDS)
    except (TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        pool.terminate()


async def open_pool(
    dsn: str, *, size: int, application: str, min_size: int = 1, lock_seconds: float | None = LOCK_SECONDS
) -> BoundedPool:
    """Return an open pool, to be closed by the caller. Raises DatabaseUnavailable, in one line without the password."""
    try:
        return await connect_pool(
            dsn,
            size=size,
            min_size=min_size,
            application=application,
            lock_seconds=lock_seconds,
            class_for=connection_class,
        )
    except (OSError, *NO_DATABASE_URL, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DatabaseUnavailable(describe_connection_error(dsn, error)) from error
