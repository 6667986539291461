# SPDX-License-Identifier: Apache-2.0
"""What was tried before the last error or answer, by the client or by the application: it may have arrived."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import aiohttp
import clients
import httpx
import pytest
import requests
import socket_faults as faults
import urllib3
from clients import outcome
from requests.adapters import HTTPAdapter
from requests.auth import HTTPDigestAuth

from reconciler import classify
from reconciler.classify import Result
from reconciler.sending.claims import NotSent, Rejected

pytestmark = pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")

SOON = 0.25  # where hanging is the point
LONG = 20.0

ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
NOT_SENT: Final = "not_sent"
AMBIGUOUS: Final = "ambiguous"


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
    with faults.deaf_port(listening=False) as port:
        assert outcome(repeating(3).post, f"http://127.0.0.1:{port}/").meaning == NOT_SENT


@pytest.mark.parametrize("client", clients.HTTP)
def test_an_application_that_tries_again_in_its_except_does_not_hide_the_first_try(client: str) -> None:
    submit = clients.HTTP[client]

    def twice() -> object:
        try:
            return submit(f"http://127.0.0.1:{server.port}/", LONG)
        except Exception:  # noqa: BLE001
            return submit(f"http://127.0.0.1:{port}/", LONG)

    with faults.running(faults.http("close")) as server, faults.deaf_port(listening=False) as port:
        assert outcome(twice).meaning == AMBIGUOUS


def test_a_second_try_after_one_s_own_time_out_does_not_hide_the_first() -> None:
    async def twice() -> None:
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(SOON):
                    await session.post(f"http://127.0.0.1:{server.port}/")
            except TimeoutError:
                await session.post(f"http://127.0.0.1:{port}/")

    with faults.running(faults.http("hang")) as server, faults.deaf_port(listening=False) as port:
        assert outcome(asyncio.run, twice()).meaning == AMBIGUOUS


@pytest.mark.parametrize("client", clients.HTTP)
def test_what_an_application_was_handling_anyway_does_not_matter(client: str) -> None:
    def after_a_miss() -> object:
        try:
            return clients.HTTP["template"]
        except KeyError:
            return clients.HTTP[client](f"http://127.0.0.1:{port}/", LONG)

    with faults.deaf_port(listening=False) as port:
        assert outcome(after_a_miss).meaning == NOT_SENT


# Redirects: the first answer took the body, and the client asked for another page.


def by_urllib(url: str) -> object:
    return urllib.request.urlopen(url, data=b"m", timeout=LONG)  # noqa: S310


def by_aiohttp(url: str) -> object:
    async def run() -> object:
        async with aiohttp.ClientSession() as session:
            return await classify.read_answer(await session.post(url, data=b"m"), "mailgun")

    return asyncio.run(run())


def by_aiohttp_raising(url: str) -> object:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            (await session.post(url, data=b"m")).raise_for_status()

    return asyncio.run(run())


FOLLOWING: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {
        "aiohttp": by_aiohttp,
        "aiohttp, raising": by_aiohttp_raising,
        "httpx": lambda url: httpx.post(url, content=b"m", follow_redirects=True),
        "httpx, raising": lambda url: httpx.post(url, content=b"m", follow_redirects=True).raise_for_status(),
        "requests": lambda url: requests.post(url, data=b"m", timeout=LONG),
        "requests, raising": lambda url: requests.post(url, data=b"m", timeout=LONG).raise_for_status(),
        "urllib": by_urllib,
        "urllib3": lambda url: clients.by_urllib3(url, LONG),
    }
)


def redirecting(to: str) -> Callable[[faults.Faulty, socket.socket], None]:
    """Answer a POST with `to`, 303, and a GET with the status that its path is."""

    def serve(server: faults.Faulty, connection: socket.socket) -> None:
        while head := faults.read_request(connection):
            server.arrived += head.startswith(b"POST")
            status = "303" if head.startswith(b"POST") else head.split()[1].decode().strip("/")
            connection.sendall(faults.reply(status, headers=f"Location: {to}\r\n" if status == "303" else ""))

    return serve


@pytest.mark.parametrize("client", FOLLOWING)
@pytest.mark.parametrize("to", ["/400", "/404", "/429", "refused"])
def test_what_comes_after_a_redirect_says_nothing_of_the_message_that_was_taken(client: str, to: str) -> None:
    with faults.deaf_port(listening=False) as port:
        place = f"http://127.0.0.1:{port}/" if to == "refused" else to
        with faults.running(redirecting(place)) as server:
            found = outcome(FOLLOWING[client], f"http://127.0.0.1:{server.port}/")
            assert (found.meaning, server.arrived) == (AMBIGUOUS, 1)


@pytest.mark.parametrize("client", [client for client in FOLLOWING if "raising" not in client])
def test_a_page_that_a_redirect_leads_to_is_no_acceptance(client: str) -> None:
    with faults.running(redirecting("/200")) as server:
        found = outcome(FOLLOWING[client], f"http://127.0.0.1:{server.port}/")
    assert found == Result(AMBIGUOUS, "HTTP 200 after a redirect")


def test_an_answer_after_a_question_for_the_password_is_the_message_s() -> None:
    with faults.running(asking) as server:
        url = f"http://127.0.0.1:{server.port}/"
        for response in (
            httpx.post(url, content=b"m", auth=httpx.DigestAuth("a", "b")),
            requests.post(url, data=b"m", auth=HTTPDigestAuth("a", "b"), timeout=LONG),
        ):
            assert len(response.history) == 1
            assert classify.answer(response) == Result(ACCEPTED, "HTTP 200")


def asking(server: faults.Faulty, connection: socket.socket) -> None:
    """Answer every second request; the others are asked who they are."""
    while faults.read_request(connection) is not None:
        server.arrived += 1
        asks = 'WWW-Authenticate: Digest realm="r", nonce="n", qop="auth", algorithm=MD5\r\n'
        connection.sendall(faults.reply("401", headers=asks) if server.arrived % 2 else faults.reply("200"))


# Errors raised from another one.


class ResendError(Exception):
    """As resend.exceptions.ResendError."""

    __module__ = "resend.exceptions"

    def __init__(self, code: int, error_type: str) -> None:
        self.code, self.error_type = code, error_type


def raised_from(error: Exception, cause: Exception) -> Exception:
    """Return the error as it is caught that an application has raised over another one."""
    try:
        try:
            raise cause  # noqa: TRY301
        except Exception as caught:
            raise error from caught
    except Exception as found:  # noqa: BLE001
        return found


def refused_by(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://esp.example.com")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "cause", "meaning"),
    [
        (NotSent("too late"), httpx.ReadTimeout(""), AMBIGUOUS),
        (NotSent("too late"), TimeoutError(), AMBIGUOUS),
        (NotSent("too late"), ResendError(500, "internal_server_error"), AMBIGUOUS),
        (NotSent("too late"), httpx.ConnectTimeout(""), NOT_SENT),
        (NotSent("no such template"), KeyError("template"), NOT_SENT),
        (Rejected("no such address"), requests.ReadTimeout(), AMBIGUOUS),
        (Rejected("no such address"), refused_by(422), REJECTED),
        (Rejected("no such address"), refused_by(500), AMBIGUOUS),
        (ResendError(429, "rate_limit_exceeded"), requests.ReadTimeout(), AMBIGUOUS),
        (ResendError(429, "rate_limit_exceeded"), refused_by(429), NOT_SENT),
    ],
)
def test_what_is_raised_from_an_error_that_may_have_arrived_is_ambiguous(
    error: Exception, cause: Exception, meaning: str
) -> None:
    assert classify.failure(raised_from(error, cause)).meaning == meaning
