# SPDX-License-Identifier: Apache-2.0
"""What a submission is taken for: real clients against servers that misbehave on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import MappingProxyType
from typing import Any, Final

import clients
import pytest
import socket_faults as faults
from clients import outcome

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
        is_codeless = fault == "400" and client in {"botocore", "aiobotocore"}  # which AWS says of throttling, too
        assert found.meaning == (AMBIGUOUS if is_codeless else meaning)
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
