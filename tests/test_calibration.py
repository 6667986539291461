# SPDX-License-Identifier: Apache-2.0
"""A small calibration: stated against actual in a few invented worlds. All of them: `python -m tests.calibration`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from calibration.judge import broken, budget, p_value
from calibration.simulation import GRACE, SUBMIT_WITHIN, Outcome, Simulation, Tally
from calibration.view import FEED, View
from calibration.worlds import ACCEPTED, CONTROL, GONE, LOST, ON_HOLD, WORLDS, Sends, World

from reconciler.rule.history import Stratum

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
        ("restored", 1_000),
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


def test_after_a_restore_nothing_is_released_until_the_operator_resumes():
    world = next(world for world in WORLDS if world.restored and world.rate == 1_000)
    life = Simulation(world, 1_200, seed=3)
    due = [
        at + SUBMIT_WITHIN + GRACE for at, kind in zip(life.sends.at, life.sends.kind, strict=True) if kind != CONTROL
    ]
    assert sum(life.sends.on_hold(at) for at in due) > 10
    outcome = life.run()
    assert (outcome.on_hold, broken(outcome)) == (0, [])
    assert outcome.all.released > 400
    assert "1 releases while all was to be held" in broken(Outcome(world, on_hold=1))[0]


# What a pass sees


def view(sends):
    """Return what is seen of one class of a feed; the history before the first send is not looked at."""
    return View(World("by hand", 3_600), sends, GRACE, SUBMIT_WITHIN, Random(1))


def by_hand(sends):
    """Return sends from (at, kind, lag)."""
    made = Sends()
    for at, kind, lag in sends:
        for column, value in zip(
            (made.at, made.kind, made.lag, made.bad, made.group), (at, kind, lag, 0, 0), strict=True
        ):
            column.append(value)
        made.unreported.append(0)
    return made


def test_a_spell_that_begins_inside_a_minute_is_seen_by_all_claims_of_that_minute():
    down_from = 90.0
    sends = by_hand([(at / 10, CONTROL, LOST if at / 10 >= down_from else 20.0) for at in range(3_000)])
    seen = view(sends).recent(Stratum(FEED, "mail"), 65.0, 115.0, 1_200.0, 30.0)
    assert (seen.before, seen.after, seen.k) == (25, 25, 25)
    around_the_middle = view(sends).recent(Stratum(FEED, "mail"), 85.0, 85.0, 1_200.0, 30.0)
    assert around_the_middle.k == 0


def test_a_crowd_is_looked_for_where_so_many_sends_lie_and_fewer_at_the_edge_of_the_log():
    sends = by_hand([(10.0 * i, ACCEPTED if i in (5, 58, 60, 61, 75) else CONTROL, 20.0) for i in range(100)])
    seen = view(sends)
    assert seen.reach(60, 2_000.0)[0] == (100.0, 100.0, 20)
    assert seen.burst(60, seen.reach(60, 2_000.0), 2_000.0).crowd == ((2, 20), (3, 89), (4, 99))
    assert seen.reach(60, 665.0)[0] == (100.0, 60.0, 16)
    assert seen.burst(60, seen.reach(60, 665.0), 665.0).crowd[0] == (1, 16)  # the one after it may still be answered


def test_a_database_that_goes_back_forgets_what_was_stored_in_between_until_it_is_replayed():
    sends = by_hand([(0.0, CONTROL, 20.0), (90.0, CONTROL, 20.0), (95.0, ACCEPTED, LOST), (96.0, CONTROL, 2 * GONE)])
    assert sends.go_back(100.0) == 100.0 + GONE + ON_HOLD
    assert list(sends.lag) == [20.0, GONE + ON_HOLD + 10.0, LOST, 2 * GONE]
    assert [sends.on_hold(at) for at in (99.0, 100.0, GONE + ON_HOLD, GONE + ON_HOLD + 100.0)] == [
        False,
        True,
        True,
        False,
    ]


# The judge and the worlds


def test_the_default_budget_of_a_feed():
    assert [budget(rate) for rate in (10, 1_000, 10_000, 100_000)] == [20, 200, 1_000, 1_000]


def test_what_came_before_the_rule_could_know_is_bounded_by_the_budget():
    learning = Tally(released=90, stated=1.0, duplicates=41)
    assert "more than the budget's 40" in broken(Outcome(WORLDS[0], learning=learning, learning_hours=2.0))[0]
    assert broken(Outcome(WORLDS[0], learning=learning, learning_hours=3.0)) == []


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


def test_the_page_about_it_describes_and_judges_every_world():
    page = (ROOT / "docs" / "calibration.md").read_text("utf-8")
    assert set(re.findall(r"^\| ([a-z ]+?) +\|", page, re.MULTILINE)) - {"world"} == {world.name for world in WORLDS}
    judged = re.findall(r"^([a-z][a-z ]+?) +([\d,]+) all ", page, re.MULTILINE)
    assert judged == [(world.name, f"{world.rate:,}") for world in WORLDS]


def test_the_command_prints_a_world_and_its_exit_status_says_whether_all_promises_hold():
    command = [sys.executable, "-m", "tests.calibration", "--world", "healthy@10000", "--claims", "300", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    (told,) = (one for one in json.loads(done.stdout) if one["rate"] == 10_000)
    assert (told["world"], told["all"]["ambiguous"]) == ("healthy", 300)
    assert done.returncode == (1 if any(one["broken"] for one in json.loads(done.stdout)) else 0)
