# SPDX-License-Identifier: Apache-2.0
"""What failed, exactly: whether a submission that raised can have reached the provider. Imports no client.

`failure` reads exceptions of HTTP and SMTP clients and SDKs, `answer` and its kin their answers (`sending.answered`).
Not sent is said only where nothing of the message can have left: the connection was not made, or the answer says so.
The block that submits must do nothing else: an error of another call in it can't be told from the provider's.
`docs/failures.md` has it client by client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from reconciler import hidden_retries
from reconciler.sending.answered import (
    Http,
    Meaning,
    Result,
    answer,
    answers,
    as_one,
    as_told,
    by_aws_code,
    by_smtp_code,
    doubted,
    http_parts,
    is_success,
    read,
    read_answer,
    read_answers,
)

__all__ = ["Meaning", "Result", "answer", "answers", "failure", "read_answer", "read_answers"]

_NOT_SENT: Final = frozenset(
    {
        "aiohttp.ClientConnectorError",  # refused, DNS, TLS, proxy
        "aiohttp.ClientHttpProxyError",  # the answer to CONNECT
        "aiohttp.ConnectionTimeoutError",
        "aiohttp.ServerFingerprintMismatch",
        "aiosmtplib.SMTPAuthenticationError",
        "aiosmtplib.SMTPConnectError",
        "aiosmtplib.SMTPHeloError",
        "aiosmtplib.SMTPNotSupported",
        "botocore.ConnectTimeoutError",
        "botocore.CredentialRetrievalError",
        "botocore.NoCredentialsError",
        "botocore.NoRegionError",
        "botocore.ParamValidationError",
        "botocore.PartialCredentialsError",
        "botocore.TokenRetrievalError",
        "httpx.ConnectError",
        "httpx.ConnectTimeout",
        "httpx.PoolTimeout",
        "httpx.ProxyError",  # the answer to CONNECT
        "requests.ConnectTimeout",
        "smtplib.SMTPAuthenticationError",
        "smtplib.SMTPConnectError",
        "smtplib.SMTPHeloError",
        "smtplib.SMTPNotSupportedError",
        "urllib3.ConnectTimeoutError",
        "urllib3.EmptyPoolError",
        "urllib3.NewConnectionError",
    }
)
"""Raised only before a byte of the message is written."""

_WRAPPING: Final = frozenset({"botocore", "requests", "urllib", "urllib3"})
"""Clients whose other errors say nothing by their own class but by what they wrap: aiobotocore calls a reset answer
EndpointConnectionError, and urllib3 calls an answer lost behind a proxy ProxyError."""

_PLAIN: Final = frozenset({"aiohttp", "aiosmtplib", "http", "httpcore", "httpx", "smtplib"})
"""Clients whose other errors leave it open."""

_LIBRARIES: Final = (
    _WRAPPING | _PLAIN | {"aiobotocore", "aiohappyeyeballs", "anyio", "asyncio", "httpcore", "socket", "ssl"}
)

_ANSWERS: Final = frozenset(
    {"aiohttp.ClientResponseError", "httpx.HTTPStatusError", "requests.HTTPError", "urllib.HTTPError"}
)
"""Errors of clients that carry the provider's answer. Those of aiohttp's own server carry the application's."""

_SDKS: Final = frozenset(
    {"ElasticEmail", "anymail", "azure", "brevo", "brevo_python", "mailchimp_transactional", "mailersend"}
    | {"mailjet_rest", "mailtrap", "postmarker", "python_http_client", "resend", "sib_api_v3_sdk", "sparkpost"}
)
"""Packages of providers, whose errors carry it too. The status of any other error (starlette's HTTPException) may be
what the application is going to answer itself."""

_SMTP_BEFORE_DATA: Final = frozenset({"connect", "ehlo", "helo", "starttls", "login", "mail", "rcpt"})
_BEFORE: Final = {
    "http.client": frozenset({"connect"}),
    "urllib3.connection": frozenset({"connect"}),
    "smtplib": _SMTP_BEFORE_DATA,
    "aiosmtplib.smtp": _SMTP_BEFORE_DATA,
}
"""Functions that end before a byte of the message is written. What they raise (refused, DNS, TLS, time-out) has classes
that others raise as well, so that only the place tells."""

_LOST: Final = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, TimeoutError)
_DEPTH: Final = 10


def failure(error: BaseException, provider: str | None = None) -> Result:
    """Return what a submission that raised came to. Never raises; what it does not know is ambiguous.

    With `provider` an answer that the error carries is read in the provider's own words.
    """
    found, source = _judge(error, provider)
    return doubted(found) if found.meaning != "ambiguous" and _tried_before(error, source, provider) else found


def _judge(error: BaseException, provider: str | None) -> tuple[Result, BaseException]:
    """Return what an error came to, and which of those that it was raised from says so."""
    for link in _wrapped(error):
        found = _by_class(link) or _by_answer(link, provider)
        if found is not None:
            return found, link
    return Result("ambiguous", type(error).__name__), error


