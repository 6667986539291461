# SPDX-License-Identifier: Apache-2.0
"""Clients of AWS for a feed or the archive: SQS, SES, SNS, S3. Needs the extra `aws`."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import aiohttp

from webhooks.asking import ApiError
from webhooks.provider import Feed

CALL_SECONDS: Final = 30
"""Longest wait for an answer. A long poll of SQS takes 20."""

_REGION: Final = re.compile(r"arn:aws[a-z-]*:[a-z]+:([a-z0-9-]+):|https?://sqs\.([a-z0-9-]+)\.")
_S3_URL: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in S3 the archive is."""

    bucket: str
    prefix: str
    region: str
    endpoint_url: str | None = None


def s3_place(url: str, region: str | None, endpoint_url: str | None) -> Place:
    """Return the place that `s3://bucket/prefix` names. Raises ValueError."""
    found = _S3_URL.fullmatch(url)
    if not found and url.removeprefix("s3://") in (url, ""):
        raise ValueError("is no place in S3: write s3://bucket/prefix")
    if not found:
        raise ValueError("names no bucket: its name has 3 to 63 lower-case letters, digits, dots and hyphens")
    return Place(found[1], (found[2] or "").strip("/"), region or default_region(), endpoint_url)


def region_of(feed: Feed) -> str:
    """Return the feed's AWS region: the one that is set, else that of its queue or first topic."""
    places = (feed.queue_url or "", *feed.topics[:1])
    found = next(filter(None, map(_REGION.match, places)), None)
    return feed.region or (found and (found[1] or found[2])) or default_region()


def default_region() -> str:
    """Return the region that AWS's own tools would take from the environment."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


@cache
def _loader() -> Any:
    """Return what reads the services' descriptions: 100 ms of the event loop for each session that has its own."""
    from botocore.loaders import Loader, create_loader  # noqa: PLC0415

    loader: Loader = create_loader()
    return loader


@asynccontextmanager
async def open_client(service: str, region: str, endpoint_url: str | None) -> AsyncIterator[Any]:
    """Yield a client; credentials come from where AWS's own tools look for them, and are renewed by themselves.

    Raises ApiError where the extra is not installed, and for whatever AWS refuses or fails at meanwhile.
    """
    try:
        from aiobotocore.config import AioConfig  # noqa: PLC0415 - an extra, and slow to import
        from aiobotocore.session import get_session  # noqa: PLC0415
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError  # noqa: PLC0415
    except ImportError:
        raise ApiError("unconfigured", "no AWS client: install the extra aws of esp-reconciler") from None
    config = AioConfig(
        connect_timeout=5, read_timeout=CALL_SECONDS, retries={"mode": "standard", "total_max_attempts": 3}
    )
    try:
        session = get_session()
        session.register_component("data_loader", _loader())
        async with session.create_client(
            service, region_name=region, endpoint_url=endpoint_url, config=config
        ) as client:
            yield client
    except ParamValidationError:
        raise  # a call that we made wrongly is no fault of AWS
    except (BotoCoreError, ClientError, aiohttp.ClientError, TimeoutError) as error:
        raise aws_failure(error) from error


async def ask(feed: Feed, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
    """Return what one operation answers, in the feed's region. Raises ApiError."""
    async with open_client(service, region_of(feed), feed.endpoint_url) as client:
        return dict(await getattr(client, operation)(**arguments))


async def do(feed: Feed, service: str, operation: str, **arguments: Any) -> None:
    """Have one operation done, in the feed's region. Raises ApiError."""
    await ask(feed, service, operation, **arguments)


def aws_failure(error: Exception) -> ApiError:
    """Return what an exception of a client means for a person, without its text, which may quote a message."""
    if isinstance(error, ApiError):
        return error
    from botocore import exceptions  # noqa: PLC0415

    match error:
        case exceptions.NoCredentialsError() | exceptions.PartialCredentialsError():
            return ApiError("unconfigured", "no AWS credentials found: set AWS_ACCESS_KEY_ID, or give the host a role")
        case exceptions.CredentialRetrievalError():
            return ApiError("unauthorized", "AWS credentials could not be renewed: look at the role, or where they lie")
        case exceptions.ClientError():
            return _answered(error.response)
        case exceptions.EndpointConnectionError():
            return ApiError("unreachable", "no connection to AWS: check region and endpoint_url, and the network")
    return ApiError("unreachable", f"AWS did not answer ({type(error).__name__}): check region, endpoint_url, network")


_DENIED: Final = ("AccessDenied", "AccessDeniedException", "AuthorizationError", "AuthFailure")
_STALE: Final = ("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException")
_MISSING: Final = (
    "NoSuchBucket",
    "NonExistentQueue",
    "QueueDoesNotExist",
    "NotFound",
    "NotFoundException",
    "NoSuchKey",
)


def _answered(response: Any) -> ApiError:
    code = str(response.get("Error", {}).get("Code", "")).rpartition(".")[2]
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _DENIED or status == 403:  # noqa: PLR2004
        return ApiError("forbidden", f"AWS refused it ({code}): give this role the right")
    if code in _STALE:
        return ApiError("unauthorized", f"AWS refused the credentials ({code}): renew them, or check the region")
    if code in _MISSING or status == 404:  # noqa: PLR2004
        return ApiError("not_found", f"AWS knows no such place ({code}): check its name, region and account")
    return ApiError("server_error" if status >= 500 else "refused", f"AWS answered {code or status}")  # noqa: PLR2004
