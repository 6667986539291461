# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201 - what it prints is its result
"""Breaks each law on purpose, by one small change at a time, and demands that the test named beside it fails.

`laws.toml` holds the changes. Each is made in a copy of the working tree, never in the tree itself. A change that no
longer fits the code is an error, and so is a named test that fails without it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn, Self

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
LAWS: Final = Path(__file__).with_name("laws.toml")
SECONDS: Final = 60
"""Longest run of one test; one that takes longer has noticed nothing."""

TRIES: Final = 2
"""Where the test is one of a race, or of invented examples, luck has a part in what it meets: it may try again."""

PROFILE: Final = "mutants"
"""Ten times as many invented examples, and none made smaller: see tests/conftest.py."""

NOT_COPIED: Final = (".git", ".venv", "__pycache__", "build", "dist", "data", "node_modules")
IMPORTED_ONCE: Final = (
    *("hypothesis.stateful", "asyncpg", "aiohttp.web", "aiohttp.test_utils", "msgspec", "structlog"),
    *("cryptography.x509", "cryptography.hazmat.primitives.asymmetric.ec", "prometheus_client", "django.conf"),
    *("aiobotocore.session", "apscheduler.schedulers.asyncio", "click.testing", "moto.server", "pydantic_settings"),
)
"""What most tests import of others: done once, before each run is forked off, it saves half of the time."""

OPTIONS: Final = (
    *("-q", "-n0", "-p", "no:cacheprovider", "--timeout=0", "--tb=line", "-m", ""),
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)
FROM_ELSEWHERE: Final = 90
"""Exit status of a run in which Python would have imported our packages from somewhere else than the copy."""


class Broken(Exception):
    """The mutants can't be run; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change that breaks a law, and the test that fails with it."""

    law: str
    file: str
    old: str
    new: str
    test: str
    times: int = 1
    """How often `old` occurs in the file; each occurrence is replaced."""

    def applied(self, text: str) -> str:
        """Return the file's text with the change made. Raises Broken where it doesn't fit."""
        if (found := text.count(self.old)) != self.times:
            raise Broken(f"stale: {self.law}: the text to replace is {found} times in {self.file}, not {self.times}")
        return text.replace(self.old, self.new)


def load(only: str) -> list[Mutant]:
    """Return the mutants whose law, file or test holds the given text."""
    mutants = [Mutant(**entry) for entry in tomllib.loads(LAWS.read_text())["mutant"]]
    return [mutant for mutant in mutants if only in f"{mutant.law}\n{mutant.file}\n{mutant.test}"]


# The copies


def source_files() -> list[Path]:
    """Return the working tree's files, without what is ignored, relative to its root."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        command = [git, "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        return [Path(name) for name in listed if name and (ROOT / name).is_file()]
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [path for path in found if not set(path.parts) & set(NOT_COPIED)]


def copy_tree(to: Path) -> None:
    """Copy the working tree."""
    for path in source_files():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, to / path)


@contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Make the change in the copy, and take it back."""
    path = tree / mutant.file
    before = path.read_text()
    try:
        write_source(path, mutant.applied(before))
        yield
    finally:
        write_source(path, before)


