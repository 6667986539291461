# SPDX-License-Identifier: Apache-2.0
"""Posts sample events to the running receiver over real HTTP, as their provider would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import aiohttp
from yarl import URL

from reconciler.configuration.settings import Settings
from reconciler.configuration.values import masked_url
from reconciler.errors import UserError
from webhooks.provider import Delivery, Feed, NoSample
from webhooks.registry import PROVIDERS

SECONDS: Final = 15.0
"""How long one answer is waited for. A receiver that can't store says so within ten."""

LONGEST_ANSWER: Final = 4000
"""Characters of an answer's body that are kept."""

_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104 - what a server listens on


@dataclass(frozen=True, slots=True)
class Answered:
    """What the receiver answered to the event about one key."""

    key: str
    status: int
    body: str


def receiver_url(settings: Settings) -> str:
    """Return where the receiver of these settings listens, as seen from this machine. Raises UserError."""
    receiver = settings.receiver
    if receiver.port == 0:
        raise UserError("receiver.port is 0, any free one: say where the receiver listens with --url")
    host = _ANYWHERE.get(receiver.host, receiver.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{receiver.port}"


async def post_samples(base: str, feed: Feed, kind: str, keys: Sequence[str], now: datetime) -> list[Answered]:
    """Post one sample event a key to a feed of the receiver at `base`, and return its answers.

    A key goes as it is: whatever comes back, the receiver makes a wire key of, with the installation's namespace. `now`
    is this host's clock, by which samples are signed. Raises UserError.
    """
    try:
        samples = [(key, PROVIDERS[feed.provider].sample(kind, key, feed, now)) for key in keys]
    except NoSample as error:
        raise UserError(str(error)) from None
    place = masked_url(base)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
            return [await _post(session, f"{base}/webhooks/{feed.name}", key, sample) for key, sample in samples]
    except TimeoutError:
        raise UserError(f"the receiver at {place} did not answer within {SECONDS:g} s") from None
    except (aiohttp.ClientConnectorError, ConnectionError):
        raise UserError(f"no receiver answers at {place}: start it with reconciler serve, or say --url") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise UserError(
            f"{place} can't be posted to ({type(error).__name__}): write --url as in http://host:port"
        ) from None


async def _post(session: aiohttp.ClientSession, url: str, key: str, sample: Delivery) -> Answered:
    target = f"{url}?{sample.query}" if sample.query else url
    as_it_is = URL(target, encoded=True)
    async with session.request(
        sample.method, as_it_is, data=sample.body, headers=sample.headers, allow_redirects=False
    ) as answer:
        return Answered(key, answer.status, (await answer.text(errors="replace"))[:LONGEST_ANSWER])
