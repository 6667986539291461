# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, what it exits with, and that no failure shows a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import asyncpg
import click
import pytest
from click.testing import CliRunner, Result
from kit import claim, event, fail, make_older, old_claim, row, state
from program import Program

from reconciler.cli import statements as sql
from reconciler.cli import text as cli_text
from reconciler.cli.commands import cli
from reconciler.configuration.settings import load_settings
from webhooks.registry import PROVIDERS

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-c", "from reconciler.cli import main; main()"]


def one_line(done: Result) -> str:
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.output
    return lines[0].removeprefix("reconciler: ")


async def test_reconcile_settles_what_evidence_decides(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await event(db, "order:1")
    done = await program("reconcile")
    assert (done.exit_code, await state(db, "order:1")) == (0, "sent")
    assert "sent:accepted" in done.stdout


async def test_a_dry_run_says_what_a_pass_would_do_and_changes_nothing(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    before = await row(db, "order:1")
    done = await program.json("reconcile", "--dry-run")
    assert done["counts"] == {"held:silent": 1}
    assert [(v["wire_key"], v["send_key"], v["verdict"]["action"]) for v in done["verdicts"]] == [
        (before["wire_key"], "order:1", "held")
    ]
    assert await row(db, "order:1") == before
    assert await db.fetchval("SELECT count(*) FROM pass") == 0


async def test_a_dry_run_names_sends_by_both_keys_and_shows_a_risk_only_where_there_is_one(
    program: Program, db: asyncpg.Pool
) -> None:
    await old_claim(db, "order:1")
    header, line = (await program("reconcile", "--dry-run")).stdout.splitlines()[-2:]
    assert header.split("  ")[:1] + header.split()[-2:] == ["SEND KEY", "NEXT", "LOOK"]
    assert line.split()[:4] == ["order:1", (await row(db, "order:1"))["wire_key"], "held", "silent"]
    await old_claim(db, "again", feed="resend-main", fingerprint="f")
    header, line = (await program("reconcile", "--dry-run", "--key", "again")).stdout.splitlines()[-2:]
    assert (header.split()[-1], line.split()[-2:]) == ("RISK", ["0", "%"])


async def test_reconcile_of_one_key_leaves_the_others_alone(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await old_claim(db, "order:2")
    await program("reconcile", "--key", "order:1")
    assert [(await row(db, key))["held_reason"] for key in ("order:1", "order:2")] == ["silent", None]


async def test_reconcile_of_a_key_that_no_send_has_says_so(program: Program) -> None:
    done = await program("reconcile", "--key", "order:9")
    assert (done.exit_code, one_line(done)) == (
        1,
        "no send has the key order:9: reconciler why order:9 says whether events do",
    )


async def test_an_unknown_feed_is_answered_with_the_one_that_is_meant(program: Program) -> None:
    for args in (
        ("reconcile", "--feed", "resend-mian"),
        ("status", "--feed", "resend-mian"),
        ("pause", "--feed", "resend-mian", "--reason", "x"),
        ("release", "--held", "--feed", "resend-mian", "--reason", "x"),
        ("trigger", "delivered", "--feed", "resend-mian", "--key", "k"),
    ):
        done = await program(*args)
        assert (done.exit_code, one_line(done)) == (
            1,
            'no feed is named "resend-mian": did you mean "resend-main"?',
        ), args


async def test_a_feed_that_only_undecided_sends_name_may_be_named(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", feed="retired")
    assert (await program("reconcile", "--feed", "retired")).exit_code == 0
    done = await program.json("fail", "--held", "--feed", "retired", "--reason", "gone")
    assert done["counts"] == {"failed": 1}


async def test_release_frees_a_send_and_notes_who_and_why(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    done = await program("release", "order:1", "--reason", "not in the log")
    assert (done.exit_code, (await row(db, "order:1"))["release_basis"]) == (0, "operator")
    verdict = await db.fetchrow("SELECT who, note, source FROM verdict")
    assert verdict["who"].endswith(f"@{socket.gethostname()}")
    assert (verdict["note"], verdict["source"]) == ("not in the log", "operator")


async def test_confirm_and_fail_decide(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await old_claim(db, "order:2")
    assert (await program("confirm", "order:1", "--reason", "seen")).exit_code == 0
    assert (await program("fail", "order:2", "--reason", "obsolete")).exit_code == 0
    assert (await state(db, "order:1"), await state(db, "order:2")) == ("sent", "failed")


async def test_a_refused_key_makes_the_verb_fail_and_the_others_are_done(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await claim(db, "order:2")  # its sender may still submit
    done = await program("release", "order:1", "order:2", "order:3", "--reason", "x")
    assert (done.exit_code, one_line(done)) == (1, "2 of 3 refused")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["order:1", "released"],
        ["order:2", "refused"],
        ["order:3", "unknown_key"],
    ]


async def test_a_refusal_names_times_in_utc_wherever_the_database_stands(program: Program, db: asyncpg.Pool) -> None:
    here = await db.fetchval("SELECT quote_ident(current_database())")
    await db.execute(f"ALTER DATABASE {here} SET timezone = 'America/St_Johns'")
    await db.execute(f"ALTER DATABASE {here} SET datestyle = 'SQL, DMY'")
    await claim(db, "order:1")
    until = (await row(db, "order:1"))["submit_by"]
    for verb in ("release", "fail"):
        told = (await program(verb, "order:1", "--reason", "x")).stdout
        assert f"its sender may still submit until {until:%Y-%m-%d %H:%M:%S}" in told
        assert told.endswith("+00\n")


async def test_a_release_of_a_send_that_was_accepted_makes_it_sent(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await event(db, "order:1")
    done = await program.json("release", "order:1", "--reason", "x")
    assert done["sends"] == [{"key": "order:1", "outcome": "sent", "reason": "accepted"}]
    assert await state(db, "order:1") == "sent"


async def test_held_means_all_held_sends_of_the_feed(program: Program, db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await old_claim(db, "order:2", feed="resend-main")
    await claim(db, "order:3")
    await program("reconcile")
    done = await program.json("release", "--held", "--feed", "mg", "--reason", "x")
    assert done["counts"] == {"released": 1}
    assert [(await state(db, f"order:{n}")) for n in (1, 2, 3)] == ["pending", "claimed", "claimed"]


async def test_nothing_held_is_no_failure(program: Program) -> None:
    done = await program("fail", "--held", "--reason", "x")
    assert (done.exit_code, done.stdout) == (0, "no send is held\n")


@pytest.mark.parametrize(
    "args",
    [
        ("release", "--reason", "x"),
        ("release", "k", "--held", "--reason", "x"),
        ("release", "k", "--feed", "mg", "--reason", "x"),
        ("release", "k"),
        ("release", "k", "--reason", " "),
        ("why", ""),
        ("why", "\udcff"),
        ("pause",),
        ("migrate", "--check", "--namespace", "x"),
        ("serve", "--only", "nothing"),
        ("no-such-command",),
    ],
)
async def test_wrong_usage_exits_with_2(program: Program, args: tuple[str, ...]) -> None:
    done = await program(*args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage:")


async def test_pause_and_resume_say_how_the_feeds_stand(program: Program, db: asyncpg.Pool) -> None:
    assert (await program("pause", "--feed", "mg", "--reason", "incident")).stdout == "feed mg: paused\n"
    assert await db.fetchval("SELECT reason FROM feed_state WHERE feed = 'mg' AND paused_at IS NOT NULL") == "incident"
    await program("pause", "--reason", "all")
    assert await program.json("resume", "--feed", "mg", "--reason", "over") == {
        "feed": "mg",
        "changed": True,
        "holds": {"*": "paused", "mg": "paused"},
    }
    assert (await program("resume", "--reason", "over")).stdout == "all feeds: not on hold\n"
    nothing = "nothing was on hold for all feeds together\n"
    assert (await program("resume", "--reason", "over")).stdout == nothing
    assert (await program("resume", "--feed", "mg", "--reason", "x")).stdout == "nothing was on hold for feed mg\n"
    await program("pause", "--feed", "mg", "--reason", "again")
    assert (await program("resume", "--reason", "over")).stdout == f"{nothing}feed mg: paused\n"


async def test_statements_of_psql_run_one_by_one_so_that_a_procedure_can_commit(
    program: Program, db: asyncpg.Pool
) -> None:
    done = await program.json(
        "psql",
        "-c",
        "CALL send_claim_commit('k;1', 'mg', '{}'); -- a comment;\n SELECT 1 AS a, NULL AS b; CREATE TABLE t()",
    )
    assert [(result["status"], result["columns"][:2]) for result in done] == [
        ("CALL", ["outcome", "wire_key"]),
        ("SELECT 1", ["a", "b"]),
        ("CREATE TABLE", []),
    ]
    assert done[0]["rows"][0][0] == "claimed"
    assert await state(db, "k;1") == "claimed"


async def test_psql_reads_statements_from_standard_input_where_no_psql_is_installed(
    program: Program, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    done = await program("psql", stdin="SELECT 'a;b'\n AS one;\nSELECT 2 AS two")
    assert done.exit_code == 0
    assert done.stdout.split() == ["one", "a;b", "(1", "row)", "two", "2", "(1", "row)"]


async def test_an_error_of_sql_is_one_line_that_names_the_statement(program: Program) -> None:
    done = await program("psql", "-c", "SELECT 1 AS a; SELECT * FROM nowhere")
    assert (done.exit_code, one_line(done)) == (1, 'relation "nowhere" does not exist (statement 2 of 2)')
    assert done.stdout.splitlines()[0] == "a"


async def test_psql_says_that_it_knows_no_meta_commands(program: Program) -> None:
    done = await program("psql", "-c", r"\d send_log")
    assert (done.exit_code, one_line(done)[:2]) == (1, r"\d")


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("SELECT 1; SELECT 2", ["SELECT 1", "SELECT 2"]),
        ("SELECT ';' || \";\"", ["SELECT ';' || \";\""]),
        ("SELECT 'it''s;'; ;; ", ["SELECT 'it''s;'"]),
        (r"SELECT E'\';'; SELECT 2", [r"SELECT E'\';'", "SELECT 2"]),
        ("DO $x$ BEGIN; END $x$; SELECT 1", ["DO $x$ BEGIN; END $x$", "SELECT 1"]),
        ("SELECT $$;$$ /* ; /* ; */ ; */; SELECT 2", ["SELECT $$;$$ /* ; /* ; */ ; */", "SELECT 2"]),
        ("-- only; a comment\n;", []),
        ("SELECT a$1; SELECT $1", ["SELECT a$1", "SELECT $1"]),
        ("SELECT 'never ends; ", ["SELECT 'never ends;"]),
    ],
)
def test_statements_end_at_semicolons_outside_of_quotes_and_comments(text: str, statements: list[str]) -> None:
    assert sql.split(text) == statements


def test_a_statement_is_complete_once_its_semicolon_has_come() -> None:
    assert not sql.is_complete("SELECT ';")
    assert not sql.is_complete("SELECT 1")
    assert sql.is_complete("SELECT 1; -- done")


async def test_migrate_applies_what_is_missing_once(config: Path, empty_dsn: str) -> None:
    program = Program(config, empty_dsn)
    done = await program("migrate", "--check")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (3, "missing  0001_send_log.sql")
    done = await program("status")
    assert (done.exit_code, one_line(done).rpartition(": ")[2]) == (1, "run reconciler migrate")
    applied = (await program.json("migrate", "--namespace", "shop"))["applied"]
    assert applied[0] == "0001_send_log.sql"
    assert (await program("migrate", "--check")).exit_code == 0
    done = await program("psql", "-c", "SELECT namespace FROM installation", "--json")
    assert json.loads(done.stdout)[0]["rows"] == [["shop"]]


async def test_a_dead_database_is_one_line_without_its_password(config: Path) -> None:
    with socket.socket() as nobody:  # bound and not listening: connections are refused
        nobody.bind(("127.0.0.1", 0))
        program = Program(config, f"postgresql://app:secret-word@127.0.0.1:{nobody.getsockname()[1]}/mail")
        for args in (["status"], ["why", "k"], ["migrate"], ["psql", "-c", "SELECT 1"], ["reconcile"]):
            done = await program(*args)
            assert done.exit_code == 1
            assert "can't be used" in one_line(done)
            assert "secret-word" not in done.output


@pytest.mark.parametrize("place", ["127.0.0.1:99999", "127.0.0.1:1,", ",127.0.0.1:1"])
async def test_a_database_url_that_leads_nowhere_is_one_line_without_its_password(config: Path, place: str) -> None:
    program = Program(config, f"postgresql://app:secret-word@{place}/mail")
    for args in (["status"], ["migrate", "--check"], ["psql", "-c", "SELECT 1"], ["reconcile"]):
        done = await program(*args)
        assert done.exit_code == 1
        assert "database.url" in one_line(done)
        assert "secret-word" not in done.output


async def test_each_problem_of_the_configuration_is_one_line(program: Program, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[feeds.mg]\nprovider = "mailgum"\n[rulez]\n')
    done = await program("config", "--config", str(wrong))
    assert done.exit_code == 1
    assert [line.split(": ")[1].split("/")[-1] for line in done.stderr.splitlines()] == ["wrong.toml:2", "wrong.toml:3"]


async def test_config_may_be_named_before_or_after_the_command(program: Program, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[receiver]\nport = 1234\n")
    for args in (["--config", str(other), "config", "--json"], ["config", "--config", str(other), "--json"]):
        assert json.loads((await program(*args)).stdout)["receiver"]["port"] == 1234


async def test_config_prints_a_file_that_means_the_same_with_secrets_masked(program: Program, tmp_path: Path) -> None:
    done = await program("config")
    assert "key-0123456789abcdef" not in done.output
    again = tmp_path / "again.toml"
    again.write_text(done.stdout.replace('url = "', '# url = "').replace('"***"', '"whsec_YQ=="'))
    settings = load_settings(again, {"HOME": "/nowhere"}, PROVIDERS)
    assert settings.feeds["mg"].secrets == ("whsec_YQ==",)
    assert settings.rules.grace == timedelta(minutes=15)


async def test_config_names_the_file_and_the_folder_of_the_data(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    file = folder / "r.toml"
    file.write_text('[database]\ndata_dir = "../data"\n')
    shown = (await program("config", "--config", str(folder / "../etc/r.toml"))).stdout
    assert shown.splitlines()[0] == f"# from {file}"
    assert f'data_dir = "{tmp_path / "data"}"' in shown


READ_ONLY = (
    ("status",),
    ("status", "--json"),
    ("why", "order:1"),
    ("migrate", "--check"),
    ("reconcile", "--dry-run"),
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logs_as_before: None) -> Program:
    """Commands in a folder without a settings file, where nothing names a database."""
    monkeypatch.chdir(tmp_path)
    found = Program(tmp_path / "none", "")
    found.env = {
        "XDG_DATA_HOME": str(tmp_path),
        **{name: None for name in os.environ if name.startswith("RECONCILER_") and name != "RECONCILER_PG_BIN"},
    }
    return found


@pytest.mark.parametrize("args", READ_ONLY)
async def test_who_only_looks_makes_no_embedded_database(
    elsewhere: Program, tmp_path: Path, args: tuple[str, ...]
) -> None:
    done = await elsewhere(*args)
    assert (done.exit_code, done.stdout) == (1, "")
    assert one_line(done) == (
        f"there is no embedded database in {tmp_path}/esp-reconciler and no settings file (looked for "
        "./reconciler.toml): name the settings file with --config, or start reconciler serve, which makes one"
    )
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_a_command_that_guesses_its_database_says_so(elsewhere: Program, tmp_path: Path) -> None:
    guess = f"no settings file (looked for ./reconciler.toml): using the embedded database in {tmp_path}/esp-reconciler"
    done = await elsewhere("psql", "-c", "SELECT 1 AS one")  # makes it
    assert (done.exit_code, one_line(done)) == (0, guess)
    done = await elsewhere("status")
    assert (done.exit_code, one_line(done)) == (0, guess)
    assert done.stdout.splitlines()[:2] == [
        "settings file: none (looked for ./reconciler.toml)",
        f"database:      embedded in {tmp_path}/esp-reconciler",
    ]
    elsewhere.env["RECONCILER_DATABASE__DATA_DIR"] = str(tmp_path / "esp-reconciler")
    assert (await elsewhere("status", "--check")).stderr == ""  # somebody named it


async def test_status_shows_which_settings_and_which_database_it_looked_at(
    program: Program, config: Path, dsn: str
) -> None:
    program.env["RECONCILER_DATABASE__URL"] = dsn.replace("postgres@", "postgres:secret-word@")
    done = await program("status")
    assert done.stdout.splitlines()[0] == f"settings file: {config}"
    assert done.stdout.splitlines()[1].startswith("database:      postgresql://postgres:***@")
    shown = await program.json("status")
    assert (shown["settings_file"], "secret-word" in str(shown)) == (str(config), False)


async def test_config_warns_of_a_feed_that_refuses_everything(program: Program, tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text('[feeds.mg]\nprovider = "mailgun"\n')
    done = await program("config", "--config", str(bare))
    assert (done.exit_code, one_line(done)) == (
        0,
        "feeds.mg: has no secrets, so every delivery is refused: set feeds.mg.secrets",
    )


async def test_providers_are_listed_and_told_of(program: Program) -> None:
    assert set(await program.json("providers")) == set(PROVIDERS)
    told = (await program("providers", "resend")).stdout
    assert "same key window:          24h" in told
    done = await program("providers", "mailgum")
    assert (done.exit_code, one_line(done)) == (1, 'no provider is named "mailgum": did you mean "mailgun"?')


async def test_a_provider_whose_redelivery_nobody_knows_is_said_to_be_one(program: Program) -> None:
    unknown = {name for name, provider in PROVIDERS.items() if not provider.facts.redelivers_for}
    assert unknown == {"scaleway", "elastic_email"}
    listed = {line.split()[0]: line for line in (await program("providers")).stdout.splitlines()}
    assert {name for name, line in listed.items() if "not known" in line} == unknown
    in_json = await program.json("providers")
    assert {name for name, facts in in_json.items() if facts["redelivers_for"] is None} == unknown
    for name in unknown:
        assert "redelivers for:           not known\n" in (await program("providers", name)).stdout
        assert " 0s" not in listed[name]


def every_command(
    group: click.Group = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), [pytest.param(*one, id="-".join(one[0])) for one in every_command()])
def test_every_command_says_what_it_does_in_one_line_and_takes_config(
    path: tuple[str, ...], command: click.Command
) -> None:
    assert 10 < len(command.get_short_help_str(65)) < 65
    assert "..." not in command.get_short_help_str(65)
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--config" in options
    shown = CliRunner().invoke(cli, [*path, "--help"])
    assert shown.exit_code == 0
    if not isinstance(command, click.Group):
        assert path == ("serve",) or "--json" in options
        assert "Example" in shown.stdout


def test_help_does_not_wait_for_libraries_that_it_does_not_need() -> None:
    libraries = "{'pydantic', 'asyncpg', 'aiohttp', 'structlog'}"
    check = f"import sys, reconciler.cli.commands; print({libraries} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_a_provider_wrote_can_not_steer_the_terminal() -> None:
    assert cli_text.printable("a\x1b[2Jb\nc\u202e") == "a\\x1b[2Jb\\nc\\u202e"


def test_a_port_that_is_in_use_is_one_line_without_a_traceback(config: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = os.environ | {
            "RECONCILER_CONFIG": str(config),
            "RECONCILER_RECEIVER__PORT": str(port),
            "RECONCILER_DATABASE__DATA_DIR": str(tmp_path / "pg"),
        }
        done = subprocess.run([*PROGRAM, "serve"], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("reconciler: ")]
    assert (done.returncode, len(lines)) == (1, 1)
    assert f"port {port}" in lines[0]
    assert "in use" in lines[0]
    assert "Traceback" not in done.stderr


INTERRUPTED_AT_IMPORT = """
import signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "click":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from reconciler.cli import main
main()
"""


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_libraries_are_imported_shows_no_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT_IMPORT, "status"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "reconciler: interrupted\n")


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_command_with_one_line_and_130(config: Path, dsn: str) -> None:
    env = os.environ | {"RECONCILER_CONFIG": str(config), "RECONCILER_DATABASE__URL": dsn}
    command = [*PROGRAM, "psql", "-c", "DO $$ BEGIN RAISE NOTICE 'begun'; PERFORM pg_sleep(60); END $$"]
    with subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "NOTICE: begun\n"
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
        assert (running.wait(20), rest) == (130, "reconciler: interrupted\n")


async def test_a_person_on_a_terminal_is_asked_before_all_held_sends_are_moved(
    program: Program, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_claim(db, "order:1")
    await program("reconcile")
    asked = []

    def no(text: str, **_: object) -> None:
        asked.append(text)
        raise click.Abort

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("reconciler.cli.operate.click.confirm", no)
    monkeypatch.setattr("reconciler.cli.operate.sys", type("Sys", (), {"stdin": Terminal()}))
    done = await program("release", "--held", "--reason", "x")
    assert (done.exit_code, asked) == (1, ["release 1 held send?"])
    assert await state(db, "order:1") == "claimed"
    assert (await program("release", "--held", "--reason", "x", "--yes")).exit_code == 0
    assert await state(db, "order:1") == "pending"


async def test_status_exits_with_3_only_when_it_is_asked_to_check(program: Program, db: asyncpg.Pool) -> None:
    young = [" few_controls mg", " few_controls resend-main"]  # controls are missing, and nobody can hurry them
    done = await program("status", "--check")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "nothing needs a person")
    assert [line.split(":")[1] for line in done.stdout.splitlines()[1:]] == young
    await old_claim(db, "order:1")
    await program("reconcile")
    await make_older(db, "order:1", timedelta(hours=2))
    done = await program("status", "--check")
    assert done.exit_code == 3
    needed, *notes = done.stdout.splitlines()
    assert (needed.split(":")[0], [line.split(":")[1] for line in notes]) == ("held mg", young)
    await program("pause", "--feed", "mg", "--reason", "incident")
    done = await program("status", "--check")
    assert (done.exit_code, [line.split(":")[1] for line in done.stdout.splitlines()[1:]]) == (
        *(3, [" paused mg", *young]),
    )
    shown = await program("status")
    assert (shown.exit_code, "! held mg" in shown.stdout) == (0, True)
    assert (await program.json("status"))["ok"] is False


async def test_why_tells_what_the_sender_reported_and_the_application_was_told(
    program: Program, db: asyncpg.Pool
) -> None:
    await db.execute("UPDATE installation SET tell = '{released}'")
    fence = (await claim(db, "order:1"))["fence"]
    await fail(db, "order:1", fence, "connection refused", not_sent=True)
    await db.execute("UPDATE release_outbox SET delivered_at = clock_timestamp(), tries = 1")
    shown = (await program("why", "order:1")).stdout
    report = f"the sender reported of claim {fence}: connection refused; it was not sent"
    assert f"  report    {report}\n" in shown
    assert "  telling   the application was told: released (1 try)\n" in shown
    entries = {entry["what"]: entry for entry in (await program.json("why", "order:1"))["timeline"]}
    assert entries["report"]["details"] == {
        "attempt": 1, "fence": fence, "reason": "connection refused", "exact": True, "not_sent": True
    }  # fmt: skip
    told = entries["telling"]
    assert (told["at"], told["details"]["what"]) == (told["details"]["delivered_at"], "released")


async def test_why_of_an_unknown_key_exits_with_1_and_says_whether_events_do(
    program: Program, db: asyncpg.Pool
) -> None:
    done = await program("why", "order:1")
    assert (done.exit_code, one_line(done)) == (1, "order:1: no send and no event has this key")
    await event(db, "order:1")
    done = await program("why", "order:1")
    assert (done.exit_code, "events do (1)" in one_line(done)) == (1, True)
    assert "delivered from mg" in done.stdout