def write_source(path: Path, text: str) -> None:
    """Write a source file and forget its compiled form, which is told apart by size and whole seconds only."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


# Runs of pytest, each in a process of its own


class Run:
    """Tests that run in a copy; `done` says whether they have ended."""

    def __init__(self, tree: Path, tests: Sequence[str], seconds: float, *options: str) -> None:
        self.output = tree / "output.txt"
        self.ends_at = time.monotonic() + seconds
        self.over = 0
        self.status: int | None = None
        sys.stdout.flush()
        self.process = os.fork()
        if self.process == 0:
            run_pytest(tree, self.output, [*options, *tests])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.over:
            self.stop()

    def done(self) -> bool:
        """Say whether the run has ended, and end it where it takes too long (`status` stays None)."""
        if not self.over:
            self.over, status = map(int, os.waitpid(self.process, os.WNOHANG))
            if self.over:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self.ends_at:
                self.stop()
        return bool(self.over)

    def stop(self) -> None:
        """End the run; pytest gets some seconds to stop its database."""
        os.kill(self.process, signal.SIGINT)
        patience = time.monotonic() + 15
        while not self.over and time.monotonic() < patience:
            self.over, _ = os.waitpid(self.process, os.WNOHANG)
            time.sleep(0.1)
        if not self.over:
            os.kill(self.process, signal.SIGKILL)
            self.over, _ = os.waitpid(self.process, 0)


def run_pytest(tree: Path, output: Path, args: Sequence[str]) -> NoReturn:
    """Run pytest in this process, a forked one, with the packages of the copy, whatever is installed."""
    status = FROM_ELSEWHERE
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the runner, which asks once: asked twice, pytest leaves its database behind
        signal.signal(signal.SIGINT, signal.default_int_handler)
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False  # the copy is thrown away, and what it has compiled saves half of each run
        sys.path[:] = [str(tree), *(path for path in sys.path if path != str(LAWS.parent))]
        ours = [importlib.import_module(name).__file__ for name in ("reconciler", "webhooks")]
        if all(file and Path(file).is_relative_to(tree) for file in ours):
            status = int(pytest.main([*OPTIONS, *args]))
    except BaseException:  # noqa: BLE001 - the forked process must end here, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def how_it_failed(run: Run) -> str:
    """Return what pytest said of the failure, in one line."""
    found = re.search(r"^(?:/.*?:(?=\d+: )|E  )(.*)", run.output.read_text(), re.MULTILINE)
    return found[1].strip() if found else ""


def why_survived(run: Run) -> str | None:
    """Return why a mutant was not noticed, or None where its test failed as it should."""
    if run.status is None:
        return f"the test does not end within {SECONDS} s"
    if run.status == 0:
        return "the test passes"
    last = run.output.read_text().rstrip().rpartition("\n")[2]
    if run.status == 1 and re.search(r"\d+ failed", last):  # what breaks before the test is an error, no failure
        return None
    return f"no failure of the test but exit status {run.status}: {last}"


def check_fit(tree: Path, mutants: Sequence[Mutant]) -> None:
    """Raise Broken, which names all of them, where changes no longer fit the code."""
    stale = []
    for mutant in mutants:
        try:
            mutant.applied((tree / mutant.file).read_text())
        except Broken as error:
            stale.append(str(error))
    if stale:
        raise Broken("\n".join(stale))


def check_clean(trees: Sequence[Path], tests: Sequence[str]) -> None:
    """Run the named tests on unchanged copies, a share in each. Raises Broken unless all pass."""
    shares = [tests[n :: len(trees)] for n in range(len(trees))]
    with ExitStack() as stack:
        runs = [
            stack.enter_context(Run(tree, share, 30 * SECONDS, "-rfE"))
            for tree, share in zip(trees, shares, strict=True)
            if share
        ]
        while not all([run.done() for run in runs]):
            time.sleep(0.05)
    for run in runs:
        if run.status != 0:
            raise Broken(f"a named test fails without any change, or is not there:\n{run.output.read_text()}")


@dataclass(slots=True)
class Results:
    """What became of mutants, printed in their order."""

    verbose: bool
    survivors: list[str] = field(default_factory=list)
    printed: int = 0
    waiting: dict[int, str] = field(default_factory=dict)

    def take(self, number: int, mutant: Mutant, run: Run, why: str | None) -> None:
        """Note a result, and print it once all before it are printed."""
        lines = [f"{'SURVIVES' if why else 'noticed '}  {mutant.law}"]
        if why:
            lines.append(f"          {mutant.file}: {why}: {mutant.test}")
            self.survivors.append("\n".join(lines))
        elif self.verbose:
            lines.append(f"          {mutant.test}: {how_it_failed(run)}")
        self.waiting[number] = "\n".join(lines)
        while self.printed in self.waiting:
            print(self.waiting.pop(self.printed), flush=True)
            self.printed += 1


def one_by_one(tree: Path, waiting: deque[tuple[int, Mutant]], results: Results) -> Generator[None]:
    """Run waiting mutants in one copy; yields while a run is under way, and ends it where it is closed."""
    while waiting:
        number, mutant = waiting.popleft()
        for _ in range(TRIES):
            with (
                mutated(tree, mutant),
                Run(tree, [mutant.test], SECONDS, "-x", f"--hypothesis-profile={PROFILE}") as run,
            ):
                while not run.done():
                    yield
            if (why := why_survived(run)) is None:
                break
        results.take(number, mutant, run, why)


def run_all(mutants: Sequence[Mutant], trees: Sequence[Path], verbose: bool) -> list[str]:
    """Check that every change fits and every named test passes, run the mutants, and return those that survive."""
    for tree in trees:
        copy_tree(tree)
    check_fit(trees[0], mutants)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    check_clean(trees, sorted({mutant.test for mutant in mutants}))
    waiting, results = deque(enumerate(mutants)), Results(verbose)
    with ExitStack() as stack:
        lanes = [stack.enter_context(closing(one_by_one(tree, waiting, results))) for tree in trees]
        while lanes:
            lanes = [lane for lane in lanes if next(lane, lanes) is None]
            time.sleep(0.02)
    return results.survivors


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description="Break each law; its test must fail.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose law, file or test holds it")
    parser.add_argument("--list", action="store_true", help="print laws and tests, and run nothing")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many run at once (2), each in a copy")
    parser.add_argument("-v", "--verbose", action="store_true", help="say how each test failed")
    asked = parser.parse_args()
    mutants = load(asked.only)
    if asked.list:
        print(*(f"{mutant.law}\n    {mutant.file}: {mutant.test}" for mutant in mutants), sep="\n")
        return 0
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as parent:
            survivors = run_all(mutants, [Path(parent).resolve() / str(n) for n in range(asked.jobs)], asked.verbose)
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"{len(mutants)} mutants in {time.monotonic() - began:.0f} s", *survivors, sep="\n")
    print(f"{len(mutants) - len(survivors)} passed, {len(survivors)} failed")
    return int(bool(survivors) or not mutants)


if __name__ == "__main__":
    sys.exit(main())
