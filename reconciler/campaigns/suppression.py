# SPDX-License-Identifier: Apache-2.0
"""The suppression list: whom no campaign writes to, whatever the case of the address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final

import asyncpg
import msgspec

from reconciler.campaigns.file import Bad, Line, address_problem
from reconciler.errors import UserError
from reconciler.keys import normal_recipient

BATCH: Final = 1000
MOST_NAMED: Final = 20


@dataclass
class Imported:
    """What an import did."""

    added: int = 0
    known: int = 0
    """Suppressed before, or twice in the file."""
    bad_lines: int = 0
    bad: list[Bad] = field(default_factory=list)
    """The first bad lines, by number, and what is wrong with them."""

    def note_bad(self, bad: Bad) -> None:
        """Count what is passed over."""
        self.bad_lines += 1
        if len(self.bad) < MOST_NAMED:
            self.bad.append(bad)


ADD: Final = """
INSERT INTO suppression (recipient_key, reason, source)
SELECT DISTINCT ON (1) lower(coalesce(recipient_hash(s.address, i.recipient_salt), s.address)), s.reason, $3
FROM unnest($1::text[], $2::text[]) AS s(address, reason), installation i
ORDER BY 1
ON CONFLICT (recipient_key) DO NOTHING RETURNING recipient_key
"""


async def import_lines(pool: asyncpg.Pool, lines: Iterable[Line | Bad], source: str) -> Imported:
    """Suppress the addresses of a file, a batch at a time; a line may give a `reason`, too.

    Who is on the list already stays there as he is. Bad lines are counted, named by number and stop nothing.
    """
    done = Imported()
    entries = iter(lines)
    while batch := list(islice(entries, BATCH)):
        found = [entry if isinstance(entry, Bad) else _checked(entry) for entry in batch]
        for entry in found:
            if isinstance(entry, Bad):
                done.note_bad(entry)
        good = [entry for entry in found if not isinstance(entry, Bad)]
        added = len(await pool.fetch(ADD, [key for key, _ in good], [reason for _, reason in good], source))
        done.added += added
        done.known += len(good) - added
    return done


def _checked(said: Line) -> tuple[str, str | None] | Bad:
    line, address, rest = said
    if problem := address_problem(address):
        return Bad(line, problem)
    reason = msgspec.json.decode(rest).get("reason") or None if rest else None
    if reason is not None and (not isinstance(reason, str) or "\0" in reason):
        return Bad(line, "gives a reason that is no text")
    return normal_recipient(address), reason


async def add(pool: asyncpg.Pool, addresses: Iterable[str], reason: str | None, source: str) -> int:
    """Suppress addresses, and return how many of them were not before. Raises UserError for what is no address."""
    wanted = [_key(address) for address in addresses]
    return len(await pool.fetch(ADD, wanted, [reason] * len(wanted), source))


REMOVE: Final = """
DELETE FROM suppression
WHERE recipient_key IN (SELECT lower(coalesce(recipient_hash(address, i.recipient_salt), address))
                        FROM unnest($1::text[]) AS address, installation i)
RETURNING recipient_key
"""


async def remove(pool: asyncpg.Pool, addresses: Iterable[str]) -> int:
    """Take addresses from the list, and return how many were on it. Raises UserError for what is no address.

    A campaign that left them out gets them by loading its file again.
    """
    return len(await pool.fetch(REMOVE, [_key(address) for address in addresses]))


def _key(address: str) -> str:
    if problem := address_problem(address):
        raise UserError(f"an argument {problem}")
    return normal_recipient(address)


@dataclass(frozen=True, slots=True)
class Suppressed:
    """Somebody on the list."""

    recipient_key: str = field(repr=False)
    """The address, or where recipients are stored hashed, its hash."""
    reason: str | None
    since: datetime
    source: str


LIST: Final = """
SELECT recipient_key, reason, since, source FROM suppression
WHERE recipient_key > $1 ORDER BY recipient_key LIMIT $2
"""
COUNTS: Final = "SELECT source, count(*) AS n FROM suppression GROUP BY source"


async def listed(pool: asyncpg.Pool, most: int, after: str = "") -> list[Suppressed]:
    """Return so many entries of the list, in the order of their addresses, from behind one on."""
    return [Suppressed(**row) for row in await pool.fetch(LIST, after, most)]


async def counts(pool: asyncpg.Pool) -> Counter[str]:
    """Return how many are on the list, by what put them there."""
    rows: list[Any] = await pool.fetch(COUNTS)
    return Counter({row["source"]: row["n"] for row in rows})
