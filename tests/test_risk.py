# SPDX-License-Identifier: Apache-2.0
"""What silence is worth, by hand-made histories."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.rule.history import Counts, Curve, Stratum, at_least, stratum
from reconciler.rule.policy import Action, FeedView, Heard, Row, Rules, Witness, decide
from reconciler.rule.risk import REPORTED, UNREPORTED, Burst, Cause, Recent, assess, nearest, risk_of, usual_share
from webhooks.event import Answer

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
ALONE = Burst(((0, 20), (2, 100), (10, 500)), 0.02)
"""As many ambiguous neighbours as usual."""

NEAR = Recent(before=10, after=10, k=0, k_late=0, longest=60.0)
"""Twenty controls, all heard of within a minute."""


def history(n=2_000, *, unheard=0, lag=20.0, ambiguous=(), **more):
    """Return a curve of n controls, one a minute from two hours ago backwards."""
    ages = [2 * HOUR + i * MINUTE for i in range(n)]
    lags = [None if i % max(1, n // max(1, unheard)) == 0 and i < n and unheard else lag for i in range(n)]
    return Curve.of(ages, lags, [DAY] * len(ambiguous), list(ambiguous), **more)


HEALTHY = history()


def said(curve=HEALTHY, recent=NEAR, burst=ALONE, *, age=15 * MINUTE, p0=0.5, stress=None, max_risk=0.01):
    return assess(age, curve, recent, burst, p0, stress, max_risk)


# History


def test_history_counts_the_sends_that_have_passed_an_age_and_those_not_heard_of_within_it():
    curve = Curve.of([100, 200, 300, 400, 500], [10, 150, None, 90, 450])
    assert [(curve.at(age).n, curve.at(age).k) for age in (0, 10, 100, 200, 300, 450, 501)] == [
        *((5, 5), (5, 4), (5, 3), (4, 2), (3, 2), (1, 0), (0, 0))
    ]


def test_controls_and_ambiguous_sends_are_counted_apart():
    curve = Curve.of([HOUR] * 3, [10, 20, None], [DAY, DAY], [5.0, 7 * HOUR])
    assert curve.at(900) == Counts(n=3, k=1, ambiguous_n=2, ambiguous_k=1)


def test_a_prompt_ambiguous_send_counts_once_those_that_come_late_had_time_a_late_one_at_once():
    curve = Curve.of([], [], [HOUR, 7 * HOUR, 2 * HOUR, 2 * HOUR], [10.0, 10.0, HOUR, None])
    assert [(curve.at(age).ambiguous_n, curve.at(age).ambiguous_k) for age in (5, 901, 4 * HOUR)] == [
        *((4, 4), (2, 2), (1, 1))
    ]


def test_the_miss_rate_is_the_mean_of_its_posterior():
    assert Counts(n=98, k=1).miss_rate() == 2 / 100


def test_few_ambiguous_sends_lean_on_the_controls_and_late_ones_count_at_once():
    assert Counts(n=98, k=0).ambiguous_miss_rate() == pytest.approx(0.01)
    assert Counts(n=98, k=0, ambiguous_n=10, ambiguous_k=3).ambiguous_miss_rate() == pytest.approx(4 / 110)


def test_many_ambiguous_sends_speak_for_themselves_and_punctual_ones_end_the_stress_gently():
    assert Counts(n=998, k=0, ambiguous_n=100).ambiguous_miss_rate() == pytest.approx(0.3 / 200)
    assert Counts(n=998, k=0, ambiguous_n=100, ambiguous_k=30).ambiguous_miss_rate() == pytest.approx(30.3 / 200)
    assert Counts(n=998, k=0, ambiguous_n=1_900, ambiguous_k=19).ambiguous_miss_rate() == pytest.approx(19.3 / 2_000)


def test_an_outage_leaves_history():
    ages = [DAY - i * MINUTE for i in range(1_000)]
    lags = [3 * HOUR if 400 <= i < 440 else 20.0 for i in range(1_000)]
    curve = Curve.of(ages, lags)
    assert curve.left_out == 40
    assert (curve.at(900).n, curve.at(900).k) == (960, 0)


def test_a_history_that_is_ill_for_the_most_part_stays():
    ages = [DAY - i * MINUTE for i in range(1_000)]
    curve = Curve.of(ages, [None if i % 2 else 20.0 for i in range(1_000)])
    assert curve.left_out == 0
    assert curve.at(900).k == 500
    assert curve.late_after is None


def test_the_age_at_which_history_misses_two_in_a_hundred():
    assert history(lag=20.0).late_after == 20.0
    assert Curve.of([HOUR] * 1_000, [float(i) for i in range(1_000)]).late_after == 980.0


# Near the claim


def test_recent_controls_are_counted_by_what_was_heard_and_when():
    before = [(1_000.0, 10.0), (990.0, None)]
    after = [(900.0, 200.0), (890.0, 30.0), (60.0, None)]
    assert Recent.of(before, after, late_after=100.0) == Recent(before=2, after=2, k=1, k_late=2, longest=200.0)


def test_the_nearest_25_within_five_minutes_are_recent_or_the_nearest_ten_within_the_hour():
    a_second = [(1_000.0 - i, 9.0) for i in range(40)]
    assert nearest(1_000.0, a_second, None) == a_second[:25]
    half_a_minute = [(1_000.0 - 30 * i, 9.0) for i in range(40)]
    assert nearest(1_000.0, half_a_minute, None) == half_a_minute[:11]  # the last of them is 300 s away
    minutes = [(9_000.0 + 60 * i, 9.0) for i in range(1, 25)]
    assert nearest(9_000.0, minutes, None) == minutes[:10]
    quarters = [(9_000.0 + 900 * i, 9.0) for i in range(1, 25)]
    assert nearest(9_000.0, quarters, None) == quarters[:4]  # the last of them is an hour away


def test_controls_too_young_to_be_late_are_passed_over_for_older_ones_farther_away():
    side = [(1_000.0 + i, None) for i in range(60)]
    assert nearest(1_000.0, side, late_after=1_020.0) == side[20:45]
    assert nearest(1_000.0, [(999.0, None), (90.0, 5.0)], late_after=100.0) == [(999.0, None)]


# The figure


def test_the_risk_of_a_healthy_neighbourhood_by_hand():
    # m_h = 1/2002. Late: .05/21 / (.95 * .98^20) = .0037541, misses m_h. Loss: .02/11 / (.98 * (1-m_h)^10) = .0018646,
    # misses 1/12. Together (.00050138 + .00015538) / 1.0056187 = .00065309; stress 3; p0 = 1/2.
    found = said()
    assert found.answer is Answer.ABSENT
    assert found.m == pytest.approx(0.00195927, rel=1e-3)
    assert found.risk == pytest.approx(0.00195544, rel=1e-3)


def test_stress_ends_with_a_hundred_ambiguous_sends_unless_it_is_set():
    known = history(ambiguous=[20.0] * 2_000)
    assert (said().stress, said(known).stress, said(known, stress=2.0).stress, said(stress=2.0).stress) == (3, 1, 2, 3)
    assert said(known, p0=0.5).m == pytest.approx(0.00065309, rel=1e-3)


def test_late_ambiguous_sends_hold_although_controls_are_punctual():
    found = said(history(ambiguous=[20.0] * 100 + [5 * HOUR] * 40))
    assert (found.answer, found.reason) == (Answer.SILENT, "risk")
    assert not found.ill


@pytest.mark.parametrize(
    ("near", "held"),
    [
        (replace(NEAR, k=1, k_late=1), True),
        (replace(NEAR, k=10, k_late=10), True),
        (replace(NEAR, k_late=20, longest=14 * MINUTE), True),  # a backlog that has just drained
        (replace(NEAR, k_late=20, longest=7 * MINUTE), False),  # one that drained when the claim was half as old
        (replace(NEAR, k_late=1), False),
    ],
)
def test_what_recent_controls_say_holds_or_not(near, held):
    found = said(recent=near)
    assert (found.answer is Answer.SILENT, found.reason) == ((True, "risk") if held else (False, ""))


def test_six_controls_that_were_heard_of_say_less_than_fifty():
    few, many = Recent(3, 3, 0, 0, 60.0), Recent(25, 25, 0, 0, 60.0)
    assert said(recent=few).risk > 1.5 * said(recent=many).risk


def test_the_prior_decides_how_much_silence_is_needed():
    assert said(p0=0.5).answer is Answer.ABSENT
    assert said(p0=0.95).answer is Answer.SILENT
    assert risk_of(0.01, 0.5) == pytest.approx(0.01 / 1.01)
    assert (risk_of(1.0, 0.95), risk_of(0.0, 0.95), risk_of(0.0, 1.0)) == (0.95, 0.0, 0.0)


# Silence


def test_without_enough_history_nothing_is_absent_and_the_missing_controls_are_counted():
    found = said(history(60))
    assert (found.answer, found.reason, found.missing) == (Answer.SILENT, "few_controls", 40)
    assert said(age=3 * DAY).reason == "few_controls"


@pytest.mark.parametrize(("before", "after"), [(20, 0), (0, 20), (3, 17), (17, 3)])
def test_controls_on_one_side_are_silence(before, after):
    assert said(recent=replace(NEAR, before=before, after=after)).reason == "few_controls"


def test_a_feed_that_loses_events_must_show_ten_controls_after_the_claim_or_wait_an_hour():
    ages = [DAY - i * MINUTE for i in range(1_000)]
    patchy = Curve.of(ages, [None if 400 <= i < 420 and i % 2 else 20.0 for i in range(1_000)])
    near = replace(NEAR, after=4)
    assert said(patchy, near).reason == "few_controls"
    assert said(patchy, NEAR).answer is Answer.ABSENT
    assert said(patchy, near, age=HOUR + MINUTE).answer is Answer.ABSENT


def test_a_class_that_never_echoed_is_silent_whatever_its_feed_says():
    never = Curve.of([HOUR] * 200, [None] * 200)
    assert said(never).reason == "no_echo"
    assert said(history(class_ever_heard=False)).reason == "no_echo"


def test_a_feed_of_which_nothing_near_was_heard_is_silent():
    assert said(recent=replace(NEAR, k=20, k_late=20, longest=0.0)).reason == "silent"


# Bursts


@pytest.mark.parametrize(
    ("crowd", "reason", "excess"),
    [
        (((3, 20), (5, 100), (15, 500)), "", 0.0),
        (((4, 20), (5, 100), (15, 500)), "burst", 0.9),
        (((1, 20), (8, 100), (15, 500)), "burst", 0.75),
        (((1, 20), (3, 100), (40, 500)), "burst", 0.75),
        (((11, 20), (11, 100), (11, 500)), "burst", 0.0),
        (((3, 9), (3, 49), (3, 249)), "burst", 0.94),  # at the log's edge fewer sends are looked at
        (((25, 20), (0, 100), (0, 500)), "burst", 0.0),  # a stretch of time may hold more than usual
        (((0, 0), (0, 0), (0, 0)), "", 0.0),
    ],
)
def test_a_crowd_of_ambiguous_sends_has_no_controls(crowd, reason, excess):
    found = said(burst=Burst(crowd, 0.02))
    assert (found.reason, found.excess) == (reason, pytest.approx(excess))
    assert found.ill is bool(reason)


def test_a_crowd_that_may_be_chance_makes_an_ill_feed_likelier_until_many_controls_outweigh_it():
    chance = Burst(((3, 16), (3, 56), (5, 256)), 0.02)
    # Binom(3; 16, .02) = 560 * .02^3 * .98^13 = .0034452; 1/17 of that
    assert (ALONE.crowding, chance.crowding) == (1.0, pytest.approx(17.0743, rel=1e-4))
    few = Recent(before=10, after=4, k=0, k_late=0, longest=60.0)
    assert (chance.excess, said(recent=few).reason, said(recent=few, burst=chance).reason) == (0.0, "", "burst")
    assert said(recent=Recent(25, 25, 0, 0, 60.0), burst=chance).answer is Answer.ABSENT
    assert Burst(((25, 20),), 0.02).crowding == 1_000.0


def test_the_usual_share_leaves_bursts_out():
    assert usual_share([(100, 2)] * 98 + [(100, 90)] * 2) == pytest.approx((197 + 14.0357) / 9_802)
    assert usual_share([(100, 1)]) == pytest.approx((2 + 1.414214) / 102)  # of few sends: cautiously large
    assert usual_share([]) < 0.001


# The prior


def test_the_prior_is_learned_upwards_only_and_from_a_hundred_on():
    assert (REPORTED.p0(), UNREPORTED.p0()) == (0.5, 0.95)
    assert Cause(0.5, accepted=99).p0() == 0.5
    assert Cause(0.5, accepted=10, unheard=990, risk=1.0).p0() == 0.5
    assert Cause(0.5, accepted=80, unheard=18 + 20, risk=9 - 0.5).p0() == pytest.approx(89.5 / 120)


# Strata


def test_a_stratum_is_coarsened_until_it_holds_a_hundred_controls():
    counts = {
        Stratum("main", "mail", "big.example"): 500,
        Stratum("main", "mail", "a.example"): 60,
        Stratum("main", "mail", "b.example"): 50,
        Stratum("main", "few", "a.example"): 99,
        Stratum("main", "two", "big.example"): 150,
        Stratum("other", "few", "a.example"): 900,
    }
    assert stratum(counts, "main", "mail", "big.example") == Stratum("main", "mail", "big.example")
    assert stratum(counts, "main", "mail", "a.example") == Stratum("main", "mail", "~small")
    assert stratum(counts, "main", "mail", "unknown.example") == Stratum("main", "mail", "~small")
    assert stratum(counts, "main", "two", "a.example") == Stratum("main", "two")
    assert stratum(counts, "main", "mail") == Stratum("main", "mail")
    assert stratum(counts, "main", "few", "a.example") == Stratum("main")
    assert stratum(counts, "main", "new") == Stratum("main")


# For every input

FIGURE = st.floats(min_value=0, max_value=1e7)
SHARE = st.floats(min_value=0, max_value=1)
SOME = st.integers(min_value=0, max_value=60)


@st.composite
def recents(draw):
    before, after = draw(SOME), draw(SOME)
    k_late = draw(st.integers(0, before + after))
    return Recent(before, after, draw(st.integers(0, k_late)), k_late, draw(FIGURE))


@given(FIGURE, st.sampled_from([0, 1, 500]), recents(), st.tuples(*[st.tuples(SOME, SOME)] * 3), SHARE, SHARE, SHARE)
def test_every_input_gets_an_answer_and_a_risk_that_is_one(age, unheard, near, crowd, share, p0, ceiling):
    found = said(history(500, unheard=unheard), near, Burst(crowd, share), age=age, p0=p0, max_risk=ceiling)
    assert 0 <= found.risk <= 1
    assert 0 <= found.m <= 1
    assert (found.answer is Answer.ABSENT) == (found.reason == "")
    assert found.answer is Answer.SILENT or found.risk <= ceiling
    assert found.stored()["risk"] == pytest.approx(found.risk, rel=1e-3)


@given(recents(), SHARE)
def test_a_miss_more_never_makes_absence_likelier(near, p0):
    if near.k < near.k_late:
        assert said(recent=replace(near, k=near.k + 1), p0=p0).m >= said(recent=near, p0=p0).m * 0.999


def test_the_tail_of_the_binomial():
    assert at_least(0, 10, 0.1) == 1.0
    assert at_least(1, 2, 0.5) == pytest.approx(0.75)
    assert at_least(3, 2, 0.5) == 0.0


# Public trouble reports

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
RULES = Rules(timedelta(minutes=15), timedelta(days=1), 0.01, 5, False, timedelta(seconds=30), "hold")


def verdict(witness, hold=None):
    claimed = NOW - timedelta(minutes=20)
    row = Row("claimed", 1, claimed, claimed - timedelta(minutes=1), None, has_fingerprint=False)
    view = FeedView(hold=hold, witness=Witness(witness.answer, witness.reason, witness.risk))
    return decide(row, Heard(), view, None, RULES, NOW)


def test_case_045_a_feed_that_loses_every_second_event_releases_none_of_forty():
    near = [(20 * MINUTE, 20.0 if i % 2 else None) for i in range(25)]
    for shift in range(40):
        recent = Recent.of(near[shift % 4 :], near[shift % 3 :], HEALTHY.late_after)
        assert verdict(said(recent=recent)).action is Action.HELD


def test_case_064_a_database_that_went_back_releases_nothing_however_small_the_risk():
    found = verdict(said(), hold="suspect")
    assert (found.action, found.reason) == (Action.HELD, "suspect")


def test_case_067_one_feed_is_silent_the_other_is_judged_by_its_own_controls():
    silent = Recent.of([(20 * MINUTE, None)] * 25, [(20 * MINUTE, None)] * 25, HEALTHY.late_after)
    assert verdict(said(recent=silent)).reason == "silent"
    assert verdict(said()).action is Action.RELEASED
