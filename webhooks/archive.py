# SPDX-License-Identifier: Apache-2.0
"""Keeps raw deliveries, with their headers, in S3: an optional copy from which `reconciler replay` can read again.

It never holds up an answer. What was stored is written to a spool on disk within about a second and carried to S3 in
compressed batches; while S3 is away the spool grows up to its limit. The events themselves are in the database before
they are acknowledged: what an archive lacks (the last second before a kill, what passed the limit) is no event lost.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import fcntl
import gzip
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final
from urllib.parse import unquote_plus

import structlog

from webhooks import metrics
from webhooks.aws import Place, open_client
from webhooks.provider import Delivery, Feed

_log: Final = structlog.get_logger()

OPEN: Final = "open-*.ndjson"
READY: Final = "*.ndjson.gz"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
MAX_WAITING: Final = 64_000_000
"""Bytes of deliveries that may wait for the disk; what comes then is not archived, and counted."""

MAX_FILE: Final = 50_000_000
"""Bytes after which a spool file is closed, however young."""

CREDENTIALS: Final = ("authorization", "proxy-authorization", "cookie")
"""Headers that are never kept: they let anyone post as the provider."""


class Archive:
    """Takes deliveries with `add`; `write` and `upload` are to be called again and again, and `close` once."""

    def __init__(self, spool: Path, place: Place, every: timedelta, spool_max: int) -> None:
        self._spool, self._place, self._every, self._max = spool, place, every, spool_max
        self._waiting: list[tuple[Feed, Delivery, datetime]] = []
        self._waiting_bytes = 0
        self._file: FileIO | None = None
        self._opened_at = datetime.now(UTC)

    def open(self) -> None:
        """Make the spool and take over what a killed process left in it. Raises OSError, but not for a full disk."""
        try:
            self._spool.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds addresses
            TemporaryFile(dir=self._spool).close()  # one that is there may be somebody else's, or read-only
            for path in self._spool.glob(OPEN):
                _close_orphan(path)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # Events can be taken all the same. What waits in the spool is carried by the first process that finds room.
            _log.warning("archive_disk_full", reason=error.strerror, hint="make room, then restart")

    def add(self, feed: Feed, delivery: Delivery, at: datetime) -> None:
        """Remember a delivery; never waits."""
        if self._waiting_bytes > MAX_WAITING:
            metrics.ARCHIVE_DROPPED.inc()
            return
        self._waiting.append((feed, delivery, at))
        self._waiting_bytes += len(delivery.body)

    async def write(self) -> None:
        """Write what waits to the disk, and close the file that is old or large enough. Raises OSError."""
        taken, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            await asyncio.to_thread(self._written, taken)
        except OSError:
            self._waiting = taken + self._waiting  # tried again
            self._waiting_bytes = sum(len(delivery.body) for _, delivery, _ in self._waiting)
            raise

    def _written(self, taken: list[tuple[Feed, Delivery, datetime]]) -> None:
        now = datetime.now(UTC)
        if taken:
            if self._file is None:
                self._file, self._opened_at = _new_file(self._spool, now), now
            _append(self._file, b"".join(encode(*one) for one in taken))
        if self._file and (now - self._opened_at >= self._every or self._file.tell() > MAX_FILE):
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            _compress(Path(str(self._file.name).removesuffix(".part")))
            self._file.close()  # and with it the lock
            self._file = None

    async def upload(self) -> None:
        """Carry closed files to S3 and remove them from the spool. Raises ApiError."""
        if not (ready := sorted(self._spool.glob(READY))):
            return
        try:
            async with open_client("s3", self._place.region, self._place.endpoint_url) as s3:
                for path in ready:
                    with suppress(FileNotFoundError):  # another process on this spool was quicker
                        await s3.put_object(Bucket=self._place.bucket, Key=self._key(path), Body=path.read_bytes())
                        path.unlink()
        finally:
            self._keep_within_limit()

    def waiting_bytes(self) -> int:
        """Return how much waits in the spool to be carried to S3."""
        return sum(map(_size, self._spool.glob(READY)))

    def _key(self, path: Path) -> str:
        day = f"{path.name[:4]}/{path.name[4:6]}/{path.name[6:8]}"
        return "/".join(filter(None, (self._place.prefix, day, path.name)))

    def _keep_within_limit(self) -> None:
        sizes = {path: size for path in sorted(self._spool.glob(READY)) if (size := _size(path))}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total <= self._max:
                return
            total -= size
            path.unlink(missing_ok=True)
            metrics.ARCHIVE_DROPPED.inc()
            _log.error("archive_dropped", file=path.name, reason="the spool is full and S3 away")

    async def close(self) -> None:
        """Write what waits and close the file, so that the next process carries it to S3. Raises OSError."""
        await self.write()
        await asyncio.to_thread(self._close_file)


def encode(feed: Feed, delivery: Delivery, at: datetime) -> bytes:
    """Return a delivery as one line of JSON, without the credentials that it carries by itself."""
    credentials = {*CREDENTIALS, *_names(feed, "header:")}
    line: dict[str, Any] = {
        "feed": feed.name,
        "received_at": at.isoformat(),
        "method": delivery.method,
        "query": _without(delivery.query, _names(feed, "query:")),
        "headers": {name: text for name, text in _lower(delivery.headers) if name not in credentials},
    }
    try:
        line["body"] = delivery.body.decode()
    except UnicodeDecodeError:
        line["body_base64"] = base64.b64encode(delivery.body).decode()
    return json.dumps(line).encode() + b"\n"


def _names(feed: Feed, scheme: str) -> list[str]:
    carried = (secret.removeprefix(scheme) for secret in feed.secrets if secret.startswith(scheme))
    return [secret.partition("=")[0].strip().lower() for secret in carried]


def _lower(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name.lower(), text) for name, text in headers.items())


def _without(query: str, names: list[str]) -> str:
    if not names:
        return query
    # Piece by piece, since what is kept must stay byte for byte what a provider said.
    return "&".join(piece for piece in query.split("&") if unquote_plus(piece.partition("=")[0]).lower() not in names)


def _append(file: FileIO, lines: bytes) -> None:
    before = file.tell()
    try:
        left = memoryview(lines)
        while left:
            left = left[file.write(left) :]
    except OSError:  # no half lines, and the disk is full as it is
        file.truncate(before)
        file.seek(before)
        raise


def _new_file(spool: Path, now: datetime) -> FileIO:
    """Return a new file of ours, locked before its name says that it is there."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    name = f"open-{now:%Y%m%dT%H%M%S}-{host}-{secrets.token_hex(4)}.ndjson"
    part = spool / f"{name}.part"
    part.touch(mode=0o600)
    file = part.open("r+b", buffering=0)
    fcntl.flock(file, fcntl.LOCK_EX)
    part.rename(spool / name)
    return file


def _close_orphan(path: Path) -> None:
    """Close a file whose writer was killed; one that lives holds its lock, another process may be quicker."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if os.fstat(file.fileno()).st_nlink:  # still there
            _compress(path)


def _compress(path: Path) -> None:
    """Turn an open file into a ready one. Its name appears only once it is whole."""
    done = path.with_name(path.name.removeprefix("open-") + ".gz")
    part = done.with_suffix(".part")
    part.touch(mode=0o600)
    try:
        with path.open("rb") as plain, gzip.open(part, "wb") as packed:
            while piece := plain.read(1_000_000):
                packed.write(piece)
    except OSError:
        part.unlink()
        raise
    part.replace(done)
    path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
