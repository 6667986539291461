# SPDX-License-Identifier: Apache-2.0
"""Whatever README and docs/ show in a fence is run by a test, or the line before it says why not.

Some languages are run here, by a rule for all pages. Any other snippet is taken by the test that runs it, with
`snippets.block(page, language, words)`: who takes which is read from the tests themselves.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import asyncpg
import click
import pytest
from api_kit import asked
from apis import mailgun, sendgrid
from kit import heard_neighbours, old_claim
from program import Program
from snippets import ROOT, Snippet, every, pages, snippets, statements, text_of

from reconciler.cli.commands import cli
from reconciler.configuration.settings import load_settings
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

PROSE: Final = ("text",)
"""What is shown and not to be run: output, pictures."""


@cache
def taken() -> frozenset[str]:
    """The texts that some test takes by `block` or `blocks`."""
    calls = [call for path in (ROOT / "tests").rglob("*.py") for call in _calls(ast.parse(path.read_text("utf-8")))]
    return frozenset(
        one.text
        for page, language, *words in calls
        for one in snippets(page)
        if one.language == language and all(word in one.text for word in words)
    )


def _calls(tree: ast.Module) -> Iterator[list[str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("block" | "blocks"), args=[ast.Constant(), ast.Constant(), *_] as given):
                yield [str(one.value) for one in given if isinstance(one, ast.Constant)]


def only_ours(one: Snippet) -> bool:
    """Say whether a script calls nothing but the program."""
    return all(words[0] == "reconciler" and not {"|", "&&", ">"} & {*words} for words in statements(one.text))


def by_rule(one: Snippet) -> bool:
    """Say whether a test of this module runs a snippet."""
    match one.language:
        case "toml" | "json" | "pycon":
            return True
        case "sql":
            return "$1" not in one.text
        case "sh" | "console":
            return one.text not in taken() and only_ours(one)
    return False


def of(language: str) -> list[Snippet]:
    """What is to be run of a language, by the rule."""
    return [one for one in every() if one.language == language and not one.not_run and one.text not in taken()]


def by_page(*languages: str) -> list[Any]:
    """The snippets of each page that has any, in order."""
    found: dict[str, list[Snippet]] = {}
    for language in languages:
        for one in of(language):
            if by_rule(one):
                found.setdefault(one.page, []).append(one)
    return [pytest.param(ones, id=page) for page, ones in found.items()]


def test_every_snippet_is_run_or_says_why_not(record_property: Any) -> None:
    asked_for = [one for one in every() if one.language not in PROSE]
    excused = [one for one in asked_for if one.not_run]
    run = [one for one in asked_for if not one.not_run and (one.text in taken() or by_rule(one))]
    count = f"{len(asked_for)} snippets: {len(run)} are run, {len(excused)} are not and say why"
    record_property("snippets", count)
    print(count)  # noqa: T201 - shown where this fails
    left = [f"{one.place} ({one.language})" for one in asked_for if one not in run and one not in excused]
    assert left == [], count
    assert len(run) >= 3 * len(excused), count


def test_no_snippet_is_run_that_says_it_is_not() -> None:
    assert [one.place for one in every() if one.not_run and one.text in taken()] == []


def test_no_fence_is_left_open() -> None:
    for page in pages():
        assert text_of(page).count("```") == 2 * len(snippets(page)), page


# By rule


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """Variables that documents name."""
    return {
        "HOME": str(tmp_path),
        "OUTBOX_SECRET": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
        "SESSION_KEY": "0123456789abcdef0123456789abcdef",
    }


def load(text: str, folder: Path, variables: dict[str, str]) -> Any:
    """Load settings; the files of secrets that they name are there."""
    for name in re.findall(r"file:/run/([\w./-]+)", text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("basic:hooks:0123456789")
    file = folder / "reconciler.toml"
    file.write_text(text.replace("/run/", f"{folder}/"))
    return load_settings(file, variables, PROVIDERS)


@pytest.mark.parametrize("one", [pytest.param(one, id=one.place) for one in of("toml")])
def test_settings_that_are_shown_are_taken(one: Snippet, tmp_path: Path, secrets: dict[str, str]) -> None:
    loaded = load(one.text, tmp_path, secrets)
    assert loaded.model_fields_set


@pytest.mark.parametrize("one", [pytest.param(one, id=one.place) for one in of("json")])
def test_json_that_is_shown_is_json(one: Snippet) -> None:
    assert json.loads(one.text)


@pytest.mark.parametrize("ones", by_page("pycon"))
def test_what_python_is_shown_to_answer_is_what_it_answers(ones: list[Snippet]) -> None:
    names: dict[str, Any] = {}
    for one in ones:
        test = doctest.DocTestParser().get_doctest(one.text, names, one.place, one.page, 0)
        failed, tried = doctest.DocTestRunner(verbose=False).run(test, clear_globs=False)
        names = test.globs
        assert (failed, tried > 0) == (0, True), one.place


@pytest.mark.parametrize("ones", by_page("sql"))
async def test_sql_that_is_shown_runs(ones: list[Snippet], db: asyncpg.Pool) -> None:
    for one in ones:
        for statement in re.sub(r"--.*", "", one.text).split(";"):
            if statement.strip():
                await db.fetch(statement)


FEEDS: Final = {
    "mailgun-main": "mailgun",
    "mailgun-eu": "mailgun",
    "postmark-main": "postmark",
    "sendgrid-main": "sendgrid",
    "ses-main": "ses",
}
WORDS: Final = {"FEED": "mailgun-main", "KEY": "order:1", "CLASS": "default", "NAME": "spring", "PROVIDER": "mailgun"}
"""What stands for the reader's own in documents."""

