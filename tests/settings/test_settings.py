# SPDX-License-Identifier: Apache-2.0
"""What settings mean: the contract's names, defaults, and which of several values wins."""

from __future__ import annotations

from datetime import timedelta

import pytest
from contract import CONTRACT

from reconciler.configuration.settings import ConfigError, Settings, load_settings
from reconciler.rule.policy import Rules
from webhooks.registry import PROVIDERS


def test_without_a_file_the_documented_defaults_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = load_settings(None, {}, PROVIDERS)
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
    assert load_settings(tmp_path / "argument.toml", variable, PROVIDERS).receiver.port == 1
    assert load_settings(None, variable, PROVIDERS).receiver.port == 2
    assert load_settings(None, {}, PROVIDERS).receiver.port == 3


def test_a_file_that_was_named_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, environ in ((tmp_path / "none.toml", {}), (None, {"RECONCILER_CONFIG": "none.toml"}), (tmp_path, {})):
        with pytest.raises(ConfigError, match=r"can't be read .*: check --config and RECONCILER_CONFIG"):
            load_settings(path, environ, PROVIDERS)


def test_a_file_of_another_editor_is_read(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[receiver]\r\nport = 81\r\n")
    assert load_settings(file, {}, PROVIDERS).receiver.port == 81
    file.write_bytes("[receiver]\nhost = 'ä'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_settings(file, {}, PROVIDERS)


def test_broken_toml_is_one_line_with_its_place(problems):
    assert problems("[receiver]\nport = \n") == ["reconciler.toml:2: is not valid TOML: Invalid value"]
    assert problems("[receiver]\nhost = 'x")[0].startswith("reconciler.toml:2: is not valid TOML: ")


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
    feeds = "[feeds.b]\nprovider = 'resend'\ntolerance = '90s'\n[feeds.c]\nprovider = 'resend'\nsecrets = 'whsec_YQ=='"
    settings = load(CONTRACT + feeds)
    five = timedelta(minutes=5)
    assert settings.webhook_feed("sendgrid-main", five).tolerance is None
    assert settings.webhook_feed("b", five).tolerance == timedelta(seconds=90)
    assert settings.webhook_feed("c", five).tolerance == five
    assert settings.webhook_feed("c", None).tolerance is None
    feed = settings.webhook_feed("c", None)
    assert (feed.name, feed.provider, feed.secrets, feed.certificates) == ("c", "resend", ("whsec_YQ==",), None)
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
        topics = "arn:aws:sns:eu-west-1:000000000000:t"
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
