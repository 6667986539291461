# SPDX-License-Identifier: Apache-2.0
"""Keeps raw deliveries, with their headers, in S3: an optional copy from which `reconciler replay` can read again.

It never holds up an answer. What was stored is written to a spool on disk within about a second and carried to S3 in
compressed batches; while S3 is away the spool grows up to its limit. The events themselves are in the database before
they are acknowledged: what an archive lacks (the last second before a kill, what passed the limit) is no event lost.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import gzip
import json
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import unquote_plus

import structlog

from webhooks import metrics
from webhooks.aws import Place, open_client
from webhooks.provider import Delivery, Feed

_log: Final = structlog.get_logger()

OPEN: Final = "open-*.ndjson"
READY: Final = "*.ndjson.gz"
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
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._file: BinaryIO | None = None
        self._opened_at = datetime.now(UTC)

    def open(self) -> None:
        """Make the spool and take over what a killed process left in it. Raises OSError."""
        self._spool.mkdir(parents=True, exist_ok=True)
        for path in self._spool.glob(OPEN):
            _close_orphan(path)

    def add(self, feed: Feed, delivery: Delivery, at: datetime) -> None:
        """Remember a delivery; never waits."""
        if self._waiting_bytes > MAX_WAITING:
            metrics.ARCHIVE_DROPPED.inc()
            return
        line = encode(feed, delivery, at)
        self._waiting.append(line)
        self._waiting_bytes += len(line)

    async def write(self) -> None:
        """Write what waits to the disk, and close the file that is old or large enough. Raises OSError."""
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            await asyncio.to_thread(self._written, lines)
        except OSError:
            # Tried again, into a new file: the last line of this one may be torn.
            self._waiting = lines + self._waiting
            self._waiting_bytes = sum(map(len, self._waiting))
            self._file = None
            raise

    def _written(self, lines: list[bytes]) -> None:
        now = datetime.now(UTC)
        if lines:
            if self._file is None:
                self._file, self._opened_at = _new_file(self._spool, now), now
            self._file.writelines(lines)
            self._file.flush()
        if self._file and (now - self._opened_at >= self._every or self._file.tell() > MAX_FILE):
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            _compress(Path(file.name))
            file.close()  # and with it the lock

    async def upload(self) -> None:
        """Carry closed files to S3 and remove them from the spool. Raises ApiError."""
        if not (ready := sorted(self._spool.glob(READY))):
            return
        try:
            async with open_client("s3", self._place.region, self._place.endpoint_url) as s3:
                for path in ready:
                    await s3.put_object(Bucket=self._place.bucket, Key=self._key(path), Body=path.read_bytes())
                    path.unlink(missing_ok=True)
        finally:
            self._keep_within_limit()

    def _key(self, path: Path) -> str:
        day = f"{path.name[:4]}/{path.name[4:6]}/{path.name[6:8]}"
        return "/".join(filter(None, (self._place.prefix, day, path.name)))

    def _keep_within_limit(self) -> None:
        ready = sorted(self._spool.glob(READY))
        size = sum(path.stat().st_size for path in ready)
        for path in ready:
            if size <= self._max:
                return
            size -= path.stat().st_size
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


def _new_file(spool: Path, now: datetime) -> BinaryIO:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
    file = (spool / f"open-{now:%Y%m%dT%H%M%S}-{host}-{secrets.token_hex(4)}.ndjson").open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _close_orphan(path: Path) -> None:
    """Close a file whose writer was killed; one that lives holds its lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        _compress(path)


def _compress(path: Path) -> None:
    """Turn an open file into a ready one. Its name appears only once it is whole."""
    done = path.with_name(path.name.removeprefix("open-") + ".gz")
    part = done.with_suffix(".part")
    with path.open("rb") as plain, gzip.open(part, "wb") as packed:
        while piece := plain.read(1_000_000):
            packed.write(piece)
    part.replace(done)
    path.unlink(missing_ok=True)
