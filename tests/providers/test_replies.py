# SPDX-License-Identifier: Apache-2.0
"""What every provider's API replies to a submission, and what each reply proves of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conformance_kit import FIXTURES, events, with_key
from hypothesis import given
from hypothesis import strategies as st
from reply_rows import ADDRESS, HTML, ROWS, SENT, Row
from spoiling import DELETE, changed, paths

from webhooks.event import MAX_ID, storable
from webhooks.registry import PROVIDERS
from webhooks.reply import Reply

NAMED = [(name, title) for name, rows in ROWS.items() for title in rows]
each_provider = pytest.mark.parametrize("name", PROVIDERS)
each_row = pytest.mark.parametrize(("name", "title"), NAMED, ids=[f"{name}-{title}" for name, title in NAMED])

BODY_DECIDES = {
    "ses",
    "postmark",
    "mailjet",
    "sparkpost",
    "mandrill",
    "mailersend",
    "mailtrap",
    "postal",
    "smtp2go",
} | {"elastic_email"}
"""Where a status of success is given to what was refused, too."""
REFUSALS_ARE_READ = {"ses", "postmark", "resend", "brevo", "mailjet", "sparkpost", "mandrill", "mailersend", "smtp2go"}
"""Where a refusal's body tells what was taken, or may be tried again."""


def body_of(row: Row) -> bytes:
    return row.body if isinstance(row.body, bytes) else json.dumps(row.body).encode()


def read(name: str, status: int, body: bytes, headers: Any = None) -> list[Reply]:
    return PROVIDERS[name].read_reply(status, headers or {}, body)


@each_row
def test_a_reply_proves_what_its_provider_documents(name: str, title: str) -> None:
    row = ROWS[name][title]
    assert read(name, row.status, body_of(row), row.headers) == row.replies


@each_provider
def test_each_provider_s_replies_are_told_by_hand(name: str) -> None:
    rows = ROWS[name]
    assert len(rows) >= 4
    assert {"accepted", "rejected", "not_sent", "ambiguous"} <= {
        reply.meaning for row in rows.values() for reply in row.replies
    }


@pytest.mark.parametrize("name", SENT)
def test_the_id_of_an_answer_is_the_one_that_its_events_bear(name: str) -> None:
    fixture, status = SENT[name]
    body, headers = (FIXTURES / name / f"{fixture}.json").read_bytes(), {}
    if fixture.endswith("_headers"):
        headers = {header.lower(): value for header, value in json.loads(body)["headers"].items()}
        body = b""
    (reply,) = read(name, status, body, headers)
    assert reply.meaning == "accepted"
    assert reply.message_id in {event.message_id for sent in with_key(name).values() for event in events(name, sent)}


def test_only_where_no_id_is_answered_none_is_read() -> None:
    assert set(PROVIDERS) - set(SENT) == {"loops"}


@each_provider
@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"7", HTML, b"\xff\xfe", b"[" * 100_000, b"9" * 10_000])
def test_a_success_that_can_t_be_read_is_ambiguous_where_the_body_decides(name: str, body: bytes) -> None:
    status = 200 if name == "postal" else 202
    (reply,) = read(name, status, body)
    assert reply.message_id is None
    assert reply.meaning == ("ambiguous" if name in BODY_DECIDES else "accepted")


@each_provider
@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        *((401, "not_sent"), (403, "not_sent"), (429, "not_sent"), (400, "rejected"), (422, "rejected")),
        *(
            (402, "ambiguous"),
            (408, "ambiguous"),
            (409, "ambiguous"),
            (424, "ambiguous"),
            (302, "ambiguous"),
            (500, "ambiguous"),
            (502, "ambiguous"),
        ),
    ],
)
@pytest.mark.parametrize("body", [b"", HTML])
def test_a_refusal_or_fault_that_can_t_be_read_is_what_its_status_says(
    name: str, status: int, meaning: str, body: bytes
) -> None:
    (reply,) = read(name, status, body)
    if (meaning == "rejected" and name in REFUSALS_ARE_READ) or (name, status) == ("mailjet", 403):
        meaning = "ambiguous"
    assert (reply.meaning, reply.message_id) == (meaning, None)
    assert reply.reason in {f"HTTP {status}", f"HTTP {status} unclear"}


# -- hostile bodies ----------------------------------------------------------------------------------------------------


def check(status: int, replies: list[Reply]) -> None:
    """Hold what was read of whatever came against what every reading promises."""
    assert replies
    for reply in replies:
        assert reply.meaning in ("accepted", "rejected", "not_sent", "ambiguous")
        assert re.fullmatch(r"[A-Za-z0-9 _:-]{1,60}", reply.reason)
        if status // 100 not in (2, 4):
            assert reply.meaning != "accepted"
        if reply.message_id is not None:
            assert reply.meaning == "accepted"
            assert storable(reply.message_id) == reply.message_id
            assert 0 < len(reply.message_id.encode()) <= 3 * MAX_ID


STATUSES = st.integers(100, 599)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud83d", "\x00", ADDRESS])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
HEADERS = st.dictionaries(
    st.sampled_from(["x-message-id", "x-amzn-errortype", "operation-id", "content-type"]),
    st.text() | st.sampled_from(["\ud83d", "\x00", "k" * 3000]),
)


@each_provider
@given(status=STATUSES, body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()), headers=HEADERS)
def test_whatever_comes_is_read_with_care(name: str, status: int, body: bytes, headers: dict[str, str]) -> None:
    replies = read(name, status, body, headers)
    check(status, replies)
    if status // 100 == 2:
        assert "not_sent" not in {reply.meaning for reply in replies}


@each_provider
@given(data=st.data())
def test_a_reply_with_parts_missing_or_odd_is_read_with_care(name: str, data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(list(ROWS[name].values())))
    value = row.body
    if isinstance(value, (dict, list)):
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from([(), *paths(value)]))
            value = changed(value, path, data.draw(JSON | st.just(DELETE) if path else JSON))
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    status = data.draw(st.just(row.status) | STATUSES)
    check(status, read(name, status, body, row.headers | data.draw(HEADERS)))
