# SPDX-License-Identifier: Apache-2.0
"""What all commands share: settings, the database, exit statuses, and errors as one line.

Exit statuses: 0 done; 1 failed, with one clear line on stderr; 2 wrong usage; 3 a `--check` found something that needs
a person; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NoReturn, TypeVar

import click

from reconciler.cli.text import printable
from reconciler.errors import OTHER_SCHEMA, UserError

if TYPE_CHECKING:
    import asyncpg

    from reconciler.composition import Database
    from reconciler.configuration.settings import Settings
    from webhooks.database import BoundedPool
    from webhooks.provider import Feed

T = TypeVar("T")

NEEDS_A_PERSON: Final = 3
INTERRUPTED: Final = 130
POOL_SIZE: Final = 2
LOOKED_FOR: Final = "(looked for ./reconciler.toml)"
NO_FILE: Final = f"no settings file {LOOKED_FOR}"


class Failed(click.ClickException):
    """The command failed: its text goes to stderr, and the exit status is 1."""

    def show(self, file: Any = None) -> None:
        """Print the text, a line a problem."""
        for line in self.message.split("\n"):
            click.echo(printable(f"reconciler: {line}"), file=file, err=file is None)


class Interrupted(Failed):
    """Ctrl-C: the exit status is the shell's own for it."""

    exit_code = INTERRUPTED


class App:
    """What a command is called with: the settings, and the database that they name."""

    def __init__(self) -> None:
        self.config: Path | None = None

    @cached_property
    def settings(self) -> Settings:
        """The settings of the file and the environment. Raises ConfigError."""
        return self.read_settings()

    def read_settings(self) -> Settings:
        """Read the settings as they are written now. Raises ConfigError."""
        from reconciler.configuration.settings import load_settings
        from webhooks.registry import PROVIDERS

        return load_settings(self.config, os.environ, PROVIDERS)

    def feed(self, name: str) -> Feed:
        """Return a configured feed. Raises UserError, with the one that may be meant."""
        from reconciler import composition

        feeds = composition.feeds(self.settings)
        if name not in feeds:
            raise unknown("feed", name, feeds, "no feeds are configured: see --config")
        return feeds[name]

    def configure_logs(self) -> None:
        """Send log lines to stderr, as the settings say."""
        from reconciler import logs

        logs.configure(self.settings.log.format, self.settings.log.level, sys.stderr, self.settings.secret_values())

    @property
    def settings_file(self) -> Path | None:
        """The file that the settings come from, None where there is none."""
        from reconciler.configuration.sources import DEFAULT_FILE, FILE_VARIABLE

        named = self.config or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
        return named or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)

    @property
    def data_dir(self) -> Path:
        """Where the embedded database is, or would be."""
        return self.settings.database.data_dir.resolve()

    def is_unconfigured(self) -> bool:
        """Say whether nothing names a database, so that the folder from which a command is run may be the wrong one."""
        return self.settings_file is None and not {"url", "data_dir"} & self.settings.database.model_fields_set

    @asynccontextmanager
    async def open_database(self, *, check_schema: bool = True, create: bool = True) -> AsyncIterator[Database]:
        """Give the database of the settings: the given one, or the embedded one, started where need be.

        Another directory silently means another database, hence the line where nothing names one. Without `create` an
        embedded one that isn't there is refused.
        """
        from reconciler import composition

        if not create and not self.settings.database.url and not composition.embedded_exists(self.settings):
            lacking = f" and {NO_FILE}" if self.settings_file is None else ""
            raise UserError(
                f"there is no embedded database in {self.data_dir}{lacking}: name the settings file with --config, or "
                "start reconciler serve, which makes one"
            )
        if self.is_unconfigured():
            click.echo(f"reconciler: {NO_FILE}: using the embedded database in {self.data_dir}", err=True)
        async with composition.open_database(self.settings, check_schema=check_schema) as database:
            yield database

    def with_database(self, work: Callable[[BoundedPool], Awaitable[T]], *, create: bool = True) -> T:
        """Run work on the database of the settings. See `open_database`."""
        from reconciler import composition

        self.configure_logs()

        async def run() -> T:
            async with self.open_database(create=create) as database:
                pool = await composition.open_pool(database.dsn, size=POOL_SIZE, application=f"reconciler {_command()}")
                try:
                    return await work(pool)
                finally:
                    await _close(pool)

        return asyncio.run(run())

    async def check_feed(self, connection: asyncpg.Connection | asyncpg.pool.PoolConnectionProxy, feed: str) -> None:
        """Raise UserError unless the feed is configured, or sends that are undecided name it."""
        if feed not in self.settings.feeds and not await connection.fetchval(SENDS_NAME_FEED, feed):
            raise unknown("feed", feed, self.settings.feeds, "no feeds are configured: see --config")


