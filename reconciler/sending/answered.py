# SPDX-License-Identifier: Apache-2.0
"""What an answer to a submission says of its messages, whatever client it came through. Imports no client.

`webhooks` is imported only where a provider is named: senders have packages of that name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from reconciler import hidden_retries

Meaning = Literal["accepted", "rejected", "not_sent", "ambiguous"]

_SUCCESS: Final = 2
_REFUSAL: Final = 4
_FAULT: Final = 5
_OK: Final = 200
"""What is taken for the status of a decoded answer, which bears none."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one message's submission came to. A twin of `webhooks.reply.Reply`, which senders may not import."""

    meaning: Meaning
    """Accepted: the provider has it. Rejected: it will never send this message. Not sent: it took nothing, and the same
    message may be submitted again. Ambiguous: nobody can tell."""
    reason: str
    """A short stable text for logs and reports (`HTTP 429`, `ConnectTimeout`): no address, no text of an error."""
    message_id: str | None = None
    for_all: bool = field(default=True, compare=False)
    """Whether it speaks of every message of the call, where it stands alone; else of its own, or of some."""


class Http(NamedTuple):
    """The parts of an HTTP answer that are read; headers have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    """Empty where it can't be had any more."""


USABLE: Final = (
    "the provider's message id (empty where it took the message and named none), a response of requests, httpx, "
    "urllib3 or aiohttp, a result of botocore or of an SMTP client, or (status, headers, body)"
)


def answer(response: object, provider: str | None = None) -> Result:
    """Return what an answer says of the one message that was submitted. As `answers`."""
    return as_one(answers(response, provider))


def answers(response: object, provider: str | None = None) -> list[Result]:
    """Return what an answer says of each message of a call, in its order; one result where it speaks of all alike.

    Takes a message id (a str; empty: accepted, no id), a response of requests, httpx, urllib3 or urllib, a result of
    botocore, `smtplib.sendmail` or `aiosmtplib.send`, a tuple (status, headers, body), and where the provider is named
    the decoded JSON of its answer, which is accepted only with a message id in it: its status is lost. A Result stays
    as it is. None is no answer, and ambiguous: a function that forgets its `return` gives it, too. What a body says is
    read only where `provider` is named; then `{}`, which smtplib returns as well, is decoded JSON. Raises TypeError for
    anything else.
    """
    match response:
        case Result():
            return [response]
        case None:
            return [Result("ambiguous", "no answer")]
        case str():
            return [_of_message_id(response)]
        case (int() as status, headers, bytes() as body) if hasattr(headers, "items"):
            return read(Http(status, lower(headers), body), provider)
        case (Mapping() as refused, str()):  # aiosmtplib
            return [_of_smtp(refused)]
        case Mapping() if "ResponseMetadata" in response:
            return _of_aws(response)
        case Mapping() if (response or provider is None) and all(map(_is_smtp_reply, response.values())):
            return [_of_smtp(response)]
        case dict() | list() if provider is not None:
            return _of_decoded(response, provider)
    return _of_response(response, provider)


async def read_answer(response: object, provider: str | None = None) -> Result:
    """As `answer`, for aiohttp's responses too: reads the body where nobody has."""
    return as_one(await read_answers(response, provider))


async def read_answers(response: Any, provider: str | None = None) -> list[Result]:
    """As `answers`, for aiohttp's responses too: reads the body where nobody has."""
    if _is_aiohttp(response) and _kept_body(response) is None:
        try:
            body = await response.read()
        except Exception:  # noqa: BLE001 - the status stands, whatever befell the body
            body = b""
        return as_told(read(Http(response.status, lower(response.headers), body), provider), response)
    return answers(response, provider)


def http_parts(response: object) -> Http | None:
    """Return the parts of what looks like an HTTP response, None for anything else."""
    status = getattr(response, "status_code", None) or getattr(response, "status", None)
    headers = getattr(response, "headers", None)
    if not isinstance(status, int) or status // 100 not in range(1, 6):
        return None
    return Http(status, lower(headers) if hasattr(headers, "items") else {}, _body(response))


