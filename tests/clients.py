# SPDX-License-Identifier: Apache-2.0
"""One submission by each client, as a sender would write it. Certificates are not looked at; repeating is off."""

from __future__ import annotations

import asyncio
import smtplib
from collections.abc import Callable
from email.message import EmailMessage
from functools import cache
from typing import Any

import aiohttp
import aiosmtplib
import boto3
import httpx
import requests
import urllib3
from aiobotocore.session import get_session
from botocore.config import Config

from reconciler import classify

ONCE = {"total_max_attempts": 1}
ACCOUNT: dict[str, Any] = {"region_name": "eu-west-1", "aws_access_key_id": "a", "aws_secret_access_key": "b"}
ADDRESS = "ada@example.com"
SES_MESSAGE: dict[str, Any] = {
    "FromEmailAddress": ADDRESS,
    "Destination": {"ToAddresses": [ADDRESS]},
    "Content": {"Simple": {"Subject": {"Data": "hello"}, "Body": {"Text": {"Data": "hello"}}}},
}
MESSAGE = EmailMessage()
MESSAGE["From"] = MESSAGE["To"] = ADDRESS
MESSAGE.set_content("hello")


def by_aiohttp(url: str, seconds: float, **proxies: Any) -> object:
    async def run() -> object:
        timeout = aiohttp.ClientTimeout(sock_connect=seconds, sock_read=seconds)
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            async with session.post(url, json={}, **proxies) as response:
                await response.read()
            return await classify.read_answer(response)

    return asyncio.run(run())


def by_httpx(url: str, seconds: float, **proxies: Any) -> object:
    return httpx.post(url, json={}, timeout=seconds, verify=False, **proxies)  # noqa: S501


def by_requests(url: str, seconds: float, proxy: str | None = None) -> object:
    proxies = {"http": proxy, "https": proxy} if proxy else None
    return requests.post(url, json={}, timeout=seconds, verify=False, proxies=proxies)  # noqa: S501


def by_urllib3(url: str, seconds: float, proxy: str | None = None, **options: Any) -> object:
    pool = urllib3.ProxyManager(proxy, cert_reqs="CERT_NONE") if proxy else urllib3.PoolManager(cert_reqs="CERT_NONE")
    with pool:
        return pool.request("POST", url, body=b"{}", timeout=seconds, **options)


def by_urllib3_once(url: str, seconds: float, proxy: str | None = None) -> object:
    return by_urllib3(url, seconds, proxy, retries=False)


@cache
def aws_session() -> boto3.Session:
    return boto3.Session()


def boto_client(url: str, seconds: float, retries: dict[str, Any] | None, proxy: str | None = None) -> Any:
    proxies = {"http": proxy, "https": proxy} if proxy else None
    config = Config(retries=retries, connect_timeout=seconds, read_timeout=seconds, proxies=proxies)
    return aws_session().client("sesv2", endpoint_url=url, config=config, verify=False, **ACCOUNT)


def by_botocore(url: str, seconds: float, proxy: str | None = None, retries: dict[str, Any] | None = ONCE) -> object:
    return boto_client(url, seconds, retries, proxy).send_email(**SES_MESSAGE)


def by_aiobotocore(url: str, seconds: float, retries: dict[str, Any] | None = ONCE) -> object:
    async def run() -> object:
        config = Config(retries=retries, connect_timeout=seconds, read_timeout=seconds)
        client = get_session().create_client("sesv2", endpoint_url=url, config=config, verify=False, **ACCOUNT)
        async with client as ses:
            return await ses.send_email(**SES_MESSAGE)

    return asyncio.run(run())


def by_smtplib(port: int, seconds: float) -> object:
    with smtplib.SMTP("127.0.0.1", port, timeout=seconds) as server:
        return server.send_message(MESSAGE)


def by_aiosmtplib(port: int, seconds: float) -> object:
    return asyncio.run(aiosmtplib.send(MESSAGE, hostname="127.0.0.1", port=port, timeout=seconds, start_tls=False))


HTTP: dict[str, Callable[[str, float], object]] = {
    "aiohttp": by_aiohttp,
    "httpx": by_httpx,
    "requests": by_requests,
    "urllib3": by_urllib3,
    "urllib3 once": by_urllib3_once,
    "botocore": by_botocore,
    "aiobotocore": by_aiobotocore,
}
SMTP: dict[str, Callable[[int, float], object]] = {"smtplib": by_smtplib, "aiosmtplib": by_aiosmtplib}


def outcome(submit: Callable[..., object], *args: Any, **options: Any) -> classify.Result:
    """Submit, and classify what came of it."""
    try:
        return classify.answer(submit(*args, **options))
    except Exception as error:  # noqa: BLE001
        return classify.failure(error)
