# SPDX-License-Identifier: Apache-2.0
"""Several sends in one call to the provider, for threads, over psycopg 3. The same calls as in `guard_many`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from reconciler.classify import Result, answers, failure
from reconciler.guard_many import CLAIM, CONFIRM, FAIL
from reconciler.guard_sync import Executor, rows, until_told
from reconciler.sending import tracing
from reconciler.sending.claims import (
    DEADLOCK_PAUSE,
    Claim,
    GuardError,
    Sent,
    Told,
    as_claim,
    boot_time,
    check_call,
    claim_options,
    concluded,
    is_deadlock,
    is_mistake,
    known_id_problem,
    refuse_fingerprint,
    refuse_nonce,
    refused,
    results_of,
    to_confirm,
    to_fail,
)

Submit = Callable[[Sequence[Claim]], object]


def claim_many(
    executor: Executor, sends: Mapping[str, Mapping[str, Any]], feed: str, *, provider: str | None = None
) -> list[Claim]:
    """Claim several sends in one statement, each with its options. As `guard_many.claim_many`."""
    for key, options in sends.items():
        check_call(key, provider, options)
        refuse_fingerprint(provider, options)
    asked_at, began = boot_time(), tracing.begin()
    wanted = feed, [*sends], [claim_options(options) for options in sends.values()]
    try:
        found = rows(executor, CLAIM, *wanted)
    except Exception as error:
        if not is_deadlock(error):
            raise
        time.sleep(DEADLOCK_PAUSE)
        found = rows(executor, CLAIM, *wanted)
    by_key = {row["key"]: as_claim(row["key"], row, asked_at, provider) for row in found}
    claims = [by_key[key] for key in sends]
    tracing.claimed_all(claims, feed, began, "send_claim")
    problems = [known_id_problem(claimed, sends[claimed.send_key]) for claimed in claims]
    if problem := next(filter(None, problems), None):
        granted = [claimed for claimed in claims if claimed.granted]
        _report(executor, granted, [Result("not_sent", "wrong known_message_id")] * len(granted))
        raise GuardError(problem)
    return claims


def send_many(
    executor: Executor,
    sends: Mapping[str, Mapping[str, Any]],
    feed: str,
    submit: Submit,
    *,
    provider: str | None = None,
) -> list[Sent]:
    """Submit those of several sends that nobody has submitted, in one call. As `guard_many.send_many`."""
    for options in sends.values():
        refuse_nonce(options)
    claims = claim_many(executor, sends, feed, provider=provider)
    sent = {claimed.send_key: refused(claimed) for claimed in claims}
    if granted := [claimed for claimed in claims if claimed.granted]:
        sent |= _submitted(executor, submit, granted)
    return [sent[key] for key in sends]


def _submitted(executor: Executor, submit: Submit, claims: Sequence[Claim]) -> dict[str, Sent]:
    error, began = None, tracing.begin()
    try:
        results = _answered(submit, claims)
    except Exception as raised:  # noqa: BLE001 - classified, and the caller's to raise
        error = raised
        results = results_of(claims, [failure(raised, claims[0].provider)])
    tracing.submitted_all(claims, results, began, error)
    told = until_told(partial(_report, executor, claims, results)) or {}
    if error is not None and is_mistake(error):
        raise error
    return {
        claimed.send_key: concluded(claimed, result, told.get(claimed.send_key), error)
        for claimed, result in zip(claims, results, strict=True)
    }


def _answered(submit: Submit, claims: Sequence[Claim]) -> list[Result]:
    for claimed in claims:
        claimed.seconds_left()
    return results_of(claims, answers(submit(claims), claims[0].provider))


def _report(executor: Executor, claims: Sequence[Claim], results: Sequence[Result]) -> dict[str, Told]:
    began = tracing.begin()
    told = {
        **_confirm(executor, to_confirm(claims, results)),
        **_fail(executor, to_fail(claims, results)),
    }
    tracing.told_all(claims, results, told, began)
    return told


def _confirm(executor: Executor, columns: Sequence[Sequence[Any]]) -> dict[str, Told]:
    return {row["key"]: (row["outcome"], row["reason"]) for row in rows(executor, CONFIRM, *columns)}


def _fail(executor: Executor, columns: Sequence[Sequence[Any]]) -> dict[str, Told]:
    return {row["key"]: (row["outcome"], None) for row in rows(executor, FAIL, *columns)}
