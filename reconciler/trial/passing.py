# SPDX-License-Identifier: Apache-2.0
"""A pass to be killed, and the rules by which all passes of the trial decide: the product's own, but within seconds."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from reconciler.passes.histories import Histories
from reconciler.passes.reconcile import Policies, Scope, run_pass
from reconciler.rule.limits import Limit
from reconciler.rule.policy import Rules
from reconciler.trial.job import Job, do
from webhooks.database import connect_pool

WHO: Final = "selftest"
GIVE_UP_AFTER: Final = timedelta(seconds=0.5)
"""From `submit_by`. What nobody spoke of by then is released: the trial tells of all that was taken before."""

RULES: Final = Rules(
    grace=timedelta(seconds=0.1),
    give_up_after=GIVE_UP_AFTER,
    max_risk=0.01,
    max_attempts=5,
    same_key_retry=False,
    retry_backoff=timedelta(0),
    on_unknown="release",
)
LIMIT: Final = Limit(count=10_000, share=1.0, canary=1.0, awaited=timedelta(0))


def _rules_for(_feed: str, _message_class: str) -> Rules:
    return RULES


def policies() -> Policies:
    """Return what the trial's passes have to know."""
    return Policies(
        _rules_for,
        lambda _feed: None,
        late_window=timedelta(days=1),
        histories=Histories(_rules_for, lambda _feed: False),
        limit_for=lambda _feed: LIMIT,
    )


async def one_pass(job: Job) -> str:
    """Run one pass over a feed."""
    pool = await connect_pool(job.dsn, size=2, application=job.application)
    try:
        await run_pass(pool, policies(), who=WHO, scope=Scope(job.feeds[0]))
    finally:
        pool.terminate()  # one of its connections may be broken
    return "done"


if __name__ == "__main__":
    do(one_pass)
