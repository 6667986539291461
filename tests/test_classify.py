# SPDX-License-Identifier: Apache-2.0
"""What a failed or answered submission is taken for: real clients against servers that misbehave on real sockets."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import clients
import httpx
import pytest
import requests
import socket_faults as faults
import urllib3
from anymail.exceptions import AnymailRecipientsRefused, AnymailRequestsAPIError
from botocore.exceptions import ClientError, NoCredentialsError
from clients import outcome
from requests.adapters import HTTPAdapter

from reconciler import classify
from reconciler.classify import Result

pytestmark = pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")

SOON = 0.25  # where hanging is the point
LONG = 20.0

ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
NOT_SENT: Final = "not_sent"
AMBIGUOUS: Final = "ambiguous"

# One row a fault: what every client has to be understood to say.
AT_THE_SERVER: Mapping[str, str] = MappingProxyType(
    {
        "hang": AMBIGUOUS,
        "close": AMBIGUOUS,
        "reset_midway": AMBIGUOUS,
        "reset_after": AMBIGUOUS,
        "half": AMBIGUOUS,
        "202": ACCEPTED,
        "400": REJECTED,
        "401": NOT_SENT,
        "409": AMBIGUOUS,
        "429": NOT_SENT,
        "500": AMBIGUOUS,
        "503": AMBIGUOUS,
    }
)


@pytest.mark.parametrize("client", clients.HTTP)
@pytest.mark.parametrize(("fault", "meaning"), AT_THE_SERVER.items())
def test_what_happens_at_the_server_is_told_apart(client: str, fault: str, meaning: str) -> None:
    with faults.running(faults.http(fault)) as server:
        found = outcome(clients.HTTP[client], f"http://127.0.0.1:{server.port}/", SOON if fault == "hang" else LONG)
        assert found.meaning == meaning
        assert server.arrived == (fault != "reset_midway")


def refusing() -> AbstractContextManager[int]:
    return faults.deaf_port(listening=False)


def never_accepting() -> AbstractContextManager[int]:
    return faults.deaf_port(listening=True)


# Nothing of the message has left: whichever way it fails, the send is free again.
@pytest.mark.parametrize("client", clients.HTTP)
@pytest.mark.parametrize(
    "fault", ["refused", "no connection in time", "no TLS", "no handshake in time", "no such host"]
)
def test_before_the_request_is_written_nothing_was_sent(
    client: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        port = _broken_before(fault, stack, monkeypatch)
        url = f"http{'s' if fault in {'no TLS', 'no handshake in time'} else ''}://127.0.0.1:{port}/"
        if fault == "no such host":
            url = "http://nowhere.example.com/"
        assert outcome(clients.HTTP[client], url, SOON if "in time" in fault else LONG).meaning == NOT_SENT


def _broken_before(fault: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> int:
    match fault:
        case "refused":
            return stack.enter_context(refusing())
        case "no connection in time":
            return stack.enter_context(never_accepting())
        case "no TLS":
            return stack.enter_context(faults.running(faults.no_tls)).port
        case "no handshake in time":
            return stack.enter_context(faults.running(faults.silent)).port
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    return 0


def _unknown(*_args: object, **_options: object) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "unknown")


# SMTP: the message leaves with DATA, and only then.
MAIL_FAULTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "connect": {"hang": NOT_SENT, "reset": NOT_SENT, "421": NOT_SENT, "554": NOT_SENT},
        "ehlo": {"hang": NOT_SENT, "reset": NOT_SENT},
        "mail": {"hang": NOT_SENT, "reset": NOT_SENT, "421": NOT_SENT, "451": NOT_SENT, "550": REJECTED},
        "rcpt": {"hang": NOT_SENT, "reset": NOT_SENT, "421": NOT_SENT, "451": NOT_SENT, "550": REJECTED},
        "data": {"hang": AMBIGUOUS, "reset": AMBIGUOUS, "421": NOT_SENT, "451": NOT_SENT, "550": REJECTED},
        "dot": {"hang": AMBIGUOUS, "reset": AMBIGUOUS, "421": NOT_SENT, "451": NOT_SENT, "550": REJECTED},
        "never": {"": ACCEPTED},
    }
)


@pytest.mark.parametrize("client", clients.SMTP)
@pytest.mark.parametrize(("stage", "fault"), [(stage, fault) for stage, of in MAIL_FAULTS.items() for fault in of])
def test_a_mail_server_s_fault_means_what_its_place_says(client: str, stage: str, fault: str) -> None:
    with faults.running(faults.smtp(stage, fault)) as server:
        found = outcome(clients.SMTP[client], server.port, SOON if fault == "hang" else LONG)
        assert found.meaning == MAIL_FAULTS[stage][fault]
        assert server.arrived == (stage in {"dot", "never"})


@pytest.mark.parametrize("client", clients.SMTP)
@pytest.mark.parametrize("port", [refusing, never_accepting])
def test_a_mail_server_that_is_not_reached_got_nothing(
    client: str, port: Callable[[], AbstractContextManager[int]]
) -> None:
    with port() as number:
        assert outcome(clients.SMTP[client], number, SOON).meaning == NOT_SENT


PROXIED: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "aiohttp": clients.by_aiohttp,
        "httpx": clients.by_httpx,
        "requests": clients.by_requests,
        "urllib3": clients.by_urllib3,
        "botocore": clients.by_botocore,
    }
)


@pytest.mark.parametrize("client", PROXIED)
def test_an_answer_lost_behind_a_proxy_is_no_proxy_that_was_not_reached(client: str) -> None:
    """urllib3 says `ProxyError: Unable to connect to proxy` of both."""
    with faults.running(faults.http("close")) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        assert outcome(PROXIED[client], "http://esp.example.com/", LONG, proxy=url).meaning == AMBIGUOUS
        assert proxy.arrived
    with refusing() as port:
        url = f"http://127.0.0.1:{port}"
        assert outcome(PROXIED[client], "http://esp.example.com/", LONG, proxy=url).meaning == NOT_SENT


@pytest.mark.parametrize("client", PROXIED)
def test_a_proxy_that_refuses_to_connect_passed_nothing_on(client: str) -> None:
    with faults.running(faults.http("407")) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        assert outcome(PROXIED[client], "https://esp.example.com/", LONG, proxy=url).meaning == NOT_SENT


# What else was tried before the last error: it may have arrived.


def repeating(count: int) -> requests.Session:
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=urllib3.Retry(count, allowed_methods=None)))
    return session


def test_a_refusal_after_a_hidden_retry_does_not_hide_the_first_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    for submit in (
        lambda url: repeating(1).post(url),
        lambda url: clients.by_botocore(url, LONG, retries=None),
        lambda url: clients.by_urllib3(url, LONG, retries=urllib3.Retry(1, allowed_methods=None)),
    ):
        with faults.running(faults.http("vanish")) as server:
            found = outcome(submit, f"http://127.0.0.1:{server.port}/")
            assert (found.meaning, server.arrived) == (AMBIGUOUS, 1)


def test_an_answer_after_a_hidden_retry_speaks_only_of_the_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with faults.running(faults.http("reset_after", "429")) as server:
        url = f"http://127.0.0.1:{server.port}/"
        assert outcome(repeating(1).post, url) == Result(AMBIGUOUS, "HTTP 429 after another try")
    with faults.running(faults.http("reset_after", "429")) as server:
        url = f"http://127.0.0.1:{server.port}/"
        assert outcome(clients.by_botocore, url, LONG, retries=None).meaning == AMBIGUOUS
    with faults.running(faults.http("reset_after", "202")) as server:
        assert outcome(repeating(1).post, f"http://127.0.0.1:{server.port}/").meaning == ACCEPTED


def test_refused_again_and_again_is_still_not_sent() -> None:
    with refusing() as port:
        assert outcome(repeating(3).post, f"http://127.0.0.1:{port}/").meaning == NOT_SENT


@pytest.mark.parametrize("client", clients.HTTP)
def test_an_application_that_tries_again_in_its_except_does_not_hide_the_first_try(client: str) -> None:
    submit = clients.HTTP[client]

    def twice() -> object:
        try:
            return submit(f"http://127.0.0.1:{server.port}/", LONG)
        except Exception:  # noqa: BLE001
            return submit(f"http://127.0.0.1:{port}/", LONG)

    with faults.running(faults.http("close")) as server, refusing() as port:
        assert outcome(twice).meaning == AMBIGUOUS


def test_a_second_try_after_one_s_own_time_out_does_not_hide_the_first() -> None:
    async def twice() -> None:
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(SOON):
                    await session.post(f"http://127.0.0.1:{server.port}/")
            except TimeoutError:
                await session.post(f"http://127.0.0.1:{port}/")

    with faults.running(faults.http("hang")) as server, refusing() as port:
        assert outcome(asyncio.run, twice()).meaning == AMBIGUOUS


@pytest.mark.parametrize("client", clients.HTTP)
def test_what_an_application_was_handling_anyway_does_not_matter(client: str) -> None:
    def after_a_miss() -> object:
        try:
            return clients.HTTP["template"]
        except KeyError:
            return clients.HTTP[client](f"http://127.0.0.1:{port}/", LONG)

    with refusing() as port:
        assert outcome(after_a_miss).meaning == NOT_SENT


# Errors of others.


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

    with refusing() as port:
        assert outcome(wrapped).meaning == meaning


def test_a_refusal_of_something_that_sends_no_mail_proves_nothing() -> None:
    """A database or a cache that is down after the message has left."""

    def cache() -> None:
        try:
            socket.create_connection(("127.0.0.1", port))
        except OSError:
            raise SendingError from None

    with refusing() as port:
        assert outcome(socket.create_connection, ("127.0.0.1", port)).meaning == AMBIGUOUS
        assert outcome(cache).meaning == AMBIGUOUS


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), asyncio.CancelledError(), KeyboardInterrupt(), ExceptionGroup("", [KeyError()]), SystemExit(404)],
)
def test_what_tells_nothing_is_ambiguous(error: BaseException) -> None:
    assert classify.failure(error) == Result(AMBIGUOUS, type(error).__name__)


def test_the_application_s_own_word_counts() -> None:
    from reconciler.claims import NotSent, Rejected  # noqa: PLC0415

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
        (aws_error(400, "Email ada@example.com"), REJECTED, "HTTP 400"),
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

    with refusing() as port:
        assert outcome(send).meaning == NOT_SENT
    with faults.running(faults.http("close")) as server:
        port = server.port
        assert outcome(send).meaning == AMBIGUOUS


class SdkError(Exception):
    """As of SDKs that hand the answer on: python_http_client, and those generated from OpenAPI."""

    def __init__(self, status_code: int, body: bytes) -> None:
        self.status_code, self.body = status_code, body
        self.headers: dict[str, str] = {}


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
        (SdkError(200, b"<html>"), None, Result(AMBIGUOUS, "SdkError after HTTP 200")),
        (SdkError(200, b"<html>"), "no such provider", Result(AMBIGUOUS, "HTTP 200")),
        (ResendError("429", "rate_limit_exceeded"), "resend", Result(NOT_SENT, "rate_limit_exceeded")),
        (ResendError(409, "concurrent_idempotent_requests"), None, Result(AMBIGUOUS, "HTTP 409")),
        (ResendError(409, "invalid_idempotent_request"), "resend", Result(ACCEPTED, "invalid_idempotent_request")),
    ],
)
def test_an_answer_that_an_error_carries_is_read_in_the_provider_s_words(
    error: Exception, provider: str | None, expected: Result
) -> None:
    assert classify.failure(error, provider) == expected


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
