# SPDX-License-Identifier: Apache-2.0
"""`reconciler token`: makes a bearer token for the HTTP API."""

from __future__ import annotations

import re

import click

from reconciler.cli.root import Command, json_option
from reconciler.cli.text import say, say_json
from reconciler.tokens import SCOPES, hash_of, new_token


def _plain(_: click.Context, __: click.Parameter, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise click.BadParameter("a name in the settings has letters, digits, _ and - only")
    return name


@click.command(cls=Command, epilog="Example: reconciler token --name shop --scope send")
@click.option("--name", default="NAME", metavar="NAME", callback=_plain, help="Who will call with it.")
@click.option("--scope", "scopes", type=click.Choice(SCOPES), multiple=True, default=("send",), show_default=True)
@json_option
def token(name: str, scopes: tuple[str, ...], as_json: bool) -> None:
    """Make a token for /v1/sends, and the lines for the settings.

    It is shown this once and stored nowhere; the settings hold its hash. To replace one, add the new hash to the list,
    move the caller to the new token, and take the old hash out.
    """
    made = new_token()
    if as_json:
        say_json({"token": made, "name": name, "hash": hash_of(made), "scopes": scopes})
        return
    listed = ", ".join(f'"{scope}"' for scope in scopes)
    for line in (
        f"# for the caller, who sends it as Authorization: Bearer ...: {made}",
        f"[api.tokens.{name}]",
        f'hash = ["{hash_of(made)}"]',
        f"scopes = [{listed}]",
    ):
        say(line)
