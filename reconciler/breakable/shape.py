# SPDX-License-Identifier: Apache-2.0
"""What the loopback provider asks of one provider's shape: its send API, its webhooks and its look-up API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from reconciler.breakable.fate import SAID, Said
from webhooks.event import derived_id
from webhooks.provider import Delivery
from webhooks.reply import is_success

SENDER: Final = "orders@shop.example.com"
SUBJECT: Final = "Your receipt"
TEXT: Final = "Thank you."
DOMAIN: Final = "mg.example.com"
"""The sending domain, where an API or an id names one."""

BOUNCE: Final = "550 5.1.1 no such mailbox"
DELAY: Final = "451 4.7.1 try again later"


@dataclass(frozen=True, slots=True)
class Request:
    """What the provider was asked. Header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What it answers: JSON, or nothing where the value is None."""

    status: int
    value: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """The bytes of the answer."""
        return b"" if self.value is None else msgspec.json.encode(self.value)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks to be sent."""

    key: str
    """Our key, as it stands in the provider's slot; empty where there is none."""
    recipient: str
    native_key: str | None = None
    """The provider's own idempotency key, where it has one."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that the provider took."""

    id: str
    """As answers and events name it."""
    key: str
    recipient: str
    at: datetime
    """When it was taken."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that the provider says of a message. It is the same event however often it is told."""

    message: Message
    kind: Said

    @property
    def id(self) -> str:
        """Names the event: 40 hex digits."""
        return derived_id("breakable", self.message.id, self.kind)

    @property
    def at(self) -> datetime:
        """When it happened, however late it is told."""
        return self.message.at + SAID.index(self.kind) * timedelta(milliseconds=1)


class Shape(ABC):
    """One provider's APIs, with a key of its own that signs its webhooks. Each lives in one file."""

    path: ClassVar[str]
    """Where messages are posted."""
    names: ClassVar[Mapping[Said, str]]
    """Its own name of each thing that it says."""
    refused: ClassVar[Answer]
    """Says that it will never send this message."""
    busy: ClassVar[Answer]
    """Says to come again later."""
    reused: ClassVar[Answer] = Answer(HTTPStatus.CONFLICT)
    """Says that its idempotency key came with another message before."""
    content_type: ClassVar[str] = "application/json"
    batches: ClassVar[bool] = False
    """Whether one post may hold several events."""

    @abstractmethod
    def message_id(self, digest: str) -> str:
        """Return an id of its form, made of 40 hex digits."""

    @abstractmethod
    def message(self, recipient: str) -> dict[str, Any]:
        """Return the body of a request to send something to somebody, without a stamp."""

    def encode(self, body: Mapping[str, Any]) -> bytes:
        """Return a body as it is posted."""
        return msgspec.json.encode(body)

    @abstractmethod
    def asked(self, request: Request) -> Asked:
        """Return what a request asks for. Raises BadPayload where it is not one message in this provider's form."""

    @abstractmethod
    def took(self, message: Message) -> Answer:
        """Return the answer to a message that was taken."""

    @abstractmethod
    def delivery(self, notices: Sequence[Notice], secret: str | None, now: datetime) -> Delivery:
        """Return the signed request that brings notices, one of them where it does not batch.

        `secret` is one that the feed was given; None: the shape's own key, of which `feed` tells. Raises NoSample where
        nothing can be signed with the secret.
        """

    def ends(self, status: int) -> bool:
        """Say whether it never brings a delivery again that was answered so."""
        return is_success(status)

    @abstractmethod
    def feed(self, certificates: Path | None) -> dict[str, Any]:
        """Return the settings of a feed that verifies its own key's signatures and asks its look-up API.

        `certificates` is a folder for what is too long for a setting. Raises ValueError where it takes one.
        """

    def look_up(self, request: Request, messages: Sequence[Message]) -> Answer | None:  # noqa: ARG002 - it has no such API
        """Return what its API says about the messages that it shows by now, oldest first; None: no such place."""
        return None
