# SPDX-License-Identifier: Apache-2.0
"""A mistake in the settings is one clear line, before anything starts."""

from __future__ import annotations

from datetime import timedelta

import pytest
from contract import CONTRACT

from reconciler.configuration.settings import Settings


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[reciever]\nport = 1", "reconciler.toml:1: unknown setting reciever; did you mean receiver?"),
        ("\n[rules]\ngrase = '1m'", "reconciler.toml:3: unknown setting rules.grase; did you mean rules.grace?"),
        ("rules.grase = '1m'", "reconciler.toml:1: unknown setting rules.grase; did you mean rules.grace?"),
        ("grace = '1m'", "reconciler.toml:1: unknown setting grace; did you mean rules.grace?"),
        ("secrets = 'x'", "reconciler.toml:1: unknown setting secrets; did you mean feeds.NAME.secrets?"),
        ("[LOG]\nlevel = 'info'", "reconciler.toml:1: unknown setting LOG: there is database, receiver, feeds, "),
        ("[log]\nxyz = 1", "reconciler.toml:2: unknown setting log.xyz: there is format, level"),
        (
            "[feeds.x]\nprovider = 'sendgird'",
            'reconciler.toml:2: feeds.x.provider names no provider that exists; did you mean "sendgrid"?',
        ),
        (
            "[feeds.x]\nprovider = '?'",
            "reconciler.toml:2: feeds.x.provider names no provider that exists: there is azure_acs, brevo, ",
        ),
        ("[feeds.x]", "reconciler.toml:1: feeds.x.provider is missing: set it"),
        (
            "[feeds.x]\nprovidr = 'ses'",
            "reconciler.toml:2: unknown setting feeds.x.providr; did you mean feeds.x.provider?",
        ),
        (
            "[feeds.Main]\nprovider = 'ses'",
            "reconciler.toml:1: feeds.Main is no name of a feed: use lower-case letters, digits and hyphens, as in ",
        ),
        ("[rules]\ngrace = 900", 'did you mean "900s"?'),
        (
            "[rules]\ngrace = 'soon'",
            'reconciler.toml:2: rules.grace is no duration: write a number with a unit, such as "90s", "15m", "24h" or',
        ),
        ("[rules]\ngrace = '99999d'", "reconciler.toml:2: rules.grace is too long: at most 3650d"),
        ("[rules]\nsubmit_within = '0s'", "reconciler.toml:2: rules.submit_within must be greater than 0 seconds"),
        ("[rules]\nmax_risk = nan", "reconciler.toml:2: rules.max_risk must be a finite number"),
        ("[rules]\nmax_risk = true", "reconciler.toml:2: rules.max_risk must be a number, not true or false"),
        ("[rules]\nmax_risk = 1.5", "reconciler.toml:2: rules.max_risk must be less than or equal to 1"),
        ("[rules]\non_unknown = 'x'", "reconciler.toml:2: rules.on_unknown must be 'hold', 'fail' or 'release'"),
        ("[rules]\nsame_key_retry = 'x'", "reconciler.toml:2: rules.same_key_retry must be true or false"),
        ("[receiver]\nport = 70000", "reconciler.toml:2: receiver.port must be less than or equal to 65535"),
        ("[receiver]\nmax_body = '25 apples'", "reconciler.toml:2: receiver.max_body is no size: "),
        ("[receiver]\npublic_url = 'hooks.example.com'", "reconciler.toml:2: receiver.public_url is no URL: "),
        ("[receiver]\npublic_url = 'https:///a'", "reconciler.toml:2: receiver.public_url is no URL: "),
        ("[receiver]\npublic_url = 'https://a:x/'", "reconciler.toml:2: receiver.public_url is no URL: "),
        ("[receiver]\npublic_url = 'ftp://a/'", "reconciler.toml:2: receiver.public_url is no URL: "),
        ("[receiver]\nmax_body = '25XB'", "reconciler.toml:2: receiver.max_body is no size: "),
        ("[database]\ndata_dir = ''", "reconciler.toml:2: database.data_dir is empty: write a path, or remove the"),
        ("[log]\nformat = 3", "reconciler.toml:2: log.format must be 'auto', 'json' or 'console'"),
        ("[receiver]\nhost = 3", "reconciler.toml:2: receiver.host must be a valid string"),
        ("[receiver]\nhost = ''", "reconciler.toml:2: receiver.host is empty: write the address to listen on, "),
        ("[receiver]\nhost = ' '", "reconciler.toml:2: receiver.host is empty: "),
        ("[database]\nurl = 'mysql://x'", "reconciler.toml:2: database.url is no PostgreSQL URL: "),
        ("[reconcile]\nevery = '0s'", "reconciler.toml:2: reconcile.every must be greater than 0 seconds"),
        ("log = 'json'", "reconciler.toml:1: log must be a table: write [log] and its settings below it"),
        ("database = 'x'", "reconciler.toml:1: database must be a table: "),
        ("feeds = 1", "reconciler.toml:1: feeds must be a table: "),
        ("[feeds]\nx = 1", "reconciler.toml:2: feeds.x must be a table: "),
    ],
)
def test_a_mistake_is_one_line_that_says_where_what_and_what_to_do(problems, text, line):
    (found,) = problems(text)
    assert found.startswith(line) or (line.startswith("did") and found.endswith(line)), found
    assert "\n" not in found


