# SPDX-License-Identifier: Apache-2.0
"""Starts workers, follows their steps, and kills them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

from reconciler.trial.job import Job
from reconciler.trial.outcome import NotTried

SECONDS: Final = 30.0
"""How long a step is waited for: starting Python takes long where the machine is busy."""


Module = Literal["sender", "receiving", "passing"]


class Worker:
    """A process that works on a job."""

    def __init__(self, process: Process, job: Job) -> None:
        assert process.stdout is not None  # noqa: S101 - it was started with pipes
        assert process.stdin is not None  # noqa: S101
        self._process, self._said, self._commands = process, process.stdout, process.stdin
        self._commands.write(job.line())

    async def reached(self, step: str) -> dict[str, Any]:
        """Wait for a step, and return what was said with it. Raises NotTried where the process does not get there."""
        try:
            async with asyncio.timeout(SECONDS):
                while (said := await self._next()).get("step") != step:
                    if "step" not in said:
                        raise NotTried(f"the process was to reach {step!r}, and ended: {_ending(said)}")
        except TimeoutError:
            raise NotTried(f"the process did not reach {step!r} within {SECONDS:g} s") from None
        return said

    async def ended(self) -> str:
        """Wait for the end, and return the outcome, or `error` and which. Raises NotTried where it does not end."""
        try:
            async with asyncio.timeout(SECONDS):
                while "step" in (said := await self._next()):
                    pass
        except TimeoutError:
            raise NotTried(f"the process did not end within {SECONDS:g} s") from None
        return _ending(said)

    async def _next(self) -> dict[str, Any]:
        line = await self._said.readline()
        if not line:
            raise NotTried("the process ended without a word")
        said: dict[str, Any] = json.loads(line)
        return said

    def go_on(self) -> None:
        """Let it leave the step at which it stands."""
        self._commands.write(b"\n")

    async def kill(self) -> None:
        """SIGKILL. Raises NotTried where it had ended before."""
        if self._process.returncode is None:
            self._process.kill()
        if await self._process.wait() != -signal.SIGKILL:
            raise NotTried("the process had ended before it was killed")


def _ending(said: dict[str, Any]) -> str:
    return said["ended"] if "ended" in said else f"error {said.get('error')}"


@asynccontextmanager
async def working(module: Module, job: Job) -> AsyncIterator[Worker]:
    """Start a worker, and kill it at the end if nobody has done so before."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", f"reconciler.trial.{module}"),  # -P: a folder `webhooks` here is the user's own
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        start_new_session=True,  # Ctrl-C is ours
    )
    try:
        yield Worker(process, job)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
