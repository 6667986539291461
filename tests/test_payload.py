# SPDX-License-Identifier: Apache-2.0
"""JSON as providers send it: bytes kept, digits kept, odd characters survived."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhooks.payload import (
    at,
    has_doubled_names,
    iso_time,
    list_at,
    load,
    load_object,
    short,
    split,
    text_at,
    unix_time,
)
from webhooks.provider import BadPayload

HALF_AN_EMOJI = chr(0xD83D)
DEEP = b"[" * 9000 + b"]" * 9000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


# --- splitting


def test_each_element_keeps_its_exact_bytes() -> None:
    assert split(b' [ {"a" : 1.0},\r\n"x" ,[1, 2], null]\r\n') == [b'{"a" : 1.0}', b'"x"', b"[1, 2]", b"null"]


@pytest.mark.parametrize("body", [b"{}", b' {"a":[1,2]}', b"7", b'"x"', b"null", b"\xef\xbb\xbf{}"])
def test_a_body_that_is_no_array_is_a_batch_of_one(body: bytes) -> None:
    (element,) = split(body)
    assert load(element) == json.loads(body)


@pytest.mark.parametrize("body", [b"[]", b" [ ] ", b"\xef\xbb\xbf[]"])
def test_an_empty_array_has_no_elements(body: bytes) -> None:
    assert split(body) == []


def test_an_element_that_is_missing_between_commas_is_left_out() -> None:
    assert split(b'[,{"a": 1},,{"b": 2}\n,]') == [b'{"a": 1}', b'{"b": 2}']


@pytest.mark.parametrize(
    "odd",
    [b'"\\ud83d"', b"NaN", b'{"a":"]},[\\"\\\\"}', b'"a\nb"', b'"\xff"', b"tru", DEEP, b'{"a":}', b"9" * 5000],
)
def test_an_odd_element_costs_its_neighbours_nothing(odd: bytes) -> None:
    first, last = b'{"a": "[,]{\\"}", "n": [ 1,{}]}', b"[ ]"
    assert split(b"[ %b ,%b,\n%b]\r\n" % (first, odd, last)) == [first, odd, last]


def test_a_byte_order_mark_and_other_encodings_are_read() -> None:
    text = '[{"a":"é"}, 2]'
    for encoding in ("utf-8-sig", "utf-16", "utf-16-be", "utf-32"):
        assert [load(part) for part in split(text.encode(encoding))] == [{"a": "é"}, 2]


@pytest.mark.parametrize("body", [b"", b" ", b"[", b"[1", b'["a', b'[{"a":1}', b"hello"])
def test_what_is_no_json_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(BadPayload, match="not JSON"):
        split(body)


@given(st.lists(JSON))
def test_any_array_falls_into_its_elements_on_either_way(values: list[object]) -> None:
    parts = [json.dumps(value).encode() for value in values]
    assert split(b"[%b]" % b",".join(parts)) == parts
    assert split(b"[%b]" % b",".join([*parts, b"NaN"])) == [*parts, b"NaN"]


@given(st.binary() | st.text('[]{},"\\ 1aN').map(str.encode))
def test_any_bytes_split_and_load_or_are_refused(body: bytes) -> None:
    try:
        values = [load(part) for part in split(body)]
    except BadPayload as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(values, list)


def test_a_hostile_body_is_split_in_linear_time() -> None:
    started = time.process_time()
    for body in (b'["' + b"\\" * 2_000_001, b"[" + b'"' * 1_000_001, b"[NaN," + b"[" * 1_000_000):
        with pytest.raises(BadPayload):
            split(body)
    assert time.process_time() - started < 5  # well under a second each


# --- loading


def test_big_integers_stay_whole() -> None:
    assert load(b"12345678901234567890123") == 12345678901234567890123
    assert load(b"[NaN, 12345678901234567890123]")[1] == 12345678901234567890123


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b'"cut \\ud83d"', "cut " + HALF_AN_EMOJI),
        (b'"\\u0000"', "\0"),
        (b'"a\nb"', "a\nb"),
        (b'"\xff"', "\ufffd"),
        (b"\xef\xbb\xbf1", 1),
        (b"1e999", float("inf")),
    ],
)
def test_odd_characters_are_survived(raw: bytes, value: object) -> None:
    assert load(raw) == value


@pytest.mark.parametrize("raw", [b"", b"{", b"hello", b'{"a":tru}', b"[1]]", DEEP, b"9" * 5000])
def test_what_cannot_be_read_is_refused_in_one_line(raw: bytes) -> None:
    with pytest.raises(BadPayload, match=r"^not JSON: \w+$"):
        load(raw)


@pytest.mark.parametrize("raw", [b"[]", b"7", b"null", b'"x"'])
def test_an_object_is_wanted_where_one_is_needed(raw: bytes) -> None:
    assert load_object(b'{"a":1}') == {"a": 1}
    with pytest.raises(BadPayload, match="object"):
        load_object(raw)


def test_the_first_of_doubled_names_is_kept() -> None:
    assert has_doubled_names(b'{"a":1,"b":2,"a":3}') == {"a": 1, "b": 2}
    assert has_doubled_names(b'{"a":1,"b":{"a":2,"a":3}}') is None
    assert has_doubled_names(b'[{"a":1,"a":3}]') is None
    assert has_doubled_names(b'{"a":1,"a"') is None


# --- picking


def test_a_path_that_breaks_off_leads_to_nothing() -> None:
    value = {"a": {"b": [1], "c": None}}
    assert at(value, "a", "b") == [1]
    assert at(value) is value
    for path in (("x",), ("a", "x"), ("a", "c", "d"), ("a", "b", "0")):
        assert at(value, *path) is None


def test_ids_come_as_text_or_as_numbers() -> None:
    value = {
        "text": "x",
        "number": 12345678901234567890123,
        "zero": 0,
        "empty": "",
        "true": True,
        "real": 1.5,
        "list": [],
    }
    assert [text_at(value, name) for name in value] == ["x", "12345678901234567890123", "0", None, None, None, None]


def test_a_reason_is_short_or_nothing() -> None:
    assert short("x" * 500) == "x" * 200
    assert short("  550 no  ") == "550 no"
    assert [short(text) for text in (None, "", "  ")] == [None, None, None]


def test_a_reason_of_several_parts_is_those_that_there_are() -> None:
    assert short("550", None, "", "no such user ") == "550 no such user"
    assert short("x" * 199, "yy") == "x" * 199 + " "
    assert [short(), short(None, " ")] == [None, None]


def test_a_list_that_is_none_is_empty() -> None:
    tags = ["a", None]
    value = {"data": {"tags": tags}, "to": "ada"}
    assert list_at(value, "data", "tags") == list_at(tags) == tags
    assert [list_at(value, *path) for path in (("to",), ("data",), ("data", "no"), ("to", "tags"), ())] == [[]] * 5
    assert [list_at(None), list_at("[]")] == [[], []]


# --- times


WANTED = datetime(2026, 11, 2, 8, 15, 5, tzinfo=UTC)


@pytest.mark.parametrize("value", [1793607305, "1793607305", 1793607305.0, "1793607305.0"])
def test_seconds_may_be_numbers_or_text(value: object) -> None:
    assert unix_time(value) == WANTED


@pytest.mark.parametrize(
    "value",
    [None, "", "x", [], {}, True, 0, -1, 1793607305000, 10**400, float("inf"), float("nan"), "nan", HALF_AN_EMOJI],
)
def test_absurd_seconds_are_no_time(value: object) -> None:
    assert unix_time(value) is None


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("2026-11-02T08:15:05Z", 0),
        ("2026-11-02T08:15:05.640Z", 640000),
        ("2026-11-02T08:15:05.123456789Z", 123456),
        ("2026-11-02T10:15:05+02:00", 0),
        ("2026-11-02 10:15:05 +0200", 0),
        ("2026-11-02 01:15:05 -07:00", 0),
        (" 2026-11-02 08:15:05 ", 0),
    ],
)
def test_iso_times_are_read_leniently(text: str, micros: int) -> None:
    found = iso_time(text)
    assert found == WANTED + timedelta(microseconds=micros)
    assert found.tzinfo is UTC


@pytest.mark.parametrize(
    "value",
    [None, 7, "", "yesterday", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1969-01-01", HALF_AN_EMOJI],
)
def test_absurd_iso_times_are_no_time(value: object) -> None:
    assert iso_time(value) is None


@given(st.datetimes(datetime(2001, 1, 1), datetime(2199, 1, 1)), st.integers(-14 * 60, 14 * 60))  # noqa: DTZ001
def test_any_zone_names_the_same_instant(naive: datetime, minutes: int) -> None:
    time_there = naive.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    assert iso_time(time_there.isoformat()) == time_there
