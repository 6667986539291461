# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201 - what it prints is its result
"""Does every fault of the plan to a world under load, and fails where a promise is broken."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace

from .plan import SMALL, WHOLE
from .report import HEAD, promises
from .run import Result, run
from .world import FULL_PACE, SMALL_PACE


def printed(result: Result) -> None:
    """Print what came of a run."""
    print(HEAD)
    for row in result.rows.values():
        print(row.line)
    print(promises(result.kept))
    for line in (*result.commits, *(f"not tried: {name}" for name in result.not_tried)):
        print(line)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another seed, other dice and another order")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the faults those whose name holds it")
    parser.add_argument("--small", action="store_true", help="a minute of it, as in the tests")
    asked = parser.parse_args()
    plan, pace = (SMALL, SMALL_PACE) if asked.small else (WHOLE, FULL_PACE)
    plan = replace(plan, only=asked.only)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {line}", file=sys.stderr, flush=True)

    result = asyncio.run(run(asked.seed, pace, plan, say))
    printed(result)
    broken = len(result.broken)
    print(f"seed {asked.seed}: {broken} promises broken, {time.monotonic() - began:.0f} s")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
