# SPDX-License-Identifier: Apache-2.0
"""Makes rows of `provider_event` out of events: keys, ids and text in the form the table holds. Quick, and pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime
from typing import Final

from webhooks.event import (
    MAX_ID,
    Event,
    Kind,
    Testimony,
    bounded_id,
    hashed_recipient,
    normal_recipient,
    stand_in_key,
    storable,
    wire_key,
)

Key = tuple[str, str, str, str, datetime]
"""The primary key: wire key, message id, event id, feed, partition_at."""

Rest = tuple[datetime | None, str, str, str | None, str | None, str, bytes]
"""The other columns: occurred_at, kind, testimony, recipient, reason, source, raw."""

Rows = dict[Key, Rest]

UNDATED: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""The partition of events whose time is unknown, absurd, or in a month without a partition."""

MAX_RECIPIENT: Final = 320
MAX_REASON: Final = 500

SEPARATOR: Final = "\x1f"
"""Stands between the values of a column that is handed over as one text; no value holds it."""

_ROW_BYTES: Final = 300  # what a row takes beside its raw bytes, roughly


class RowMaker:
    """Makes rows for one installation: its namespace, the months that have a partition, and the salt of recipients.

    With a salt no row holds an address: recipients are hashed, raw bytes are left out, and reasons lose what looks like
    one.
    """

    def __init__(self, namespace: str = "", months: Iterable[date] = (), salt: bytes | None = None) -> None:
        self._namespace = namespace
        self._salt = salt
        self._months = frozenset((month.year, month.month) for month in months)

    def make(self, feed: str, events: Sequence[Event], source: str) -> tuple[Rows, int]:
        """Return the rows of one delivery, each identity once, and about how many bytes they take."""
        rows: Rows = {}
        for event in events:
            key, rest = self._row(feed, event, source)
            rows.setdefault(key, rest)
        return rows, bytes_of(rows)

    def key_of(self, event: Event) -> str | None:
        """Return the wire key that an event bears; None: it bears none of ours."""
        key = event.send_key
        return wire_key(key, self._namespace) if key else None

    def redated(self, rows: Rows) -> Rows:
        """Return rows with the partitions that this maker knows of."""
        return {(*key[:4], self._partition(rest[0])): rest for key, rest in rows.items()}

    def _row(self, feed: str, event: Event, source: str) -> tuple[Key, Rest]:
        event_id = _id(event.event_id)
        message_id = _id(event.message_id) if event.message_id else "~" + event_id
        key = wire_key(event.send_key, self._namespace) if event.send_key else stand_in_key(feed, message_id)
        at = _utc(event.occurred_at)
        recipient = _recipient(event.recipient) if event.recipient else None
        reason = _text(event.reason, MAX_REASON) if event.reason else None
        raw = event.raw
        if self._salt is not None:
            recipient, reason, raw = _hashed_recipient(event.recipient, self._salt), _without_addresses(reason), b""
        return (
            (key, message_id, event_id, feed, self._partition(at)),
            (at, event.kind, event.testimony, recipient, reason, source, raw),
        )

    def _partition(self, at: datetime | None) -> datetime:
        return at if at is not None and (at.year, at.month) in self._months else UNDATED


def bytes_of(rows: Rows) -> int:
    """Return about how many bytes rows take."""
    return sum([len(rest[-1]) for rest in rows.values()]) + _ROW_BYTES * len(rows)


def parts(rows: Rows, most: int, most_bytes: int) -> list[Rows]:
    """Cut rows into parts of at most so many rows and bytes; a single larger row is a part of its own."""
    cut: list[Rows] = [{}]
    size = 0
    for key, rest in rows.items():
        size += len(rest[-1]) + _ROW_BYTES
        if cut[-1] and (len(cut[-1]) == most or size > most_bytes):
            cut.append({})
            size = len(rest[-1]) + _ROW_BYTES
        cut[-1][key] = rest
    return cut


def halves(rows: Rows) -> list[Rows]:
    """Cut rows in two."""
    items = list(rows.items())
    middle = len(items) // 2
    return [dict(items[:middle]), dict(items[middle:])]


def reduced(key: Key, rest: Rest) -> Rows:
    """Return what is kept of an event that the database refuses: raw bytes, what it proves, and hashes of its ids."""
    _, kind, testimony, _, _, source, raw = rest
    wire, message_id, event_id, feed, _ = key
    return {
        (_known(wire, 48), _hashed(message_id), _hashed(event_id), feed, UNDATED): (
            None,
            kind if kind in _KINDS else Kind.UNKNOWN,
            testimony if testimony in _TESTIMONIES else Testimony.NONE,
            None,
            None,
            source,
            bytes(raw),
        )
    }


_KINDS: Final[Collection[str]] = frozenset(map(str, Kind))
_TESTIMONIES: Final[Collection[str]] = frozenset(map(str, Testimony))


def _known(wire: str, longest: int) -> str:
    return wire if wire.isascii() and wire.isprintable() and len(wire) <= longest else _hashed(wire)[:longest]


def _hashed(value: str) -> str:
    return "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()


def _utc(at: datetime | None) -> datetime | None:
    if at is None or at.tzinfo is UTC:
        return at
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def _id(value: str) -> str:
    # Nearly all ids are short and plain, and asking for that costs a tenth of making sure.
    if len(value) <= MAX_ID and value.isascii() and value.isprintable():
        return value
    return _fit(bounded_id(value))


def _text(value: str, longest: int) -> str:
    return value[:longest] if value.isprintable() else _fit(value[:longest])


def _recipient(address: str) -> str | None:
    local, at, domain = address.rpartition("@")
    if at and address.isascii() and address.isprintable() and "<" not in address and " " not in address:
        return f"{local}@{domain.lower()}"[:MAX_RECIPIENT]
    normal = normal_recipient(address)
    return _fit(normal)[:MAX_RECIPIENT] if normal else None


def _hashed_recipient(address: str | None, salt: bytes) -> str | None:
    normal = normal_recipient(address)
    return hashed_recipient(normal, salt) if normal else None


def _without_addresses(text: str | None) -> str | None:
    return text and " ".join("~" if "@" in word else word for word in text.split(" "))


def _fit(text: str) -> str:
    return storable(text).replace(SEPARATOR, "\ufffd")
