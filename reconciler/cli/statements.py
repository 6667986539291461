# SPDX-License-Identifier: Apache-2.0
"""Runs SQL that a person typed: statements one by one, outside of any transaction that they do not begin themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from reconciler.errors import UserError

# A quote or comment that never ends runs to the end of the text, and the server says what is wrong with it.
_TOKEN: Final = re.compile(
    r"""
      (?<![\w$]) [eE] ' (?: \\. | '' | [^'\\] )* (?: ' | \Z )
    | ' (?: '' | [^'] )* (?: ' | \Z )
    | " (?: "" | [^"] )* (?: " | \Z )
    | (?<![\w$]) \$ (?P<tag> (?: [^\W\d] \w* )? ) \$ .*? (?: \$ (?P=tag) \$ | \Z )
    | -- [^\n]*
    | /\*
    | ;
    """,
    re.VERBOSE | re.DOTALL,
)
_COPY: Final = re.compile(r"copy\b.*\b(from\s+stdin|to\s+stdout)\b", re.IGNORECASE | re.DOTALL)
_BLANK: Final = re.compile(r"\s+|--[^\n]*|/\*")
_UNSENDABLE: Final = re.compile("[\0\ud800-\udfff]")
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")


@dataclass(frozen=True, slots=True)
class Result:
    """What one statement brought. Without columns it brought no rows, and its status says what it did."""

    status: str
    columns: list[str]
    rows: list[list[Any]]


def split(text: str) -> list[str]:
    """Return the statements of a text, without their semicolons and without empty ones."""
    statements, _ = _cut(text)
    return [statement for statement in statements if _says_something(statement)]


def is_complete(text: str) -> bool:
    """Say whether a text ends with a semicolon that ends a statement, so that nothing more is to be waited for."""
    _, rest = _cut(text)
    return not _says_something(rest)


def _cut(text: str) -> tuple[list[str], str]:
    """Return the pieces between semicolons, and the last one again: what no semicolon ends."""
    pieces, begin, at = [], 0, 0
    while found := _TOKEN.search(text, at):
        at = found.end()
        if found[0] == ";":
            pieces.append(text[begin : found.start()].strip())
            begin = at
        elif found[0] == "/*":
            at = _end_of_comment(text, at)
    rest = text[begin:].strip()
    return [*pieces, rest], rest


def _end_of_comment(text: str, at: int) -> int:
    depth = 1
    while depth and (edge := _COMMENT_EDGE.search(text, at)):
        depth += 1 if edge[0] == "/*" else -1
        at = edge.end()
    return len(text) if depth else at


def _says_something(statement: str) -> bool:
    """Say whether there is more than blanks and comments."""
    return _begin(statement) < len(statement)


def _begin(statement: str) -> int:
    """Return where a statement begins, after blanks and comments."""
    at = 0
    while found := _BLANK.match(statement, at):
        at = _end_of_comment(statement, found.end()) if found[0] == "/*" else found.end()
    return at


def _refuse_for_psql(statement: str) -> None:
    if statement.startswith("\\"):
        command = statement.split(maxsplit=1)[0]
        raise UserError(f"{command} is a command of the psql program, not SQL: reconciler psql opens it")
    if _COPY.match(statement, _begin(statement)):  # it would wait for ever, or lose what it reads
        raise UserError("COPY from STDIN or to STDOUT is for the psql program: reconciler psql opens it")
    if _UNSENDABLE.search(statement):
        raise UserError("SQL is UTF-8 text without zero bytes")


async def run(connection: asyncpg.Connection, statement: str) -> Result:
    """Run one statement in the protocol that lets a procedure commit, and return what it brought.

    Raises UserError for what only the psql program can do, and for values that Python can't hold.
    """
    _refuse_for_psql(statement)
    prepared = await connection.prepare(statement)
    try:
        rows = await prepared.fetch()
    except (OverflowError, ValueError) as error:
        if isinstance(error, asyncpg.InterfaceError):
            raise
        raise UserError(f"a value can't be shown ({error}): cast it to text") from None
    columns = [attribute.name for attribute in prepared.get_attributes()]
    return Result(prepared.get_statusmsg() or "", columns, [list(row.values()) for row in rows])
