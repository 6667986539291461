# SPDX-License-Identifier: Apache-2.0
"""A small chaos: kills and cuts under load. All of it: `python -m tests.chaos`."""

from __future__ import annotations

import pytest
from chaos.plan import SMALL
from chaos.run import run
from chaos.world import SMALL_PACE

pytestmark = pytest.mark.proof


async def test_kills_and_cuts_under_load_lose_nothing_double_nothing_and_need_nobody() -> None:
    result = await run(1, SMALL_PACE, SMALL, print)
    assert result.broken == []
    assert {name for name, row in result.rows.items() if row.times} == {fault.name for fault in SMALL.always}
