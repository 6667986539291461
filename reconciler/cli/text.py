# SPDX-License-Identifier: Apache-2.0
"""How commands print: plain aligned tables for people, JSON for programs, and nothing that steers a terminal."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import click

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return text on one line, with escapes for what would steer a terminal. Providers write some of it."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def say(text: object = "") -> None:
    """Print one line."""
    click.echo(printable(text))


def say_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below their header, in columns as wide as their widest cell. Numbers are aligned to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    right = [bool(cells) and all(re.fullmatch(r"-?[\d.,]+ ?%?", row[i]) for row in cells) for i in range(len(header))]
    widths = [max(map(len, column)) for column in zip(map(printable, header), *cells, strict=True)]
    for row in (list(map(printable, header)), *cells):
        aligned = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)]
        click.echo("  ".join(aligned).rstrip())


def count(n: int, one: str, many: str = "") -> str:
    """Return a number with the word for so many: 1 line, 2 lines."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    match value:
        case None:
            return "-"
        case datetime():
            return iso(value)
        case float():
            return f"{value:.4g}"
        case bool():
            return "yes" if value else "no"
    return printable(value)


def iso(at: datetime) -> str:
    """Return a time in UTC, to the second."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def when(at: datetime | None, now: datetime) -> str:
    """Return a time in UTC with how far it is from now."""
    if at is None:
        return "-"
    from reconciler.units import roughly

    return f"{iso(at)} ({roughly(now - at)} ago)" if at <= now else f"{iso(at)} (in {roughly(at - now)})"


def say_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=True))


def plain(value: Any) -> Any:
    """Return a value made of what JSON knows: times in ISO form, durations in seconds, records as objects."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if value == value and abs(value) != float("inf") else str(value)  # noqa: PLR0124 - NaN
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes():
            return "\\x" + value.hex()
        case Mapping():
            return {str(name): plain(part) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Iterable):
        return [plain(part) for part in value]
    return str(value)
