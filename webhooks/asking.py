# SPDX-License-Identifier: Apache-2.0
"""How a provider is asked: the vocabulary in which its file searches its API and registers its webhook. Pure."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol, runtime_checkable

from webhooks.event import Event, derived_id, same_mailbox
from webhooks.payload import id_at
from webhooks.provider import Feed

Setting = Literal["api_key", "api_secret", "api_scope"]

MAX_PAGES: Final = 1_000
"""Pages of one answer; an API that has more of them is not read to its end."""


class ApiError(Exception):
    """The API could not be asked, or not to the end. `reason` is a short stable word, `hint` one line for a person.

    The words: `unconfigured`, `unauthorized`, `forbidden`, `not_found`, `refused`, `rate_limited`, `server_error`,
    `timeout`, `unreachable`, `garbage`, `endless`, `too_many`, and `unnamed`: something is listed that shows no key, so
    that it may be the send that is looked for.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{reason}: {hint}" if hint else reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ApiReply:
    """What an API answered: its JSON, None where the body was empty."""

    status: int
    value: Any


class Api(Protocol):
    """Calls a provider's API within a time limit and a rate, patiently where it says 429 or 5xx."""

    async def call(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        json: object = None,
        form: Mapping[str, str] | None = None,
        expect: tuple[int, ...] = (),
    ) -> ApiReply:
        """Return the answer: of status 2xx, or one of `expect`. Raises ApiError for anything else.

        GET is repeated after 429, any 5xx, a time-out or a lost connection; any other method, a search by POST too,
        only after 429 and 503, where nothing was done.
        """
        ...


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for among the sends submitted from `since` to `until`: one of them, or all (for a back-fill)."""

    since: datetime
    until: datetime
    wire_key: str | None = None
    """The send's key; None for a back-fill."""
    recipient: str | None = None
    """Its recipient, where it is known."""
    message_id: str | None = None
    """An id that was known before the call (Azure's Operation-Id)."""

    def seconds(self) -> tuple[int, int]:
        """Return the span in whole seconds since 1970, rounded outwards."""
        return math.floor(self.since.timestamp()), math.ceil(self.until.timestamp())

    def is_of_another_time(self, event: Event) -> bool:
        """Say whether an event happened outside of the span; one without a time did not."""
        return event.occurred_at is not None and not self.since <= event.occurred_at <= self.until

    def may_be_to(self, recipient: str | None) -> bool:
        """Say whether an address may be that of the recipient: one of them isn't known, or they may be one mailbox."""
        return recipient is None or self.recipient is None or same_mailbox(recipient, self.recipient)

    def is_unnamed(self, event: Event) -> bool:
        """Say whether an event shows no key, and by its recipient may be about the send that is looked for."""
        return event.send_key is None and self.may_be_to(event.recipient)


@runtime_checkable
class Searches(Protocol):
    """A provider whose API can be asked what became of sends."""

    def search(self, query: Query, feed: Feed, api: Api) -> AsyncIterator[Event]:
        """Yield what the API lists for the query, to the end of the range; it may yield more than was asked for.

        Whoever asks compares each event again. Raises ApiError where the range could not be read to its end.
        """
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not yet as it should be at the provider, and how it is put right."""

    text: str
    """One line that says what is done: "create the webhook with the events ..."."""
    make: Callable[[], Awaitable[str | None]]
    """Does it; returns a line for the person where the provider answered something to be configured (a new key)."""


@runtime_checkable
class Registers(Protocol):
    """A provider whose webhook can be looked after through its API."""

    async def changes(self, url: str, feed: Feed, api: Api) -> list[Change]:
        """Return what has to change so that events of this feed reach `url`; nothing where all is well.

        Changes nothing by itself, and making the changes twice is harmless. Raises ApiError.
        """
        ...


class Pages:
    """Counts the pages of an answer, and refuses a cursor that was there before: such an answer has no end."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def turn(self, cursor: str) -> None:
        """Note the page that is read next. Raises ApiError where the answer doesn't end."""
        if cursor in self._seen or len(self._seen) >= MAX_PAGES:
            raise ApiError("endless", f"the API's answer did not end after {len(self._seen)} pages")
        self._seen.add(cursor)


