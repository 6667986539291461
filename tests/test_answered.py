# SPDX-License-Identifier: Apache-2.0
"""What an answer to a submission says, in whatever form a client or an SDK hands it on."""

from __future__ import annotations

import asyncio
import email.message
import json
import urllib.error
import urllib.request
from typing import Final

import aiohttp
import clients
import httpx
import pytest
import requests
import socket_faults as faults

from reconciler import classify
from reconciler.classify import Result
from reconciler.sending import answered
from reconciler.sending.claims import as_claim, results_of
from webhooks import reply
from webhooks.providers import ses
from webhooks.registry import PROVIDERS

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


def headers_of_the_standard_library() -> email.message.Message:
    """As of urllib and python_http_client: no Mapping."""
    headers = email.message.Message()
    headers["X-Message-Id"] = "m-1"
    return headers


@pytest.mark.parametrize(
    ("response", "provider", "expected"),
    [
        (None, None, [Result(AMBIGUOUS, "no answer")]),
        ("m-1", None, [Result(ACCEPTED, "returned", "m-1")]),
        ("", None, [Result(ACCEPTED, "returned")]),
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
        (({}, "2.0.0 queued"), "ses", [Result(ACCEPTED, "SMTP 250")]),
        ({"ada@example.com": (550, b"no")}, "ses", [Result(ACCEPTED, "some recipients refused")]),
        (TAKEN | {"BulkEmailEntryResults": [{"Error": "?"}]}, None, [Result(AMBIGUOUS, "HTTP 200")]),
        ((402, {}, b""), None, [Result(AMBIGUOUS, "HTTP 402")]),
        ((202, headers_of_the_standard_library(), b""), "sendgrid", [Result(ACCEPTED, "HTTP 202", "m-1")]),
        ([{"ErrorCode": 406}], "postmark", [Result(REJECTED, "ErrorCode 406")]),
        ('{"message": "Forbidden"}', None, [Result(AMBIGUOUS, "no message id")]),
        ("<html><body>Bad Gateway</body></html>", None, [Result(AMBIGUOUS, "no message id")]),
    ],
)
def test_answers_of_every_form_are_read(response: object, provider: str | None, expected: list[Result]) -> None:
    assert classify.answers(response, provider) == expected


