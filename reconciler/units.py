# SPDX-License-Identifier: Apache-2.0
"""Durations and sizes as people write them in settings (`90s`, `24h`, `25MB`), both ways. Pure."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

LONGEST: Final = timedelta(days=3650)
"""No setting means more than ten years; anything longer is a slip of the pen and would overflow later."""

_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|s|m|h|d)", re.ASCII)
_BYTES: Final = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE: Final = re.compile(r"(\d{1,12}) ?([a-z]{1,3})", re.ASCII | re.IGNORECASE)
_UNITS_BY_LOWER: Final = {unit.lower(): factor for unit, factor in _BYTES.items()}


def parse_duration(text: str) -> timedelta:
    """Return the duration that `500ms`, `90s`, `15m`, `24h` or `7d` means. Raises ValueError, in one line."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        hint = f'; did you mean "{text.strip()}s"?' if text.strip().isdecimal() else ""
        raise ValueError(f'is no duration: write a number with a unit, such as "90s", "15m", "24h" or "7d"{hint}')
    seconds = float(found[1]) * _SECONDS[found[2]]
    if seconds > LONGEST.total_seconds():
        raise ValueError(f"is too long: at most {LONGEST.days}d")
    return timedelta(seconds=seconds)


def format_duration(duration: timedelta) -> str:
    """Return a duration in the largest unit that writes it whole; a single day stays `24h`."""
    milliseconds = round(duration / timedelta(milliseconds=1))
    for unit, factor in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % factor == 0 and milliseconds >= (2 * factor if unit == "d" else factor):
            return f"{milliseconds // factor}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def parse_size(text: str) -> int:
    """Return the bytes that `25MB`, `64KiB` or `1GB` mean. Raises ValueError, in one line."""
    found = _SIZE.fullmatch(text.strip())
    factor = _UNITS_BY_LOWER.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError('is no size: write a number with a unit, such as "25MB" or "64KiB"')
    return int(found[1]) * factor


def roughly(age: timedelta) -> str:
    """Return an age in one unit that a person takes in at a glance."""
    for unit in (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)):
        if age >= 2 * unit:
            return format_duration(age // unit * unit)
    return format_duration(timedelta(seconds=max(0, int(age.total_seconds()))))
