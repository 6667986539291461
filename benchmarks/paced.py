# SPDX-License-Identifier: Apache-2.0
"""The load generator that keeps a pace, a process of its own: posts are due at equal intervals, answered or not.

How long an answer took is counted from when its post was due, so that a server that stalls is seen to stall. It says
`ready`, waits for a line, posts, and prints what came of it: JSON. `begun` is by the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from benchmarks.load import read_answer, request_bytes
from benchmarks.payloads import deliveries, mailgun_about, mixed
from benchmarks.stand import say

MIXED: Final = "mixed"
CONNECTIONS: Final = 64
POSTS_OF_A_CONNECTION: Final = 100
"""So many posts go over a connection, then it is closed: providers come and go."""

TICK: Final = 0.002
"""Seconds between two looks at what is due."""


class _Post(NamedTuple):
    number: int
    due: float
    request: bytes


class _Pacer:
    """Hands out what is due to connections that are free; what finds none waits."""

    def __init__(self, requests: Iterable[bytes], rate: float) -> None:
        self.begun = 0.0
        self.answers: Counter[str] = Counter()
        self.took: list[tuple[int, float]] = []
        self._requests, self._rate = requests, rate
        self._waiting: deque[_Post] = deque()
        self._free: list[_Client] = []
        self._under_way = 0
        self.done = asyncio.Event()
        self.error: OSError | None = None

    def start(self) -> None:
        """Begin: the first post is due now."""
        self.begun = time.monotonic()
        self._posts = (
            _Post(number, self.begun + number / self._rate, request) for number, request in enumerate(self._requests)
        )
        self._next = next(self._posts, None)
        self.tick()

    def tick(self) -> None:
        """Post what is due, again and again."""
        now = time.monotonic()
        while self._next and self._next.due <= now:
            self._waiting.append(self._next)
            self._next = next(self._posts, None)
        while self._waiting and self._free:
            self._free.pop().post(self._taken())
        if self.error is None and (self._next or self._waiting or self._under_way):
            asyncio.get_running_loop().call_later(TICK, self.tick)
        else:
            self.done.set()

    def _taken(self) -> _Post:
        self._under_way += 1
        return self._waiting.popleft()

    def free(self, client: _Client) -> None:
        """Let a client post what waits, or rest."""
        if self._waiting:
            client.post(self._taken())
        else:
            self._free.append(client)

    def give_up(self, error: OSError) -> None:
        """End: nobody takes posts any more."""
        self.error = error
        self.done.set()

    def leave(self, client: _Client) -> None:
        """Post nothing more over a connection that is gone."""
        if client in self._free:
            self._free.remove(client)

    def answered(self, post: _Post, status: str) -> None:
        """Note an answer, or what was there instead of one."""
        self._under_way -= 1
        self.answers[status] += 1
        self.took.append((post.number, time.monotonic() - post.due))


class _Client(asyncio.Protocol):
    """One connection, made anew when it has had its share of posts or was closed."""

    def __init__(self, pacer: _Pacer, port: int) -> None:
        self._pacer, self._port = pacer, port
        self._post: _Post | None = None
        self._left = 0
        self._buffer = b""
        self._transport: Any = None
        self._connecting: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Connect, and be free."""
        self._left = POSTS_OF_A_CONNECTION
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        except OSError as error:
            self._pacer.give_up(error)
        else:
            self._pacer.free(self)

    def post(self, post: _Post) -> None:
        """Post."""
        self._post, self._buffer = post, b""
        self._left -= 1
        self._transport.write(post.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._post is None or (answer := read_answer(self._buffer)) is None:
            return
        self._pacer.answered(self._post, answer.status.decode())
        self._post = None
        if answer.last or not self._left:
            self._transport.close()
        else:
            self._pacer.free(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._post:
            self._pacer.answered(self._post, type(error).__name__)
            self._post = None
        self._pacer.leave(self)
        if not self._pacer.done.is_set():
            self._connecting = asyncio.create_task(self.connect())


async def _keep_pace(port: int, requests: Iterable[bytes], rate: float) -> dict[str, Any]:
    pacer = _Pacer(requests, rate)
    for _ in range(CONNECTIONS):
        await _Client(pacer, port).connect()
    used, begun = time.process_time(), time.monotonic()
    pacer.start()
    await pacer.done.wait()
    if pacer.error:
        raise SystemExit(f"nobody takes posts at port {port}: {pacer.error}")
    return {
        "begun": pacer.begun,
        "answers": pacer.answers,
        "took": [round(seconds, 6) for _, seconds in sorted(pacer.took)],
        "busy": (time.process_time() - used) / (time.monotonic() - begun),
    }


def _requests(given: argparse.Namespace) -> Iterable[bytes]:
    """Return the posts: all at once, but mixed ones signed as they are due, since hours of them fill no memory."""
    folder = Path(given.certificates)
    if given.kind == MIXED:
        return (request_bytes(one, f"/webhooks/{feed}") for feed, one in mixed(given.mark, given.count, folder))
    if given.keys:
        built = mailgun_about(given.keys.read_text().split(), given.mark)
    else:
        built = deliveries(given.kind, given.mark, given.count, folder)
    return [request_bytes(one, f"/webhooks/{given.kind}") for one in built]


def main() -> None:
    """Build, wait for the word, post."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paced")
    for name in ("kind", "mark", "certificates"):
        parser.add_argument(name)
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("rate", type=float, help="posts a second")
    parser.add_argument("--keys", type=Path, help="a file of wire keys, one a line: a Mailgun post about each")
    given = parser.parse_args()
    requests = _requests(given)
    say("ready")
    input()
    say(json.dumps(uvloop.run(_keep_pace(given.port, requests, given.rate))))


if __name__ == "__main__":
    main()
