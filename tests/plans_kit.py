# SPDX-License-Identifier: Apache-2.0
"""Keeps the plan of every statement that a connection runs, those inside of functions too, and says what each read.

The server's own auto_explain tells, so that what is held is what the product runs: its functions, its arguments, its
prepared statements.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import asyncpg

ROOT: Final = Path(__file__).parent.parent

FEW_PAGES: Final = 128
"""A table that fits into so many may be read from end to end; a BRIN index tells no smaller parts of it apart."""

CUSTOM, GENERIC = "force_custom_plan", "force_generic_plan"
"""A statement that is kept prepared comes to either: planned for its arguments each time, or once for all."""


@cache
def constants() -> Mapping[str, str]:
    """The product's texts of SQL by module and name: `passes.ledger.TAKE_DUE`, `webhooks.writer.STORE_EVENTS`."""
    found = {}
    for file in sorted([*ROOT.glob("reconciler/**/*.py"), *ROOT.glob("webhooks/**/*.py")]):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("reconciler.")
        for name, text in _texts(ast.parse(file.read_text())):
            if any(word in text for word in ("SELECT", "INSERT", "UPDATE", "DELETE", "CALL ")):
                found[f"{module}.{name}"] = text
    return found


def _texts(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            name = target.id if isinstance(target, ast.Name) else ""
            if name.isupper() and isinstance(node.value.value, str):
                yield name, node.value.value


CATALOG: Final = """
SELECT c.relname AS name, coalesce(p.relname, c.relname) AS stands_for,
       pg_relation_size(coalesce(i.indrelid, c.oid)) / current_setting('block_size')::int AS pages
FROM pg_class c LEFT JOIN pg_index i ON i.indexrelid = c.oid
LEFT JOIN pg_inherits h ON h.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = h.inhparent
WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'i')
"""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What the tables and indexes of a database stand for (partitions for their parent), and how large tables are."""

    stands_for: Mapping[str, str]
    pages: Mapping[str, int]

    def is_large(self, name: str) -> bool:
        """Say whether a table, or an index's table, is one of which no more than a part may be read."""
        return self.pages.get(name, 0) > FEW_PAGES


@dataclass(slots=True)
class Reading:
    """What one run of a statement read of large tables, with what was run inside of it."""

    statement: str
    rows: float = 0
    """Those that a filter then took away included."""
    pages: int = 0
    """Of anything, counted each time that it was looked at."""
    indexes: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    """Tables that the plan reads from end to end though less than half of it is asked for. (In the first days of a
    month the newest partition is hardly more than the last day.)"""
    scans: list[str] = field(default_factory=list)
    """For people."""

    def add(self, plan: dict[str, Any], catalog: Catalog) -> None:
        """Add what a plan that was run says."""
        for node in nodes(plan):
            table, index = node.get("Relation Name", ""), node.get("Index Name", "")
            if catalog.is_large(index):
                self.indexes.add(catalog.stands_for[index])
            if node["Node Type"].endswith("Scan") and catalog.is_large(table):
                rows = rows_of(node)
                self.rows += rows
                self.scans.append(f"{node['Node Type']} on {table} {index}: {rows:.0f} rows")
                if node["Node Type"] == "Seq Scan" and rows > 2 * node["Actual Rows"] * node["Actual Loops"]:
                    self.whole.add(catalog.stands_for[table])
        self.pages += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a node of a plan and all below it."""
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def rows_of(node: dict[str, Any]) -> float:
    """What a node saw. PostgreSQL tells averages over its loops, in whole numbers of what was taken away."""
    names = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    seen: float = sum(node.get(name, 0) for name in names) * node["Actual Loops"]
    return seen


SETTINGS: Final = """
LOAD 'auto_explain';
SET auto_explain.log_min_duration = 0;
SET auto_explain.log_analyze = on;
SET auto_explain.log_timing = off;
SET auto_explain.log_buffers = on;
SET auto_explain.log_nested_statements = on;
SET auto_explain.log_format = json;
SET auto_explain.log_level = notice;
SET jit = off;
SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'auto_explain.log_parameter_max_length';
"""


class Desk:
    """A connection, and what its statements read, by their names. `names` are those of texts."""

    def __init__(self, connection: asyncpg.Connection, catalog: Catalog, names: Mapping[str, str]) -> None:
        self.connection = connection
        self.readings: defaultdict[str, list[Reading]] = defaultdict(list)
        self._catalog = catalog
        self._names = names
        self._inside: list[dict[str, Any]] = []

    def note(self, _connection: object, message: asyncpg.PostgresLogMessage) -> None:
        """Take a notice of auto_explain: what runs inside of a statement ends, and is told, before it."""
        if not message.message.startswith("duration:"):
            return
        told = json.loads(message.message[message.message.index("{") :])
        self._inside.append(told["Plan"])
        if name := self._names.get(told["Query Text"]):
            reading = Reading(name)
            for plan in self._inside:
                reading.add(plan, self._catalog)
            self.readings[name].append(reading)
            self._inside.clear()


@asynccontextmanager
async def watched(dsn: str, mode: str, more: Mapping[str, str]) -> AsyncIterator[Desk]:
    """Watch the product's statements, and `more` texts by their names; what they write is rolled back in the end."""
    names = {text: name for name, text in [*reversed(constants().items()), *more.items()]}
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch(CATALOG)
        catalog = Catalog({r["name"]: r["stands_for"] for r in rows}, {r["name"]: r["pages"] for r in rows})
        desk = Desk(connection, catalog, names)
        await connection.execute(SETTINGS)
        await connection.execute("SELECT set_config('plan_cache_mode', $1, false)", mode)
        connection.add_log_listener(desk.note)
        transaction = connection.transaction(isolation="read_committed")
        await transaction.start()
        yield desk
        await transaction.rollback()
        connection.remove_log_listener(desk.note)
    finally:
        await connection.close()
