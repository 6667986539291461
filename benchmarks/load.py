# SPDX-License-Identifier: Apache-2.0
"""The load generator, a process of its own: posts prepared deliveries over many connections, one at a time on each.

It says `ready` once everything is built and signed, waits for a line, posts, and prints what came of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import uvloop

from benchmarks.payloads import deliveries, sendgrid_batches
from benchmarks.stand import percentile, say
from webhooks.provider import Delivery

CONNECTIONS: Final = 128


class _Client(asyncio.Protocol):
    """One connection. It posts the next request when the answer to the last has arrived in full.

    Where an answer ends the connection, as those of gunicorn's sync workers do, it makes another.
    """

    def __init__(
        self, requests: Iterator[bytes], answers: dict[bytes, int], took: list[float], done: asyncio.Future[None]
    ) -> None:
        self._requests, self._answers, self._took, self._done = requests, answers, took, done
        self._posted = 0.0
        self._buffer = b""
        self._waits = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._post()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if (answer := read_answer(self._buffer)) is None:
            return
        self._answers[answer.status] = self._answers.get(answer.status, 0) + 1
        self._took.append(time.perf_counter() - self._posted)
        self._buffer, self._waits = b"", False
        if answer.last:
            self._transport.close()
        else:
            self._post()

    def connection_lost(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if error or self._waits:
            self._done.set_exception(error or ConnectionError("the server hung up"))
        else:
            self._again = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        host, port = self._transport.get_extra_info("peername")
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        except OSError as error:
            self._done.set_exception(error)

    def _post(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._waits, self._posted = True, time.perf_counter()
            self._transport.write(request)
        elif not self._done.done():
            self._done.set_result(None)
            self._transport.close()


class Answer(NamedTuple):
    """An answer that has arrived in full."""

    status: bytes
    last: bool
    """Whether the server ends the connection after it."""


def read_answer(received: bytes) -> Answer | None:
    """Return the answer that was received; None: there is more to come."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        return None
    lines = head.lower() + b"\r\n"
    at = lines.find(b"content-length:")
    length = int(lines[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0
    return Answer(head[9:12], b"\r\nconnection: close\r\n" in lines) if len(body) >= length else None


def request_bytes(delivery: Delivery, path: str) -> bytes:
    """Return a delivery as the bytes of an HTTP request."""
    headers = {"host": "127.0.0.1", "content-length": str(len(delivery.body)), **delivery.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + delivery.body


async def _post_all(port: int, requests: list[bytes]) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    left, answers, took = iter(requests), dict[bytes, int](), list[float]()
    done: list[asyncio.Future[None]] = [loop.create_future() for _ in range(CONNECTIONS)]
    begun, used = time.perf_counter(), time.process_time()
    clients = [partial(_Client, left, answers, took, end) for end in done]
    await asyncio.gather(*(loop.create_connection(client, "127.0.0.1", port) for client in clients))
    await asyncio.gather(*done)
    seconds = time.perf_counter() - begun
    counts = {status.decode(): n for status, n in answers.items()}
    busy = (time.process_time() - used) / seconds
    return {"seconds": seconds, "answers": counts, "busy": busy, "p99": percentile(took, 0.99)}


def main() -> None:
    """Build, wait for the word, post."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load")
    for name in ("provider", "path", "mark", "certificates"):
        parser.add_argument(name)
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--events", type=int, default=1, help="of each SendGrid post")
    given = parser.parse_args()
    if given.events > 1:
        built: Iterable[Delivery] = sendgrid_batches(given.mark, given.count, given.events)
    else:
        built = deliveries(given.provider, given.mark, given.count, Path(given.certificates))
    requests = [request_bytes(delivery, given.path) for delivery in built]
    say("ready")
    input()
    say(json.dumps(uvloop.run(_post_all(given.port, requests))))


if __name__ == "__main__":
    main()
