# SPDX-License-Identifier: Apache-2.0
"""Reads deliveries again: from files and folders, plain or gzip, from NDJSON (an archive, Firehose), and from S3.

A file whose first line is a whole JSON value is read line by line; any other is one delivery (a saved body). A line in
the archive's form brings its headers and its feed with it.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from webhooks.aws import Place, open_client
from webhooks.provider import Delivery

MAX_ENTRY: Final = 40_000_000
"""Greatest entry, in bytes: an archive's line about a body of 25 MB that is no text has 34 MB."""

_GZIP_MAGIC: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Entry:
    """One delivery of a source, or what is wrong with it."""

    name: str
    """Where it is: the file, and its line where it has several."""
    delivery: Delivery | None
    feed: str | None = None
    """The feed that an archive's line names."""
    damage: str = ""
    read: int = 0
    """How many bytes of the file were read when this entry was complete."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file to be read, wherever it lies."""

    name: str
    size: int


class Files:
    """The files of a path: the file itself, or all below a folder, in the order of their names."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def blobs(self) -> list[Blob]:
        """Return the files, regular ones only. Raises OSError where there is no such place."""
        if not self._path.is_dir():
            return [Blob(str(self._path), self._path.stat().st_size)]
        found = (Path(folder, name) for folder, _, names in os.walk(self._path) for name in names)
        files = sorted(path for path in found if path.is_file() and not path.name.startswith("."))
        return [Blob(str(path), path.stat().st_size) for path in files]

    @asynccontextmanager
    async def open(self, blob: Blob) -> AsyncIterator[BinaryIO]:
        """Yield a file's bytes. Raises OSError."""
        with Path(blob.name).open("rb") as file:  # noqa: ASYNC230 - nothing else runs on the loop of a replay
            yield file


class S3Files:
    """The objects below a prefix in S3, each fetched to a temporary file."""

    def __init__(self, place: Place) -> None:
        self._place = place

    async def blobs(self) -> list[Blob]:
        """Return the objects. Raises ApiError."""
        found = []
        async with open_client("s3", self._place.region, self._place.endpoint_url) as s3:
            pages = s3.get_paginator("list_objects_v2")
            async for page in pages.paginate(Bucket=self._place.bucket, Prefix=self._place.prefix):
                found += [Blob(one["Key"], one["Size"]) for one in page.get("Contents", ()) if one["Size"]]
        return [blob for blob in found if self._holds(blob.name)]

    def _holds(self, key: str) -> bool:
        """Say whether a key is the place itself or lies below it: `raw` doesn't mean `raw-of-another`, too."""
        prefix = self._place.prefix
        return not prefix or key == prefix or key.startswith(f"{prefix}/")

    @asynccontextmanager
    async def open(self, blob: Blob) -> AsyncIterator[BinaryIO]:
        """Yield an object's bytes. Raises ApiError."""
        with tempfile.TemporaryFile() as file:
            async with open_client("s3", self._place.region, self._place.endpoint_url) as s3:
                answer = await s3.get_object(Bucket=self._place.bucket, Key=blob.name)
                async with answer["Body"] as body:
                    while piece := await body.read(1_000_000):
                        file.write(piece)
            file.seek(0)
            yield cast("BinaryIO", file)


def entries(name: str, file: BinaryIO) -> Iterator[Entry]:
    """Yield the deliveries of a file; what is damaged is named and skipped. Never raises for what the file holds."""
    packed = file.read(2) == _GZIP_MAGIC
    file.seek(0)
    plain = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if packed else file
    try:
        ahead = [plain.readline(MAX_ENTRY + 1)]
        if not _is_line(ahead[0]):  # the first line of a file that was cut off is often torn
            ahead.append(plain.readline(MAX_ENTRY + 1))
        if _is_line(ahead[-1]):
            yield from _lines(name, chain(ahead, iter(partial(plain.readline, MAX_ENTRY + 1), b"")), file)
        else:
            body = b"".join(ahead)
            yield _whole(name, body + plain.read(max(0, MAX_ENTRY + 1 - len(body))), file.tell())
    except (OSError, EOFError, zlib.error) as error:
        yield Entry(name, None, damage=f"can't be read on: {type(error).__name__}", read=file.tell())


def _lines(name: str, lines: Iterable[bytes], file: BinaryIO) -> Iterator[Entry]:
    number, is_rest = 0, False
    for line in lines:
        if not is_rest:
            number += 1
            if line.strip():
                yield _entry(f"{name}:{number}", line.rstrip(b"\r\n"), file.tell())
        is_rest = len(line) > MAX_ENTRY and not line.endswith(b"\n")


def _whole(name: str, body: bytes, read: int) -> Entry:
    if not body.strip():
        return Entry(name, None, damage="is empty", read=read)
    if len(body) > MAX_ENTRY:
        return Entry(name, None, damage=f"is longer than {MAX_ENTRY} bytes", read=read)
    return Entry(name, Delivery(body, {}), read=read)


def _entry(name: str, line: bytes, read: int) -> Entry:
    if len(line) > MAX_ENTRY:
        return Entry(name, None, damage=f"is longer than {MAX_ENTRY} bytes", read=read)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Entry(name, None, damage="is no JSON: cut off or damaged", read=read)
    if not _is_archived(value):
        return Entry(name, Delivery(line, {}), read=read)
    try:
        return Entry(name, _archived(value), value["feed"], read=read)
    except (ValueError, TypeError, AttributeError):
        return Entry(name, None, damage="is no whole line of an archive", read=read)


def _is_archived(value: Any) -> bool:
    return isinstance(value, dict) and {"feed", "received_at", "headers"} < set(value)


def _archived(value: dict[str, Any]) -> Delivery:
    if not isinstance(value["feed"], str):
        raise TypeError
    body = value.get("body")
    exact = base64.b64decode(value["body_base64"], validate=True) if body is None else body.encode()
    headers = {str(name).lower(): str(text) for name, text in value["headers"].items()}
    return Delivery(exact, headers, str(value.get("method", "POST")), str(value.get("query", "")))


def _is_line(line: bytes) -> bool:
    """Say whether a line is a whole JSON object or array, as each line of NDJSON is."""
    try:
        return isinstance(json.loads(line), dict | list) and line.strip() not in (b"{}", b"[]")
    except (ValueError, RecursionError):
        return False
