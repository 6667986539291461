# SPDX-License-Identifier: Apache-2.0
"""Loopback servers that misbehave on purpose, for clients of any kind: each connection has a thread of its own."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

ACCEPTED = b'{"MessageId": "m-1"}\n'
RESET = struct.pack("ii", 1, 0)  # linger for no time: a close becomes a reset


class Faulty:
    """Accepts connections and treats each as `serve` says. `arrived` counts the whole submissions that it read."""

    def __init__(self, serve: Callable[[Faulty, socket.socket], None]) -> None:
        self.arrived = 0
        self.over = threading.Event()
        self._serve = serve
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        threads = []
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._open.append(connection)
                threads.append(threading.Thread(target=self._handle, args=(connection,)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _handle(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self._serve(self, connection)

    def stop_listening(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def close(self) -> None:
        self.over.set()
        self.stop_listening()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()


@contextmanager
def running(serve: Callable[[Faulty, socket.socket], None]) -> Iterator[Faulty]:
    server = Faulty(serve)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def deaf_port(*, listening: bool) -> Iterator[int]:
    """A port that refuses connections; `listening`: one that lets them wait for ever, since its queue is full."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        if not listening:
            yield port
            return
        bound.listen(0)
        with socket.create_connection(("127.0.0.1", port)):
            yield port


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()


def read_request(connection: socket.socket) -> bytes | None:
    """Read one HTTP request with its body, None where the client hung up."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    if b"100-continue" in head.lower():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while len(body) < length:
        if not (more := connection.recv(65536)):
            return None
        body += more
    return head


def reply(status: str, body: bytes = ACCEPTED, headers: str = "") -> bytes:
    text = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return text.encode() + body


def http(*faults: str) -> Callable[[Faulty, socket.socket], None]:
    """A server with a fault for each request, the last one for all that follow.

    hang, close, reset_midway, reset_after, vanish (a reset, and nobody listens any more), half; or a status.
    """

    def serve(server: Faulty, connection: socket.socket) -> None:
        goes_on = True
        while goes_on:
            fault = faults[min(server.arrived, len(faults) - 1)]
            if fault == "reset_midway":
                connection.recv(1)
                reset(connection)
                return
            if read_request(connection) is None:
                return
            server.arrived += 1
            goes_on = _answer(server, connection, fault)

    return serve


def _answer(server: Faulty, connection: socket.socket, fault: str) -> bool:
    match fault:
        case "hang":
            server.over.wait()
        case "close":
            pass
        case "vanish":
            server.stop_listening()
            reset(connection)
        case "reset_after":
            reset(connection)
        case "half":
            connection.sendall(reply("200")[: -len(ACCEPTED) // 2])
        case _:
            connection.sendall(reply(fault))
            return True
    return False


def no_tls(server: Faulty, connection: socket.socket) -> None:
    """Answer a client's first words of TLS with something else."""
    connection.recv(65536)
    connection.sendall(b"220 this is no TLS\r\n")


def silent(server: Faulty, connection: socket.socket) -> None:
    """Let a client say what it likes."""
    server.over.wait()


def lost_in_tls(context: ssl.SSLContext) -> Callable[[Faulty, socket.socket], None]:
    """Read a request through TLS, and answer with what is none."""

    def serve(server: Faulty, connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            if read_request(secured) is None:
                return
            server.arrived += 1
            with socket.socket(fileno=secured.detach()) as bare:
                bare.sendall(b"this is no TLS any more")

    return serve


_SAYS = {"connect": b"220 ok\r\n", "data": b"354 go on\r\n", "quit": b"221 bye\r\n"}


def smtp(stage: str, fault: str) -> Callable[[Faulty, socket.socket], None]:
    """An SMTP server with a fault at connect, ehlo, mail, rcpt, data or dot: hang, reset, or what it says then."""

    def serve(server: Faulty, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            at = "connect"
            while at:
                server.arrived += at == "dot"
                if at == stage and fault == "reset":
                    reset(connection)
                    return
                if at == stage and fault == "hang":
                    server.over.wait()
                    return
                connection.sendall(f"{fault} no\r\n".encode() if at == stage else _SAYS.get(at, b"250 ok\r\n"))
                at = _next(lines, in_data=at == "data" != stage)

    return serve


def _next(lines: BinaryIO, *, in_data: bool) -> str:
    """Return the next command in lower case, `dot` at a message's end, nothing where the client hung up."""
    for line in lines:
        if not in_data:
            return line[:4].strip().lower().decode()
        if line == b".\r\n":
            return "dot"
    return ""
