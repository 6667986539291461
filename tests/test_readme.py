# SPDX-License-Identifier: Apache-2.0
"""The README is true: what a newcomer types works on a machine that has only Python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import free_port
from snippets import ROOT, block, blocks

COPIED = (
    "reconciler",
    "webhooks",
    "migrations",
    "examples",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
)


def first_command() -> str:
    return block("README.md", "sh", "serve\n").strip()


def quickstart_blocks() -> list[str]:
    return blocks("README.md", "sh", "order:12")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what is needed to install, as a newcomer has it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "quickstart-data"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.fixture
def bare_machine(checkout: Path) -> dict[str, str]:
    """An environment whose PATH holds a Python and nothing else: no git, curl, psql, gcc, nor PostgreSQL."""
    programs = checkout / "bin-of-this-machine"
    programs.mkdir()
    # Not a link to the program itself: a version manager's launcher decides by its own place.
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (programs / "python3").symlink_to(base)
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    return {**kept, "PATH": str(programs), "HOME": str(checkout), "RECONCILER_RECEIVER__PORT": str(free_port())}


@pytest.fixture
def serving(checkout: Path, bare_machine: dict[str, str]) -> Iterator[dict[str, str]]:
    """README's first command, run until it serves; yields the environment."""
    log = (checkout / "serve.log").open("wb")
    server = subprocess.Popen(
        ["/bin/sh", "-c", f"exec 2>&1; {first_command()}"],
        cwd=checkout,
        env=bare_machine,
        stdout=log,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until_ready(server, bare_machine["RECONCILER_RECEIVER__PORT"], checkout / "serve.log")
        yield bare_machine
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
        log.close()


def wait_until_ready(server: subprocess.Popen[bytes], port: str, log: Path) -> None:
    end = time.monotonic() + 240  # it installs first
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"not ready: {log.read_text()[-3000:]}")


def sh(script: str, checkout: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["/bin/sh", "-e", "-c", script],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def why(key: str, checkout: Path, environment: dict[str, str]) -> dict[str, object]:
    script = f"RECONCILER_CONFIG=examples/quickstart.toml .venv/bin/reconciler why {key} --json"
    told: dict[str, object] = json.loads(sh(script, checkout, environment))
    return told


@pytest.mark.index
@pytest.mark.timeout(400)
def test_the_first_command_and_a_few_lines_show_a_send_found_and_another_released(
    checkout: Path, serving: dict[str, str]
) -> None:
    claims, explanations = quickstart_blocks()
    assert claims.count("trigger accepted") == 1
    said = sh(claims, checkout, serving)
    assert said.count("claimed") == 12
    assert said.count('"stored": 1') == 11
    end = time.monotonic() + 60
    while (told := why("order:4", checkout, serving))["state"] != "pending":
        assert time.monotonic() < end, told
        time.sleep(0.5)
    assert why("order:12", checkout, serving)["state"] == "sent"
    explained = sh(claims.splitlines()[0] + "\n" + explanations, checkout, serving)
    assert "proves acceptance" in explained
    assert "released: absent" in explained
    assert "answered before and 7 after it, all heard of" in explained
    assert "risk of a duplicate 0." in explained


def commands(scripts: list[str]) -> list[str]:
    """Their lines, without comments and empty ones."""
    return [line for script in scripts for line in script.splitlines() if line and not line.startswith("#")]


def test_the_quick_start_in_steps_is_the_readme_s() -> None:
    first, serve, *steps = blocks("docs/quickstart.md", "sh")
    assert first == block("README.md", "sh", "reconciler demo")
    assert serve == block("README.md", "sh", "serve\n")
    assert commands(steps) == commands(quickstart_blocks())
