# SPDX-License-Identifier: Apache-2.0
"""What errors of SDKs, applications and others prove: those that tell what the provider answered."""

from __future__ import annotations

import asyncio
import email.message
import io
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Final

import aiohttp
import clients
import httpx
import pytest
import requests
import socket_faults as faults
from aiohttp import web
from anymail.exceptions import AnymailRecipientsRefused, AnymailRequestsAPIError
from botocore.exceptions import ClientError, NoCredentialsError
from clients import outcome

from reconciler import classify
from reconciler.classify import Result

LONG = 20.0

ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
NOT_SENT: Final = "not_sent"
AMBIGUOUS: Final = "ambiguous"


class SendingError(Exception):
    """An application's own."""


class RetryError(Exception):
    """As tenacity's: raised from the error of the last try."""


@pytest.mark.parametrize(("wrapper", "meaning"), [(SendingError, NOT_SENT), (RetryError, AMBIGUOUS)])
def test_an_error_raised_from_a_client_s_says_the_same_unless_it_tells_of_tries(
    wrapper: type[Exception], meaning: str
) -> None:
    def wrapped() -> None:
        try:
            clients.by_httpx(f"http://127.0.0.1:{port}/", LONG)
        except httpx.ConnectError as error:
            raise wrapper from error

    with faults.deaf_port(listening=False) as port:
        assert outcome(wrapped).meaning == meaning


def test_a_refusal_of_something_that_sends_no_mail_proves_nothing() -> None:
    """A database or a cache that is down after the message has left."""

    def cache() -> None:
        try:
            socket.create_connection(("127.0.0.1", port))
        except OSError:
            raise SendingError from None

    with faults.deaf_port(listening=False) as port:
        assert outcome(socket.create_connection, ("127.0.0.1", port)).meaning == AMBIGUOUS
        assert outcome(cache).meaning == AMBIGUOUS


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), asyncio.CancelledError(), KeyboardInterrupt(), ExceptionGroup("", [KeyError()]), SystemExit(404)],
)
def test_what_tells_nothing_is_ambiguous(error: BaseException) -> None:
    assert classify.failure(error) == Result(AMBIGUOUS, type(error).__name__)


def test_the_application_s_own_word_counts() -> None:
    from reconciler.sending.claims import NotSent, Rejected  # noqa: PLC0415

    assert classify.failure(NotSent("unsubscribed")) == Result(NOT_SENT, "unsubscribed")
    assert classify.failure(Rejected("no such template")) == Result(REJECTED, "no such template")


def test_a_reason_never_repeats_an_error_s_text() -> None:
    with faults.running(faults.smtp("rcpt", "550 ada@example.com is unknown")) as server:
        found = outcome(clients.by_smtplib, server.port, LONG)
    assert found == Result(REJECTED, "SMTP 550")


def aws_error(status: int, code: str, tries: int = 0) -> ClientError:
    told = {"HTTPStatusCode": status, "RetryAttempts": tries}
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": told}, "SendEmail")


@pytest.mark.parametrize(
    ("error", "meaning", "reason"),
    [
        (aws_error(400, "Throttling"), NOT_SENT, "Throttling"),
        (aws_error(429, "TooManyRequestsException"), NOT_SENT, "TooManyRequestsException"),
        (aws_error(400, "ConfigurationSetDoesNotExist"), NOT_SENT, "ConfigurationSetDoesNotExist"),
        (aws_error(403, "SignatureDoesNotMatch"), NOT_SENT, "SignatureDoesNotMatch"),
        (aws_error(400, "MessageRejected"), REJECTED, "MessageRejected"),
        (aws_error(400, "MessageRejected", tries=1), AMBIGUOUS, "MessageRejected after another try"),
        (aws_error(400, "Email ada@example.com"), AMBIGUOUS, "HTTP 400"),
        (aws_error(400, "PriorRequestNotComplete"), AMBIGUOUS, "PriorRequestNotComplete"),
        (aws_error(403, "SomethingNew"), NOT_SENT, "HTTP 403"),
        (aws_error(503, "ServiceUnavailable"), AMBIGUOUS, "HTTP 503"),
        (NoCredentialsError(), NOT_SENT, "NoCredentialsError"),
        (AnymailRecipientsRefused(), REJECTED, "AnymailRecipientsRefused"),
    ],
)
def test_errors_of_sdks_say_what_the_provider_answered(
    error: Exception, meaning: classify.Meaning, reason: str
) -> None:
    assert classify.failure(error) == Result(meaning, reason)


def test_what_anymail_raises_over_a_lost_connection_is_read_through() -> None:
    def send() -> None:
        try:
            clients.by_requests(f"http://127.0.0.1:{port}/", LONG)
        except requests.RequestException as error:
            raise AnymailRequestsAPIError("it failed") from error

    with faults.deaf_port(listening=False) as port:
        assert outcome(send).meaning == NOT_SENT
    with faults.running(faults.http("close")) as server:
        port = server.port
        assert outcome(send).meaning == AMBIGUOUS


class SdkError(Exception):
    """As of SDKs that hand the answer on: python_http_client, and those generated from OpenAPI."""

    __module__ = "python_http_client.exceptions"

    def __init__(self, status_code: int, body: object) -> None:
        self.status_code, self.body = status_code, body
        self.headers = email.message.Message()


class MailchimpError(Exception):
    """As mailchimp_transactional.api_client.ApiClientError."""

    __module__ = "mailchimp_transactional.api_client"

    def __init__(self, text: object, status_code: int) -> None:
        self.text, self.status_code = text, status_code


