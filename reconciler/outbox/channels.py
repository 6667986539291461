# SPDX-License-Identifier: Apache-2.0
"""The roads by which the application is told: an HTTP callback signed by Standard Webhooks, or an SQS queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Final

from aiohttp import ClientError, ClientSession, ClientSSLError, ClientTimeout

from reconciler.configuration.tables import OutboxSettings
from webhooks.aws import aws_failure, open_client, region_of
from webhooks.provider import Feed
from webhooks.signature import sign_standard_webhook, standard_webhook_keys

SECONDS: Final = 10.0
"""How long one delivery may take, connection and answer together."""

LONGEST_WAIT: Final = timedelta(days=1)
"""The longest Retry-After that is followed."""

GONE: Final = 410
_SAY_WHEN: Final = (429, 503)


@dataclass(frozen=True, slots=True)
class Message:
    """What is delivered."""

    id: str
    """The same each time: by it the application knows a repetition."""
    wire_key: str
    sent_at: datetime
    """When this delivery is made, by the database's clock."""
    body: bytes


class NotTaken(Exception):
    """The message was not taken, or nobody knows. `reason` is short and holds no secret."""

    def __init__(self, reason: str, *, wait: timedelta | None = None, gone: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        """How long the receiver asks to be left alone."""
        self.gone = gone
        """The receiver wants no more of these."""


Send = Callable[[Message], Awaitable[None]]
"""Delivers one message. Raises NotTaken."""

Channel = Callable[[], AbstractAsyncContextManager[Send]]
"""Opens a road for some messages."""


def channel_of(settings: OutboxSettings) -> Channel | None:
    """Return the road that the settings name, None where there is none."""
    if settings.queue_url:
        return partial(open_queue, settings.queue_url, settings.region, settings.endpoint_url)
    if settings.url:
        return partial(open_callback, settings.url, standard_webhook_keys(settings.secrets))
    return None


@asynccontextmanager
async def open_callback(url: str, keys: tuple[bytes, ...]) -> AsyncIterator[Send]:
    """Post messages to a URL, signed with each of the keys. Redirects are not followed."""
    headers = {"Content-Type": "application/json", "User-Agent": "esp-reconciler"}
    async with ClientSession(timeout=ClientTimeout(total=SECONDS), headers=headers, trust_env=True) as session:
        yield partial(_post, session, url, keys)


async def _post(session: ClientSession, url: str, keys: tuple[bytes, ...], message: Message) -> None:
    try:
        async with session.post(
            url, data=message.body, headers=signed_headers(keys, message), allow_redirects=False
        ) as answer:
            if answer.status // 100 != 2:  # noqa: PLR2004
                wait = retry_after(answer.headers, message.sent_at) if answer.status in _SAY_WHEN else None
                raise NotTaken(f"http_{answer.status}", wait=wait, gone=answer.status == GONE)
    except TimeoutError:
        raise NotTaken("timeout") from None
    except ClientSSLError:
        raise NotTaken("tls") from None
    except (ClientError, OSError, ValueError) as error:
        raise NotTaken(f"unreachable ({type(error).__name__})") from None


def signed_headers(keys: tuple[bytes, ...], message: Message) -> dict[str, str]:
    """Return the headers by which the application knows that a message is ours, and whether it is a repetition."""
    timestamp = str(int(message.sent_at.timestamp()))
    signatures = [sign_standard_webhook(key, message.id, timestamp, message.body) for key in keys]
    return {
        "webhook-id": message.id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures),
    }


def retry_after(headers: Mapping[str, str], now: datetime) -> timedelta | None:
    """Return how long the answer asks to wait: seconds, or until a date. None: it says nothing that makes sense."""
    said = headers.get("Retry-After", "").strip()
    try:
        wait = timedelta(seconds=int(said)) if said.isdecimal() else _zoned(parsedate_to_datetime(said)) - now
    except OverflowError:
        return LONGEST_WAIT
    except ValueError:
        return None
    return min(wait, LONGEST_WAIT) if wait > timedelta(0) else None


def _zoned(at: datetime) -> datetime:
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@asynccontextmanager
async def open_queue(url: str, region: str | None, endpoint_url: str | None) -> AsyncIterator[Send]:
    """Send messages to an SQS queue; in a FIFO queue those of one send keep their order."""
    place = Feed("outbox", "", queue_url=url, region=region)
    async with open_client("sqs", region_of(place), endpoint_url) as sqs:

        async def send(message: Message) -> None:
            fifo = {"MessageGroupId": message.wire_key, "MessageDeduplicationId": message.id}
            named = fifo if url.endswith(".fifo") else {}
            try:
                async with asyncio.timeout(SECONDS):
                    await sqs.send_message(QueueUrl=url, MessageBody=message.body.decode(), **named)
            except TimeoutError:
                raise NotTaken("timeout") from None
            except Exception as error:  # noqa: BLE001 - whatever it is, the message is tried again
                raise NotTaken(str(aws_failure(error))[:200]) from None

        yield send
