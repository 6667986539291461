# SPDX-License-Identifier: Apache-2.0
"""What the receiver asks of a provider, and the vocabulary in which a provider's file answers. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from webhooks.event import Event, Kind, Testimony
from webhooks.reply import Reply


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One request as it arrived: headers are asked for in lower case, the body is inflated but otherwise exact."""

    body: bytes
    headers: Mapping[str, str]
    method: str = "POST"
    query: str = ""
    """The raw query string, without the question mark."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One configured source of provider events, as a provider's file needs to know it."""

    name: str
    provider: str
    secrets: tuple[str, ...] = ()
    """What verifies deliveries; any one of them is enough (rotation). None: every delivery is refused."""
    tolerance: timedelta | None = None
    """Greatest age of a signed timestamp; None: age is not checked. (The provider's default is filled in before.)"""
    signed_url: str | None = None
    topics: tuple[str, ...] = ()
    certificates: str | None = None
    """Folder of pinned SNS signing certificates (SES), or of the chain that they must lead back to (Scaleway)."""
    api_key: str = field(default="", repr=False)
    api_secret: str = field(default="", repr=False)
    """The second half of a credential that has two."""
    api_url: str | None = None
    """Where the provider's API is, without a slash at the end; None: its usual place."""
    api_scope: str = ""
    """The part of the account that is asked: a domain, a message stream, a project, as the provider's facts say."""
    queue_url: str | None = None
    region: str | None = None
    """AWS region; None: taken from the topic or queue."""
    endpoint_url: str | None = None
    """Where AWS is, for one that is not Amazon's."""


class Verified(msgspec.Struct, frozen=True, gc=False):
    """The delivery is the provider's."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The delivery is not proved to be the provider's: it is answered 401 and counted under `reason`.

    `reason` is a short stable word for counters (`signature`, `missing`, `stale`, `no_secret`, `topic` ...);
    `hint` is one line for the person who configures the feed, free of secrets and recipients.
    """

    reason: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Later:
    """We could not find out (a certificate could not be fetched): the provider must deliver again."""

    reason: str


Verdict = Verified | Refused | Later


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a provider wants to hear to a handshake, with status 200, instead of the usual answer."""

    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class Parsed(msgspec.Struct, frozen=True, gc=False):
    """What one delivery holds. A control message (ping, validation sentence) has no events and names itself."""

    events: Sequence[Event] = ()
    control: str | None = None
    """A short stable word for a message that is no event (`ping`, `subscription_confirmation`, `topic_validation`)."""
    confirm_url: str | None = None
    """A URL that the receiver must GET once to complete a handshake; already checked by `verify`."""
    answer: Handshake | None = None
    anomalies: Mapping[str, int] = {}
    """Oddities that are counted, by a short stable word (`duplicate_keys`, `damaged`)."""


class BadPayload(ValueError):
    """The body is not this provider's format: answered 400. The text is one line without personal data."""


class Fetch(Protocol):
    """GET a URL without following redirects and return the body; raises FetchError."""

    def __call__(self, url: str, *, max_bytes: int = 65_536) -> Awaitable[bytes]:
        """Return the body of the URL, or raise FetchError where it is longer than `max_bytes`."""
        ...