def read(parts: Http, provider: str | None) -> list[Result]:
    """Return what an HTTP answer says: by the provider's own words where it is named, else by the status.

    A provider that can't be looked up leaves it ambiguous; the claim, which needs it too, has told why.
    """
    if provider is None:
        return [by_status(parts.status)]
    try:
        from webhooks.registry import PROVIDERS  # noqa: PLC0415 - see the module's text
    except ImportError:
        return [Result("ambiguous", f"HTTP {parts.status}")]
    if provider not in PROVIDERS:
        return [Result("ambiguous", f"HTTP {parts.status}")]
    replies = PROVIDERS[provider].read_reply(*parts)
    return [Result(reply.meaning, reply.reason, reply.message_id, reply.for_all) for reply in replies]


def as_one(results: list[Result]) -> Result:
    """Return what several results say together: one thing, or nothing."""
    return results[0] if len({result.meaning for result in results}) == 1 else Result("ambiguous", "answers differ")


def doubted(result: Result) -> Result:
    """Return a result whose request was not the only try: but for an acceptance it says nothing of the others."""
    return result if result.meaning == "accepted" else Result("ambiguous", f"{result.reason} after another try")


def as_told(results: list[Result], response: object) -> list[Result]:
    """Return what of a response's results stands: nothing after a redirect, where its first answer took the body."""
    if hidden_retries.redirected(response):
        return [Result("ambiguous", f"{result.reason} after a redirect") for result in results]
    return [doubted(result) for result in results] if hidden_retries.before_answer(response) else results


def is_success(status: int) -> bool:
    """Say whether a status is one of success."""
    return status // 100 == _SUCCESS


_NOT_TAKEN: Final = frozenset({401, 403, 404, 405, 407, 420, 421, 429})
_UNCLEAR: Final = frozenset({402, 408, 409, 423, 424, 425, 460, 499})


def by_status(status: int) -> Result:
    """Return what a status proves by itself. A twin of `webhooks.reply.by_status`; a test holds them equal."""
    reason = f"HTTP {status}"
    if is_success(status):
        return Result("accepted", reason)
    if status in _NOT_TAKEN:
        return Result("not_sent", reason)
    if status // 100 == _REFUSAL and status not in _UNCLEAR:
        return Result("rejected", reason)
    return Result("ambiguous", reason)


