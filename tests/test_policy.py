# SPDX-License-Identifier: Apache-2.0
"""The rule of release, as promises that hold for every row, every set of testimonies and every moment."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.rule.policy import (
    LATEST_LOOK,
    SOONEST_LOOK,
    WINDOW_MARGIN,
    Action,
    FeedView,
    Heard,
    Row,
    Rules,
    Verdict,
    Witness,
    decide,
)
from webhooks.event import Answer

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
RULES = Rules(
    grace=15 * MINUTE,
    give_up_after=DAY,
    max_risk=0.01,
    max_attempts=5,
    same_key_retry=True,
    retry_backoff=timedelta(seconds=30),
    on_unknown="hold",
)
NOTHING = Heard()
ABSENT = FeedView(witness=Witness(Answer.ABSENT, "absent"))
SILENT = FeedView(witness=Witness(Answer.SILENT, "few_controls"))
KEEPS_KEY = FeedView(key_window=DAY)


def claimed(age: timedelta = HOUR, **changes: object) -> Row:
    row = Row(
        state="claimed",
        reached=1,
        submit_by=NOW - age,
        first_claimed_at=NOW - age - MINUTE,
        expires_at=None,
        has_fingerprint=True,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def said(
    row: Row, heard: Heard = NOTHING, feed: FeedView = ABSENT, rules: Rules = RULES, look_up: Witness | None = None
) -> tuple[str, str]:
    verdict = decide(row, heard, feed, look_up, rules, NOW)
    return verdict.action, verdict.reason


moments = st.integers(-2 * 86400, 5 * 86400).map(lambda s: NOW - timedelta(seconds=s))
rows = st.builds(
    Row,
    state=st.sampled_from(["pending", "claimed"]),
    reached=st.integers(0, 7),
    submit_by=moments,
    first_claimed_at=moments,
    expires_at=st.none() | moments,
    has_fingerprint=st.booleans(),
    released=st.booleans(),
    told=st.integers(0, 50),
)
hearings = st.builds(Heard, accepted=st.booleans(), rejected=st.booleans(), other=st.booleans())
witnesses = st.builds(Witness, answer=st.sampled_from([Answer.ABSENT, Answer.SILENT]), reason=st.just("few_controls"))
feeds = st.builds(
    FeedView,
    hold=st.sampled_from([None, "paused", "breaker", "suspect"]),
    witness=witnesses,
    key_window=st.sampled_from([None, HOUR, DAY]),
    can_be_asked=st.booleans(),
)
rules = st.builds(
    replace,
    st.just(RULES),
    grace=st.sampled_from([timedelta(0), 15 * MINUTE, HOUR]),
    max_attempts=st.integers(1, 5),
    same_key_retry=st.booleans(),
    on_unknown=st.sampled_from(["hold", "fail", "release"]),
    look_up=st.sampled_from(["before_release", "silent", "never"]),
)


@given(rows, hearings, feeds, st.none() | witnesses, rules)
def test_every_look_ends_in_a_verdict_with_a_reason_and_where_open_a_next_look(
    row: Row, heard: Heard, feed: FeedView, look_up: Witness | None, rules: Rules
) -> None:
    verdict = decide(row, heard, feed, look_up, rules, NOW)
    assert verdict.reason
    if verdict.action in {Action.HELD, Action.RELEASED} or (
        verdict.action is Action.WAITING and row.state == "claimed"
    ):
        assert verdict.next_check_at is not None
        assert verdict.next_check_at > NOW or row.expires_at == verdict.next_check_at


@given(rows, hearings, feeds, st.none() | witnesses, rules)
def test_acceptance_of_any_attempt_is_sent_whatever_else_was_heard(
    row: Row, heard: Heard, feed: FeedView, look_up: Witness | None, rules: Rules
) -> None:
    assert decide(row, replace(heard, accepted=True), feed, look_up, rules, NOW).action is Action.SENT
    assert decide(row, replace(heard, accepted=False), feed, look_up, rules, NOW).action is not Action.SENT


@given(rows, hearings, feeds, st.none() | witnesses, rules)
def test_nothing_is_released_once_anything_was_heard_or_while_a_hold_is_on(
    row: Row, heard: Heard, feed: FeedView, look_up: Witness | None, rules: Rules
) -> None:
    verdict = decide(row, heard, feed, look_up, rules, NOW)
    if verdict.action is Action.RELEASED:
        assert not heard.anything
        assert feed.hold is None
        assert row.state == "claimed"
        assert row.submit_by is not None
        assert row.submit_by <= NOW
        assert row.expires_at is None or row.expires_at > NOW
        assert row.reached < rules.max_attempts


@given(rows, feeds, rules)
def test_silence_releases_only_by_the_providers_promise_or_the_owners_standing_order(
    row: Row, feed: FeedView, rules: Rules
) -> None:
    silent = replace(feed, witness=Witness(Answer.SILENT, "silent"))
    verdict = decide(row, NOTHING, silent, None, rules, NOW)
    if verdict.action is Action.RELEASED and verdict.reason == "gave_up":
        assert rules.on_unknown == "release"
        assert row.submit_by is not None
        assert row.submit_by + rules.give_up_after <= NOW
        assert verdict.risk == silent.prior
    elif verdict.action is Action.RELEASED:
        assert verdict.reason == "same_key_retry"
        assert silent.key_window is not None


@given(rows, feeds, rules)
def test_nothing_is_released_on_a_feeds_word_alone_where_the_api_is_to_be_asked_first(
    row: Row, feed: FeedView, rules: Rules
) -> None:
    asks = replace(rules, look_up="before_release")
    verdict = decide(row, NOTHING, replace(feed, can_be_asked=True), None, asks, NOW)
    assert verdict.reason not in ("absent", "looked_up")


@given(rows, hearings, feeds, st.none() | witnesses, rules)
def test_a_same_key_retry_is_over_before_the_provider_forgets_the_key(
    row: Row, heard: Heard, feed: FeedView, look_up: Witness | None, rules: Rules
) -> None:
    verdict = decide(row, heard, feed, look_up, rules, NOW)
    if verdict.reason == "same_key_retry":
        assert verdict.retry_until is not None
        assert feed.key_window is not None
        assert row.first_claimed_at is not None
        assert NOW < verdict.retry_until <= row.first_claimed_at + feed.key_window - WINDOW_MARGIN


@given(st.integers(0, 200_000))
def test_a_held_row_is_looked_at_again_between_fifteen_seconds_and_fifteen_minutes(seconds: int) -> None:
    verdict = decide(claimed(15 * MINUTE + timedelta(seconds=seconds)), NOTHING, SILENT, None, RULES, NOW)
    assert verdict.action is Action.HELD
    assert verdict.next_check_at is not None
    assert SOONEST_LOOK <= verdict.next_check_at - NOW <= LATEST_LOOK


@pytest.mark.parametrize(
    ("row", "heard", "feed", "rules", "wanted"),
    [
        pytest.param(claimed(-MINUTE), NOTHING, ABSENT, RULES, ("waiting", "submitting"), id="its sender may submit"),
        pytest.param(claimed(10 * MINUTE), NOTHING, ABSENT, RULES, ("waiting", "grace"), id="younger than the grace"),
        pytest.param(claimed(), NOTHING, ABSENT, RULES, ("released", "absent"), id="absent"),
        pytest.param(claimed(), NOTHING, SILENT, RULES, ("held", "few_controls"), id="silent"),
        pytest.param(claimed(2 * DAY), NOTHING, SILENT, RULES, ("held", "few_controls"), id="given up, class holds"),
        pytest.param(claimed(2 * DAY), NOTHING, SILENT, replace(RULES, on_unknown="fail"), ("failed", "gave_up"), id="given up, class fails"),
        pytest.param(claimed(2 * DAY), NOTHING, SILENT, replace(RULES, on_unknown="release"), ("released", "gave_up"), id="given up, class releases"),
        pytest.param(claimed(), NOTHING, replace(ABSENT, hold="paused"), RULES, ("held", "paused"), id="paused"),
        pytest.param(claimed(), NOTHING, replace(ABSENT, hold="suspect"), RULES, ("held", "suspect"), id="suspect"),
        pytest.param(claimed(), Heard(rejected=True), SILENT, RULES, ("failed", "rejected"), id="the only attempt was rejected"),
        pytest.param(claimed(-MINUTE), Heard(rejected=True), SILENT, RULES, ("failed", "rejected"), id="rejected before submit_by"),
        pytest.param(claimed(reached=2), Heard(rejected=True), SILENT, RULES, ("held", "rejection"), id="an older attempt may be the rejected one"),
        pytest.param(claimed(-MINUTE, reached=2), Heard(rejected=True), ABSENT, RULES, ("waiting", "submitting"), id="never fails a running attempt"),
        pytest.param(claimed(reached=2), Heard(rejected=True), ABSENT, RULES, ("failed", "rejected"), id="rejected, and absent otherwise"),
        pytest.param(claimed(2 * DAY, reached=2), Heard(rejected=True), SILENT, RULES, ("failed", "rejected"), id="rejected, given up"),
        pytest.param(claimed(), Heard(other=True), ABSENT, RULES, ("held", "unknown_event"), id="an unknown event forbids release"),
        pytest.param(claimed(2 * DAY), Heard(other=True), ABSENT, replace(RULES, on_unknown="release"), ("held", "unknown_event"), id="even by standing order"),
        pytest.param(claimed(2 * DAY), Heard(other=True), ABSENT, replace(RULES, on_unknown="fail"), ("failed", "unknown_event"), id="a class may fail it"),
        pytest.param(claimed(expires_at=NOW), NOTHING, ABSENT, RULES, ("failed", "expired"), id="absent and expired"),
        pytest.param(claimed(expires_at=NOW), NOTHING, SILENT, RULES, ("held", "few_controls"), id="never expired while silent"),
        pytest.param(claimed(reached=5), NOTHING, ABSENT, RULES, ("failed", "attempts"), id="no attempt left"),
        pytest.param(claimed(reached=5), NOTHING, SILENT, RULES, ("held", "few_controls"), id="never out of attempts while silent"),
        pytest.param(claimed(MINUTE), NOTHING, KEEPS_KEY, RULES, ("released", "same_key_retry"), id="same key, before the grace"),
        pytest.param(claimed(timedelta(seconds=10)), NOTHING, KEEPS_KEY, RULES, ("waiting", "backoff"), id="same key, backing off"),
        pytest.param(claimed(45 * timedelta(seconds=1), reached=2), NOTHING, KEEPS_KEY, RULES, ("waiting", "backoff"), id="the back-off doubles"),
        pytest.param(claimed(HOUR), NOTHING, replace(KEEPS_KEY, witness=ABSENT.witness), replace(RULES, retry_backoff=2 * HOUR), ("waiting", "backoff"), id="a retry that can't duplicate is worth waiting for, past the grace too"),
        pytest.param(claimed(MINUTE, has_fingerprint=False), NOTHING, KEEPS_KEY, RULES, ("waiting", "grace"), id="same key needs the same content"),
        pytest.param(claimed(MINUTE), NOTHING, replace(KEEPS_KEY, hold="paused"), RULES, ("waiting", "grace"), id="a pause stops same-key retries"),
        pytest.param(claimed(MINUTE), NOTHING, KEEPS_KEY, replace(RULES, same_key_retry=False), ("waiting", "grace"), id="same key switched off"),
        pytest.param(claimed(HOUR, first_claimed_at=NOW - DAY + MINUTE), NOTHING, replace(KEEPS_KEY, witness=SILENT.witness), RULES, ("held", "few_controls"), id="the key's window is over"),
    ],
)  # fmt: skip
def test_a_claimed_row(row: Row, heard: Heard, feed: FeedView, rules: Rules, wanted: tuple[str, str]) -> None:
    assert said(row, heard, feed, rules) == wanted


@pytest.mark.parametrize(
    ("row", "heard", "wanted"),
    [
        pytest.param({"released": True}, NOTHING, ("waiting", "told_again"), id="told again"),
        pytest.param({}, NOTHING, ("waiting", "pending"), id="needs no look"),
        pytest.param({"released": True}, Heard(rejected=True), ("failed", "rejected"), id="rejected"),
        pytest.param({"released": True}, Heard(other=True), ("held", "unknown_event"), id="unknown"),
        pytest.param({"released": True, "expires_at": NOW}, NOTHING, ("failed", "expired"), id="expired"),
    ],
)
def test_a_pending_row(row: dict[str, object], heard: Heard, wanted: tuple[str, str]) -> None:
    assert said(claimed(state="pending", **row), heard, SILENT) == wanted


def test_a_released_row_is_told_again_after_one_five_and_fifteen_minutes() -> None:
    waits = [
        decide(claimed(state="pending", released=True, told=n), NOTHING, SILENT, None, RULES, NOW).next_check_at
        for n in range(5)
    ]
    assert waits == [NOW + MINUTE, NOW + 5 * MINUTE, NOW + 15 * MINUTE, NOW + 15 * MINUTE, NOW + 15 * MINUTE]


@pytest.mark.parametrize(
    ("age", "seconds"),
    [(20 * MINUTE, 120), (100 * MINUTE, 600), (200 * MINUTE, 900), (timedelta(seconds=100), 15)],
)
def test_a_held_row_is_looked_at_again_after_a_tenth_of_its_age_within_bounds(age: timedelta, seconds: int) -> None:
    verdict = decide(claimed(age), NOTHING, SILENT, None, replace(RULES, grace=MINUTE), NOW)
    assert verdict.next_check_at == NOW + timedelta(seconds=seconds)


def test_a_waiting_row_is_looked_at_when_something_can_have_changed() -> None:
    def next_look(row: Row, feed: FeedView = ABSENT) -> datetime | None:
        return decide(row, NOTHING, feed, None, RULES, NOW).next_check_at

    assert next_look(claimed(-MINUTE)) == NOW + MINUTE
    assert next_look(claimed(MINUTE)) == NOW + 14 * MINUTE
    assert next_look(claimed(timedelta(seconds=10)), KEEPS_KEY) == NOW + timedelta(seconds=20)
    assert next_look(claimed(timedelta(seconds=10), reached=3), KEEPS_KEY) == NOW + timedelta(seconds=110)


@pytest.mark.parametrize(
    ("age", "wanted"),
    [(timedelta(0), "backoff"), (timedelta(seconds=29), "backoff"), (timedelta(seconds=30), "same_key_retry")],
)
def test_the_back_off_ends_to_the_second(age: timedelta, wanted: str) -> None:
    assert decide(claimed(age), NOTHING, KEEPS_KEY, None, RULES, NOW).reason == wanted


@pytest.mark.parametrize(
    ("age", "wanted"), [(DAY - timedelta(seconds=1), "few_controls"), (DAY, "gave_up"), (DAY + MINUTE, "gave_up")]
)
def test_giving_up_begins_to_the_second(age: timedelta, wanted: str) -> None:
    assert decide(claimed(age), NOTHING, SILENT, None, replace(RULES, on_unknown="fail"), NOW).reason == wanted


def test_the_grace_ends_to_the_second() -> None:
    assert said(claimed(15 * MINUTE - timedelta(seconds=1))) == ("waiting", "grace")
    assert said(claimed(15 * MINUTE)) == ("released", "absent")


def test_a_same_key_release_states_its_window_and_no_risk() -> None:
    row = claimed(MINUTE)
    assert row.first_claimed_at is not None
    assert decide(row, NOTHING, KEEPS_KEY, None, RULES, NOW) == Verdict(
        Action.RELEASED,
        "same_key_retry",
        next_check_at=NOW + MINUTE,
        retry_until=row.first_claimed_at + DAY - WINDOW_MARGIN,
        risk=0.0,
    )


@pytest.mark.parametrize(
    ("heard", "look_up", "action", "source"),
    [
        (Heard(accepted=True), None, "sent", "feed"),
        (NOTHING, Witness(Answer.ACCEPTED), "sent", "look-up"),
        (Heard(rejected=True), Witness(Answer.ACCEPTED), "sent", "look-up"),
        (Heard(accepted=True), Witness(Answer.REJECTED), "sent", "feed"),
        (NOTHING, Witness(Answer.REJECTED), "failed", "look-up"),
        (Heard(rejected=True), Witness(Answer.REJECTED), "failed", "feed"),
        (Heard(rejected=True, looked_up=True), Witness(Answer.REJECTED), "failed", "look-up"),
        (Heard(rejected=True, looked_up=True), None, "failed", "look-up"),
    ],
)
def test_a_look_up_testifies_like_a_feed(heard: Heard, look_up: Witness | None, action: str, source: str) -> None:
    verdict = decide(claimed(-MINUTE), heard, SILENT, look_up, RULES, NOW)
    assert (verdict.action, verdict.source) == (action, source)


def test_a_rejection_keeps_the_providers_words() -> None:
    assert decide(claimed(), Heard(rejected=True, reason="suppressed"), SILENT, None, RULES, NOW).detail == "suppressed"


ASKS_FIRST = replace(RULES, look_up="before_release")
CAN_BE_ASKED = replace(ABSENT, can_be_asked=True)
TOLD = Witness(Answer.ABSENT, "absent")
CANNOT_TELL = Witness(Answer.SILENT, "no_recipient")


@pytest.mark.parametrize(
    ("feed", "look_up", "rules", "wanted"),
    [
        pytest.param(CAN_BE_ASKED, None, ASKS_FIRST, ("held", "look_up"), id="not asked yet"),
        pytest.param(
            CAN_BE_ASKED, CANNOT_TELL, ASKS_FIRST, ("released", "absent"), id="asked, and the feed alone can tell"
        ),
        *[
            pytest.param(CAN_BE_ASKED, Witness(Answer.SILENT, trouble), ASKS_FIRST, ("held", "look_up"), id=trouble)
            for trouble in ("not_settled", "unauthorized", "timeout", "control_not_found")
        ],
        *[
            pytest.param(CAN_BE_ASKED, Witness(Answer.SILENT, it), RULES, ("held", it), id=f"{it}: it may be this one")
            for it in ("unnamed", "unknown_event")
        ],
        pytest.param(CAN_BE_ASKED, TOLD, ASKS_FIRST, ("released", "looked_up"), id="asked and told"),
        pytest.param(ABSENT, None, ASKS_FIRST, ("released", "absent"), id="nobody to ask"),
        pytest.param(CAN_BE_ASKED, None, RULES, ("released", "absent"), id="asked only where the feed is silent"),
        pytest.param(
            replace(SILENT, can_be_asked=True), None, ASKS_FIRST, ("held", "few_controls"), id="neither can tell"
        ),
    ],
)
def test_a_class_may_have_the_api_asked_before_each_release(
    feed: FeedView, look_up: Witness | None, rules: Rules, wanted: tuple[str, str]
) -> None:
    assert said(claimed(), NOTHING, feed, rules, look_up) == wanted


def test_whoever_can_not_be_asked_in_time_is_given_up_on_at_last() -> None:
    asked_in_vain = replace(ASKS_FIRST, on_unknown="fail")
    assert said(claimed(DAY), NOTHING, CAN_BE_ASKED, asked_in_vain) == ("failed", "gave_up")


def test_a_look_up_that_says_absent_releases_where_the_feed_is_silent() -> None:
    asked = Witness(Answer.ABSENT, "absent", risk=0.001)
    assert decide(claimed(), NOTHING, SILENT, asked, RULES, NOW) == Verdict(
        Action.RELEASED, "looked_up", "look-up", next_check_at=NOW + MINUTE, risk=0.001
    )
