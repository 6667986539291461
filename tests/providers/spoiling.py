# SPDX-License-Identifier: Apache-2.0
"""Ways to take a delivery apart and to spoil a part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode

from msgspec.structs import replace

from webhooks.provider import Delivery

CONTENT_TYPES = {".json": "application/json", ".form": "application/x-www-form-urlencoded"}
DELETE = object()
Place = tuple[str | int, ...]


def value_of(delivery: Delivery) -> Any:
    """Return what a delivery's JSON or form says."""
    if delivery.headers.get("content-type") == CONTENT_TYPES[".form"]:
        return dict(parse_qsl(delivery.body.decode(), keep_blank_values=True))
    return json.loads(delivery.body)


def with_value(delivery: Delivery, value: Any, *, ascii_only: bool = True) -> Delivery:
    """Return the delivery with another value, in the same format where it fits that."""
    if delivery.headers.get("content-type") == CONTENT_TYPES[".form"] and isinstance(value, dict):
        pairs = {
            str(name).encode("utf-8", "replace"): str(text).encode("utf-8", "replace") for name, text in value.items()
        }
        return replace(delivery, body=urlencode(pairs).encode())
    return replace(delivery, body=json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))


def paths(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the path of every value below this one; JSON within a text is entered, as SNS has it."""
    value = _opened(value)
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        yield (*path, name)
        yield from paths(entry, (*path, name))


def value_at(value: Any, path: Place) -> Any:
    for name in path:
        value = _opened(value)[name]
    return value


def changed(value: Any, path: Place, new: Any) -> Any:
    """Return a copy with another value at a path, or without it (DELETE)."""
    if not path:
        return new
    inner, (name, *rest) = _opened(value), path
    copy = dict(inner) if isinstance(inner, dict) else list(inner)
    if rest or new is not DELETE:
        copy[name] = changed(copy[name], tuple(rest), new)  # type: ignore[index]
    else:
        del copy[name]  # type: ignore[arg-type]
    return json.dumps(copy) if isinstance(value, str) else copy


def _opened(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("{", "[")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