def test_a_secret_where_a_name_belongs_is_not_told(problems):
    for text, environment in (
        ("[feeds.x]\nprovider = 's3cret\\ns3cret'", {}),
        ("[feeds.x]", {"RECONCILER_FEEDS__X__PROVIDER": "s3cret"}),
    ):
        (line,) = problems(text, **environment)
        assert "s3cret" not in line
        assert "\n" not in line


def test_a_list_that_is_almost_json_is_refused(problems):
    (line,) = problems(CONTRACT, RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS=' ["a"')
    assert line == (
        'RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS: feeds.sendgrid-main.secrets must be a list: write ["one", "two"]'
    )


def test_relative_paths_start_at_the_file_whatever_the_current_directory(load, tmp_path, monkeypatch):
    (tmp_path / "odd:name").write_text("from-file  \n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = load(
        """
        [database]
        data_dir = "data"
        [feeds.a]
        provider = "ses"
        secrets = "file:odd:name"
        """
    )
    assert settings.database.data_dir == tmp_path / "data"
    assert settings.masked()["database"]["data_dir"] == str(tmp_path / "data")
    assert settings.feeds["a"].secrets == ("from-file  ",)


def test_a_list_that_is_none_is_refused(problems):
    (line,) = problems("[feeds.a]\nprovider = 'ses'\ntopics = 5")
    assert line == 'reconciler.toml:3: feeds.a.topics must be a list: write ["one", "two"]'


def test_nothing_is_read_but_what_is_given(load, monkeypatch):
    monkeypatch.setenv("RECONCILER_RECEIVER__PORT", "1")
    monkeypatch.setenv("RECONCILER_RECEIVER__PROT", "1")
    monkeypatch.setenv("receiver", '{"port": 1}')
    monkeypatch.setenv("XDG_DATA_HOME", "/other")
    assert load().receiver.port == 8080
    assert str(load(HOME="/home/a").database.data_dir) == "/home/a/.local/share/esp-reconciler"
    assert Settings().receiver.port == 8080
    assert Settings(receiver={"host": "::1"}).receiver.port == 8080


def test_settings_made_in_code_after_a_load_know_nothing_of_it(load):
    load(CONTRACT)
    assert Settings() == Settings.model_validate({})
    assert Settings().feeds == {}


def test_settings_can_be_made_in_code():
    settings = Settings(rules={"grace": timedelta(minutes=1)}, feeds={"a": {"provider": "anything", "secrets": "s"}})
    assert settings.rules_for("a", "").grace == timedelta(minutes=1)
    with pytest.raises(ValueError, match="is empty"):
        Settings(feeds={"a": {"provider": "anything", "secrets": [""]}})


def test_all_mistakes_are_told_at_once(problems):
    assert len(problems("[rules]\ngrace = 1\nmax_attempts = 0\n[log]\nlevel = 'loud'", RECONCILER_LOG__X="1")) == 4
