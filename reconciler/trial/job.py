# SPDX-License-Identifier: Apache-2.0
"""How a process that may be killed is told what to do, and says how far it is: lines of JSON on stdin and stdout.

Who says steps stands still at the one that its job names, deaf to everything, until it reads a line or is killed. It
ends where whoever gave it the job is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

LONGEST: Final = 120.0
"""Seconds after which a process ends by itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is to do."""

    dsn: str
    application: str
    """What its connections call themselves."""
    feeds: list[str]
    """Of a sender and a pass it is one."""
    key: str = ""
    url: str = ""
    """Where the provider takes messages."""
    submit_within: float = 60.0
    stop_at: str | None = None
    secret: str = ""
    """What the feeds' deliveries are signed with."""

    def line(self) -> bytes:
        """Return the job as the process reads it. By standard input, since everybody can read arguments."""
        return json.dumps(asdict(self)).encode() + b"\n"


def say(**what: Any) -> None:
    """Say one thing to whoever gave the job."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Steps:
    """Says each step, and stands still at one."""

    def __init__(self, stop_at: str | None) -> None:
        self._stop_at = stop_at

    def reached(self, step: str) -> None:
        """Say a step. Blocks the whole process, once, at the one where it is to stand still."""
        say(step=step)
        if step == self._stop_at:
            self._stop_at = None
            if not sys.stdin.readline():
                os._exit(1)  # nobody is there any more


def do(work: Callable[[Job], Awaitable[str]]) -> None:
    """Do the job that the first line of standard input describes, and say how it ended."""
    job = Job(**json.loads(sys.stdin.readline()))

    async def limited() -> str:
        async with asyncio.timeout(LONGEST):
            return await work(job)

    try:
        outcome = asyncio.run(limited())
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever gave the job says what it means
        say(error=f"{type(error).__name__}: {' '.join(str(error).split())}")
    else:
        say(ended=outcome)