FILES: Final = {
    "spring.csv": "recipient,name\nada@example.com,Ada\n",
    "unsubscribed.csv": "email,reason\nbob@example.com,asked\n",
    "sends.csv": "key,claimed_at\norder:77,{yesterday}\n",
    "send_one.py": "import os, urllib.request\n"
    'urllib.request.urlopen(os.environ["RECONCILER_SELFTEST_URL"], data=b"{{}}", timeout=5)\n',
}


@pytest.fixture
async def stage(
    program: Program, db: asyncpg.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Program]:
    """The program where documents have it: its feeds, a provider's API that answers, and the files that are named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    yesterday = (await db.fetchval("SELECT now() - interval '1 day'")).isoformat()
    for name, text in FILES.items():
        Path(name).write_text(text.format(yesterday=yesterday))
    async with asked("mailgun", mailgun.Fake([])) as (one, _), asked("sendgrid", sendgrid.Fake([])) as (other, _):
        apis = {feed.provider: feed for feed in (one, other)}
        feeds = "".join(table(name, provider, apis.get(provider)) for name, provider in FEEDS.items())
        Path("reconciler.toml").write_text(f'[receiver]\npublic_url = "https://hooks.example.com"\n{feeds}')
        yield program


def table(name: str, provider: str, api: Feed | None) -> str:
    """The settings of a feed, with the API that it asks."""
    given = {"provider": provider, "secrets": "basic:hooks:0123456789"}
    if api:
        given |= {"api_key": api.api_key, "api_scope": api.api_scope, "api_url": api.api_url or ""}
    return f"[feeds.{name}]\n" + "".join(f'{setting} = "{value}"\n' for setting, value in given.items() if value)


@pytest.mark.parametrize("ones", by_page("sh", "console"))
async def test_commands_that_are_shown_work(ones: list[Snippet], stage: Program, db: asyncpg.Pool) -> None:
    if not any("--hash-recipients" in one.text or "--namespace" in one.text for one in ones):  # said of an empty one
        await old_claim(db, "order:1", feed="mailgun-main")
        await heard_neighbours(db, age=timedelta(hours=2), feed="mailgun-main", n=40)
    for one in ones:
        for words in statements(one.text):
            assert await done(stage, words) in (0, 3), (one.place, words)


async def done(program: Program, words: list[str]) -> int:
    """Run a command, and what follows it after `||` if it fails; its exit status."""
    first, *others = _split(words)
    status = (await program(*(WORDS.get(word, word) for word in first[1:]))).exit_code
    return await done(program, others[0]) if status and others else status


def _split(words: list[str]) -> list[list[str]]:
    at = words.index("||") if "||" in words else len(words)
    return [words[:at], *([words[at + 1 :]] if words[at + 1 :] else [])]


# Commands in the text


SPAN: Final = re.compile(r"(?<!`)`(reconciler [^`]+)`")


def commands(text: str) -> Iterator[str]:
    """The commands that a text names between backticks, those of alternatives (`pause|resume`) one by one."""
    for found in SPAN.findall(text.replace("\\|", "|")):
        line = re.sub(r"[\[\]]|\.\.\.", "", found)
        several = re.search(r"(?<= )[a-z-]+(\|[a-z-]+)+", line)
        for word in several[0].split("|") if several else [""]:
            yield line.replace(several[0], word, 1) if several else line


def objection(line: str) -> str | None:
    """Say what the program doesn't know of a command and its options; None if it knows them all."""
    at: click.Command = cli
    words = re.split(r"[\s=]+", line.partition(" -- ")[0])[1:]
    while isinstance(at, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in at.commands:
            return None if name.isupper() else f"{line}: no command {name}"
        at = at.commands[name]
    known = {option for one in at.params for option in (*one.opts, *one.secondary_opts)} | {"--help", "--version"}
    missing = [word for word in words if word.startswith("--") and word not in known]
    return f"{line}: no option {missing}" if missing else None


@pytest.mark.parametrize("page", pages())
def test_every_command_in_the_text_exists(page: str) -> None:
    assert [problem for line in commands(text_of(page)) if (problem := objection(line))] == []


def test_the_page_of_commands_has_each() -> None:
    named = " ".join(commands(text_of("docs/commands.md")))
    every_one = [
        f"reconciler {name}" + (f" {inner}" if inner else "")
        for name, command in cli.commands.items()
        for inner in (command.commands if isinstance(command, click.Group) else [""])
    ]
    assert [one for one in every_one if one not in named] == []
