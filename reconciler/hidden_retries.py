# SPDX-License-Identifier: Apache-2.0
"""Clients that repeat a request by themselves, inside one attempt: one time-out, two messages. Imports no client.

    hidden_retries.refuse(boto3_client)     # at start, once for each client that submits

What is said of each client was measured: `tests/test_hidden_retries.py` counts the requests that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

AWS: Final = "botocore.config.Config(retries={'total_max_attempts': 1})"
REQUESTS: Final = "mount requests.adapters.HTTPAdapter(), whose default repeats nothing"
URLLIB3: Final = "urllib3.PoolManager(retries=False), or retries=False with the request"

_LEGACY_ATTEMPTS: Final = 5
_ATTEMPTS: Final = 3
"""botocore's own defaults, of its mode `legacy` (the default) and of the others."""
_URLLIB3_RETRIES: Final = 3
_REDIRECT: Final = 3
_KNOWN_TO_SUBMIT_ONCE: Final = frozenset(
    {
        "aiohttp.ClientSession",  # repeats idempotent methods on a connection that it used before; a POST never
        "aiosmtplib.SMTP",
        "httpx.AsyncClient",  # `retries` of its transport repeats connecting only
        "httpx.Client",
        "smtplib.SMTP",
    }
)


class HiddenRetriesError(RuntimeError):
    """A client repeats requests by itself; the text says how to switch that off."""


def refuse(*clients: object) -> None:
    """Raise HiddenRetriesError if one of the clients repeats a POST by itself. Call it at start."""
    if lines := [line for client in clients for line in find(client)]:
        raise HiddenRetriesError("; ".join(lines))


def find(client: object) -> list[str]:
    """Return a line for each way in which a client repeats a POST by itself: what repeats, and how to switch it off.

    Knows clients of botocore, boto3, aiobotocore, requests, urllib3, httpx, aiohttp, smtplib and aiosmtplib; what
    stands around one may repeat by other means. Raises TypeError for others, which `reconciler selftest client` tries.
    """
    names = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(client).__mro__}
    if "boto3.ServiceResource" in names:
        return find(client.meta.client)  # type: ignore[attr-defined]
    if "botocore.BaseClient" in names:
        return _of_aws(client)
    if "requests.Session" in names:
        return _of_requests(client)
    if "urllib3.PoolManager" in names:
        return _of_urllib3(client.connection_pool_kw.get("retries"))  # type: ignore[attr-defined]
    if "urllib3.HTTPConnectionPool" in names:
        return _of_urllib3(client.retries)  # type: ignore[attr-defined]
    if names.isdisjoint(_KNOWN_TO_SUBMIT_ONCE):
        raise TypeError(
            f"whether {type(client).__name__} repeats requests is not known: try it out with reconciler selftest client"
        )
    return []


def _of_aws(client: Any) -> list[str]:
    retries = client.meta.config.retries or {}
    mode = retries.get("mode", "legacy")
    attempts = retries.get("total_max_attempts", _LEGACY_ATTEMPTS if mode == "legacy" else _ATTEMPTS)
    if attempts <= 1:
        return []
    return [
        f"{type(client).__name__} of botocore submits up to {attempts} times (retry mode {mode}): create it with {AWS}"
    ]


def _of_requests(session: Any) -> list[str]:
    return [
        f"the adapter of requests for {prefix} {how}: {REQUESTS}"
        for prefix, adapter in session.adapters.items()
        if (how := _repeats(getattr(adapter, "max_retries", 0)))
    ]


def _of_urllib3(retries: Any) -> list[str]:
    how = _repeats(_URLLIB3_RETRIES if retries is None else retries)
    return [f"urllib3 {how}: {URLLIB3}"] if how else []


def _repeats(retry: Any) -> str | None:
    """Say how a `Retry` of urllib3, or the number that stands for one, repeats a POST that may have arrived."""
    if isinstance(retry, int):
        return _LOST_BEHIND_TLS if retry else None
    if retry.total == 0:  # False, too
        return None
    methods = retry.allowed_methods
    if not methods or "POST" in methods:
        if retry.read != 0:
            return "repeats a POST that got no answer"
        if retry.status_forcelist and retry.status != 0:
            return "repeats a POST that got one of some answers"
    return _LOST_BEHIND_TLS if retry.other != 0 else None


_LOST_BEHIND_TLS: Final = "repeats a POST whose answer was lost by an error of TLS or behind a proxy"


def before(error: BaseException) -> list[BaseException | None]:
    """Return why the client made another request before this error, try by try; None where that isn't known.

    A redirect that it followed is one. Only the frames of the client that the error went through still tell.
    """
    return [cause for traceback in _frames(error.__traceback__) for cause in _causes(traceback)]


def before_answer(response: object) -> bool:
    """Say whether urllib3, or requests over it, repeated the request before it got this answer."""
    return any(not tried.redirect_location for tried in _tries(response))


def redirected(response: object) -> bool:
    """Say whether a client followed a redirect to this answer: the first answer took the message, perhaps."""
    history = getattr(response, "history", ())
    return (
        any(is_redirect(one) for one in history if isinstance(history, list | tuple))
        or any(tried.redirect_location for tried in _tries(response))
        or getattr(response, "_method", None) == "GET"  # of urllib, which keeps no history
    )


def is_redirect(response: object) -> bool:
    """Say whether a response, of an earlier step, is a redirect; it may be the question for a password, too."""
    status = getattr(response, "status_code", None) or getattr(response, "status", None)
    return isinstance(status, int) and status // 100 == _REDIRECT


def _tries(response: object) -> Sequence[Any]:
    retries = getattr(response, "retries", None) or getattr(getattr(response, "raw", None), "retries", None)
    return getattr(retries, "history", ())


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _causes(traceback: TracebackType) -> list[BaseException | None]:
    frame = traceback.tb_frame
    match frame.f_globals.get("__name__"), frame.f_code.co_name:
        case ("urllib3.util.retry", "increment"):
            return [tried.error for tried in getattr(frame.f_locals.get("self"), "history", ())]
        case ("botocore.endpoint" | "aiobotocore.endpoint", "_send_request"):
            return [None] * (frame.f_locals.get("attempts", 1) - 1)
        case ("requests.sessions", "resolve_redirects") | ("urllib.request", "http_error_302"):
            return [None]
        case ("httpx._client", "_send_handling_redirects") | ("aiohttp.client", "_request"):
            return [None for one in frame.f_locals.get("history", ()) if is_redirect(one)]
    return []
