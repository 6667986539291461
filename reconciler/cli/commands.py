# SPDX-License-Identifier: Apache-2.0
"""All commands, hung on `root.cli` in the order in which the help lists them. One module a family of them."""

from __future__ import annotations

from reconciler.cli import (
    campaign,
    database,
    demo,
    endpoints,
    importing,
    inspect,
    operate,
    outbox,
    prune,
    reconcile,
    report,
    report_lag,
    roads,
    selftest,
    serve,
    suppress,
    token,
    trigger,
    what_if,
)
from reconciler.cli.root import cli

__all__ = ["cli"]

report.report.add_command(report_lag.lag)

for command in (
    demo.demo,
    serve.serve,
    reconcile.reconcile,
    inspect.status,
    inspect.why,
    report.report,
    what_if.what_if,
    operate.release,
    operate.confirm,
    operate.fail,
    operate.pause,
    operate.resume,
    campaign.campaign,
    suppress.suppress,
    outbox.outbox,
    roads.lookup,
    roads.replay,
    roads.backfill,
    importing.import_,
    endpoints.endpoints,
    selftest.selftest,
    trigger.trigger,
    prune.prune,
    prune.forget,
    database.migrate,
    database.psql,
    inspect.stamp,
    inspect.providers,
    inspect.config,
    token.token,
):
    cli.add_command(command)
