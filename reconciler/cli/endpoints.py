# SPDX-License-Identifier: Apache-2.0
"""`reconciler endpoints show|check|apply`: the webhook at the provider's side."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import click

from reconciler.cli.root import NEEDS_A_PERSON, App, Command, Failed, Root, feed_option, json_option
from reconciler.cli.text import printable, say, say_json
from reconciler.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.upkeep.endpoints import Endpoint, Step
    from webhooks.provider import Feed

UNKNOWN_URL: Final = "<receiver.public_url>/webhooks/{feed}"


@click.group(cls=Root)
def endpoints() -> None:
    """Look after the webhooks at the providers: show, check, apply."""


@endpoints.command(cls=Command, epilog="Example: reconciler endpoints show --feed sendgrid-main")
@feed_option
@json_option
@click.pass_obj
def show(app: App, feed: str | None, as_json: bool) -> None:
    """Say what to enter where at the provider.

    URL, events, authentication, what makes our key come back, and traps.
    """
    from webhooks.registry import PROVIDERS

    steps = {}
    for name, one in _feeds(app, feed).items():
        url = app.settings.webhook_url(name) or UNKNOWN_URL.format(feed=name)
        facts = PROVIDERS[one.provider].facts
        texts = [step.replace("{url}", url).replace("<name>", name) for step in facts.setup]
        steps[name] = {"provider": facts.title, "url": url, "steps": texts, "registration": facts.registration}
    if as_json:
        say_json(steps)
        return
    for name, shown in steps.items():
        say(f"{name}: {shown['provider']}")
        for number, step in enumerate(shown["steps"], 1):
            say(f"  {number}. {step}")
        say(f"  By its API: {shown['registration']}")
        say()


def _feeds(app: App, feed: str | None) -> Mapping[str, Feed]:
    from reconciler import composition

    if feed is not None:
        return {feed: app.feed(feed)}
    feeds = composition.feeds(app.settings)
    if not feeds:
        raise UserError("no feeds are configured: see --config")
    return feeds


@endpoints.command(cls=Command, epilog="Example: reconciler endpoints check")
@feed_option
@json_option
@click.pass_obj
def check(app: App, feed: str | None, as_json: bool) -> None:
    """Ask the providers whether the webhooks are in order.

    Needs each feed's api_key. Exits with 3 where something has to be changed, or could not be looked at. The daemon
    does the same once a day, since providers switch off webhooks that fail; reconciler status shows what it found.
    """
    findings = {one.feed: one.finding for one in asyncio.run(_found(app, feed))}
    if as_json:
        say_json(findings)
    else:
        for name, finding in findings.items():
            say(f"{name}: {finding or 'as it should be'}")
    if any(findings.values()):
        raise click.exceptions.Exit(NEEDS_A_PERSON)


@endpoints.command(cls=Command, epilog="Example: reconciler endpoints apply --feed postmark-main --dry-run")
@feed_option
@click.option("--dry-run", is_flag=True, help="Say what would be changed, and change nothing.")
@json_option
@click.pass_obj
def apply(app: App, feed: str | None, dry_run: bool, as_json: bool) -> None:
    """Set up or repair the webhooks at the providers.

    What is there already and right is left alone. A new key that a provider answers is printed once, to be put into the
    feed's secrets.
    """
    steps = asyncio.run(_applied(app, feed, dry_run, quiet=as_json))
    if as_json:
        say_json(steps)
    if failed := [f"{step.feed}: {step.text}: {step.problem}" for step in steps if step.problem]:
        raise Failed("\n".join(failed))


async def _found(app: App, feed: str | None) -> list[Endpoint]:
    async with AsyncExitStack() as stack:
        return await _inspected(app, feed, stack)


async def _inspected(app: App, feed: str | None, stack: AsyncExitStack) -> list[Endpoint]:
    """Look at the webhook of one feed, or of all whose providers can be asked. The stack keeps the clients open."""
    from reconciler.upkeep.endpoints import inspect
    from webhooks.api import open_api

    found = []
    for name, one in _feeds(app, feed).items():
        found.append(await inspect(one, _url(app, name), await stack.enter_async_context(open_api())))
    if feed is not None:
        return found
    if not (askable := [endpoint for endpoint in found if endpoint.askable]):
        raise UserError(f"no feed's provider can be asked: {found[0].feed}: {found[0].problem}")
    return askable


def _url(app: App, feed: str) -> str:
    url = app.settings.webhook_url(feed)
    if url is None:
        raise UserError("receiver.public_url is not set: it is what the providers have to post to")
    return url


async def _applied(app: App, feed: str | None, dry_run: bool, *, quiet: bool) -> list[Step]:
    """Make the changes, feed by feed, and return how each went."""
    from reconciler.upkeep.endpoints import Step, make

    steps = []
    async with AsyncExitStack() as stack:
        for endpoint in await _inspected(app, feed, stack):
            if endpoint.problem:
                steps.append(Step(endpoint.feed, "look at the webhook", problem=endpoint.problem))
            elif not endpoint.changes and not quiet:
                say(f"{endpoint.feed}: as it should be")
            for change in endpoint.changes:
                steps.append(Step(endpoint.feed, change.text) if dry_run else await make(endpoint.feed, change))
                _say_step(steps[-1], to_stderr=quiet)
                if steps[-1].problem:
                    break  # what comes next builds on it
    return steps


def _say_step(step: Step, *, to_stderr: bool) -> None:
    # At once, since a key that the provider made is told once: whatever comes after may fail.
    if not step.problem:
        text = f"{step.text}: done" if step.done else f"would {step.text}"
        click.echo(printable(f"{step.feed}: {text}"), err=to_stderr)
    if step.told:
        click.echo(printable(f"{step.feed}: {step.told}"), err=to_stderr)
