# SPDX-License-Identifier: Apache-2.0
"""What may be written in the settings, what it means, and that a mistake is one clear line before anything starts."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.errors import UserError
from reconciler.policy import Rules
from reconciler.settings import ConfigError, Settings, load_settings
from reconciler.settings_values import masked_url
from reconciler.units import format_duration, parse_duration, parse_size

KNOWN = {"sendgrid", "ses", "mailgun", "resend"}

CONTRACT = """
[database]
url = "postgresql://app@db/mail"
data_dir = "/var/lib/esp-reconciler"
[receiver]
host = "0.0.0.0"
port = 8081
public_url = "https://hooks.example.com/"
max_body = "25MB"
[feeds.sendgrid-main]
provider = "sendgrid"
secrets = ["one", "two"]
tolerance = "off"
signed_url = "https://other.example.com/hook/"
grace = "30m"
[feeds.ses-eu]
provider = "ses"
topics = ["arn:aws:sns:eu-west-1:000000000000:ses-events"]
certificates = "dir"
[feeds.ses-queue]
provider = "ses"
queue_url = "https://sqs.eu-west-1.example.com/000000000000/q"
endpoint_url = "http://127.0.0.1:4566"
[rules]
grace = "10m"
give_up_after = "12h"
max_risk = 0.02
max_attempts = 4
submit_within = "50s"
same_key_retry = false
retry_backoff = "20s"
late_window = "6d"
[classes.marketing]
on_unknown = "release"
[reconcile]
every = "20s"
[log]
format = "json"
level = "warning"
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load settings from a text, in a folder of their own."""
    monkeypatch.chdir(tmp_path)

    def from_text(text="", **environ):
        file = tmp_path / "reconciler.toml"
        file.write_text(text, encoding="utf-8")
        return load_settings(file, environ, KNOWN)

    return from_text


@pytest.fixture
def problems(load, tmp_path):
    """Load settings that are wrong and return the lines that say so, with the file's name cut short."""

    def of(text="", **environ):
        with pytest.raises(ConfigError) as caught:
            load(text, **environ)
        assert str(caught.value) == "\n".join(caught.value.problems)
        assert isinstance(caught.value, UserError)
        return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]

    return of


def test_without_a_file_the_documented_defaults_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {}, KNOWN)
    assert settings.database.url is None
    assert (settings.receiver.host, settings.receiver.port) == ("127.0.0.1", 8080)
    assert settings.receiver.max_body == 25_000_000
    assert settings.rules_for("any", "any") == Rules(
        grace=timedelta(minutes=15),
        give_up_after=timedelta(hours=24),
        max_risk=0.01,
        max_attempts=5,
        same_key_retry=True,
        retry_backoff=timedelta(seconds=30),
        on_unknown="hold",
    )
    assert settings.rules.submit_within == timedelta(seconds=60)
    assert settings.rules.late_window == timedelta(days=7)
    assert settings.reconcile.every == timedelta(seconds=15)
    assert settings.feeds == {}
    assert settings.warnings() == []


def test_every_name_of_the_contract_is_read(load, tmp_path):
    settings = load(CONTRACT)
    assert settings.database.url == "postgresql://app@db/mail"
    assert str(settings.database.data_dir) == "/var/lib/esp-reconciler"
    assert settings.receiver.public_url == "https://hooks.example.com"
    sendgrid, ses, queue = settings.feeds.values()
    assert (sendgrid.provider, sendgrid.secrets, sendgrid.tolerance) == ("sendgrid", ("one", "two"), "off")
    assert sendgrid.signed_url == "https://other.example.com/hook/", "signed as it is, to the last slash"
    assert ses.topics == ("arn:aws:sns:eu-west-1:000000000000:ses-events",)
    assert ses.certificates == tmp_path / "dir"
    assert queue.queue_url == "https://sqs.eu-west-1.example.com/000000000000/q"
    assert queue.endpoint_url == "http://127.0.0.1:4566"
    assert settings.rules_for("ses-eu", "receipts") == Rules(
        grace=timedelta(minutes=10),
        give_up_after=timedelta(hours=12),
        max_risk=0.02,
        max_attempts=4,
        same_key_retry=False,
        retry_backoff=timedelta(seconds=20),
        on_unknown="hold",
    )
    assert (settings.rules.submit_within, settings.rules.late_window) == (timedelta(seconds=50), timedelta(days=6))
    assert settings.reconcile.every == timedelta(seconds=20)
    assert (settings.log.format, settings.log.level) == ("json", "warning")


