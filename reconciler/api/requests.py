# SPDX-License-Identifier: Apache-2.0
"""What senders may ask over HTTP: the bodies of `/v1/sends`, and how they are read.

Keys, options and notes are refused where they hold what PostgreSQL can't (a zero byte, half a surrogate pair); of a
provider's answer such characters are replaced, since an answer must never be lost. A member that is null is not given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Final, NoReturn, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from reconciler.problem import Problem

LARGEST_BODY: Final = 256 * 1024
LONGEST_KEY: Final = 255
"""In UTF-8 bytes."""
DEEPEST: Final = 100
"""Levels of nesting: far more than any sender has, far fewer than anything chokes on."""
EXACT: Final = 2**53
"""Below it every whole number is a float's."""
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
_AS_ANSWERED: Final = frozenset({"message_id", "response"})
"""Members that are a provider's words."""

Key = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=LONGEST_KEY,
        description=f"The send key: names one logical send, the same on every attempt. At most {LONGEST_KEY} bytes.",
        examples=["order.receipt:1234:ada@example.com"],
    ),
]
FeedName = Annotated[str, Meta(description="The feed through whose provider it is sent.")]
Text = Annotated[str, Meta(max_length=255)]
Recipient = Annotated[str, Meta(max_length=2000, description="Its address; several are parted by commas.")]
Time = Annotated[
    datetime,
    Meta(
        tz=True,
        description="With its time zone, between the years 1970 and 9998.",
        extra_json_schema={"pattern": "^(19[7-9][0-9]|[2-8][0-9]{3}|9[0-8][0-9]{2}|99[0-8][0-9]|999[0-8])-"},
    ),
]
Seconds = Annotated[int, Meta(ge=1, le=86400, description="How long the submission may take, from the claim.")]
Fence = Annotated[int, Meta(ge=1, le=2**62 - 1, description="Names the claim: its answer gave it.")]
Nonce = Annotated[
    str,
    Meta(
        pattern="^[!-~]{16,255}$",
        description="A random value that this call makes up for itself: the same call with it, where the answer was "
        "lost, gets the same claim while that runs. Made of the job, it would let two workers submit.",
    ),
]
Payload = Annotated[Any, Meta(description="Whatever the sender needs to send it later.")]
Reason = Annotated[str, Meta(max_length=1000, pattern=r"\S", description="Kept, and shown by `why`. No personal data.")]

NotSent = Annotated[
    bool,
    Meta(description="true: nothing left the sender, it may be sent again at once; false: the provider refused it."),
]


class Enqueue(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A send that is to be claimed later."""

    key: Key
    feed: FeedName
    message_class: Text | None = None
    recipient: Recipient | None = None
    campaign: Text | None = None
    source: Text | None = None
    not_before: Time | None = None
    expires_at: Time | None = None
    intended_at: Time | None = None
    fingerprint: Text | None = None
    known_message_id: Text | None = None
    payload: Payload | None = None

    def options(self) -> dict[str, Any]:
        """Return what the SQL function takes as its options."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("key", "feed")}
        return {name: value for name, value in given.items() if value is not None}


class Claim(Enqueue):
    """A call for the exclusive right to submit a send."""

    submit_within: Seconds | None = None
    claimed_by: Text | None = None
    nonce: Nonce | None = None


class Confirm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The provider took the message."""

    fence: Fence
    message_id: Annotated[str, Meta(description="The provider's, as its answer gave it.")] | None = None
    response: Annotated[Any, Meta(description="The provider's answer.")] | None = None


class Fail(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How a submission failed."""

    fence: Fence
    reason: Reason
    not_sent: NotSent | None = None
    """None: can't tell. The claim stays, and passes find out."""


class Decide(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An operator's word."""

    reason: Reason


T = TypeVar("T")


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Return the body of a request. Raises Problem: 400 where it is no JSON, 422 where it is not what is asked for."""
    try:
        document = json.loads(await request.read(), parse_float=_number, parse_constant=_refuse_constant)
        odd = next(_unstorable(document, (), 0), None)
    except (ValueError, RecursionError):
        raise Problem(
            400, f"the body must be JSON in UTF-8, nested no deeper than {DEEPEST} levels", outcome="not_json"
        ) from None
    if odd is not None:
        place = ".".join(odd) or "the body"
        raise Problem(422, f"{place}: holds a zero byte or half a surrogate pair", outcome="invalid")
    try:
        found = msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise Problem(422, _UNSTORABLE.sub("?", str(error)), outcome="invalid") from None
    return found


def checked_key(key: str) -> str:
    """Return a send key or wire key. Raises Problem 422 where no send can have it."""
    if _UNSTORABLE.search(key) or not 0 < len(key.encode(errors="replace")) <= LONGEST_KEY:
        raise Problem(422, f"a key is text of 1 to {LONGEST_KEY} bytes", outcome="invalid")
    return key


def _number(text: str) -> float:
    """Return a number; by JSON Schema one like 60.0 is whole."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < EXACT else number


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError


def _unstorable(value: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[str, ...]]:
    """Give the places of texts that can't be stored; of the caller's own names only the first is repeated."""
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, str):
        if _UNSTORABLE.search(value):
            yield path
    elif isinstance(value, dict):
        for name, part in value.items():
            if _UNSTORABLE.search(name):
                yield path
            elif path or name not in _AS_ANSWERED:
                yield from _unstorable(part, path or (name,), depth + 1)
    elif isinstance(value, list):
        for part in value:
            yield from _unstorable(part, path, depth + 1)
