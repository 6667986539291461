# SPDX-License-Identifier: Apache-2.0
"""A provider on loopback that fails as it is told: it takes messages or doesn't, and answers or doesn't.

It knows what no client of a real provider knows: `taken`, how often each message was really taken.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from reconciler.breakable.fate import Fate, Fates, Said, Telling
from reconciler.breakable.mailgun import Mailgun
from reconciler.breakable.postmark import Postmark
from reconciler.breakable.resend import Resend
from reconciler.breakable.sendgrid import SendGrid
from reconciler.breakable.ses import Ses
from reconciler.breakable.shape import Answer, Asked, Message, Notice, Request, Shape
from reconciler.breakable.teller import Teller, Webhook
from webhooks.event import derived_id, wire_key
from webhooks.registry import PROVIDERS

__all__ = ["SHAPES", "Esp", "Webhook", "esp", "request"]

SHAPES: Final[Mapping[str, type[SendGrid | Ses | Mailgun | Postmark | Resend]]] = MappingProxyType(
    {"sendgrid": SendGrid, "ses": Ses, "mailgun": Mailgun, "postmark": Postmark, "resend": Resend}
)
"""The shapes that there are, by the provider's name in settings."""

_FAULT: Final = Answer(500, {"message": "Internal Server Error"})
_NOWHERE: Final = Answer(404, {"message": "Not Found"})
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)
_MAX_BODY: Final = 50_000_000


