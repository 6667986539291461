# SPDX-License-Identifier: Apache-2.0
"""The load generator, a process of its own: posts prepared deliveries over many connections, one at a time on each.

It says `ready` once everything is built and signed, waits for a line, posts, and prints what came of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.payloads import deliveries
from benchmarks.stand import say
from webhooks.provider import Delivery

CONNECTIONS: Final = 128


class _Client(asyncio.Protocol):
    """One connection. It posts the next request when the answer to the last has arrived in full."""

    def __init__(self, requests: Iterator[bytes], answers: dict[bytes, int], done: asyncio.Future[None]) -> None:
        self._requests, self._answers, self._done = requests, answers, done
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._post()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end or len(body) < _length(head):
            return
        status = head[9:12]
        self._answers[status] = self._answers.get(status, 0) + 1
        self._buffer = b""
        self._post()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the server hung up"))

    def _post(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._transport.write(request)
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()


def _length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0


def request_bytes(delivery: Delivery, path: str) -> bytes:
    """Return a delivery as the bytes of an HTTP request."""
    headers = {"host": "127.0.0.1", "content-length": str(len(delivery.body)), **delivery.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + delivery.body


async def _post_all(port: int, requests: list[bytes]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    left, answers = iter(requests), dict[bytes, int]()
    done: list[asyncio.Future[None]] = [loop.create_future() for _ in range(CONNECTIONS)]
    begun, used = time.perf_counter(), time.process_time()
    clients = [partial(_Client, left, answers, end) for end in done]
    await asyncio.gather(*(loop.create_connection(client, "127.0.0.1", port) for client in clients))
    await asyncio.gather(*done)
    seconds = time.perf_counter() - begun
    counts = {status.decode(): n for status, n in answers.items()}
    return {"seconds": seconds, "answers": counts, "busy": (time.process_time() - used) / seconds}


def main() -> None:
    """Build, wait for the word, post."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load")
    for name in ("provider", "path", "mark", "certificates"):
        parser.add_argument(name)
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    built = deliveries(given.provider, given.mark, given.count, Path(given.certificates))
    requests = [request_bytes(delivery, given.path) for delivery in built]
    say("ready")
    input()
    say(json.dumps(uvloop.run(_post_all(given.port, requests))))


if __name__ == "__main__":
    main()