class ResendError(Exception):
    """As resend.exceptions.ResendError."""

    __module__ = "resend.exceptions"

    def __init__(self, code: int | str, error_type: str) -> None:
        self.code, self.error_type = code, error_type


@pytest.mark.parametrize(
    ("error", "provider", "expected"),
    [
        (SdkError(429, b""), None, Result(NOT_SENT, "HTTP 429")),
        (SdkError(400, b'{"code": "duplicate_parameter"}'), None, Result(REJECTED, "HTTP 400")),
        (SdkError(400, b'{"code": "duplicate_parameter"}'), "brevo", Result(ACCEPTED, "duplicate_parameter")),
        (SdkError(400, {"code": "duplicate_parameter"}), "brevo", Result(ACCEPTED, "duplicate_parameter")),
        (SdkError(400, None), "brevo", Result(AMBIGUOUS, "HTTP 400 unclear")),
        (SdkError(402, b""), None, Result(AMBIGUOUS, "HTTP 402")),
        (SdkError(200, b"<html>"), None, Result(AMBIGUOUS, "SdkError after HTTP 200")),
        (SdkError(200, b"<html>"), "no such provider", Result(AMBIGUOUS, "HTTP 200")),
        (MailchimpError({"name": "Invalid_Key"}, 500), "mandrill", Result(NOT_SENT, "Invalid_Key")),
        (ResendError("429", "rate_limit_exceeded"), "resend", Result(NOT_SENT, "rate_limit_exceeded")),
        (ResendError(409, "concurrent_idempotent_requests"), None, Result(AMBIGUOUS, "HTTP 409")),
        (ResendError(409, "invalid_idempotent_request"), "resend", Result(ACCEPTED, "invalid_idempotent_request")),
    ],
)
def test_an_answer_that_an_error_carries_is_read_in_the_provider_s_words(
    error: Exception, provider: str | None, expected: Result
) -> None:
    assert classify.failure(error, provider) == expected


class HTTPException(Exception):
    """As starlette's and FastAPI's: what the application is going to answer, whatever befell its submission."""

    __module__ = "starlette.exceptions"

    def __init__(self, status_code: int) -> None:
        self.status_code = self.status = self.code = status_code
        self.response = httpx.Response(status_code)


@pytest.mark.parametrize("status", [400, 401, 404, 424, 429, 503])
def test_a_status_that_the_application_answers_with_is_not_the_provider_s(status: int) -> None:
    own = HTTPException(status)
    for error in (own, web.HTTPTooManyRequests(), web.HTTPBadRequest()):
        for cause in (httpx.ReadTimeout(""), None):
            error.__cause__ = cause
            assert classify.failure(error) == Result(AMBIGUOUS, type(error).__name__)
    own.__cause__ = httpx.ConnectError("")
    assert classify.failure(own) == Result(NOT_SENT, "ConnectError")


def test_the_body_of_an_http_error_of_urllib_is_read_once() -> None:
    def submit() -> object:
        return urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", data=b"m", timeout=LONG)

    def wrapped() -> object:
        try:
            return submit()
        except urllib.error.HTTPError as error:
            raise SendingError from error

    with faults.running(brevo) as server:
        for send in (submit, wrapped):
            with pytest.raises((urllib.error.HTTPError, SendingError)) as found:
                send()
            assert classify.failure(found.value, "brevo") == Result(ACCEPTED, "duplicate_parameter")
        with pytest.raises(urllib.error.HTTPError) as found:
            submit()
        found.value.read()
        assert classify.failure(found.value, "brevo") == Result(AMBIGUOUS, "HTTP 400 unclear")


def brevo(server: faults.Faulty, connection: socket.socket) -> None:
    while faults.read_request(connection) is not None:
        server.arrived += 1
        connection.sendall(faults.reply("400", b'{"code": "duplicate_parameter"}'))


def test_a_refusal_whose_body_is_lost_proves_nothing_where_the_body_decides() -> None:
    async def by_aiohttp() -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            await session.post(f"http://127.0.0.1:{server.port}/")

    with faults.running(brevo) as server, pytest.raises(aiohttp.ClientResponseError) as found:
        asyncio.run(by_aiohttp())
    assert classify.failure(found.value, "brevo") == Result(AMBIGUOUS, "HTTP 400 unclear")
    assert classify.failure(found.value, "mailjet") == Result(AMBIGUOUS, "HTTP 400 unclear")
    assert classify.failure(found.value, "mailgun") == Result(REJECTED, "HTTP 400")
    lost = urllib.error.HTTPError("http://esp.example.com", 400, "", email.message.Message(), io.BytesIO(b""))
    assert classify.failure(lost, "mailjet") == Result(AMBIGUOUS, "HTTP 400 unclear")


def test_raising_for_a_status_says_the_same_as_the_status() -> None:
    async def by_aiohttp() -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            await session.post(url)

    with faults.running(faults.http("429")) as server:
        url = f"http://127.0.0.1:{server.port}/"
        for submit in (
            lambda: requests.post(url, timeout=LONG).raise_for_status(),
            lambda: httpx.post(url).raise_for_status(),
            lambda: asyncio.run(by_aiohttp()),
        ):
            assert outcome(submit) == Result(NOT_SENT, "HTTP 429")


ALONE = """
import sys
from reconciler import classify
classify.failure(ConnectionRefusedError()), classify.answers(None), classify.answers((200, {}, b""))
foreign = {"webhooks", "aiohttp", "httpx", "requests", "urllib3", "botocore", "aiosmtplib", "asyncpg", "ssl"}
print(sorted(foreign & sys.modules.keys()))
"""


def test_it_brings_no_client_and_no_webhooks_along() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
