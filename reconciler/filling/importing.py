# SPDX-License-Identifier: Apache-2.0
"""Brings past sends in from a file: JSON lines or CSV, batch by batch, through `send_adopt_all`."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from typing import Any, BinaryIO, Final, Literal

import asyncpg

from reconciler.database.connection import BAD_DATA, TRY_AGAIN, read_namespace
from reconciler.errors import UserError
from reconciler.filling.common import filling
from webhooks.event import storable, wire_key

BATCH: Final = 1000
MOST_NAMED: Final = 20
"""Bad lines that are named; the others are counted."""

OPTIONS: Final = (
    *("claimed_at", "submit_by", "answered_at", "message_id", "failed", "heard_at", "heard_kind", "recipient"),
    *("stamped", "message_class", "campaign", "source", "fingerprint", "known_message_id"),
)
"""What a line may say besides `key` and `feed`: the options of the SQL function `send_adopt`."""

_TIMES: Final = ("claimed_at", "submit_by", "answered_at", "heard_at")
_TIME: Final = re.compile(
    r"[0-9]{4}(-[0-9]{2}){2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)? ?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?"
)
"""As the SQL functions take it. Looked at here too: a whole file of other times would be halved down to its lines."""

Format = Literal["auto", "jsonl", "csv"]
Told = Callable[[int], None]
"""Is told how many bytes of the file were read so far."""


@dataclass(frozen=True, slots=True)
class Send:
    """One past send, as a line gives it."""

    line: int
    key: str
    feed: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that is no send. `lines` is how many lines of the file it takes."""

    line: int
    why: str
    lines: int = 1


@dataclass
class Imported:
    """What an import did."""

    sends: int = 0
    """Lines that were understood."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of `send_adopt`: adopted, exists, key_reused, beyond_memory."""
    unheard: int = 0
    """Answered sends without `heard_at`."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """The first bad lines, by number, and what is wrong with them."""
    bad_lines: int = 0

    def note_bad(self, bad: Bad) -> None:
        """Count what is passed over."""
        self.bad_lines += bad.lines
        if len(self.bad) < MOST_NAMED:
            self.bad.append((bad.line, bad.why))


# Reading


class _Text:
    """The lines of a file, and how many of them and of its bytes were read so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.lines = self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for raw in self._file:
            self.lines += 1
            self.bytes += len(raw)
            yield raw.decode("utf-8-sig" if self.lines == 1 else "utf-8", "surrogateescape")


def read_sends(
    file: BinaryIO, form: Format, feed: str | None, feeds: Collection[str], told: Told
) -> Iterator[Send | Bad]:
    """Yield what the lines of a file say. Blank ones are passed over.

    `auto` takes JSON lines for what begins with a bracket, and CSV for the rest. `feed` is the feed of lines that name
    none, `feeds` are those that there are. Raises UserError for a CSV header that names what is no option.
    """
    text = _Text(file)
    lines = iter(text)
    first = next((line for line in lines if line.strip()), "")
    if form == "auto":
        form = "jsonl" if first.lstrip().startswith(("{", "[")) else "csv"
    found = _csv_fields(text, first, lines) if form == "csv" else _json_fields(text, chain([first], lines))
    for line, said in found:
        told(text.bytes)
        yield said if isinstance(said, Bad) else _send(line, said, feed, feeds)


