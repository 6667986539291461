# SPDX-License-Identifier: Apache-2.0
"""`reconciler trigger`: sample events for the running receiver."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import click

from reconciler.cli.root import App, Command, Failed, json_option, key_text
from reconciler.cli.text import say_json, say_table


@click.command(cls=Command, epilog="Example: reconciler trigger delivered --feed mailgun-main --key order.receipt:1234")
@click.argument("kind")
@click.option("--feed", metavar="FEED", required=True, help="The feed to post to; its secret signs the sample.")
@click.option(
    "--key", "keys", metavar="KEY", required=True, multiple=True, callback=key_text,
    help="The send that the event is about. May be given several times.",
)  # fmt: skip
@click.option("--url", metavar="URL", help="Where the receiver listens. Default: receiver.host and receiver.port.")
@json_option
@click.pass_obj
def trigger(app: App, kind: str, feed: str, keys: tuple[str, ...], url: str | None, as_json: bool) -> None:
    """Post sample events to the running receiver.

    They look as the feed's provider sends them.

    KIND is delivered, bounced ..., or the provider's own name of an event; a wrong one lists what there is. Samples are
    signed with the feed's first secret, where the provider's scheme lets anybody who has it sign.
    """
    from reconciler.selftest.trigger import post_samples, receiver_url

    target = app.feed(feed)
    base = (url or receiver_url(app.settings)).rstrip("/")
    answers = asyncio.run(post_samples(base, target, kind, keys, datetime.now(UTC)))
    if as_json:
        say_json(answers)
    else:
        say_table(("KEY", "STATUS", "ANSWER"), [(a.key, a.status, a.body.strip()) for a in answers])
    refused = [a for a in answers if a.status != 200]  # noqa: PLR2004 - exactly 200 is stored
    if refused:
        raise Failed(f"{len(refused)} of {len(answers)} were not taken: the receiver answered {refused[0].status}")
