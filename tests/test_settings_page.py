# SPDX-License-Identifier: Apache-2.0
"""docs/settings.md names every setting as the code has it, and what it shows is taken."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import settings_page
from snippets import block, blocks, text_of

from reconciler.configuration.settings import load_settings
from reconciler.configuration.sources import EnvironmentSource, FileSource
from webhooks.registry import PROVIDERS

PAGE = text_of("docs/settings.md")
ROW = re.compile(r"^\| `\w+` \|(?: [^|]* \|){2} (.*) \| `(RECONCILER_\w+)` \|$", re.MULTILINE)


def test_the_page_is_as_the_code_makes_it() -> None:
    assert settings_page.made(PAGE) == PAGE, "make docs writes it anew"


def test_every_setting_is_on_the_page_once_and_is_explained() -> None:
    rows = {variable: meaning for meaning, variable in ROW.findall(PAGE)}
    assert len(rows) == len(ROW.findall(PAGE))
    rules = settings_page.RULES
    wanted = {
        settings_page.variable(table, name)
        for table in settings_page.tables()
        for name in table.section.model_fields
        if name != "tokens" and not (name in rules and table.name in settings_page.BY_RULES)
    }
    assert set(rows) == wanted
    assert [variable for variable, meaning in rows.items() if not meaning] == []


def test_every_variable_on_the_page_is_one_that_is_read() -> None:
    variables = {variable: "1" for _, variable in ROW.findall(PAGE)}
    source = EnvironmentSource(settings_page.Settings, variables, FileSource(settings_page.Settings, None, {}))
    assert (source.problems, set(source.variables.values())) == ([], set(variables))


def test_the_settings_of_the_page_are_taken_by_file_and_by_environment(tmp_path: Path) -> None:
    file = tmp_path / "reconciler.toml"
    (tmp_path / "sendgrid").write_text("basic:hooks:0123456789")
    (tmp_path / "mailgun-signing").write_text("signing-key")
    (tmp_path / "mailgun-api").write_text("api-key")
    file.write_text(
        (block("docs/settings.md", "toml") + "".join(blocks("docs/feeds.md", "toml"))).replace(
            "/run/secrets", str(tmp_path)
        )
    )
    exports = block("docs/settings.md", "sh", "export")
    written = dict(line.removeprefix("export ").split("=", 1) for line in exports.splitlines())
    settings = load_settings(
        file,
        {**written, "SENDGRID_KEY": "basic:hooks:other-word", "HOME": "/nowhere"},
        PROVIDERS,
    )
    assert settings.database.url == "postgresql://app@db.internal/mail"
    assert settings.feeds["sendgrid-main"].secrets == ("basic:hooks:other-word",)
    assert settings.feeds["mailgun-eu"].api_key == "api-key"
    assert settings.archive.url == "s3://mail-archive/raw"
    assert (settings.rules.grace, settings.classes["marketing"].on_unknown) == (timedelta(minutes=30), "fail")
    assert load_settings(file, {"HOME": "/nowhere"}, PROVIDERS).feeds["sendgrid-main"].secrets == (
        "basic:hooks:0123456789",
    )
