# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run to their end, each in a small size. Their figures are for people: nothing is held against them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS

ROOT = Path(__file__).parents[1]


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_each_benchmark_measures_something(name: str, tmp_path: Path) -> None:
    if name == "j":
        pytest.importorskip("gunicorn", reason="the alternative comes with the extra `bench`")
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--only", name, "--json", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert all(one["name"].startswith(f"({name})") for one in json.loads(figures.read_text()))
    assert json.loads(figures.read_text())
