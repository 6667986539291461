# SPDX-License-Identifier: Apache-2.0
"""Which clients repeat a POST by themselves: counted where it arrives, then compared with what we say of them."""

from __future__ import annotations

import asyncio
import json
import smtplib
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import aiosmtplib
import boto3
import clients
import httpx
import pytest
import requests
import socket_faults as faults
import urllib3
from aiobotocore.session import get_session
from click.testing import CliRunner
from clients import outcome
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from requests.adapters import HTTPAdapter
from snippets import block

from reconciler import hidden_retries
from reconciler.cli.commands import cli

pytestmark = pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")

SOON = 0.25
LONG = 20.0
STANDARD = {"mode": "standard"}
ANY_METHOD = urllib3.Retry(2, allowed_methods=None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients not wait before they repeat."""
    wait = asyncio.sleep
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(asyncio, "sleep", lambda _seconds: wait(0))


def by_session(retries: urllib3.Retry) -> Callable[[str, float], object]:
    def submit(url: str, seconds: float) -> object:
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=retries))
            return session.post(url, timeout=seconds)

    return submit


def by_httpx_with_retries(url: str, seconds: float) -> object:
    with httpx.Client(transport=httpx.HTTPTransport(retries=3), timeout=seconds) as client:
        return client.post(url)


# How often one submission arrives, where the answer is lost in each way.
ARRIVALS: Mapping[str, tuple[Callable[[str, float], object], dict[str, int]]] = MappingProxyType(
    {
        "botocore": (
            lambda url, seconds: clients.by_botocore(url, seconds, retries=None),
            {"reset_after": 5, "hang": 5, "500": 5, "429": 5},
        ),
        "botocore, mode standard": (
            lambda url, seconds: clients.by_botocore(url, seconds, retries=dict(STANDARD)),
            {"reset_after": 3, "hang": 3, "500": 3, "429": 1},
        ),
        "botocore, switched off": (clients.by_botocore, {"reset_after": 1, "hang": 1, "500": 1, "429": 1}),
        "aiobotocore": (
            lambda url, seconds: clients.by_aiobotocore(url, seconds, retries=None),
            {"reset_after": 5, "hang": 5, "500": 5},
        ),
        "aiobotocore, switched off": (clients.by_aiobotocore, {"reset_after": 1, "hang": 1, "500": 1}),
        "requests": (clients.by_requests, {"reset_after": 1, "hang": 1, "500": 1, "503": 1}),
        "requests, Retry for any method": (by_session(ANY_METHOD), {"reset_after": 3, "hang": 3, "500": 1}),
        "requests, Retry for idempotent methods": (
            by_session(urllib3.Retry(2)),
            {"reset_after": 1, "hang": 1, "500": 1},
        ),
        "requests, Retry for a status": (
            by_session(urllib3.Retry(2, read=False, allowed_methods=None, status_forcelist=[500])),
            {"reset_after": 1, "hang": 1, "500": 3},
        ),
        "urllib3": (clients.by_urllib3, {"reset_after": 1, "hang": 1, "500": 1, "503": 1}),
        "httpx": (clients.by_httpx, {"reset_after": 1, "hang": 1, "500": 1, "503": 1}),
        "httpx, retries of its transport": (by_httpx_with_retries, {"reset_after": 1, "hang": 1, "500": 1}),
        "aiohttp": (clients.by_aiohttp, {"reset_after": 1, "hang": 1, "500": 1, "503": 1}),
    }
)


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, (_, arrivals) in ARRIVALS.items() for fault in arrivals]
)
def test_a_submission_arrives_as_often_as_we_say(name: str, fault: str) -> None:
    submit, arrivals = ARRIVALS[name]
    with faults.running(faults.http(fault)) as server:
        outcome(submit, f"http://127.0.0.1:{server.port}/", SOON if fault == "hang" else LONG)
        assert server.arrived == arrivals[fault]


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    plain = serialization.NoEncryption()
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


LOST_IN_TLS = {"aiohttp": 1, "httpx": 1, "requests": 1, "urllib3": 4, "urllib3 once": 1, "botocore": 1}


@pytest.mark.parametrize(("client", "arrivals"), LOST_IN_TLS.items())
def test_an_answer_that_tls_spoils_is_ambiguous_and_repeated_by_urllib3(
    client: str, arrivals: int, tls: ssl.SSLContext
) -> None:
    with faults.running(faults.lost_in_tls(tls)) as server:
        found = outcome(clients.HTTP[client], f"https://127.0.0.1:{server.port}/", LONG)
        assert (found.meaning, server.arrived) == ("ambiguous", arrivals)


@pytest.mark.parametrize(
    ("submit", "arrivals"), [(clients.by_urllib3, 4), (clients.by_urllib3_once, 1), (clients.by_requests, 1)]
)
def test_an_answer_that_a_proxy_loses_is_repeated_by_urllib3(submit: Callable[..., object], arrivals: int) -> None:
    with faults.running(faults.http("close")) as proxy:
        outcome(submit, "http://esp.example.com/", LONG, proxy=f"http://127.0.0.1:{proxy.port}")
        assert proxy.arrived == arrivals


@pytest.mark.parametrize("client", clients.SMTP)
@pytest.mark.parametrize("fault", ["hang", "reset", "451"])
def test_smtp_clients_submit_once(client: str, fault: str) -> None:
    with faults.running(faults.smtp("dot", fault)) as server:
        outcome(clients.SMTP[client], server.port, SOON if fault == "hang" else LONG)
        assert server.arrived == 1


@pytest.mark.parametrize(("method", "arrivals"), [("POST", 2), ("PUT", 3)])
async def test_aiohttp_repeats_on_a_used_connection_what_is_idempotent_and_no_post(method: str, arrivals: int) -> None:
    with faults.running(faults.http("200", "close")) as server:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{server.port}/"
            async with session.request(method, url, data=b"one") as response:
                await response.read()
            with pytest.raises(aiohttp.ClientError):
                await session.request(method, url, data=b"two")
        assert server.arrived == arrivals


# What is said of a client.

URL = "http://127.0.0.1:1/"
SAID: Mapping[str, tuple[Callable[[], object], list[str]]] = MappingProxyType(
    {
        "botocore": (lambda: clients.boto_client(URL, LONG, None), ["up to 5 times (retry mode legacy)"]),
        "botocore, mode standard": (
            lambda: clients.boto_client(URL, LONG, dict(STANDARD)),
            ["up to 3 times (retry mode standard)"],
        ),
        "botocore, switched off": (lambda: clients.boto_client(URL, LONG, dict(clients.ONCE)), []),
        "requests": (requests.Session, []),
        "requests, Retry for any method": (
            lambda: mounted(ANY_METHOD),
            ["for http:// repeats a POST that got no answer"],
        ),
        "requests, Retry for idempotent methods": (
            lambda: mounted(urllib3.Retry(2)),
            ["for http:// repeats a POST whose answer was lost by an error of TLS"],
        ),
        "requests, Retry for a status": (
            lambda: mounted(urllib3.Retry(2, read=False, other=0, allowed_methods=None, status_forcelist=[500])),
            ["for http:// repeats a POST that got one of some answers"],
        ),
        "requests, Retry of nothing": (lambda: mounted(urllib3.Retry(False)), []),
        "urllib3": (urllib3.PoolManager, ["urllib3 repeats a POST whose answer was lost by an error of TLS"]),
        "urllib3, a pool": (lambda: urllib3.HTTPConnectionPool("127.0.0.1"), ["urllib3 repeats a POST whose answer"]),
        "urllib3, switched off": (lambda: urllib3.PoolManager(retries=False), []),
        "httpx": (httpx.Client, []),
        "httpx, retries of its transport": (lambda: httpx.Client(transport=httpx.HTTPTransport(retries=3)), []),
        "smtplib": (smtplib.SMTP, []),
        "aiosmtplib": (aiosmtplib.SMTP, []),
    }
)


def mounted(retries: urllib3.Retry) -> requests.Session:
    session = requests.Session()
    session.mount("http://", HTTPAdapter(max_retries=retries))
    return session


@pytest.mark.parametrize("name", SAID)
def test_a_client_that_repeats_is_found(name: str) -> None:
    make, said = SAID[name]
    lines = hidden_retries.find(make())
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


async def test_clients_of_asyncio_are_looked_into() -> None:
    async with (
        get_session().create_client("sesv2", endpoint_url=URL, **clients.ACCOUNT) as ses,
        aiohttp.ClientSession() as session,
        httpx.AsyncClient() as client,
    ):
        assert "up to 5 times" in hidden_retries.find(ses)[0]
        assert hidden_retries.find(session) == hidden_retries.find(client) == []


def test_a_boto3_resource_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert hidden_retries.find(boto3.resource("sqs", **clients.ACCOUNT)) == []
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "4")
    assert "up to 4 times" in hidden_retries.find(boto3.Session().resource("sqs", **clients.ACCOUNT))[0]


def test_whoever_asks_for_it_is_stopped_at_start() -> None:
    with requests.Session() as session:
        hidden_retries.refuse(session)
        with pytest.raises(hidden_retries.HiddenRetriesError, match="total_max_attempts"):
            hidden_retries.refuse(session, clients.boto_client(URL, LONG, None))


def test_the_documented_question_stops_a_client_that_tries_again() -> None:
    script = block("docs/failures.md", "python", "hidden_retries.refuse")
    with requests.Session() as session:
        once, several = (clients.boto_client(URL, LONG, retries) for retries in (dict(clients.ONCE), None))
        exec(script, {"requests_session": session, "ses_client": once})  # noqa: S102 - it is what readers copy
        with pytest.raises(hidden_retries.HiddenRetriesError, match="total_max_attempts"):
            exec(script, {"requests_session": session, "ses_client": several})  # noqa: S102 - as above


def test_a_client_that_is_not_known_is_no_client_that_submits_once() -> None:
    with pytest.raises(TypeError, match="reconciler selftest client"):
        hidden_retries.find(object())


# The command: it tries out whatever sends.

SENDERS: Mapping[str, str] = MappingProxyType(
    {
        "requests": "import requests; requests.post(url, json={}, timeout=9)",
        "requests, Retry": """
import requests, urllib3
session = requests.Session()
session.mount("http://", requests.adapters.HTTPAdapter(max_retries=urllib3.Retry(2, allowed_methods=None)))
session.post(url, json={}, timeout=9)
""",
        "boto3": """
import boto3
from botocore.config import Config
once = Config(retries={"total_max_attempts": 2})
ses = boto3.client("sesv2", region_name="eu-west-1", endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b",
                   config=once)
ses.send_email(FromEmailAddress="a@example.com", Destination={"ToAddresses": ["a@example.com"]},
               Content={"Raw": {"Data": b"Subject: hello"}})
""",
        "aiohttp": """
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as session:
        await session.get(url)  # a look at something else
        await session.post(url, json={})
asyncio.run(main())
""",
        "smtplib": """
import smtplib
host, _, port = smtp.partition(":")
with smtplib.SMTP(host, int(port), timeout=9) as server:
    server.sendmail("a@example.com", ["a@example.com"], "Subject: hello")
""",
        "a loop": """
import smtplib
host, _, port = smtp.partition(":")
for _ in range(3):
    try:
        with smtplib.SMTP(host, int(port), timeout=9) as server:
            server.sendmail("a@example.com", ["a@example.com"], "Subject: hello")
    except (OSError, smtplib.SMTPException):
        pass
""",
        "elsewhere": "print('nothing is sent')",
    }
)
BEFORE = """
import os
url, smtp = os.environ["RECONCILER_SELFTEST_URL"], os.environ["RECONCILER_SELFTEST_SMTP"]
"""


def trial(name: str, tmp_path: Path, *options: str) -> Any:
    sender = tmp_path / "sender.py"
    sender.write_text(BEFORE + SENDERS[name])
    args = ["selftest", "client", *options, "--", sys.executable, str(sender)]
    return CliRunner().invoke(cli, args, catch_exceptions=False)


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("requests", 0, "reset: 1 submission arrived, as it should"),
        ("requests, Retry", 3, "reset: 3 submissions arrived, by python-requests"),
        ("boto3", 3, "unavailable: 2 submissions arrived, by Boto3"),
        ("aiohttp", 0, "unavailable: 1 submission arrived, as it should"),
        ("smtplib", 0, "reset: 1 submission arrived, as it should"),
        ("a loop", 3, "reset: 3 submissions arrived, by SMTP"),
        ("elsewhere", 1, "RECONCILER_SELFTEST_URL"),
    ],
)
def test_whatever_sends_is_tried_out(name: str, status: int, said: str, tmp_path: Path) -> None:
    done = trial(name, tmp_path)
    assert (done.exit_code, said in done.output) == (status, True), done.output


def test_hidden_retries_are_told_with_the_way_to_switch_them_off(tmp_path: Path) -> None:
    assert "total_max_attempts" in trial("boto3", tmp_path, "--fault", "reset").output
    assert "HTTPAdapter()" in trial("requests, Retry", tmp_path, "--fault", "reset").output


def test_a_client_that_gives_up_waiting_is_tried_out_on_request(tmp_path: Path) -> None:
    done = trial("requests", tmp_path, "--fault", "hang", "--hold", "200ms")
    assert (done.exit_code, done.output) == (0, "hang: 1 submission arrived, as it should\n")


def test_a_trial_is_told_as_json(tmp_path: Path) -> None:
    sender = tmp_path / "sender.py"
    sender.write_text(BEFORE + "print('what the sender prints')" + SENDERS["requests, Retry"])
    args = ["selftest", "client", "--json", "--fault", "reset", "--", sys.executable, str(sender)]
    done = subprocess.run([sys.executable, "-m", "reconciler", *args], capture_output=True, text=True, check=False)
    (said,) = json.loads(done.stdout)
    assert (said["fault"], said["arrived"]) == ("reset", 3)
    assert said["by"].startswith("python-requests/")
    assert "HTTPAdapter()" in said["advice"]
    assert (done.returncode, "what the sender prints" in done.stderr) == (3, True)


def test_a_command_that_can_t_be_run_is_said() -> None:
    done = CliRunner().invoke(cli, ["selftest", "client", "--", "/no/such/program"])
    assert (done.exit_code, "can't be run" in done.output) == (1, True)
    assert CliRunner().invoke(cli, ["selftest", "client"]).exit_code == 2


def test_the_documented_counts_are_the_counted_ones() -> None:
    lines = (Path(__file__).parents[1] / "docs" / "failures.md").read_text().split("## Clients")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    counts = {name: arrivals["reset_after"] for name, (_, arrivals) in ARRIVALS.items()} | dict.fromkeys(
        clients.SMTP, 1
    )
    documented = {row[0]: int(row[3].split(";")[0]) for row in rows}
    assert documented == {name: counts[name] for name in documented}
    assert documented.keys() == set(clients.HTTP) - {"urllib3 once"} | set(clients.SMTP)