class Shown:
    """Notes what a search has shown of the send that it looks for: its key, or something without one that may be it."""

    def __init__(self, query: Query) -> None:
        self.found = False
        """Whether the key was shown."""
        self._key, self._unnamed = query.wire_key, False

    def note(self, event: Event, *, unnamed: bool) -> None:
        """Note an event; `unnamed`: it shows no key and may be about the send."""
        self.found = self.found or (event.send_key is not None and event.send_key == self._key)
        self._unnamed = self._unnamed or unnamed

    def settle(self, hint: str) -> None:
        """Raise ApiError where a key was looked for and not shown, but something unnamed was: absence isn't proved."""
        if self._key and self._unnamed and not self.found:
            raise ApiError("unnamed", hint)


def items(value: object, *path: str) -> list[Any]:
    """Return the list at a path of an API's answer. Raises ApiError where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, list):
        raise ApiError("garbage", f"no list at {'.'.join(path) or 'the top'} of the API's answer")
    return value


def credential(value: str, setting: str, feed: Feed) -> str:
    """Return a setting that the API needs. Raises ApiError where it is not set."""
    if not value:
        raise _unconfigured(feed, setting)
    return value


def credentials(feed: Feed, first: Setting, second: Setting) -> tuple[str, str]:
    """Return two settings that the API needs. Raises ApiError, which names both where neither is set."""
    found: tuple[str, str] = getattr(feed, first), getattr(feed, second)
    if missing := [name for name, value in zip((first, second), found, strict=True) if not value]:
        raise _unconfigured(feed, " and ".join(missing))
    return found


def _unconfigured(feed: Feed, settings: str) -> ApiError:
    return ApiError("unconfigured", f"set feeds.{feed.name}.{settings}, without which this provider can't be asked")


def needed(value: object, *path: str) -> str:
    """Return the text or number at a path of an API's answer, as text. Raises ApiError where there is none."""
    if (found := id_at(value, *path)) is None:
        raise ApiError("garbage", f"an item of the API's answer has no {'.'.join(path)}")
    return found


def utc(seconds: float) -> str:
    """Return a time in seconds since 1970 as most APIs want it: UTC, whole seconds, Z at the end."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def bearer(key: str) -> dict[str, str]:
    """Return the header that carries a token."""
    return {"Authorization": f"Bearer {key}"}


def basic(user: str, password: str) -> dict[str, str]:
    """Return the header of basic authentication."""
    return {"Authorization": "Basic " + b64encode(f"{user}:{password}".encode()).decode()}


async def by_offset(ask: Callable[[int], Awaitable[list[Any]]]) -> AsyncIterator[Any]:
    """Yield the items of all pages, until an empty one. Raises ApiError where a page comes again."""
    pages, offset = Pages(), 0
    while found := await ask(offset):
        pages.turn(derived_id(json.dumps(found)))
        for item in found:
            yield item
        offset += len(found)


async def by_halves(
    ask: Callable[[int, int], Awaitable[list[Any]]], since: int, until: int, most: int
) -> AsyncIterator[Any]:
    """Yield what an API without pages lists from `since` to before `until`, in seconds since 1970.

    An answer of `most` items may be cut off, so its time is halved. Raises ApiError where a second holds as many.
    """
    found = await ask(since, until)
    if len(found) < most:
        for item in found:
            yield item
        return
    if until - since <= 1:
        raise ApiError("too_many", f"{most} items of one second are as many as the API lists")
    middle = (since + until) // 2
    for start, end in ((since, middle), (middle, until)):
        async for item in by_halves(ask, start, end, most):
            yield item
