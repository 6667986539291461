# SPDX-License-Identifier: Apache-2.0
"""Finds the commits in what a program says to PostgreSQL, and strikes at each of them once before and once after.

A commit point is what one transaction writes, by the words of its statements. *Before*: the request that would commit
has left the program and doesn't reach the server. *After*: the server has committed, and its answer doesn't reach the
program. No program can be struck at a commit between these two: it only sees the one or the other.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal, NamedTuple

Side = Literal["before", "after"]

WRITES = re.compile(
    r"\b(?:(INSERT INTO|DELETE FROM|CALL)\s+(\w+)|(?<!FOR )(?<!KEY )(?<!DO )UPDATE\s+(\w+)"
    r"|(?:SELECT|FROM)\s+((?:send|operator|outbox|campaign|provider_event_make|idempotency)_\w+)\()",
    re.IGNORECASE,
)
STARTUP = 8
"""Bytes of a startup message's length and version."""


class Point(NamedTuple):
    """What a transaction writes, and on which side of its commit we are."""

    what: str
    side: Side


def what(statement: str) -> str:
    """Return what a statement writes in a few words; empty where it only reads."""
    found = (
        f"{verb.split()[0].lower()} {name}" if verb else f"update {updated}" if updated else called
        for verb, name, updated, called in WRITES.findall(statement)
    )
    return ", ".join(dict.fromkeys(found))


class Frames:
    """Cuts a stream of the protocol into messages."""

    def __init__(self, *, startup: bool) -> None:
        self._data = b""
        self._startup = startup

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the type and the body of each message that is complete by now; the first of a client has no type."""
        self._data += data
        while True:
            typed = 0 if self._startup else 1
            if len(self._data) < typed + 4:
                return
            end = typed + int.from_bytes(self._data[typed : typed + 4])
            if len(self._data) < end:
                return
            message, self._data, self._startup = self._data[:end], self._data[end:], False
            yield message[:typed], message[typed + 4 :]


class Session:
    """One connection, as far as its commits go. Requests are not pipelined beyond a Sync; asyncpg's are not."""

    def __init__(self) -> None:
        self._requests, self._answers = Frames(startup=True), Frames(startup=False)
        self._prepared: dict[bytes, str] = {}
        self._bound = ""
        self._said: list[str] = []
        self._status = b"I"
        self._asked: str | None = None

    def request(self, data: bytes) -> str | None:
        """Return what the commit writes that these bytes ask for; None where they ask for none."""
        asked = None
        for kind, body in self._requests.feed(data):
            match kind:
                case b"P":
                    name, statement = body.split(b"\0", 2)[:2]
                    self._prepared[name] = statement.decode(errors="replace")
                case b"B":
                    self._bound = self._prepared.get(body.split(b"\0", 2)[1], "")
                case b"Q":
                    asked = self._ask(body[:-1].decode(errors="replace"))
                case b"S" if self._bound:
                    asked = self._ask(self._bound)
                    self._bound = ""
        return asked

    def answer(self, data: bytes) -> str | None:
        """Return what the commit wrote that these bytes tell of; None where they tell of none."""
        told = None
        for kind, body in self._answers.feed(data):
            if kind == b"E":
                self._asked = None
            elif kind == b"Z":
                self._status = body
                if body == b"I":
                    told, self._asked, self._said = self._asked, None, []
        return told

    def _ask(self, statement: str) -> str | None:
        word = statement.lstrip().partition(" ")[0].rstrip(";").upper()
        if word in {"BEGIN", "START"}:
            self._said = []
            return None
        if self._status == b"I" or word == "COMMIT":
            written = [*self._said, what(statement)]
            self._asked = "; ".join(dict.fromkeys(filter(None, written))) or None
            return self._asked
        self._said.append(what(statement))
        return None


class Points:
    """The commit points of a program."""

    def __init__(self) -> None:
        self.seen: set[Point] = set()
        self.struck: set[Point] = set()


class Trap:
    """Strikes at a commit point that was not struck yet, as soon as one comes by; for all connections of a process."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.strike: Callable[[], Awaitable[None]] | None = None
        """The damage to do, once. What was to go on over the connection is lost. None: only look."""

    def tap(self) -> Tapped:
        """Return what watches one more connection."""
        return Tapped(self)

    async def springs(self, what: str | None, side: Side) -> bool:
        """Say whether this was a commit point to be struck; by then it was."""
        if what is None:
            return False
        point = Point(what, side)
        self.points.seen.add(point)
        if self.strike is None or point in self.points.struck:
            return False
        self.points.struck.add(point)
        strike, self.strike = self.strike, None
        await strike()
        return True


class Tapped:
    """A trap's look into one connection."""

    def __init__(self, trap: Trap) -> None:
        self._trap, self._session = trap, Session()

    async def request(self, data: bytes) -> bool:
        """As `fault_proxy.Tap`."""
        return not await self._trap.springs(self._session.request(data), "before")

    async def answer(self, data: bytes) -> bool:
        """As `fault_proxy.Tap`."""
        return not await self._trap.springs(self._session.answer(data), "after")
