# SPDX-License-Identifier: Apache-2.0
"""Durations and sizes, as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.units import format_duration, parse_duration, parse_size


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=3650)))
def test_a_duration_written_out_means_the_same(duration):
    whole = timedelta(milliseconds=duration // timedelta(milliseconds=1))
    assert parse_duration(format_duration(whole)) == whole


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("90s", 90), ("15m", 900), ("24h", 86400), ("7d", 604800), (" 1.5h ", 5400)]
)
def test_durations_read_as_people_write_them(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["0s", "1ms", "1500ms", "59s", "1m", "90m", "24h", "36h", "2d", "7d"])
def test_a_duration_is_shown_as_people_would_write_it(text):
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize("text", ["", "15", "15 minutes", "-5m", "1h30m", "1e3s", "٣s", "m", "5M", "inf"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("25MB", 25_000_000), ("64KiB", 65536), ("10 kb", 10_000), ("1GiB", 2**30), ("5B", 5)]
)
def test_sizes_read_as_people_write_them(text, size):
    assert parse_size(text) == size
