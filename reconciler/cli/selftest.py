# SPDX-License-Identifier: Apache-2.0
"""`reconciler selftest`: do the promises hold here, does the provider bring our key back, does a client submit once?"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from reconciler.cli.root import NEEDS_A_PERSON, App, Command, Failed, Interrupted, Root, feed_text, json_option
from reconciler.cli.text import say, say_json, say_table
from reconciler.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reconciler.selftest.client import Trial
    from reconciler.selftest.correlation import Heard, Marked
    from reconciler.trial.outcome import Tried
    from webhooks.database import BoundedPool
    from webhooks.provider import Feed


@click.group(cls=Root, invoke_without_command=True)
@json_option
@click.pass_context
def selftest(context: click.Context, as_json: bool) -> None:
    """Try out that the promises hold and that the parts work together. Without a command: promises."""
    if context.invoked_subcommand is None:
        context.invoke(promises, as_json=as_json)
    elif as_json:
        raise click.UsageError("--json belongs behind the command that is to print it")


@selftest.command(cls=Command, epilog="Example: reconciler selftest promises --json")
@json_option
@click.pass_obj
def promises(app: App, as_json: bool) -> None:
    """Put the promises to the test on your database.

    Senders, passes and receivers are killed and cut off at each step, events come in bad orders, and a provider on this
    machine counts what it took. All of it in a schema of its own, dropped at the end; yours is not touched. Takes about
    half a minute. Exits with 1 unless every promise was tried and kept.
    """
    app.configure_logs()
    began = time.monotonic()
    tried = asyncio.run(_until_told_to_stop(app))
    seconds, results = time.monotonic() - began, Counter(one.result for one in tried)
    if as_json:
        counts = {"kept": results["kept"], "broken": results["broken"], "not_tried": results["not tried"]}
        say_json({**counts, "seconds": round(seconds, 1), "promises": tried})
    else:
        _say_promises(tried, seconds)
    if results["kept"] < len(tried):
        raise Failed(f"{results['broken']} promises are broken, {results['not tried']} could not be tried")


async def _until_told_to_stop(app: App) -> list[Tried]:
    from reconciler.serving.process import stop_on_signals, unless_stopped

    tried: list[Tried] = []
    async with AsyncExitStack() as stack:
        stop = stop_on_signals(stack)  # SIGTERM, too, has to leave the database as it was
        await unless_stopped(stop, _put_to_test(app, tried))
        if stop.is_set():
            raise Interrupted("interrupted: nothing is said of the promises")
    return tried


async def _put_to_test(app: App, tried: list[Tried]) -> None:
    from reconciler.trial.run import PROMISES, try_promises
    from reconciler.trial.scratch import scratch_schema

    async with (
        app.open_database(check_schema=False) as database,
        scratch_schema(app.settings.database.direct_url or database.dsn) as scratch,
    ):
        click.echo(f"reconciler: trying {len(PROMISES)} promises in the schema {scratch.name}", err=True)
        tried += await try_promises(scratch)


def _say_promises(tried: list[Tried], seconds: float) -> None:
    rows = [(one.result, one.promise, one.reason or "; ".join(map(str, one.counted))) for one in tried]
    say_table(("RESULT", "PROMISE", "COUNTED"), rows)
    say()
    say("taken: how often the provider took the message; attempts: how often the send was given out;")
    say("(NOT ...): what was promised")
    kept = sum(one.result == "kept" for one in tried)
    say(f"{kept} of {len(tried)} promises kept, in {seconds:.0f} s")


@selftest.command(
    cls=Command,
    epilog="Example: reconciler selftest correlation --feed sendgrid-main -- python send_one.py",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--feed", metavar="FEED", required=True, callback=feed_text, help="Which feed's provider is tried.")
@click.option("--wait", metavar="DURATION", default="5m", show_default=True, help="How long events are waited for.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@json_option
@click.pass_obj
def correlation(app: App, feed: str, wait: str, command: tuple[str, ...], as_json: bool) -> None:
    """Say whether a provider brings our key back.

    In which events of one stamped message, and after how long. COMMAND sends the message through the provider (its
    sandbox will do), merged with the stamp that it finds in its environment: SEND_KEY, and as JSON STAMP_BODY,
    STAMP_HEADERS, STAMP_SMTP_HEADERS; MESSAGE_ID where the provider lets us choose it. Without COMMAND the stamp is
    printed, for you to send by hand. The receiver must be running. Exits with 1 where the key does not come back.
    """
    target, seconds = app.feed(feed), _seconds(wait, "--wait")
    _refuse_hopeless(target)
    heard = app.with_database(lambda pool: _tried(pool, target, command, seconds, as_json), create=False)
    if as_json:
        say_json(heard)
    _conclude(target, heard)


def _refuse_hopeless(feed: Feed) -> None:
    from webhooks.registry import PROVIDERS

    provider = PROVIDERS[feed.provider]
    if not provider.facts.echoes_key and provider.stamp("probe").message_id is None:
        raise UserError(f"{provider.facts.title} brings no key back, and takes no message id of ours: nothing to try")


def _seconds(duration: str, option: str) -> float:
    from reconciler.units import parse_duration

    try:
        return parse_duration(duration).total_seconds()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


async def _tried(pool: BoundedPool, feed: Feed, command: Sequence[str], seconds: float, quiet: bool) -> list[Heard]:
    from reconciler.selftest.correlation import listen, marked
    from reconciler.units import format_duration

    message = await marked(pool, feed)
    if command:
        await _send(command, message, quiet)
    else:
        _say_stamp(message, to_stderr=quiet)
    wait = format_duration(timedelta(seconds=seconds))
    click.echo(f"waiting up to {wait} for its events (--wait); Ctrl-C ends", err=True)
    heard = []
    async for event in listen(pool, feed, message, seconds):
        heard.append(event)
        if not quiet:
            came = "our key came back" if event.key_came_back else "WITHOUT our key"
            say(f"after {event.after_seconds:.1f} s: {event.kind} ({event.testimony}), {came}")
    return heard


def _say_stamp(message: Marked, *, to_stderr: bool) -> None:
    click.echo("Send one message through the provider now, with this merged into the call:", err=to_stderr)
    for what, value in _stamp(message).items():
        click.echo(f"  {what} {value}", err=to_stderr)


def _stamp(message: Marked) -> dict[str, str]:
    stamp = message.stamp
    found = {
        "SEND_KEY": message.wire_key,
        "STAMP_BODY": json.dumps(stamp.body),
        "STAMP_HEADERS": json.dumps(dict(stamp.headers)),
        "STAMP_SMTP_HEADERS": json.dumps(dict(stamp.smtp_headers)),
    }
    return {**found, "MESSAGE_ID": stamp.message_id} if stamp.message_id else found


async def _send(command: Sequence[str], message: Marked, quiet: bool) -> None:
    if status := await _run(command, _stamp(message), quiet):
        raise UserError(f"{command[0]} ended with status {status}: nothing was waited for")


async def _run(command: Sequence[str], environment: dict[str, str], quiet: bool) -> int:
    stdout = sys.stderr if quiet else None  # ours is JSON
    try:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment}, stdout=stdout)
    except OSError as error:
        raise UserError(f"{command[0]} can't be run: {error.strerror}") from None
    return await process.wait()


def _conclude(feed: Feed, heard: list[Heard]) -> None:
    from webhooks.registry import PROVIDERS

    facts = PROVIDERS[feed.provider].facts
    if any(event.key_came_back for event in heard):
        return
    if heard and not facts.echoes_key:
        click.echo("found by the message id that the stamp chose, as it must be at this provider", err=True)
        return
    if heard:
        raise Failed(f"events came without our key: is it stamped where {facts.title} takes it? {facts.key_slot}")
    raise Failed(
        "no event came: was the message sent, does the webhook reach the receiver (reconciler endpoints check), and is "
        "the key stamped? reconciler status counts what was refused"
    )


@selftest.command(
    cls=Command,
    epilog="Example: reconciler selftest client -- python send_one.py",
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "--fault",
    "faults",
    type=click.Choice(["reset", "unavailable", "hang"]),
    multiple=True,
    default=("reset", "unavailable"),
    show_default=True,
    help="What befalls the submission once it was read. Give it again for more.",
)
@click.option("--hold", metavar="DURATION", default="2m", show_default=True, help="How long `hang` does not answer.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@json_option
@click.pass_context
def client(context: click.Context, faults: tuple[str, ...], hold: str, command: tuple[str, ...], as_json: bool) -> None:
    """Count how often one submission arrives.

    COMMAND sends one message as your application does, to the address in RECONCILER_SELFTEST_URL (HTTP) or
    RECONCILER_SELFTEST_SMTP (host:port), where its answer gets lost; it runs once for each fault, and how it ends does
    not matter. A client that repeats by itself sends twice inside one claim, which nothing can put right afterwards.
    Exits with 3 where more than one submission arrived, with 1 where none did.
    """
    trials = asyncio.run(_try_out(command, faults, _seconds(hold, "--hold"), as_json))
    if as_json:
        say_json(trials)
    if not all(trial.arrived for trial in trials):
        raise Failed("nothing arrived: does the command send to RECONCILER_SELFTEST_URL or RECONCILER_SELFTEST_SMTP?")
    if any(trial.arrived > 1 for trial in trials):
        context.exit(NEEDS_A_PERSON)


async def _try_out(command: Sequence[str], faults: Sequence[str], hold: float, quiet: bool) -> list[Trial]:
    from reconciler.selftest.client import Trial, running

    trials = []
    for fault in faults:
        trial = Trial(fault)
        async with running(trial, hold) as server:
            await _run(command, server.environment, quiet)
        trials.append(trial)
        if not quiet:
            _say_trial(trial)
    return trials


def _say_trial(trial: Trial) -> None:
    if trial.arrived <= 1:
        arrived = "1 submission arrived, as it should" if trial.arrived else "no submission arrived"
    else:
        arrived = f"{trial.arrived} submissions arrived, by {trial.by}: {trial.advice}"
    say(f"{trial.fault}: {arrived}")