def _wrapped(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it says it was raised for, from the outside inwards."""
    link: BaseException | None = error
    for _ in range(_DEPTH):
        if link is None:
            return
        yield link
        link = _inner(link)


def _inner(error: BaseException) -> BaseException | None:
    package = _package(error)
    if package in _PLAIN:
        return None
    if package is None:  # what repeats calls raises from the error of the last one
        return None if "retr" in type(error).__name__.lower() else error.__cause__
    said = getattr(error, "kwargs", None)
    candidates = (error.__cause__, *error.args, said.get("error") if isinstance(said, dict) else None)
    return next((one for one in candidates if isinstance(one, BaseException)), None)


def _package(error: BaseException) -> str | None:
    """Return the client that an error belongs to, by its class or one that it is made of."""
    packages = (cls.__module__.partition(".")[0] for cls in type(error).__mro__)
    return next((package for package in packages if package in _WRAPPING or package in _PLAIN), None)


def _by_class(error: BaseException) -> Result | None:
    name, names = type(error).__name__, _names(error)
    if not _NOT_SENT.isdisjoint(names) or _is_before_the_message(error):
        return Result("not_sent", name)
    match names[0]:
        case "reconciler.NotSent":  # the application's own word, kept as it is
            return Result("not_sent", str(error) or name)
        case "reconciler.Rejected":
            return Result("rejected", str(error) or name)
        case "anymail.AnymailRecipientsRefused":
            return Result("rejected", name)
    return _by_smtp_answer(error)


def _names(error: BaseException) -> list[str]:
    """Return the names of an error's class and those that it is made of, each with its package."""
    return [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(error).__mro__]


def _is_before_the_message(error: BaseException) -> bool:
    return isinstance(error, OSError) and any(
        frame_name in _BEFORE.get(module, ()) for module, frame_name in _places(error.__traceback__)
    )


def _places(traceback: TracebackType | None) -> Iterator[tuple[str, str]]:
    while traceback is not None:
        frame = traceback.tb_frame
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        traceback = traceback.tb_next


def _by_smtp_answer(error: BaseException) -> Result | None:
    if _package(error) not in {"smtplib", "aiosmtplib"}:
        return None
    name = type(error).__name__
    if name == "SMTPRecipientsRefused":
        return _by_refusals(getattr(error, "recipients", None))
    if name in {"SMTPSenderRefused", "SMTPRecipientRefused", "SMTPDataError"}:
        return by_smtp_code(getattr(error, "smtp_code", getattr(error, "code", 0)))
    return None


def _by_refusals(recipients: object) -> Result:
    """Return what a message came to whose every recipient was refused: nothing was taken, some may be tried again."""
    codes = recipients.values() if isinstance(recipients, dict) else recipients if isinstance(recipients, list) else ()
    results = [by_smtp_code(code[0] if isinstance(code, tuple) else getattr(code, "code", 0)) for code in codes]
    order = {"ambiguous": 0, "not_sent": 1, "rejected": 2}
    return min(results, key=lambda result: order.get(result.meaning, 0), default=Result("ambiguous", "SMTP"))


def _by_answer(error: BaseException, provider: str | None) -> Result | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict) and _package(error) == "botocore":
        return _by_aws_answer(response)
    parts = _answer_of(error, response)
    if parts is None:
        return None
    if provider is None and is_success(parts.status):  # why did it raise, then?
        return Result("ambiguous", f"{type(error).__name__} after HTTP {parts.status}")
    return as_one(as_told(read(parts, provider), error if response is None else response))


def _by_aws_answer(response: dict[str, dict[str, object]]) -> Result:
    told = response.get("ResponseMetadata", {})
    status = told.get("HTTPStatusCode")
    found = by_aws_code(response.get("Error", {}).get("Code"), status if isinstance(status, int) else 500)
    return doubted(found) if told.get("RetryAttempts") else found


def _answer_of(error: BaseException, response: object) -> Http | None:
    """Return the answer that an error carries: of requests, httpx, aiohttp, urllib, SDKs (SendGrid, Resend ...)."""
    if _ANSWERS.isdisjoint(_names(error)) and not _is_of_an_sdk(error):
        return None
    parts = http_parts(response) or http_parts(error)
    if parts is not None:
        return parts
    status = str(getattr(error, "code", None)) if "resend.ResendError" in _names(error) else ""
    if not status.isdecimal():
        return None
    said = {"statusCode": status, "name": getattr(error, "error_type", None)}  # Resend's own body, as its SDK read it
    return Http(int(status), {}, json.dumps(said, default=str).encode())


def _is_of_an_sdk(error: BaseException) -> bool:
    return any(cls.__module__.partition(".")[0] in _SDKS for cls in type(error).__mro__)


def _tried_before(error: BaseException, source: BaseException, provider: str | None) -> bool:
    """Say whether another try of the same submission is seen behind an error, of which `source` says nothing.

    Hidden ones of the client itself; and such as the application was handling when it tried again, or raised another
    error, with `from` or without.
    """
    return any(
        any(one is None or _may_have_left(one, None) for one in hidden_retries.before(link))
        or (handled and link is not source and _is_of_an_application(link) and _may_have_arrived(link, provider))
        for link, handled in _linked(error)
    )


def _linked(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield all that hangs on an error, each with whether others than a client were handling it."""
    pending, seen = [(error, False)], set()
    while pending:
        link, implicit = pending.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link, implicit
        inner = _inner(link)
        if inner is not None:
            pending.append((inner, _package(link) is None))
        if link.__context__ is not None and link.__context__ is not inner:
            pending.append((link.__context__, True))


def _is_of_an_application(error: BaseException) -> bool:
    """Say whether it was caught outside of any client: what one wraps is caught inside."""
    caught = next(_places(error.__traceback__), ("", ""))[0]
    return caught.partition(".")[0] not in _LIBRARIES


def _may_have_arrived(error: BaseException, provider: str | None) -> bool:
    is_network = isinstance(error, _LOST) or _package(error) is not None or _is_of_an_sdk(error)
    return is_network and _may_have_left(error, provider)


def _may_have_left(error: BaseException, provider: str | None) -> bool:
    found, _ = _judge(error, provider)
    return found.meaning not in {"not_sent", "rejected"}
