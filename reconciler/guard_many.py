# SPDX-License-Identifier: Apache-2.0
"""Several sends in one call to the provider, on asyncio: SendGrid's personalizations, SES bulk, Postmark's batch.

sends = {key: {"recipient": address, "fingerprint": ...}, ...}

async def submit(claims):
    return await session.post(URL, json=[messages[claim.send_key] | claim.stamp.body for claim in claims])

for sent in await send_many(pool, sends, "postmark-main", submit, provider="postmark"):
    ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from reconciler.classify import Result, failure, read_answers
from reconciler.guard import BatchExecutor, refuse_transaction, until_told
from reconciler.sending import tracing
from reconciler.sending.claims import (
    CANCELLED_SECONDS,
    DEADLOCK_PAUSE,
    STORE_SECONDS,
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

Submit = Callable[[Sequence[Claim]], Awaitable[object]]


# Locked in the order of their recipients, whose places a cap may give, and keys: as by whoever claims several.
CLAIM: Final = """
SELECT w.key, c.* FROM (
    SELECT key, options FROM unnest($2::text[], $3::text[]) AS w(key, options)
    ORDER BY lower(recipient_key(options::jsonb ->> 'recipient')), wire_key(key)
) AS w CROSS JOIN LATERAL send_claim(w.key, $1, w.options::jsonb) AS c
"""


async def claim_many(
    executor: BatchExecutor, sends: Mapping[str, Mapping[str, Any]], feed: str, *, provider: str | None = None
) -> list[Claim]:
    """Claim several sends in one statement, each with its options. The claims come in the order of `sends`.

    A deadlock over the places of a frequency cap is tried once more.

    At most 1,000 at a time, or others wait for them. Raises as `guard.claim`; then none is claimed.
    """
    refuse_transaction(executor)
    for key, options in sends.items():
        check_call(key, provider, options)
        refuse_fingerprint(provider, options)
    asked_at, began = boot_time(), tracing.begin()
    wanted = feed, [*sends], [claim_options(options) for options in sends.values()]
    try:
        rows = await executor.fetch(CLAIM, *wanted)
    except Exception as error:
        if not is_deadlock(error):
            raise
        await asyncio.sleep(DEADLOCK_PAUSE)
        rows = await executor.fetch(CLAIM, *wanted)
    found = {row["key"]: as_claim(row["key"], row, asked_at, provider) for row in rows}
    claims = [found[key] for key in sends]
    tracing.claimed_all(claims, feed, began, "send_claim")
    problems = [known_id_problem(claimed, sends[claimed.send_key]) for claimed in claims]
    if problem := next(filter(None, problems), None):
        granted = [claimed for claimed in claims if claimed.granted]
        await _report(executor, granted, [Result("not_sent", "wrong known_message_id")] * len(granted))
        raise GuardError(problem)
    return claims


async def send_many(
    executor: BatchExecutor,
    sends: Mapping[str, Mapping[str, Any]],
    feed: str,
    submit: Submit,
    *,
    provider: str | None = None,
) -> list[Sent]:
    """Submit those of several sends that nobody has submitted, in one call; return what each came to, in their order.

    `sends` maps each key to its options. `submit` is given the claims that were granted and returns the provider's
    answer, which is read for each message in that order, or holds for all where the provider says one thing of all
    (SendGrid). Else as `guard.send_once`; what `submit` raises is the error of each.
    """
    for options in sends.values():
        refuse_nonce(options)
    claims = await claim_many(executor, sends, feed, provider=provider)
    sent = {claimed.send_key: refused(claimed) for claimed in claims}
    granted = [claimed for claimed in claims if claimed.granted]
    sent |= {one.claim.send_key: one for one in await submit_claimed_many(executor, granted, submit)}
    return [sent[key] for key in sends]


async def submit_claimed_many(executor: BatchExecutor, claims: Sequence[Claim], submit: Submit) -> list[Sent]:
    """Submit sends that were granted to this caller, in one call; return what each came to, in their order.

    The second half of `send_many`; also for what `campaign.batches` and `guard.claim_released` give.
    """
    if not claims:
        return []
    error, began = None, tracing.begin()
    try:
        results = await _answered(submit, claims)
    except asyncio.CancelledError as cancelled:
        results = results_of(claims, [failure(cancelled)])
        tracing.submitted_all(claims, results, began, cancelled)
        await until_told(partial(_report, executor, claims, results), CANCELLED_SECONDS)
        raise
    except Exception as raised:  # noqa: BLE001 - classified, and the caller's to raise
        error = raised
        results = results_of(claims, [failure(raised, claims[0].provider)])
    tracing.submitted_all(claims, results, began, error)
    told = await until_told(partial(_report, executor, claims, results), STORE_SECONDS) or {}
    if error is not None and is_mistake(error):
        raise error
    return [
        concluded(claimed, result, told.get(claimed.send_key), error)
        for claimed, result in zip(claims, results, strict=True)
    ]


async def _answered(submit: Submit, claims: Sequence[Claim]) -> list[Result]:
    async with asyncio.timeout(min(claimed.seconds_left() for claimed in claims)):
        return results_of(claims, await read_answers(await submit(claims), claims[0].provider))


async def _report(executor: BatchExecutor, claims: Sequence[Claim], results: Sequence[Result]) -> dict[str, Told]:
    began = tracing.begin()
    told = {
        **await _confirm(executor, to_confirm(claims, results)),
        **await _fail(executor, to_fail(claims, results)),
    }
    tracing.told_all(claims, results, told, began)
    return told


CONFIRM: Final = """
SELECT w.key, c.outcome, c.reason FROM (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[]) AS w(key, fence, message_id) ORDER BY wire_key(key)
) AS w CROSS JOIN LATERAL send_confirm(w.key, w.fence, w.message_id, '{}') AS c
"""


async def _confirm(executor: BatchExecutor, columns: Sequence[Sequence[Any]]) -> dict[str, Told]:
    rows = await executor.fetch(CONFIRM, *columns)
    return {row["key"]: (row["outcome"], row["reason"]) for row in rows}


FAIL: Final = """
SELECT w.key, c.outcome FROM (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::boolean[]) AS w(key, fence, reason, not_sent)
    ORDER BY wire_key(key)
) AS w CROSS JOIN LATERAL send_fail(w.key, w.fence, w.reason, w.not_sent) AS c
"""


async def _fail(executor: BatchExecutor, columns: Sequence[Sequence[Any]]) -> dict[str, Told]:
    rows = await executor.fetch(FAIL, *columns)
    return {row["key"]: (row["outcome"], None) for row in rows}
