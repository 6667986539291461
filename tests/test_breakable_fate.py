# SPDX-License-Identifier: Apache-2.0
"""Fates and webhooks of the loopback provider come as often, as late and in the order that was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from reconciler.breakable.fate import Fate, Fates, Telling


def test_fates_come_in_the_shares_that_were_asked_for() -> None:
    fates, dice = Fates(hangs=0.2, busy=0.3), Random(1)
    drawn = Counter(fates.draw(dice) for _ in range(10_000))
    assert drawn.keys() == {Fate.HANGS, Fate.BUSY, Fate.ANSWERED}
    assert abs(drawn[Fate.HANGS] - 2_000) < 150
    assert abs(drawn[Fate.BUSY] - 3_000) < 150


@pytest.mark.parametrize("shares", [{"hangs": 0.6, "lost": 0.5}, {"down": -0.1}])
def test_shares_that_are_none_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        Fates(**shares)


@pytest.mark.parametrize("wrong", [{"lost": 1.1}, {"delay": (2.0, 1.0)}, {"tail_delay": (-1.0, 1.0)}, {"batch": 0}])
def test_a_telling_that_can_not_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="share|delay|batch"):
        Telling(**wrong)


def tellings(telling: Telling, n: int = 2_000) -> list[list[tuple[float, str]]]:
    dice = Random(1)
    return [list(telling.tell(dice)) for _ in range(n)]


def test_a_telling_says_as_often_and_as_late_as_was_asked_for() -> None:
    assert tellings(Telling(), 1) == [[(0.0, "accepted"), (0.0, "delivered")]]
    assert tellings(Telling(silent=1), 1) == tellings(Telling(lost=1), 1) == [[]]
    assert [kind for _, kind in tellings(Telling(bounced=1), 1)[0]] == ["accepted", "bounced"]
    twice = tellings(Telling(delay=(1, 2), twice=1), 1)[0]
    assert Counter(kind for _, kind in twice) == {"accepted": 2, "delivered": 2}
    mixed = Telling(delay=(1, 2), tail=0.25, tail_delay=(10, 20), lost=0.1, silent=0.1)
    delays = [delay for said in tellings(mixed) for delay, _ in said]
    assert abs(len(delays) - 2_000 * 2 * 0.9 * 0.9) < 150
    assert all(1 <= delay <= 2 or 10 <= delay <= 20 for delay in delays)
    assert abs(sum(delay >= 10 for delay in delays) / len(delays) - 0.25) < 0.03


def test_a_later_word_comes_first_only_where_that_was_asked_for() -> None:
    def disorders(telling: Telling) -> int:
        return sum(said[0][1] != "accepted" for said in tellings(telling))

    ordered = Telling(delay=(1, 2))
    assert disorders(ordered) == 0
    assert 800 < disorders(replace(ordered, shuffled=True)) < 1_200


def test_a_telling_is_the_same_for_the_same_dice() -> None:
    telling = Telling(delay=(1, 2), tail=0.2, tail_delay=(3, 9), lost=0.1, twice=0.3, shuffled=True)
    assert tellings(telling) == tellings(telling)
