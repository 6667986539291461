# SPDX-License-Identifier: Apache-2.0
"""What is said to Citus in quite other words follows its original: whoever changes one looks at the other."""

from __future__ import annotations

import hashlib
import re

import citus_kit
import pytest

from reconciler.database.migrate import default_folder
from reconciler.distributed import statements as distributed
from reconciler.distributed.silence import edited

# Digests of statements and functions that have another form. Look at that form (reconciler/distributed/statements.py,
# migrations/citus) before you write a new digest here.
STATEMENTS = {
    "reconciler.campaigns.caps.LIFT": "007a9d1b",
    "reconciler.passes.evidence.SETTLE_WATCHED": "0f909c5f",
    "reconciler.passes.evidence.SETTLE_FAILED": "ff2a2646",
    "reconciler.passes.histories.CLASSES": "b2cc2c91",
    "reconciler.passes.histories.NEWEST_CONTROLS": "b618d777",
    "reconciler.passes.histories.SPREAD_CONTROLS": "e826f9b0",
    "reconciler.passes.histories.PROVED": "675012ca",
    "reconciler.passes.histories.SHARES": "56e07f76",
    "reconciler.passes.histories.CAUSES": "05a17933",
    "reconciler.passes.lookup.QUESTIONS": "65699f4c",
    "reconciler.passes.lookup.CONTROLS": "567d9297",
    "reconciler.passes.neighbours.NEIGHBOURS": "05fe05b0",
    "reconciler.passes.neighbours.AMBIGUOUS": "f8ee2f6c",
    "reconciler.passes.outcomes.FOLLOW": "1f72114a",
    "reconciler.passes.releasing.USAGE": "9bcd0d53",
    "reconciler.insight.reports.VANISHED": "0604f15c",
    "reconciler.passes.restore.KEEP_HIGHEST_FENCE": "df18095a",
    "reconciler.upkeep.retention.FEEDS": "83196830",
    "reconciler.upkeep.retention.DELETE_SENDS": "49b2b2d4",
    "reconciler.upkeep.retention.DELETE_CANCELLED": "48b4856a",
    "reconciler.upkeep.retention.UNDATED_PAGES": "6742405b",
    "reconciler.upkeep.retention.DELETE_UNDATED": "565e92d4",
    "reconciler.upkeep.retention.DELETE_DUPLICATES": "86cc28db",
    "reconciler.upkeep.retention.DELETE_PLACES": "ad29b1df",
    "reconciler.passes.second_witness.RESERVE": "416b7665",
    "reconciler.insight.status.FOREIGN": "91b0754c",
}
FUNCTIONS = {
    "campaign_end_released": "781dadb3",
    "campaign_hold": "7f500536",
    "campaign_standing": "e89b98d3",
    "cap_take": "675b6698",
    "send_adopt_all": "2040af85",
    "send_claim_campaign": "7088b646",
    "send_claim_released": "762bde7f",
    "send_claim_untouched": "69d45855",
    "send_heard": "57fb5174",
    "send_note_asked_again": "2a65fe15",
    "send_note_delivery": "e054becd",
}


def digest(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:8]


def is_new(statement: str) -> bool:
    """Whether its form keeps less than half of its lines: pieces that are edited are looked for in it anyway."""
    lines, kept = statement.split("\n"), set((distributed.other_form(statement) or "").split("\n"))
    return sum(line in kept for line in lines) * 2 < len(lines)


def test_a_statement_that_has_another_form_is_the_one_that_it_was_made_of():
    formed = {name: text for name, text in citus_kit.statements() if text in distributed.FORMS}
    assert len(formed) == len(distributed.FORMS)
    assert {name: digest(text) for name, text in formed.items() if is_new(text)} == STATEMENTS


async def test_a_function_that_has_another_form_is_the_one_that_it_was_made_of(db):
    laid = "".join(path.read_text() for path in sorted((default_folder() / "citus").glob("*.sql")))
    names = set(re.findall(r"CREATE OR REPLACE FUNCTION (\w+)", laid))
    rows = await db.fetch("SELECT proname, prosrc FROM pg_proc WHERE proname = ANY ($1)", list(names))
    assert {row["proname"]: digest(row["prosrc"]) for row in rows} == FUNCTIONS


HEADER = re.compile(r"CREATE OR REPLACE FUNCTION (\w+)\(.*?AS \$\$", re.DOTALL)
SETTINGS = """
SELECT proname, prosecdef, ARRAY(SELECT replace(s, '=', ' = ') FROM unnest(proconfig) AS s
    WHERE s !~ '^(search_path|TimeZone|plan_cache_mode)=' ORDER BY s) AS settings FROM pg_proc WHERE proname = ANY ($1)
"""


async def test_a_function_that_has_another_form_keeps_its_right_and_its_settings(db):
    laid = "".join(path.read_text() for path in sorted((default_folder() / "citus").glob("*.sql")))
    headers = {found[1]: found[0] for found in HEADER.finditer(laid)}
    rows = await db.fetch(SETTINGS, list(headers))
    assert {row["proname"]: row["prosecdef"] for row in rows} == {
        row["proname"]: "SECURITY DEFINER" in headers[row["proname"]] for row in rows
    }
    assert [
        (row["proname"], s) for row in rows for s in row["settings"] if f"SET {s}" not in headers[row["proname"]]
    ] == []


def test_a_piece_that_is_gone_is_named():
    with pytest.raises(ValueError, match="no longer holds 'b'"):
        edited("a", ("b", "c"))


def test_on_one_server_nothing_is_said_in_another_way():
    assert distributed.form("SELECT now()") == "SELECT now()"
    assert distributed.form("SELECT clock_timestamp()") == "SELECT clock_timestamp()"
