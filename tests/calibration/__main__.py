# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201 - what it prints is its result
"""Prints for each world what releases stated against what they did, and fails where a promise is broken."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .judge import broken, budget, p_value
from .simulation import Outcome, Simulation, Tally
from .worlds import WORLDS

HEAD = (
    f"{'world':<20} {'an hour':>8} {'claims':<9} {'ambiguous':>9} {'absent':>7} {'released':>8} {'stated':>8} "
    f"{'actual':>6} {'p':>6} {'in time':>8} {'held':>6} {'peak/h':>6}"
)


def parts(outcome: Outcome) -> Iterator[tuple[str, Tally]]:
    """Yield what is told apart of a world: all, its bad spells, and what came before the rule could know."""
    yield "all", outcome.all
    if outcome.bad.ambiguous:
        yield "bad", outcome.bad
    if outcome.learning.ambiguous:
        yield "learning", outcome.learning


def line(outcome: Outcome, part: str, tally: Tally) -> str:
    """Return one line of the table."""
    world = outcome.world
    in_time = f"{tally.in_time / tally.absent:8.1%}" if tally.absent else f"{'-':>8}"
    return (
        f"{world.name:<20} {world.rate:>8,} {part:<9} {tally.ambiguous:>9,} {tally.absent:>7,} {tally.released:>8,} "
        f"{tally.stated:>8.2f} {tally.duplicates:>6} {p_value(tally.stated, tally.duplicates):>6.3f} {in_time} "
        f"{tally.held:>6,}" + (f" {outcome.peak:>6,}" if part == "all" else "")
    )


def bound(outcome: Outcome) -> str:
    """Return what the time is compared with in which the rule could not know."""
    hours, an_hour = outcome.learning_hours, budget(outcome.world.rate)
    return f"  it learned for {hours:.1f} hours, in which the budget allows {an_hour * hours:,.0f} releases"


def as_json(outcome: Outcome, failures: list[str]) -> dict[str, Any]:
    """Return all of an outcome as plain data."""
    more = {"peak": outcome.peak, "budget": budget(outcome.world.rate), "learning_hours": outcome.learning_hours}
    told = {part: asdict(tally) | {"p": p_value(tally.stated, tally.duplicates)} for part, tally in parts(outcome)}
    return {"world": outcome.world.name, "rate": outcome.world.rate, "broken": failures, **more, **told}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration", description=__doc__)
    parser.add_argument("--world", default="", metavar="NAME", help="only worlds whose `name@rate` holds this text")
    parser.add_argument("--claims", type=int, default=20_000, metavar="N", help="ambiguous sends of each world")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another seed, other dice")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of a table")
    asked = parser.parse_args()
    worlds = [world for world in WORLDS if asked.world in f"{world.name}@{world.rate}"]
    if not worlds:
        print(
            f"no world is named like {asked.world!r}: {', '.join(f'{w.name}@{w.rate}' for w in WORLDS)}",
            file=sys.stderr,
        )
        return 2
    told, failed = [], []
    if not asked.json:
        print(HEAD, flush=True)
    for number, world in enumerate(worlds, 1):
        began = time.process_time()
        outcome = Simulation(world, asked.claims, asked.seed).run()
        failures = broken(outcome)
        failed += failures
        told.append(as_json(outcome, failures))
        if not asked.json:
            told_apart = [line(outcome, *part) for part in parts(outcome)]
            learning = [bound(outcome)] if outcome.learning.ambiguous else []
            print(*told_apart, *learning, *failures, sep="\n", flush=True)
        took = f"{time.process_time() - began:.0f} s of processor time"
        print(f"{number} of {len(worlds)}: {world.name}@{world.rate}, {took}", file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps(told, indent=1))
    else:
        print(f"{len(worlds)} worlds, {len(failed)} promises broken")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
