# SPDX-License-Identifier: Apache-2.0
"""A small calibration: stated against actual in a few invented worlds. All of them: `python -m tests.calibration`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from calibration.judge import broken, p_value
from calibration.simulation import Outcome, Simulation, Tally
from calibration.worlds import CONTROL, WORLDS

ROOT = Path(__file__).parent.parent


def lived(name, rate, claims=600):
    world = next(world for world in WORLDS if (world.name, world.rate) == (name, rate))
    return Simulation(world, claims, seed=3).run()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("down", 1_000),
        ("draining", 10),
        ("draining", 1_000),
        ("lossy", 1_000),
        ("ill when ambiguous", 1_000),
        ("only ambiguous late", 1_000),
        ("browned out", 10),
        ("browned out", 1_000),
        ("class without echo", 1_000),
        ("slow domains", 1_000),
    ],
)
def test_what_releases_state_is_true_in_the_world_and_in_its_bad_spells(name, rate):
    outcome = lived(name, rate)
    assert broken(outcome) == []
    assert outcome.all.ambiguous + outcome.learning.ambiguous == 600
    assert outcome.all.released + outcome.learning.released > 0


def test_a_busy_healthy_feed_releases_nearly_all_absent_sends_in_time_and_states_little():
    assert broken(lived("healthy", 10_000, 2_000)) == []


@pytest.mark.parametrize(("name", "rate"), [("dead", 1_000), ("never echoing", 1_000)])
def test_a_dead_or_deaf_feed_releases_nothing_on_silence(name, rate):
    outcome = lived(name, rate)
    assert broken(outcome) == []
    assert outcome.bad.released == 0
    assert outcome.bad.absent > 30


# The judge and the worlds


def test_a_rule_that_states_too_little_is_caught():
    world = WORLDS[1]
    assert "duplicates, 1.00 stated" in broken(Outcome(world, all=Tally(released=900, stated=1.0, duplicates=6)))[0]
    assert broken(Outcome(world, bad=Tally(released=9, stated=0.01, duplicates=1)))
    assert broken(Outcome(world, all=Tally(released=900, stated=10.0, duplicates=12))) == []


def test_a_rule_that_states_a_hundred_in_a_hundred_is_caught():
    (why,) = broken(Outcome(WORLDS[0], all=Tally(released=900, stated=900.0, duplicates=20)))
    assert "too careful" in why


def test_a_rule_that_is_slow_on_busy_healthy_feeds_is_caught():
    busy = next(world for world in WORLDS if world.promise == "healthy" and world.rate == 1_000)
    assert "98 of 100" in broken(Outcome(busy, all=Tally(absent=100, in_time=98)))[0]
    assert broken(Outcome(busy, all=Tally(absent=100, in_time=99))) == []


def test_the_test_is_the_upper_tail_of_the_poisson_distribution():
    assert p_value(1.0, 0) == 1.0
    assert p_value(1.0, 1) == pytest.approx(0.63212, abs=1e-5)
    assert p_value(2.0, 3) == pytest.approx(0.32332, abs=1e-5)
    assert p_value(0.0, 1) == 0.0


def test_the_same_seed_makes_the_same_world():
    one, same, other = (Simulation(WORLDS[2], 20, seed).sends for seed in (5, 5, 6))
    assert one == same
    assert one.at != other.at
    assert sum(kind != CONTROL for kind in one.kind[: one.claims_end]) == 20


def test_the_command_prints_a_world_and_its_exit_status_says_whether_all_promises_hold():
    command = [sys.executable, "-m", "tests.calibration", "--world", "healthy@10000", "--claims", "300", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    (told,) = (one for one in json.loads(done.stdout) if one["rate"] == 10_000)
    assert (told["world"], told["all"]["ambiguous"]) == ("healthy", 300)
    assert done.returncode == (1 if any(one["broken"] for one in json.loads(done.stdout)) else 0)
