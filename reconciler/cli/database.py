# SPDX-License-Identifier: Apache-2.0
"""The commands about the database itself: `migrate` and `psql`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import click

from reconciler.cli.root import NEEDS_A_PERSON, App, Command, Failed, json_option, sql_text
from reconciler.cli.text import say, say_json, say_table
from reconciler.errors import NO_DATABASE_URL, DatabaseUnavailable, UserError, describe_connection_error

if TYPE_CHECKING:
    import asyncpg

    from reconciler.cli.statements import Result
    from reconciler.database.grants import Kind

SHARDS: Final = 8
"""Parts of each table, where no other number is given: enough for eight nodes. What is asked of all costs one each."""


@click.command(cls=Command, epilog="Example: reconciler migrate --check || reconciler migrate")
@click.option("--check", is_flag=True, help="Only say which files are missing; exit with 3 if any is.")
@click.option("--namespace", metavar="NAME", help="Name this installation, before its first send.")
@click.option("--hash-recipients", is_flag=True, help="Store no addresses, from before its first send and event on.")
@click.option(
    "--citus", "shards", metavar="[SHARDS]", is_flag=False, flag_value=SHARDS, type=click.IntRange(1, 1024),
    help="Then distribute the tables over the nodes that this coordinator of Citus knows.",
)  # fmt: skip
@click.option(
    "--grant", "roles", metavar="KIND=ROLE", multiple=True, callback=lambda _context, _option, given: _roles(given),
    help="Then give a role what a receiver, reconciler, sender, middleware or reader needs here, and no more.",
)  # fmt: skip
@click.option("--grants", "only_print", is_flag=True, help="Print the statements of --grant, and do nothing.")
@json_option
@click.pass_obj
def migrate(
    app: App,
    check: bool,
    namespace: str | None,
    hash_recipients: bool,
    shards: int | None,
    roles: dict[str, list[Kind]],
    only_print: bool,
    as_json: bool,
) -> None:
    """Bring the database to this program's schema. Safe while everything runs.

    Two installations that share a provider account each need a namespace of their own, so that neither takes
    the other's events for its own.

    With --hash-recipients addresses are kept as salted hashes only, for good: providers that can only be asked by
    recipient can't be asked, campaigns' workers get no address, raw events are not kept (docs/retention.md).

    With --citus each table about sends is cut into shards by wire key (8, or as many as are given), before the first
    large load and for good; some commands are then off (docs/citus.md).

    With --grant each role gets what its kinds need here and no more (docs/roles.md). A role may have several kinds:
    name all of them in one call.
    """
    changes = {"--namespace": namespace is not None, "--hash-recipients": hash_recipients, "--citus": bool(shards)}
    _refuse_mix(changes | {"--grant": bool(roles), "--grants": only_print}, "--check" if check else None)
    _refuse_mix(changes, "--grants" if only_print else None)
    if only_print and not roles:
        raise click.UsageError("--grants prints the statements of --grant: name the roles, as in --grant sender=shop")
    app.configure_logs()
    if only_print:
        _say_grants(asyncio.run(_grant(app, roles, apply=False)), as_json=as_json)
        return
    names = asyncio.run(_migrate(app, check, namespace, hash_recipients, shards))
    granted = asyncio.run(_grant(app, roles)) if roles else []
    if as_json:
        say_json({"missing" if check else "applied": names} | ({"granted": granted} if roles else {}))
    else:
        for name in names:
            say(f"{'missing' if check else 'applied'}  {name}")
        if not names:
            say("the schema is up to date")
        if hash_recipients:
            say("recipients are stored hashed")
        if shards:
            say("the tables are distributed")
        for role, kinds in roles.items():
            say(f"granted  {role}: {', '.join(kinds)}")
    if check and names:
        sys.exit(NEEDS_A_PERSON)


def _roles(given: tuple[str, ...]) -> dict[str, list[Kind]]:
    from reconciler.database.grants import KINDS

    roles: dict[str, list[Kind]] = {}
    for text in given:
        name, parted, role = text.partition("=")
        kind = next((kind for kind in KINDS if kind == name), None)
        if not (kind and parted and role):
            raise click.BadParameter(f"{text!r} is no KIND=ROLE: a kind is {', '.join(KINDS)}")
        roles.setdefault(role, []).append(kind)
    return roles


def _refuse_mix(options: dict[str, bool], changes_nothing: str | None) -> None:
    if changes_nothing and (given := next((name for name, is_given in options.items() if is_given), None)):
        raise click.UsageError(f"{changes_nothing} changes nothing, {given} does: choose one")


def _say_grants(statements: list[str], *, as_json: bool) -> None:
    if as_json:
        say_json({"statements": statements})
    else:
        for statement in statements:
            say(f"{statement};")


async def _grant(app: App, roles: dict[str, list[Kind]], *, apply: bool = True) -> list[str]:
    from reconciler.database.grants import grant

    async with app.open_database(check_schema=False, create=False) as database:
        return await grant(app.settings.database.direct_url or database.dsn, roles, apply=apply)


async def _migrate(
    app: App, check: bool, namespace: str | None, hash_recipients: bool, shards: int | None
) -> list[str]:
    from reconciler.database import migrate as migrations

    async with app.open_database(check_schema=False, create=not check) as database:
        dsn = app.settings.database.direct_url or database.dsn
        if check:
            return await migrations.pending(dsn)
        return await migrations.migrate(dsn, namespace=namespace, hash_recipients=hash_recipients, shards=shards)


@click.command(cls=Command, epilog='Example: reconciler psql -c "SELECT state, count(*) FROM send_log GROUP BY 1"')
@click.option(
    "-c", "--command", "sql", metavar="SQL", callback=sql_text,
    help="Run these statements, each by itself, and print the results.",
)  # fmt: skip
@json_option
@click.pass_obj
def psql(app: App, sql: str | None, as_json: bool) -> None:
    """Open a prompt on the database, or run SQL. Works where no psql is installed, too.

    Statements of -c are not wrapped in a transaction: CALL send_claim_commit(...) works, and BEGIN is yours to say.
    """
    app.configure_logs()
    asyncio.run(_psql(app, sql, as_json))


async def _psql(app: App, sql: str | None, as_json: bool) -> None:
    async with app.open_database() as database:
        dsn = app.settings.database.direct_url or database.dsn
        program = shutil.which("psql")
        if sql is None and program and not as_json:
            _run_psql(program, dsn)
            return
        connection = await _connect(dsn)
        try:
            await (_read_and_run(connection, as_json) if sql is None else _run_all(connection, sql, as_json))
        finally:
            await connection.close(timeout=5)


async def _connect(dsn: str) -> asyncpg.Connection:
    import asyncpg

    try:
        connection = await asyncpg.connect(dsn, timeout=15, statement_cache_size=0)
    except (OSError, *NO_DATABASE_URL, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DatabaseUnavailable(describe_connection_error(dsn, error)) from error
    connection.add_log_listener(_say_notice)
    return connection


def _say_notice(_connection: object, message: Any) -> None:
    click.echo(f"{message.severity}: {message.message}", err=True)


async def _run_all(connection: asyncpg.Connection, sql: str, as_json: bool) -> None:
    import asyncpg

    from reconciler.cli.statements import run, split

    results: list[Result] = []
    statements = split(sql)
    for number, statement in enumerate(statements, 1):
        try:
            result = await run(connection, statement)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, UserError) as error:
            if as_json and results:
                say_json(results)
            place = f" (statement {number} of {len(statements)})" if len(statements) > 1 else ""
            raise UserError(" ".join(str(error).split()) + place) from error
        results.append(result)
        if not as_json:
            _say_result(result)
    if as_json:
        say_json(results)


def _say_result(result: Result) -> None:
    if result.columns:
        say_table(result.columns, [[row[i] for i in range(len(result.columns))] for row in result.rows])
    say(f"({len(result.rows)} row{'s' if len(result.rows) != 1 else ''})" if result.columns else result.status)


async def _read_and_run(connection: asyncpg.Connection, as_json: bool) -> None:
    """Read statements from standard input until its end, and run each that is complete."""
    from reconciler.cli.statements import is_complete

    terminal = sys.stdin.isatty()
    waiting = ""
    while line := _read_line(terminal, waiting):
        waiting += line
        if not waiting.strip() or not is_complete(waiting):
            continue
        text, waiting = waiting, ""
        try:
            await _run_all(connection, text, as_json)
        except UserError as error:
            if not terminal:
                raise
            click.echo(f"reconciler: {error}", err=True)
    if waiting.strip():
        await _run_all(connection, waiting, as_json)


def _read_line(terminal: bool, waiting: str) -> str:
    if terminal:
        click.echo("... " if waiting.strip() else "sql> ", nl=False, err=True)
    return sys.stdin.readline()


def _run_psql(program: str, dsn: str) -> None:
    """Run psql until it ends. The password goes by the environment: everybody can read arguments."""
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query))
    password = unquote(parts.password or "") or query.pop("password", "")
    user, at, host = parts.netloc.rpartition("@")
    place = parts._replace(netloc=user.partition(":")[0] + at + host, query=urlencode(query))
    environ = os.environ | ({"PGPASSWORD": password} if password else {})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is psql's: it cancels a query
    try:
        ended = subprocess.run([program, urlunsplit(place)], env=environ, check=False)  # noqa: S603 - what was asked for
    finally:
        signal.signal(signal.SIGINT, before)
    if ended.returncode:
        raise Failed(f"psql ended with status {ended.returncode}")