class FetchError(Exception):
    """The URL could not be fetched; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What to merge into a provider's API call (or SMTP message) so that the wire key comes back in its events."""

    body: Mapping[str, object] = field(default_factory=dict)
    """What the JSON or form body has to hold; `into` merges it."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP request headers (native idempotency key)."""
    smtp_headers: Mapping[str, str] = field(default_factory=dict)
    """Message headers for submission by SMTP. Where a message has such a header, its value has to be merged by hand."""
    message_id: str | None = None
    """An id that we choose and that comes back as its events' message id: the claim's `known_message_id`."""

    def into(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return an API call's body with the stamp in it: objects are merged, lists are joined, other values ours."""
        return _merged(body, self.body)


def _merged(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(theirs)
    for name, value in ours.items():
        there = merged.get(name)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            merged[name] = _merged(there, value)
        elif isinstance(value, list) and isinstance(there, list):
            merged[name] = [*there, *value]
        else:
            merged[name] = value
    return merged


JOINED_BY_ID: Final = (
    "Where our key does not come back, an event is stored and joined by message id where exactly one row has it;"
    " else it decides nothing."
)
"""What the reconciler does then, at every provider."""

FindsBy = Literal["key", "recipient", "id", "nothing"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a provider promises and how it behaves, printed by `reconciler providers`. Each text names its source."""

    title: str
    key_slot: str
    """Where our key goes and where it comes back."""
    first_evidence: str
    """The earliest event that proves acceptance."""
    event_id: str
    """What identifies an event."""
    authentication: str
    signs_body: bool
    """Whether a signature covers the body, so that no byte of it can be changed."""
    signs_time: bool
    """Whether a signature covers a time, so that its age can be limited."""
    redelivery: str
    """How long and how often it delivers again, so: how long the receiver may be down."""
    redelivers_for: timedelta
    """The shortest time after which it gives up, by its default settings: so long may the receiver be down."""
    look_up: str
    registration: str
    """How its webhook is registered."""
    sources: str
    same_key_window: timedelta | None = None
    """How long the provider keeps our native idempotency key; None: it keeps none."""
    tolerance: timedelta | None = None
    """Default greatest age of a signed timestamp; None: age is not checked."""
    busy_status: int = 503
    """The answer that makes this provider deliver again when we can't store."""
    refused_status: int = 401
    """The answer to a delivery with a missing or wrong signature."""
    methods: tuple[str, ...] = ("POST",)
    """How it delivers, and shakes hands where a handshake is more than a HEAD or GET."""
    by_topics: bool = False
    """True where deliveries are proved by the SNS topic that signs them, so that `topics` stand for secrets."""
    fills_queues: bool = False
    """True where it puts events on SQS by itself, so that the queue's policy proves whose they are."""
    native_key: str = "none found"
    """Its idempotency key: where it goes, how long it is kept, what a replay and a "duplicate" answer prove."""
    finds_by: FindsBy = "nothing"
    """How its API finds a send: exactly by our `key`, by `recipient` and time (then compared), by a known `id`."""
    lists: bool = False
    """Whether its API lists all events of a span of time, so that a back-fill is possible."""
    settles_after: timedelta = timedelta(minutes=15)
    """How long after `submit_by` its API may not yet show a send, so that not finding it means nothing."""
    kept_for: timedelta = timedelta(days=1)
    """How long its API shows a send; where no document says, a day. Not finding an older one means nothing."""
    setup: tuple[str, ...] = ()
    """What to do at the provider, step by step, for `reconciler endpoints show`; `{url}` is the endpoint."""
    echoes_key: bool = True
    """Whether our key comes back at all; where not, events are matched by message id."""
    key_is_echoed_in: str = "every event"
    first_event_is_delivery: bool = False
    """True where no event comes before the recipient's server answered, so that absence means less."""


class Provider(Protocol):
    """All that is known of one provider. Each lives in one file of `webhooks/providers` as `PROVIDER`."""

    @property
    def name(self) -> str:
        """Return the name by which settings choose it."""
        ...

    @property
    def facts(self) -> Facts:
        """Return what is known of it."""
        ...

    def stamp(self, wire_key: str) -> Stamp:
        """Return what makes the wire key come back in this provider's events."""
        ...

    def read_reply(self, status: int, headers: Mapping[str, str], body: bytes) -> list[Reply]:
        """Return what became of each message of a call, in its order; one reply where the answer speaks of all alike.

        A message is what can bear a send key of its own. `headers` are asked for in lower case. Pure; never raises.
        """
        ...

    async def verify(self, delivery: Delivery, feed: Feed, now: datetime, fetch: Fetch) -> Verdict:
        """Say whether the delivery is the provider's. Never raises for hostile input."""
        ...

    def parse(self, delivery: Delivery) -> Parsed:
        """Return the events of a verified delivery. Pure. Raises BadPayload if nothing of it can be read."""
        ...

    def sample(self, kind: str, wire_key: str, feed: Feed, now: datetime) -> Delivery:
        """Return a signed example delivery of the given event kind, for `reconciler trigger`.

        Raises NoSample with one line that says why there is none (an asymmetric scheme, an unknown kind).
        """
        ...


@runtime_checkable
class ChecksSettings(Protocol):
    """A provider that can tell by a setting alone that it will never verify a delivery."""

    def objection(self, setting: Literal["secrets", "topics"], value: str) -> str | None:
        """Return what is wrong with a feed's secret or topic and what to do, in one line without it; else None."""
        ...


class NoSample(ValueError):
    """No example delivery can be made; the text says why in one line."""


Meanings = Mapping[str, tuple[Kind, Testimony]]
"""What each of a provider's own names of events means and proves."""

UNKNOWN: Final = (Kind.UNKNOWN, Testimony.NONE)
"""What an event means and proves that nobody has described yet."""


def sampled_name(provider: str, kind: str, meanings: Meanings) -> str:
    """Return the provider's name of an event that is asked for by it or by its normalised kind. Raises NoSample.

    `accepted`, `queued` and `sent` all ask for the event that says that the provider took the message.
    """
    names = {name: known for name, (known, testimony) in meanings.items() if testimony is not Testimony.NONE}
    taking = (Kind.SENT, Kind.QUEUED) if kind in ("accepted", "queued", "sent") else ()
    for wanted in (kind, *taking):
        for name, known in names.items():
            if wanted in (name, known):
                return name
    there = ", ".join(dict.fromkeys([*names, *names.values()]))
    raise NoSample(f"{provider} has no sample {kind!r}; there are {there}")


Clock = Callable[[], datetime]