def by_smtp_code(code: int) -> Result:
    """Return what a refusal of SMTP means: 4xx may be tried again, 5xx not; anything else is no refusal."""
    meanings: dict[int, Meaning] = {_REFUSAL: "not_sent", _FAULT: "rejected"}
    return Result(meanings.get(code // 100, "ambiguous"), f"SMTP {code}")


_AWS_NOT_TAKEN: Final = re.compile(
    r"throttl|toomanyrequests|exceeded|paused|suspended|notverified|notfound|doesnotexist|poolname|transient|"
    r"token|signature|skewed|expired|accessdenied|notauthorized"
)
_AWS_REJECTED: Final = re.compile(r"rejected|badrequest|invalidparameter|validation|missing|malformed")
_PLAIN_CODE: Final = re.compile(r"[A-Za-z0-9_.-]{1,60}")


def by_aws_code(code: object, status: int) -> Result:
    """Return what an error's code proves. Of others only a status that turned the request away does: 400 is nothing."""
    found = by_status(status)
    if status // 100 == _FAULT or not isinstance(code, str) or not _PLAIN_CODE.fullmatch(code):
        return found if found.meaning == "not_sent" else Result("ambiguous", found.reason)
    plain = code.replace("_", "").lower()
    if _AWS_NOT_TAKEN.search(plain):
        return Result("not_sent", code)
    if _AWS_REJECTED.search(plain):
        return Result("rejected", code)
    return found if found.meaning == "not_sent" else Result("ambiguous", code)


def _of_aws(response: Mapping[str, Any]) -> list[Result]:
    """Return what a result of botocore says: SES, or each entry of its bulk calls (API v2 and v1)."""
    entries = response.get("BulkEmailEntryResults", response.get("Status"))
    if isinstance(entries, list) and entries:
        return [_of_aws_entry(entry) for entry in entries]
    message_id = response.get("MessageId")
    return [_of_one("accepted", "HTTP 200", message_id) if message_id else Result("ambiguous", "HTTP 200 unclear")]


def _of_aws_entry(entry: Mapping[str, Any]) -> Result:
    status = entry.get("Status")
    if status in {"SUCCESS", "Success"}:
        return _of_one("accepted", "HTTP 200", entry.get("MessageId"))
    found = by_aws_code(status, _OK)
    return _of_one(found.meaning, found.reason)


_of_one: Final = partial(Result, for_all=False)


def _of_message_id(said: str) -> Result:
    # The text of an answer is no id, and may be a refusal.
    if _NO_ID.search(said):
        return Result("ambiguous", "no message id")
    return Result("accepted", "returned", said or None)


_NO_ID: Final = re.compile(r"[\s{}\[\]]")


def _of_decoded(value: dict[Any, Any] | list[Any], provider: str) -> list[Result]:
    """Return what decoded JSON says, as far as its status, which is lost, could not say otherwise.

    That is where it names a message id, and in lists of messages.
    """
    results = read(Http(_OK, {}, json.dumps(value, default=str).encode()), provider)
    return [one if _is_certain(one) else Result("ambiguous", "decoded, without an id") for one in results]


def _is_certain(result: Result) -> bool:
    return result.message_id is not None or (result.meaning != "accepted" and not result.for_all)


def _is_smtp_reply(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], int)


def _of_smtp(refused: Mapping[Any, Any]) -> Result:
    # An SMTP client that returns has given the message to the server, for one recipient at least.
    return _of_one("accepted", "some recipients refused") if refused else Result("accepted", "SMTP 250")


def _of_response(response: object, provider: str | None) -> list[Result]:
    if isinstance(response, BaseException):
        raise TypeError(f"{type(response).__name__} is an error: raise it, don't give it back")
    if _is_aiohttp(response) and _kept_body(response) is None:
        raise TypeError("a response of aiohttp whose body was not read yet: await read_answer(response)")
    parts = http_parts(response)
    if parts is None:
        raise TypeError(f"{type(response).__name__} tells nothing of what became of a message; give back {USABLE}")
    return as_told(read(parts, provider), response)


def _body(response: object) -> bytes:
    """Return the body of a response, empty where it can't be had (a stream that was closed, for one)."""
    try:
        value = _kept(response)
        return _unread(response) if value is None else value
    except Exception:  # noqa: BLE001 - whatever the client raises: the status stands
        return b""


def _kept(response: object) -> bytes | None:
    # Of httpx and requests; urllib3; python_http_client and Brevo, which decodes it; aiohttp; Mailchimp.
    for name in ("content", "data", "body", "_body", "text"):
        value = getattr(response, name, None)
        if isinstance(value, dict | list):
            value = json.dumps(value, default=str)
        if isinstance(value, bytes | str):
            return value.encode() if isinstance(value, str) else value
    return None


def _unread(response: Any) -> bytes:
    """Return the body of a response, or an HTTPError, of the standard library; it is empty if somebody has read it."""
    is_plain = any(cls.__module__.partition(".")[0] in {"http", "urllib"} for cls in type(response).__mro__)
    return bytes(response.read()) if is_plain else b""


def _is_aiohttp(response: object) -> bool:
    return any(
        cls.__module__.partition(".")[0] == "aiohttp" and cls.__name__ == "ClientResponse"
        for cls in type(response).__mro__
    )


def _kept_body(response: object) -> bytes | None:
    # read() would refuse it after the response's own `async with` has ended.
    return getattr(response, "_body", None)


def lower(headers: Any) -> dict[str, str]:
    """Return headers with their names in lower case, of a mapping or of what has `items()` like one."""
    return {str(name).lower(): str(value) for name, value in headers.items()}