def request(shape: str, key: str, recipient: str) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a request to send, stamped: post them to `Esp.url` as they are.

    The key may be a send key or its wire key. The same arguments give the same bytes. Raises ValueError for a shape
    that there is not.
    """
    form = _shape(shape)
    stamp = PROVIDERS[shape].stamp(wire_key(key))
    return {"Content-Type": form.content_type, **stamp.headers}, form.encode(stamp.into(form.message(recipient)))


class Esp:
    """A running provider. Its attributes may be changed while it runs."""

    def __init__(self, name: str, shape: Shape, seed: int) -> None:
        self.url = ""
        """Where to post a send."""
        self.api_url = ""
        """Where its API is: a feed's `api_url`."""
        self.fates = Fates()
        self.next_fates: deque[Fate] = deque()
        """The fates of the next requests, before any is drawn."""
        self.telling = Telling()
        self.lag = 0.0
        """Seconds after which its look-up API shows a message."""
        self.taken: Counter[str] = Counter()
        """How often each message was taken, by wire key: what recipients really got. This is the truth."""
        self.messages: list[Message] = []
        """What was taken, in order."""
        self.met: Counter[Fate] = Counter()
        """How many requests met each fate. One that is malformed meets none."""
        self.arrived = asyncio.Event()
        """Set whenever a message is taken; whoever waits for the next one clears it."""
        self._name, self._shape, self._seed = name, shape, seed
        self._teller = Teller(shape)
        self._tries: Counter[str] = Counter()
        self._natives: dict[str, tuple[bytes, Message]] = {}
        self._over = asyncio.Event()

    @property
    def webhook(self) -> Webhook | None:
        """Where its events go; None: nowhere. Raises ValueError for one that it can't sign for."""
        return self._teller.webhook

    @webhook.setter
    def webhook(self, webhook: Webhook | None) -> None:
        if webhook:
            probe = Notice(Message("probe", "probe", "probe@example.com", datetime.now(UTC)), "delivered")
            self._shape.delivery([probe], webhook.secret, probe.at)
        self._teller.webhook = webhook

    @property
    def answers(self) -> Counter[int]:
        """How often its webhook's posts were answered with each status, 0: not at all."""
        return self._teller.answers

    @property
    def acknowledged(self) -> dict[str, set[Said]]:
        """What was told and answered with success, by wire key: nothing of this may be lost."""
        return self._teller.acknowledged

    async def told(self) -> None:
        """Wait until every webhook that is due now or later was taken, or refused for ever."""
        await self._teller.told()

    def feed(self, certificates: Path | None = None) -> dict[str, Any]:
        """Return the settings of a feed that listens to this provider, what stands under `[feeds.NAME]`.

        For SES, `certificates` is a folder into which the certificate of its signatures is written. Raises ValueError
        where it is missing.
        """
        settings: dict[str, Any] = {"provider": self._name, **self._shape.feed(certificates)}
        if PROVIDERS[self._name].facts.finds_by != "nothing":
            settings |= {"api_key": "any", "api_url": self.api_url}
        if self.webhook and self.webhook.secret:
            settings["secrets"] = [self.webhook.secret]
        return settings

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of HTTP, or don't."""
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Request(request.method, request.path, dict(request.query), headers, body)
        try:
            if (asked.method, asked.path) == ("POST", self._shape.path):
                return await self._submitted(self._shape.asked(asked), body, request)
            return _response(self._shape.look_up(asked, self._shown()) or _NOWHERE)
        except ValueError as error:
            return _response(Answer(400, {"message": str(error)}))

    def stop(self) -> None:
        """Let go of the requests that hang."""
        self._over.set()

    async def close(self) -> None:
        """Stop telling."""
        await self._teller.close()

    async def _submitted(self, asked: Asked, body: bytes, request: web.Request) -> web.StreamResponse:
        fate = self._fate(asked)
        self.met[fate] += 1
        answer = self._take(asked, body) if fate.taken else self._shape.refused
        match fate:
            case Fate.HANGS | Fate.LOST:
                await self._over.wait()
                _hang_up(request)
            case Fate.RESET:
                _hang_up(request, reset=True)
            case Fate.DOWN:
                _hang_up(request)
            case Fate.LATE_ERROR:
                answer = _FAULT
            case Fate.BUSY:
                answer = self._shape.busy
        return _response(answer)

    def _fate(self, asked: Asked) -> Fate:
        """Return the fate of a request. The nth of one key has the same one in whichever order requests arrive."""
        self._tries[asked.key] += 1
        if self.next_fates:
            return self.next_fates.popleft()
        fate = self.fates.draw(self._dice("fate", asked.key, self._tries[asked.key]))
        # Whoever has a message does not say that it will never be sent.
        return Fate.ANSWERED if fate is Fate.REFUSED and asked.native_key in self._natives else fate

    def _take(self, asked: Asked, body: bytes) -> Answer:
        """Take a message, unless its native key is known: then say what was said of the first, or that it differs."""
        if asked.native_key in self._natives:
            first_body, message = self._natives[asked.native_key]
            return self._shape.took(message) if body == first_body else self._shape.reused
        self.taken[asked.key] += 1
        digest = derived_id(str(self._seed), asked.key, str(self.taken[asked.key]))
        message = Message(self._shape.message_id(digest), asked.key, asked.recipient, datetime.now(UTC))
        if asked.native_key:
            self._natives[asked.native_key] = body, message
        self.messages.append(message)
        self.arrived.set()
        if self.webhook:
            told = self.telling.tell(self._dice("telling", asked.key, self.taken[asked.key]))
            self._teller.tell(message, told, self.telling.batch)
        return self._shape.took(message)

    def _shown(self) -> list[Message]:
        until = datetime.now(UTC) - timedelta(seconds=self.lag)
        return [message for message in self.messages if message.at <= until]

    def _dice(self, *what: object) -> Random:
        return Random(f"{self._seed} {what}")  # noqa: S311 - dice, not secrets


@asynccontextmanager
async def esp(
    shape: str,
    *,
    seed: int = 1,
    fates: Fates = Fates(),  # noqa: B008 - frozen
    telling: Telling | None = None,
    webhook: Webhook | None = None,
    lag: float = 0.0,
) -> AsyncIterator[Esp]:
    """Run a provider of one of the SHAPES on a free port of loopback. Raises ValueError for a shape that there is not.

    Without `telling` a message is accepted and delivered at once, and said to be; without `webhook` nobody is told.
    `lag` is how many seconds its look-up API lies behind.
    """
    provider = Esp(shape, _shape(shape), seed)
    provider.fates, provider.telling, provider.lag = fates, telling or Telling(), lag
    app = web.Application(client_max_size=_MAX_BODY)
    app.router.add_route("*", "/{path:.*}", provider.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    try:
        provider.webhook = webhook
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        provider.api_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        provider.url = provider.api_url + SHAPES[shape].path
        yield provider
    finally:
        provider.stop()
        await runner.cleanup()
        await provider.close()


def _shape(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"no provider of the shape {name!r} can be broken; there are {', '.join(SHAPES)}")
    return SHAPES[name]()


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers, content_type="application/json")


def _hang_up(request: web.Request, *, reset: bool = False) -> None:
    if transport := request.transport:  # else the client was quicker
        if reset:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        transport.abort()