SENDS_NAME_FEED: Final = """
SELECT EXISTS (SELECT FROM send_log
               WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL AND feed = $1)
"""


def _command() -> str:
    context = click.get_current_context(silent=True)
    return (context and context.info_name) or "command"


async def _close(pool: asyncpg.Pool) -> None:
    try:
        await asyncio.wait_for(pool.close(), 5)
    except (TimeoutError, OSError):
        pool.terminate()


def unknown(what: str, name: str, known: Any, none: str) -> UserError:
    """Return the error for a name that nothing has, with the one that may be meant."""
    close = get_close_matches(name, list(known), n=1)
    if close:
        return UserError(f'no {what} is named "{name}": did you mean "{close[0]}"?')
    return UserError(f'no {what} is named "{name}": there is {", ".join(sorted(known))}' if known else none)


def operator() -> str:
    """Return who runs this command, for the notes that it leaves: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def size_of(file: BinaryIO) -> int:
    """Return a file's size in bytes, 0 for what has none: a pipe, a terminal."""
    try:
        found = os.fstat(file.fileno())
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    """Turn everything that a person can put right into one line, whatever library found it."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    except UserError as error:
        raise Failed(str(error)) from None
    except TimeoutError:
        raise Failed("the database did not answer in time") from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise Failed(f"{place}{error.strerror or error}") from None
    except Exception as error:
        _explain_database_error(error)
        _explain_api_error(error)
        raise


def _explain_database_error(error: Exception) -> None:
    """Raise Failed for an error of the database; return where it is none."""
    asyncpg = sys.modules.get("asyncpg")  # not imported: no error of it
    if asyncpg is None:
        return
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.UndefinedFunctionError | asyncpg.UndefinedColumnError):
        _fail(OTHER_SCHEMA.format(error))
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        _fail(f"the database's account may not do this: {error}")
    if isinstance(error, asyncpg.PostgresError):
        _fail(f"the database says: {error}")
    if isinstance(error, asyncpg.InterfaceError):
        _fail(f"the connection to the database broke: {error}")


def _explain_api_error(error: Exception) -> None:
    """Raise Failed for what a provider's API did; return for anything else."""
    asking = sys.modules.get("webhooks.asking")
    if asking is not None and isinstance(error, asking.ApiError):
        _fail(str(error))


def _fail(text: str) -> NoReturn:
    raise Failed(" ".join(text.split())) from None


def _use_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    app = context.ensure_object(App)
    if path is not None:
        app.config = path


def _config_option() -> click.Option:
    return click.Option(
        ["--config"],
        metavar="FILE",
        type=click.Path(path_type=Path),
        expose_value=False,
        is_eager=True,
        callback=_use_config,
        help="The settings file. Default: RECONCILER_CONFIG, else reconciler.toml where it exists.",
    )


class Command(click.Command):
    """A command that takes `--config`, before or after its name."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.params.append(_config_option())


class Root(click.Group):
    """The program: a group whose commands keep the order in which they were added."""

    command_class = Command

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.params.append(_config_option())

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands, the most used ones first."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what a person can put right ends it with one line."""
        with _errors_as_lines():
            return super().invoke(ctx)


STATUSES: Final = (
    "Exit status: 0 done; 1 failed, with the reason on stderr; 2 wrong usage; 3 a --check found something that needs a "
    "person; 130 interrupted."
)


@click.group(
    cls=Root, epilog=STATUSES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="esp-reconciler", prog_name="reconciler")
def cli() -> None:
    """Turn ambiguous e-mail sends into verdicts: sent, failed, or released for retry."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def key_text(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Refuse keys that no send can have: empty ones, and such as are not UTF-8."""
    for key in value if isinstance(value, tuple) else [value] if value is not None else []:
        _refuse_unreadable("a key", key)
        if not key:
            raise click.BadParameter("a key is not empty")
    return value


def feed_text(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty name, most likely a variable that is not set: it must never come to mean all feeds."""
    if value is not None:
        _refuse_unreadable("a feed's name", value)
        if not value:
            raise click.BadParameter("a feed's name is not empty; leave out --feed to mean all")
    return value


feed_option = click.option("--feed", metavar="FEED", callback=feed_text, help="Only this feed. Default: all.")


def reason_text(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Refuse a blank reason: it is what the next person reads."""
    _refuse_unreadable("a reason", value)
    if not value.strip():
        raise click.BadParameter("say why")
    return value.strip()


def sql_text(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse SQL that can't be sent."""
    _refuse_unreadable("SQL", value or "")
    return value


def _refuse_unreadable(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{what} is UTF-8 text") from None
