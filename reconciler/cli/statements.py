# SPDX-License-Identifier: Apache-2.0
"""Runs SQL that a person typed: statements one by one, outside of any transaction that they do not begin themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

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
    at = 0
    while found := re.compile(r"\s+|--[^\n]*|/\*").match(statement, at):
        at = _end_of_comment(statement, found.end()) if found[0] == "/*" else found.end()
    return at < len(statement)


async def run(connection: asyncpg.Connection, statement: str) -> Result:
    """Run one statement in the protocol that lets a procedure commit, and return what it brought."""
    prepared = await connection.prepare(statement)
    rows = await prepared.fetch()
    columns = [attribute.name for attribute in prepared.get_attributes()]
    return Result(prepared.get_statusmsg() or "", columns, [list(row.values()) for row in rows])