# The decoded body of a 401 or a 500: its status is lost.
DECODED = {
    "azure_acs": {"error": {"code": "Denied"}},
    "brevo": {"code": "unauthorized", "message": "Key not found"},
    "customerio": {"meta": {"error": "unauthorized"}},
    "elastic_email": {"Error": "Access Denied."},
    "loops": {"success": False, "message": "no"},
    "mailersend": {"message": "Unauthenticated."},
    "mailgun": {"message": "Invalid private key"},
    "mailjet": {"ErrorMessage": "no", "StatusCode": 401},
    "mailtrap": {"success": False, "errors": ["Unauthorized"]},
    "mandrill": {"status": "error", "name": "GeneralError"},
    "postal": {"status": "error", "data": {"code": "Confused"}},
    "postmark": {"ErrorCode": 100, "Message": "Maintenance"},
    "resend": {"statusCode": 401, "name": "missing_api_key"},
    "scaleway": {"type": "denied_authentication"},
    "sendgrid": {"errors": [{"message": "unauthorized"}]},
    "ses": {"message": "no"},
    "smtp2go": {"data": {"error_code": "E_ApiResponseCodes.API_EXCEPTION"}},
    "sparkpost": {"errors": [{"message": "Unauthorized"}]},
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_decoded_answer_is_taken_for_an_acceptance_only_with_the_provider_s_id(provider: str) -> None:
    for value in ({}, [], [1], DECODED[provider]):
        assert {result.meaning for result in classify.answers(value, provider)} == {AMBIGUOUS}


def test_an_error_that_is_given_back_is_no_answer() -> None:
    headers = headers_of_the_standard_library()
    for error in (httpx.ReadTimeout(""), urllib.error.HTTPError("http://esp.example.com", 404, "", headers, None)):
        with pytest.raises(TypeError, match="raise it"):
            classify.answer(error)


def test_a_response_of_urllib_is_read_with_headers_and_body() -> None:
    with faults.running(faults.http("200")) as server:
        response = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", data=b"m", timeout=LONG)
        assert classify.answer(response, "ses") == Result(ACCEPTED, "HTTP 200", "m-1")


async def test_a_refusal_whose_body_is_lost_is_ambiguous_where_the_body_decides() -> None:
    with faults.running(faults.http("400")) as server:
        url = f"http://127.0.0.1:{server.port}/"
        async with aiohttp.ClientSession() as session, session.post(url) as left:
            pass
        closed = await asyncio.to_thread(requests.post, url, stream=True, timeout=LONG)
        closed.close()
    for provider, meaning in {"brevo": AMBIGUOUS, "mailjet": AMBIGUOUS, "mailgun": REJECTED}.items():
        assert (await classify.read_answer(left, provider)).meaning == meaning
        assert classify.answer(closed, provider).meaning == meaning


# A lone result for several messages.
SOME = {"results": {"id": "t1", "total_accepted_recipients": 1, "total_rejected_recipients": 1}}
ALL = {"results": {"id": "t1", "total_accepted_recipients": 3, "total_rejected_recipients": 0}}


@pytest.mark.parametrize(
    ("provider", "status", "body", "meaning"),
    [
        ("mandrill", 200, [{"status": "rejected", "_id": "1"}], AMBIGUOUS),
        ("mailjet", 400, {"Messages": [{"Status": "error", "Errors": [{"StatusCode": 400}]}]}, AMBIGUOUS),
        ("postmark", 200, [{"ErrorCode": 406}], AMBIGUOUS),
        ("mailtrap", 200, {"responses": [{"success": False}]}, AMBIGUOUS),
        ("resend", 200, {"data": [{"id": "1"}]}, AMBIGUOUS),
        ("resend", 200, {"data": [], "errors": [{"index": 0}]}, AMBIGUOUS),
        ("resend", 200, {"id": "1"}, AMBIGUOUS),
        ("brevo", 201, {"messageIds": ["1"]}, AMBIGUOUS),
        ("brevo", 400, {"code": "duplicate_parameter"}, AMBIGUOUS),
        ("ses", 200, {"BulkEmailEntryResults": [{"Status": "MESSAGE_REJECTED"}]}, AMBIGUOUS),
        ("ses", 200, {"MessageId": "1"}, AMBIGUOUS),
        ("loops", 200, {"success": True}, AMBIGUOUS),
        ("loops", 409, {"success": False}, AMBIGUOUS),
        ("smtp2go", 200, {"data": {"succeeded": 1, "failed": 1, "email_id": "e"}}, AMBIGUOUS),
        ("sparkpost", 200, SOME, AMBIGUOUS),
        ("sparkpost", 200, ALL, ACCEPTED),
        ("mailgun", 200, {"id": "<1@a.b>"}, ACCEPTED),
        ("sendgrid", 202, "", ACCEPTED),
        ("postmark", 422, {"ErrorCode": 402}, REJECTED),
        ("mailjet", 400, {"ErrorCode": "mj-0002", "StatusCode": 400}, REJECTED),
        ("resend", 429, {"name": "rate_limit_exceeded"}, NOT_SENT),
    ],
)
def test_a_result_holds_for_all_messages_only_where_it_speaks_of_all(
    provider: str, status: int, body: object, meaning: str
) -> None:
    results = classify.answers((status, {}, json.dumps(body).encode()), provider)
    claims = [as_claim(key, CLAIMED, 0.0, provider) for key in "abc"]
    assert len(results) == 1
    assert [result.meaning for result in results_of(claims, results)] == [meaning] * 3
    assert results_of(claims[:1], results) == results


@pytest.mark.parametrize("response", [{"ada@example.com": (550, b"no")}, TAKEN | {"MessageId": "m-1"}])
def test_what_a_client_says_of_one_message_is_not_said_of_others(response: object) -> None:
    claims = [as_claim(key, CLAIMED, 0.0, None) for key in "ab"]
    assert [result.meaning for result in results_of(claims, classify.answers(response))] == [AMBIGUOUS] * 2
    assert [result.meaning for result in results_of(claims, classify.answers(""))] == [ACCEPTED] * 2


CLAIMED = {
    "outcome": "claimed",
    "wire_key": "a",
    "attempt": 1,
    "fence": 1,
    "reason": None,
    "retry_at": None,
    "seconds_left": 9.0,
}


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
    assert answered.by_aws_code(code, status).meaning == meaning
