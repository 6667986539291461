# SPDX-License-Identifier: Apache-2.0
"""How a provider is asked: the vocabulary in which its file searches its API and registers its webhook. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from webhooks.event import Event
from webhooks.provider import Feed

MAX_PAGES: Final = 1_000
"""Pages of one answer; an API that has more of them is not read to its end."""


class ApiError(Exception):
    """The API could not be asked, or not to the end. `reason` is a short stable word, `hint` one line for a person.

    The words: `unconfigured`, `unauthorized`, `forbidden`, `not_found`, `refused`, `rate_limited`, `server_error`,
    `timeout`, `unreachable`, `garbage`, `endless`, `too_many`.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(f"{reason}: {hint}" if hint else reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Reply:
    """What an API answered: its JSON (None where the body was empty) and its headers, in lower case."""

    status: int
    value: Any
    headers: Mapping[str, str] = field(default_factory=dict)


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
    ) -> Reply:
        """Return the answer: of status 2xx, or one of `expect`. Raises ApiError for anything else.

        A call that changes something (any method but GET, and a POST that `json` makes a search) is repeated only
        after 429 and 503, where nothing was done.
        """
        ...


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for among the sends submitted from `since` to `until`: one of them, or all (for a back-fill)."""

    since: datetime
    until: datetime
    wire_key: str | None = None
    recipient: str | None = None
    message_id: str | None = None
    """An id that was known before the call (Azure's Operation-Id)."""


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
        raise ApiError("unconfigured", f"set feeds.{feed.name}.{setting} to ask this provider's API")
    return value