def test_which_file_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, port in (("argument", 1), ("variable", 2), ("reconciler", 3)):
        (tmp_path / f"{name}.toml").write_text(f"[receiver]\nport = {port}\n")
    variable = {"RECONCILER_CONFIG": "variable.toml"}
    assert load_settings(tmp_path / "argument.toml", variable, KNOWN).receiver.port == 1
    assert load_settings(None, variable, KNOWN).receiver.port == 2
    assert load_settings(None, {}, KNOWN).receiver.port == 3


def test_a_file_that_was_named_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, environ in ((tmp_path / "none.toml", {}), (None, {"RECONCILER_CONFIG": "none.toml"}), (tmp_path, {})):
        with pytest.raises(ConfigError, match=r"can't be read .*: check --config and RECONCILER_CONFIG"):
            load_settings(path, environ, KNOWN)


def test_a_file_of_another_editor_is_read(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[receiver]\r\nport = 81\r\n")
    assert load_settings(file, {}, KNOWN).receiver.port == 81
    file.write_bytes("[receiver]\nhost = 'ä'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_settings(file, {}, KNOWN)


def test_broken_toml_is_one_line_with_its_place(problems):
    assert problems("[receiver]\nport = \n") == ["reconciler.toml:2: is not valid TOML: Invalid value"]
    assert problems("[receiver]\nhost = 'x")[0].startswith("reconciler.toml:2: is not valid TOML: ")


# Environment


def test_the_environment_wins_over_the_file(load):
    settings = load(
        CONTRACT,
        RECONCILER_RECEIVER__PORT="9000",
        RECONCILER_FEEDS__SENDGRID_MAIN__GRACE="5m",
        RECONCILER_RULES__MAX_RISK="0.5",
        RECONCILER_RULES__SAME_KEY_RETRY="true",
        RECONCILER_CLASSES__MARKETING__ON_UNKNOWN="fail",
    )
    assert settings.receiver.port == 9000
    rules = settings.rules_for("sendgrid-main", "marketing")
    assert (rules.grace, rules.max_risk, rules.on_unknown) == (timedelta(minutes=5), 0.5, "fail")
    assert rules.same_key_retry is True


@pytest.mark.parametrize(
    ("written", "secrets"),
    [
        ("one", ("one",)),
        ("one, two", ("one", "two")),
        ('["one", "t,wo"]', ("one", "t,wo")),
        ("basic:user:pass,word", ("basic:user:pass,word",)),
        ('["basic:user:a,b", "basic:user:c"]', ("basic:user:a,b", "basic:user:c")),
    ],
)
def test_a_list_in_a_variable_is_a_bare_value_or_json_or_parted_by_commas(load, written, secrets):
    settings = load(CONTRACT, RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS=written)
    assert settings.feeds["sendgrid-main"].secrets == secrets


def test_a_list_in_the_file_may_be_one_bare_value(load):
    assert load('[feeds.a]\nprovider = "ses"\nsecrets = "a,b"').feeds["a"].secrets == ("a,b",)


def test_a_feed_may_come_from_the_environment_alone(load):
    settings = load(RECONCILER_FEEDS__SENDGRID_MAIN__PROVIDER="sendgrid", RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS="s")
    assert settings.feeds["sendgrid-main"].secrets == ("s",)


def test_a_feed_with_two_hyphens_is_reached_by_its_variable(load):
    settings = load('[feeds.a--b]\nprovider = "ses"', RECONCILER_FEEDS__A__B__SECRETS="s")
    assert list(settings.feeds) == ["a--b"]
    assert settings.feeds["a--b"].secrets == ("s",)


def test_a_class_with_an_underscore_is_reached_by_its_variable_even_if_no_file_names_it(load):
    settings = load(RECONCILER_CLASSES__PASSWORD_RESET__ON_UNKNOWN="fail")
    assert settings.rules_for("x", "password_reset").on_unknown == "fail"
    assert settings.rules_for("x", "password-reset").on_unknown == "fail"
    both = load('[classes."order.receipt"]\n[classes.a_b]\n', RECONCILER_CLASSES__ORDER_RECEIPT__ON_UNKNOWN="release")
    assert both.rules_for("x", "order.receipt").on_unknown == "release"
    assert set(both.classes) == {"order.receipt", "a_b"}
    odd = load("[classes.a__b]", RECONCILER_CLASSES__A__B__ON_UNKNOWN="fail")
    assert odd.classes["a__b"].on_unknown == "fail"


def test_variables_of_kubernetes_are_none_of_ours(load):
    settings = load(
        RECONCILER_PORT="tcp://10.0.0.1:8080",
        RECONCILER_SERVICE_HOST="10.0.0.1",
        RECONCILER_PORT_8080_TCP_ADDR="10.0.0.1",
        OTHER__THING="x",
    )
    assert settings.receiver.port == 8080


def test_a_misspelt_variable_is_refused_with_what_was_meant(problems):
    advice = {
        "RECONCILER_RECEIVER__PROT": "RECONCILER_RECEIVER__PORT",
        "RECONCILER_DATABSE__URL": "RECONCILER_DATABASE__URL",
        "RECONCILER_FEEDS__SENDGRID_MAIN__SECRET": "RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS",
    }
    found = problems(CONTRACT, **dict.fromkeys(advice, "1"))
    assert {line.partition(":")[0]: line.partition("did you mean ")[2] for line in found} == {
        wrong: f"{right}?" for wrong, right in advice.items()
    }


def test_a_misspelt_feed_in_a_variable_is_refused_with_the_feed_that_was_meant(problems):
    (line,) = problems(CONTRACT, RECONCILER_FEEDS__SENDGRIDMAIN__SECRETS="x")
    assert line == (
        "RECONCILER_FEEDS__SENDGRIDMAIN__SECRETS: feeds.sendgridmain.provider is missing: set it, "
        'or did you mean feed "sendgrid-main"?'
    )


def test_a_variable_that_names_a_section_only_is_refused(problems):
    for name in ("RECONCILER_FEEDS__A", "RECONCILER_LOG__LEVEL__X", "RECONCILER_CLASSES__A"):
        (line,) = problems(**{name: "x"})
        assert line.startswith(f"{name}: names no setting: write RECONCILER_SECTION__SETTING")


def test_a_variable_below_what_is_no_table_in_the_file_does_not_hide_that_mistake(problems):
    for text, environ in (
        ("log = 1", {"RECONCILER_LOG__LEVEL": "info"}),
        ("feeds = 1", {"RECONCILER_FEEDS__A__PROVIDER": "ses"}),
        ("feeds.a = 1", {"RECONCILER_FEEDS__A__PROVIDER": "ses"}),
    ):
        (line,) = problems(text, **environ)
        assert line.startswith(f"reconciler.toml:1: {text.removesuffix(' = 1')} must be a table: ")


# Names and values that are refused


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
            'reconciler.toml:2: feeds.x.provider names no provider that exists, "sendgird"; did you mean "sendgrid"?',
        ),
        (
            "[feeds.x]\nprovider = '?'",
            'reconciler.toml:2: feeds.x.provider names no provider that exists, "?": there is mailgun, resend, ',
        ),
        ("[feeds.x]", "reconciler.toml:1: feeds.x.provider is missing: set it"),
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


# Secrets


def test_a_secret_may_lie_in_a_file_or_a_variable(load, tmp_path):
    (tmp_path / "key").write_text("from-file\n")
    settings = load(
        f"""
        [database]
        url = "env:DSN"
        [feeds.a]
        provider = "mailgun"
        secrets = ["file:{tmp_path}/key", "file:key", "env:KEY"]
        """,
        DSN="postgresql://app:pw@db/mail",
        KEY="from-variable",
    )
    assert settings.database.url == "postgresql://app:pw@db/mail"
    assert settings.feeds["a"].secrets == ("from-file", "from-file", "from-variable")


def test_a_secret_that_is_not_there_is_refused(problems, tmp_path):
    text = "[feeds.a]\nprovider = 'ses'\nsecrets = '{}'"
    (line,) = problems(text.format("env:KEY"))
    assert line == "reconciler.toml:3: feeds.a.secrets[0] lies in the variable KEY, which is not set: set it"
    (line,) = problems(text.format("file:key"))
    assert "lies in the file" in line
    assert "(No such file or directory)" in line
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in problems(text.format("file:key"))[0]


@pytest.mark.parametrize("written", ["''", "[]", "['']", "['fine', ' ']", "'env:EMPTY'", "'file:empty'"])
def test_an_empty_secret_is_refused_and_no_secret_is_not(load, problems, tmp_path, written):  # case 036
    (tmp_path / "empty").write_text("\n")
    text = f"[feeds.a]\nprovider = 'resend'\nsecrets = {written}"
    if written == "[]":
        assert load(text).feeds["a"].secrets == ()
    else:
        (line,) = problems(text, EMPTY="")
        assert "is empty" in line
        assert line.endswith("set the secret, or remove the setting")


def test_a_variable_set_to_nothing_never_opens_a_feed_or_changes_the_database(problems):  # case 036
    (line,) = problems(CONTRACT, RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS="")
    assert line.startswith("RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS: feeds.sendgrid-main.secrets[0] is empty")
    (line,) = problems(CONTRACT, RECONCILER_DATABASE__URL="")
    assert line.startswith("RECONCILER_DATABASE__URL: database.url is empty")


@pytest.mark.parametrize(
    "secret", ["bearer:", "basic:", "basic:user", "basic:user:", "basic::pw", "header:X", "header:X=", "query:=v"]
)
def test_half_a_credential_is_refused_since_anybody_could_send_it(problems, secret):
    (line,) = problems(f"[feeds.a]\nprovider = 'ses'\nsecrets = '{secret}'")
    assert "is half a credential, which anybody could send: write " in line


@pytest.mark.parametrize("secret", ["bearer:t", "basic:user:pass:word", "header:X-Key=a=b", "query:t=v", "whsec_YQ=="])
def test_whole_credentials_are_kept_as_they_are(load, secret):
    assert load(f"[feeds.a]\nprovider = 'ses'\nsecrets = '{secret}'").feeds["a"].secrets == (secret,)


def test_a_public_key_is_no_secret(problems):
    (line,) = problems("[feeds.a]\nprovider = 'resend'\nsecrets = 'whpk_abc'")
    assert "set the signing secret (whsec_)" in line


def test_no_error_repeats_a_secret(problems):
    text = (
        "[database]\nurl = 'mysql://u:hidden@h/d'\n"
        "[feeds.a]\nprovider = 'ses'\nsecrets = ['whpk_hidden', 'basic:hidden', {hidden = 1}]\n"
        "[feeds.b]\nprovider = 'ses'\nsecrets = {hidden = 'hidden'}"
    )
    found = problems(text, RECONCILER_FEEDS__C__SECRETS='["hidden')
    assert len(found) >= 5
    assert not [line for line in found if "hidden" in line]


def test_nothing_that_shows_settings_shows_a_secret(load):
    settings = load(
        """
        [database]
        url = "postgresql://app:hid/d@en@db/mail?sslpassword=hidden&sslmode=require"
        direct_url = "postgresql://app:hidden@db/mail"
        [feeds.a]
        provider = "ses"
        secrets = ["hidden", "basic:user:hidden", "header:X=https://hidden"]
        signed_url = "https://user:hidden@example.com/a?token=hidden&n=1"
        """
    )
    shown = json.dumps(settings.masked())
    for text in (shown, repr(settings), str(settings.feeds)):
        assert "hidden" not in text.replace("https://user:hidden@example.com/a?token=hidden&n=1", "")
        assert "hid/d" not in text
    assert settings.masked()["database"]["url"] == "postgresql://app:***@db/mail?sslpassword=***&sslmode=require"
    assert settings.masked()["feeds"]["a"] == {
        "provider": "ses",
        "secrets": ["***", "***", "***"],
        "signed_url": "https://user:***@example.com/a?token=***&n=1",
    }


def test_the_log_is_told_what_to_hide(load):
    settings = load(
        CONTRACT,
        RECONCILER_DATABASE__URL="postgresql://app:p%40ssword@db/mail",
        RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS=(
            '["basic:user:let:me:in", "query:t=tokentoken", "header:X=va=lue", "bearer:the-token", "signing-key", "ab"]'
        ),
    )
    assert settings.secret_values() == [
        "basic:user:let:me:in",
        "query:t=tokentoken",
        "header:X=va=lue",
        "bearer:the-token",
        "signing-key",
        "let:me:in",
        "tokentoken",
        "va=lue",
        "the-token",
        "p@ssword",
    ]


# Meaning


def test_masked_settings_read_as_they_are_written_and_can_be_read_again(load):
    shown = load(CONTRACT).masked()
    assert shown["rules"]["grace"] == "10m"
    assert shown["rules"]["give_up_after"] == "12h"
    assert shown["rules"]["late_window"] == "6d"
    assert shown["feeds"]["sendgrid-main"]["tolerance"] == "off"
    assert shown["feeds"]["sendgrid-main"]["grace"] == "30m"
    assert "max_risk" not in shown["feeds"]["sendgrid-main"], "what a feed does not set is not shown as its own"
    assert Settings.model_validate(shown).masked() == shown


def test_a_class_wins_over_a_feed_and_a_feed_over_the_rules(load):
    settings = load(
        """
        [rules]
        grace = "1m"
        max_attempts = 2
        on_unknown = "fail"
        [feeds.a]
        provider = "ses"
        grace = "2m"
        max_risk = 0.2
        submit_within = "10s"
        [classes.m]
        grace = "3m"
        failover = true
        """
    )
    assert settings.rules_for("b", "x").grace == timedelta(minutes=1)
    assert settings.rules_for("a", "x").grace == timedelta(minutes=2)
    assert settings.rules_for("a", "m").grace == timedelta(minutes=3)
    assert settings.rules_for("b", "m").grace == timedelta(minutes=3)
    rules = settings.rules_for("a", "m")
    assert (rules.max_attempts, rules.max_risk, rules.on_unknown) == (2, 0.2, "fail")
    assert settings.rule_settings_for("a", "m").submit_within == timedelta(seconds=10)
    assert settings.failover_for("m")
    assert not settings.failover_for("x")


def test_a_feed_that_writes_a_default_out_means_it(load):
    settings = load("[rules]\ngrace = '1m'\n[feeds.a]\nprovider = 'ses'\ngrace = '15m'")
    assert settings.rules_for("a", "").grace == timedelta(minutes=15)


def test_a_webhook_feed_has_its_providers_tolerance_unless_it_sets_one(load):
    settings = load(
        CONTRACT + "[feeds.b]\nprovider = 'resend'\ntolerance = '90s'\n[feeds.c]\nprovider = 'resend'\nsecrets = 's'"
    )
    five = timedelta(minutes=5)
    assert settings.webhook_feed("sendgrid-main", five).tolerance is None
    assert settings.webhook_feed("b", five).tolerance == timedelta(seconds=90)
    assert settings.webhook_feed("c", five).tolerance == five
    assert settings.webhook_feed("c", None).tolerance is None
    feed = settings.webhook_feed("c", None)
    assert (feed.name, feed.provider, feed.secrets, feed.certificates) == ("c", "resend", ("s",), None)
    assert settings.webhook_feed("sendgrid-main", None).signed_url == "https://other.example.com/hook/"
    assert settings.webhook_feed("ses-eu", None).certificates.endswith("/dir")
    assert settings.webhook_feed("ses-eu", None).topics == settings.feeds["ses-eu"].topics


def test_settings_can_not_be_changed_afterwards(load):
    settings = load(CONTRACT)
    with pytest.raises(ValueError, match="frozen"):
        settings.receiver.port = 1
    with pytest.raises(ValueError, match="frozen"):
        settings.feeds["ses-eu"].secrets = ("x",)


def test_a_feed_that_refuses_everything_is_warned_of(load):
    settings = load(
        """
        feeds.a.provider = "mailgun"
        feeds.b.provider = "ses"
        [feeds.c]
        provider = "ses"
        topics = "t"
        [feeds.d]
        provider = "ses"
        queue_url = "https://sqs.example.com/q"
        """
    )
    assert settings.warnings() == [
        "feeds.a: has no secrets, so every delivery is refused: set feeds.a.secrets",
        "feeds.b: has no topics, so every delivery is refused: set feeds.b.topics",
    ]


def test_giving_up_before_the_grace_is_warned_of_once_where_it_is_written(load):
    settings = load("[rules]\ngive_up_after = '1m'\n[feeds.a]\nprovider = 'ses'\nsecrets = 's'")
    assert [line.partition(":")[0] for line in settings.warnings()] == ["rules"]
    settings = load("[classes.m]\ngrace = '25h'\n[classes.n]\ngrace = '24h'")
    assert [line.partition(":")[0] for line in settings.warnings()] == ["classes.m"]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_DATA_HOME": "/data", "HOME": "/home/a"}, "/data/esp-reconciler"),
        ({"XDG_DATA_HOME": "relative", "HOME": "/home/a"}, "/home/a/.local/share/esp-reconciler"),
        ({"HOME": "/home/a"}, "/home/a/.local/share/esp-reconciler"),
        ({}, "esp-reconciler-data"),
    ],
)
def test_the_embedded_database_has_a_place_by_default(load, environ, folder):
    assert str(load(**environ).database.data_dir) == folder


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=3650)))
def test_a_duration_written_out_means_the_same(duration):
    whole = timedelta(milliseconds=duration // timedelta(milliseconds=1))
    assert parse_duration(format_duration(whole)) == whole


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("90s", 90), ("15m", 900), ("24h", 86400), ("7d", 604800), (" 1.5h ", 5400)]
)
def test_durations_read_as_people_write_them(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["0s", "1ms", "1500ms", "59s", "1m", "90m", "24h", "36h", "2d", "7d"])
def test_a_duration_is_shown_as_people_would_write_it(text):
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize("text", ["", "15", "15 minutes", "-5m", "1h30m", "1e3s", "٣s", "m", "5M", "inf"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("25MB", 25_000_000), ("64KiB", 65536), ("10 kb", 10_000), ("1GiB", 2**30), ("5B", 5)]
)
def test_sizes_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app@db/mail", "postgresql://app@db/mail"),
        ("postgresql://:pw@/mail?host=/tmp", "postgresql://:***@/mail?host=/tmp"),
        ("https://example.com:8080/a", "https://example.com:8080/a"),
        ("https://example.com/a?api_key=x#y", "https://example.com/a?api_key=***#y"),
    ],
)
def test_a_url_is_shown_without_its_password(url, shown):
    assert masked_url(url) == shown
