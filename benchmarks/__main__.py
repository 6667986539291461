# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: prints one table of ratios. Nothing is asserted: figures are for people and for records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import alternative, backlog, campaigns, events, latency, posts, pruning, sending, silence, soak
from benchmarks.stand import Result, Scale, machine, say, server, settle_server
from reconciler.database.postgres import EmbeddedPostgres

Benchmark = Callable[[EmbeddedPostgres, Scale], Awaitable[list[Result]]]
BENCHMARKS: Final[dict[str, Benchmark]] = {
    "a": posts.run,
    "b": events.run,
    "c": backlog.run,
    "d": silence.run,
    "e": sending.run,
    "f": pruning.run,
    "g": campaigns.run,
    "h": latency.run,
    "i": soak.run,
    "j": alternative.run,
}
LONG: Final = {"i"}
"""Takes ten minutes by itself: asked for by name."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        choices=sorted(BENCHMARKS),
        action="append",
        help="one of them; may be repeated; without, all but i",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: scale 0.01, one short round")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes, 1.0 by default")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side after the warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file as well")
    parser.add_argument("--folder", help="where the database is put (default: the system's temporary files)")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, embedded: EmbeddedPostgres) -> list[Result]:
    scale = Scale(0.01, 1) if arguments.quick else Scale(arguments.scale, arguments.rounds)
    say(f"{await settle_server(embedded)}; {machine()}")
    results: list[Result] = []
    usual = sorted(BENCHMARKS.keys() - (set() if arguments.quick else LONG))
    for name in arguments.only or usual:
        for result in await BENCHMARKS[name](embedded, scale):
            say(result.line)
            results.append(result)
    say(f"afterwards: {machine()}")
    return results


def main() -> None:
    """Run what was asked for."""
    arguments = _arguments()
    with server(arguments.folder) as embedded:
        results = uvloop.run(_run(arguments, embedded))
    if arguments.json:
        arguments.json.write_text(json.dumps([result.record() for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