def _json_fields(text: _Text, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        yield text.lines, said if isinstance(said, dict) else Bad(text.lines, "is no JSON object")


def _csv_fields(text: _Text, header: str, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
    if not header:
        return
    names = _header_names(header)
    rows = csv.reader(lines, strict=True)
    while True:
        line = text.lines + 1
        try:
            cells = next(rows, None)
        except csv.Error as error:
            yield line, Bad(line, f"is no CSV ({error})", text.lines - line + 1)
            continue
        if cells is None:
            return
        if cells and len(cells) != len(names):
            yield line, Bad(line, f"has {len(cells)} cells, and the header {len(names)}")
        elif any(cells):
            yield line, {name: cell for name, cell in zip(names, cells, strict=True) if cell}


def _header_names(header: str) -> list[str]:
    try:
        names = [name.strip() for name in next(csv.reader([header]))]
    except csv.Error as error:
        raise UserError(f"its first line is no CSV header ({error})") from None
    known = ("key", "feed", *OPTIONS)
    wrong = [name for name in names if name not in known] + [name for name, n in Counter(names).items() if n > 1]
    if "key" not in names or wrong:
        what = f"names {wrong[0]!r}, which is no column or there twice" if wrong else "names no column key"
        raise UserError(f"the CSV header {what}; there are {', '.join(known)}")
    return names


def _send(line: int, said: dict[str, Any], feed: str | None, feeds: Collection[str]) -> Send | Bad:
    options = {name: value for name, value in said.items() if name not in ("key", "feed")}
    key, feed = said.get("key"), said.get("feed") or feed
    if not isinstance(key, str):
        return Bad(line, "has no key, which is text")
    if feed is None:
        return Bad(line, "names no feed: give --feed")
    if not isinstance(feed, str) or feed not in feeds:
        return Bad(line, f"is of the feed {feed}, which is not configured")
    if unknown := sorted(options.keys() - set(OPTIONS)):
        return Bad(line, f"gives {unknown[0]}, which is no option")
    if any(isinstance(value, str) and storable(value) != value for value in said.values()):
        return Bad(line, "is not UTF-8, or holds a zero byte")
    given = {name: options[name] for name in _TIMES if options.get(name) is not None}
    if "claimed_at" not in given:
        return Bad(line, "claimed_at is missing: when it was submitted")
    if wrong := next((name for name, value in given.items() if not _TIME.fullmatch(str(value))), None):
        return Bad(line, f"{wrong} is no time: write 2026-11-02T08:00:00Z")
    return Send(line, key, feed, options)


# Storing

ADOPT: Final = """
SELECT outcome, count(*) AS n FROM send_adopt_all($1::text[], $2::text[], $3::text[]::jsonb[]) GROUP BY outcome
"""


async def _adopt(connection: Any, sends: list[Send], *, keep: bool) -> Counter[str]:
    """Bring sends in, all or none, and return how many had which outcome. Without `keep` it is taken back again."""
    columns = [s.key for s in sends], [s.feed for s in sends], [json.dumps(s.options) for s in sends]
    if keep:
        rows = await connection.fetch(ADOPT, *columns)
    else:
        transaction = connection.transaction()
        await transaction.start()
        try:
            rows = await connection.fetch(ADOPT, *columns)
        finally:
            await transaction.rollback()
    return Counter({row["outcome"]: row["n"] for row in rows})


async def _adopt_batch(connection: Any, sends: list[Send], done: Imported, *, keep: bool) -> list[Bad]:
    """Bring sends in and return those that the database refuses: halving finds them, and they fail no other."""
    try:
        try:
            outcomes = await _adopt(connection, sends, keep=keep)
        except TRY_AGAIN:
            outcomes = await _adopt(connection, sends, keep=keep)
    except BAD_DATA as error:
        if len(sends) == 1:
            return [Bad(sends[0].line, _words(error))]
        middle = len(sends) // 2
        first = await _adopt_batch(connection, sends[:middle], done, keep=keep)
        return first + await _adopt_batch(connection, sends[middle:], done, keep=keep)
    done.sends += len(sends)
    done.outcomes += outcomes
    done.unheard += sum(bool(s.options.get("answered_at") and not s.options.get("heard_at")) for s in sends)
    return []


def _words(error: Exception) -> str:
    """Return the database's words in one line, its hint included."""
    hint = getattr(error, "hint", None)
    text = str(error.args[0]) if error.args else type(error).__name__
    return " ".join(f"{text} ({hint})".split()) if hint else " ".join(text.split())


async def import_sends(pool: asyncpg.Pool, found: Iterable[Send | Bad], *, dry_run: bool = False) -> Imported:
    """Bring past sends in, a batch at a time, sorted by wire key, and return what was done.

    What is bad is counted and named and stops nothing; what was brought in before is left as it is, so that a run that
    was broken off is simply run again. `dry_run` takes each batch back. While it runs the silence of their feeds
    releases nothing. Raises UserError where the file's form is wrong, and errors of the database as they come.
    """
    done = Imported()
    namespace = await read_namespace(pool)
    feeds: set[str] = set()
    entries = iter(found)
    async with AsyncExitStack() as stack:
        while batch := list(islice(entries, BATCH)):
            bad = [entry for entry in batch if isinstance(entry, Bad)]
            sends = [entry for entry in batch if isinstance(entry, Send)]
            for feed in sorted({send.feed for send in sends} - feeds if not dry_run else ()):
                feeds.add(feed)
                await stack.enter_async_context(filling(pool, feed))
            if sends:
                sends.sort(key=lambda send: wire_key(send.key, namespace))
                async with pool.acquire() as connection:
                    bad += await _adopt_batch(connection, sends, done, keep=not dry_run)
            for entry in sorted(bad, key=attrgetter("line")):
                done.note_bad(entry)
    return done
