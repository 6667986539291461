# SPDX-License-Identifier: Apache-2.0
"""What an answer to a submission says, in whatever form a client or an SDK hands it on."""

from __future__ import annotations

from typing import Final

import aiohttp
import clients
import pytest
import socket_faults as faults

from reconciler import answered, classify
from reconciler.classify import Result
from webhooks import reply
from webhooks.providers import ses

LONG = 20.0

ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
NOT_SENT: Final = "not_sent"
AMBIGUOUS: Final = "ambiguous"

BULK = [
    {"Status": "SUCCESS", "MessageId": "m-1"},
    {"Status": "MESSAGE_REJECTED", "Error": "ada@example.com"},
    {"Status": "ACCOUNT_THROTTLED"},
    {"Status": "FAILED"},
]
BULK_READ = [
    Result(ACCEPTED, "HTTP 200", "m-1"),
    Result(REJECTED, "MESSAGE_REJECTED"),
    Result(NOT_SENT, "ACCOUNT_THROTTLED"),
    Result(AMBIGUOUS, "FAILED"),
]
TAKEN = {"ResponseMetadata": {"HTTPStatusCode": 200}}


@pytest.mark.parametrize(
    ("response", "provider", "expected"),
    [
        (None, None, [Result(ACCEPTED, "returned")]),
        ("m-1", None, [Result(ACCEPTED, "returned", "m-1")]),
        ("", None, [Result(ACCEPTED, "returned")]),
        (object(), None, [Result(AMBIGUOUS, "no answer")]),
        (Result(REJECTED, "x"), "resend", [Result(REJECTED, "x")]),
        ((202, {}, b""), None, [Result(ACCEPTED, "HTTP 202")]),
        ((202, {"X-Message-Id": "m-1"}, b""), "sendgrid", [Result(ACCEPTED, "HTTP 202", "m-1")]),
        ((429, {}, b""), None, [Result(NOT_SENT, "HTTP 429")]),
        ({"id": "m-1"}, "resend", [Result(ACCEPTED, "HTTP 200", "m-1")]),
        (TAKEN | {"MessageId": "m-1"}, "ses", [Result(ACCEPTED, "HTTP 200", "m-1")]),
        (TAKEN, None, [Result(AMBIGUOUS, "HTTP 200 unclear")]),
        (TAKEN | {"BulkEmailEntryResults": BULK}, None, BULK_READ),
        (TAKEN | {"Status": [{"Status": "Success", "MessageId": "m-1"}]}, None, BULK_READ[:1]),
        ({}, None, [Result(ACCEPTED, "SMTP 250")]),
        ({"ada@example.com": (550, b"no")}, None, [Result(ACCEPTED, "some recipients refused")]),
        (({}, "2.0.0 queued"), None, [Result(ACCEPTED, "SMTP 250")]),
    ],
)
def test_answers_of_every_form_are_read(response: object, provider: str | None, expected: list[Result]) -> None:
    assert classify.answers(response, provider) == expected


def test_one_answer_for_several_messages_that_differ_is_ambiguous() -> None:
    assert classify.answer(TAKEN | {"BulkEmailEntryResults": BULK[:1] * 2}) == Result(ACCEPTED, "HTTP 200", "m-1")
    assert classify.answer(TAKEN | {"BulkEmailEntryResults": BULK}) == Result(AMBIGUOUS, "answers differ")


@pytest.mark.parametrize("response", [7, True, {"id": "m-1"}, [], ("m-1", "m-2"), classify])
def test_what_tells_nothing_is_refused_with_what_may_be_given(response: object) -> None:
    with pytest.raises(TypeError, match="give back the provider's message id"):
        classify.answers(response)


@pytest.mark.parametrize("client", ["httpx", "requests", "urllib3"])
def test_a_response_is_read_with_headers_and_body(client: str) -> None:
    with faults.running(faults.http("200")) as server:
        response = clients.HTTP[client](f"http://127.0.0.1:{server.port}/", LONG)
    assert classify.answer(response) == Result(ACCEPTED, "HTTP 200")
    assert answered.http_parts(response) == (
        200,
        {"content-type": "application/json", "content-length": "21"},
        b'{"MessageId": "m-1"}\n',
    )


@pytest.mark.parametrize("read", [True, False])
async def test_a_response_of_aiohttp_is_read_inside_its_block_and_after_it(read: bool) -> None:
    with faults.running(faults.http("200")) as server:
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"http://127.0.0.1:{server.port}/")
            with pytest.raises(TypeError, match="await read_answer"):
                classify.answer(response, "mandrill")
            expected = classify.answer((200, {}, faults.ACCEPTED), "ses")
            if read:
                async with response:
                    await response.read()
                assert await classify.read_answer(response, "ses") == expected
            assert await classify.read_answer(response, "ses") == expected
            assert expected == Result(ACCEPTED, "HTTP 200", "m-1")


async def test_a_body_that_is_lost_leaves_the_status() -> None:
    with faults.running(faults.http("half")) as server:
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"http://127.0.0.1:{server.port}/")
            assert await classify.read_answer(response) == Result(ACCEPTED, "HTTP 200")
            response = await session.post(f"http://127.0.0.1:{server.port}/")
            assert (await classify.read_answer(response, "ses")).meaning == AMBIGUOUS


def test_a_status_means_the_same_to_both_halves() -> None:
    for status in range(100, 600):
        ours, theirs = answered.by_status(status), reply.by_status(status)
        assert (ours.meaning, ours.reason) == (theirs.meaning, theirs.reason)


@pytest.mark.parametrize(("code", "meaning"), ses._REPLIES.items())
def test_a_code_of_ses_means_the_same_to_both_halves(code: str, meaning: str) -> None:
    status = 200 if code.isupper() else 400
    expected = meaning if code != "RequestAbortedException" else REJECTED
    assert answered.by_aws_code(code, status).meaning == expected
