# SPDX-License-Identifier: Apache-2.0
"""JSON as providers really send it: exact bytes per event, big integers whole, nothing lost to odd characters. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

import msgspec

from webhooks.event import bounded_id
from webhooks.provider import BadPayload

SHORT: Final = 200
"""Longest reason kept beside an event, in characters; the raw bytes hold the whole."""

_EARLIEST: Final = datetime(2000, 1, 1, tzinfo=UTC).timestamp()
_LATEST: Final = datetime(2200, 1, 1, tzinfo=UTC).timestamp()
_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()
_STRING_OR_BRACKET: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{},]', re.DOTALL)


class Doubled(dict[str, Any]):
    """A JSON object that named a field twice. The first value is kept: the provider's own fields come first."""


def split(body: bytes) -> list[bytes]:
    """Return the exact bytes of each element of a JSON array; a body that is no array is a batch of one.

    Whether an element can be read is for `load` to say: one that can't doesn't fail its neighbours. Raises BadPayload
    for an empty body and for an array that doesn't end.
    """
    try:
        return [bytes(part) for part in _RAW_LIST.decode(body)]
    except msgspec.ValidationError:
        return [body]
    except (msgspec.DecodeError, RecursionError):
        return _split_by_brackets(_as_utf8(body))


def _split_by_brackets(body: bytes) -> list[bytes]:
    # For what the decoder refuses in one element (half an emoji, NaN, deep nesting): neighbours keep their exact bytes.
    depth, start, parts = 0, 0, []
    for token in _STRING_OR_BRACKET.finditer(body):
        sign = token[0]
        if depth == 0 and (sign != b"[" or body[: token.start()].strip()):
            return [body]
        if depth == 1 and sign in (b",", b"]"):
            parts.append(body[start : token.start()].strip())
            start = token.end()
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if depth == 1 and not start:
            start = token.end()
        if depth == 0:
            return [part for part in parts if part]  # between two commas there is nothing to keep
    raise BadPayload("not JSON: it is empty, ends too early, or is something else")


def _as_utf8(body: bytes) -> bytes:
    encoding = json.detect_encoding(body)
    return body if encoding == "utf-8" else body.decode(encoding, "replace").encode("utf-8", "replace")


def load(raw: bytes) -> Any:
    """Return the value of a JSON text. Integers stay whole. Raises BadPayload where it can't be read."""
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return _tolerant(raw)


@lru_cache(maxsize=1)
def load_shared(raw: bytes) -> Any:
    """Return what `load` does, for whoever verifies and parses a body, one right after the other. Not to be changed."""
    return load(raw)


def load_object(raw: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises BadPayload for anything else."""
    value = load(raw)
    if not isinstance(value, dict):
        raise BadPayload("expected a JSON object")
    return value


def load_text(text: str | None) -> Any:
    """Return the value of JSON that came as a text within a field, None where it is none."""
    return load_or_none(text.encode("utf-8", "surrogatepass")) if text else None


def load_or_none(raw: bytes) -> Any:
    """Return the value of a JSON text, None where it can't be read."""
    try:
        return load(raw)
    except BadPayload:
        return None


def has_doubled_names(raw: bytes) -> Doubled | None:
    """Return the object, first value of each name, if it names one of its own fields twice; None if it doesn't."""
    try:
        value = _tolerant(raw)
    except BadPayload:
        return None
    return value if isinstance(value, Doubled) else None


def _tolerant(raw: bytes) -> Any:
    # Takes what providers have sent and strict parsers refuse: half an emoji, NaN, control characters, a byte order
    # mark, other encodings, bytes that are no UTF-8.
    try:
        text = raw.decode(json.detect_encoding(raw), "replace")
        return json.loads(text, object_pairs_hook=_first_wins, strict=False)
    except (ValueError, RecursionError) as error:
        raise BadPayload(f"not JSON: {type(error).__name__}") from None


def _first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(reversed(pairs))
    return Doubled(value) if len(value) < len(pairs) else value


def at(value: object, *path: str) -> Any:
    """Return what lies at a path of nested objects, or None where any step is missing or null."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def text_at(value: object, *path: str) -> str | None:
    """Return non-empty text at a path; a number is written out whole (ids come as either), anything else is None."""
    found = at(value, *path) if path else value
    if isinstance(found, str):
        return found or None
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    return None


def id_at(value: object, *path: str) -> str | None:
    """Return the text at a path as an id that fits an index entry, or None where there is none."""
    found = text_at(value, *path)
    return bounded_id(found) if found else None


def list_at(value: object, *path: str) -> list[Any]:
    """Return the list at a path, an empty one where there is none."""
    found = at(value, *path)
    return found if isinstance(found, list) else []


def first(texts: Iterable[str | None]) -> str | None:
    """Return the first text that there is."""
    return next(filter(None, texts), None)


def short(*texts: str | None) -> str | None:
    """Return the texts that there are, one after the other and cut to the length of a reason; blank becomes None."""
    return " ".join(filter(None, texts)).strip()[:SHORT] or None


def unix_time(value: object) -> datetime | None:
    """Return the time that seconds since 1970 mean (number or text), or None where they are absent or absurd."""
    try:
        seconds = float(value)  # type: ignore[arg-type]  # anything that is no number is caught
    except (TypeError, ValueError, OverflowError):
        return None
    if not _EARLIEST <= seconds < _LATEST:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def iso_time(value: object) -> datetime | None:
    """Return the time of an ISO 8601 text, read leniently, or None where it is absent or absurd.

    A zone that is missing means UTC; fractions beyond microseconds are cut; a space may stand before the offset.
    """
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value.strip().replace(" +", "+").replace(" -", "-"))
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        return time if _EARLIEST <= time.timestamp() < _LATEST else None
    except (ValueError, OverflowError):
        return None
