# SPDX-License-Identifier: Apache-2.0
"""Every setting of the program can be set through the chart: in its tree of settings, and by its environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from helm_kit import CHOSEN, Chart, at, branch, every_setting, load, merged

from reconciler.errors import UserError

SETTINGS = dict(every_setting())
HASH = "sha256:" + "0" * 64
BASE = {
    "database": {"url": "env:URL"},
    "feeds": {CHOSEN["feeds"]: {"provider": "sendgrid"}},
    "classes": {CHOSEN["classes"]: {"cap": 3}},
    "api": {"tokens": {CHOSEN["tokens"]: {"hash": [HASH]}}},
    "ui": {"proxy_networks": ["192.0.2.0/24"]},
    "outbox": {"secrets": ["env:SIGNS"]},
}
ENVIRON = {"URL": "postgresql://app@db/mail", "SIGNS": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="}
"""What is needed around a setting for it to be allowed."""

CANDIDATES = (
    *("/srv/elsewhere", "https://other.example.com", "postgresql://app@elsewhere/mail", "s3://bucket/prefix"),
    *(
        "7",
        "0.7",
        "true",
        "false",
        "77m",
        "45d",
        "7MB",
        "mailgun",
        "Europe/Vienna",
        "bearer:0123456789",
        "sha256:" + "f" * 64,
    ),
    *("whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=", "arn:aws:sns:eu-west-1:000000000000:ses-events"),
    "10.0.0.0/8",
    *("release", "shadow", "before_release", "console", "debug", "held", "operate"),
)
"""One of them fits any setting. What fits isn't said here: the program is asked."""


def variable(name: str) -> str:
    return "RECONCILER_" + "__".join(name.upper().replace("-", "_").split("."))


@pytest.fixture(scope="module")
def plain(chart: Chart) -> str:
    """The settings file around whatever is set."""
    return chart.render({"settings": BASE}).settings_text()


@pytest.fixture
def read(chart: Chart, tmp_path):
    """Read what the program would: the file and the plain environment that the chart gives to the reconciler."""

    def through(**values):
        rendered = chart.render(values)
        given = rendered.environment("Deployment", "reconciler")
        del given["RECONCILER_CONFIG"]  # a path of the pod's
        return load(tmp_path, rendered.settings_text(), {**ENVIRON, **given})

    return through


def sample(folder: Path, plain: str, name: str) -> tuple[str, object]:
    """Return a text that the program takes for a setting, other than its default, and what it makes of it."""
    path = tuple(name.split("."))
    default = at(load(folder, plain, ENVIRON), path)
    for text in CANDIDATES:
        try:
            found = at(load(folder, plain, {**ENVIRON, variable(name): text}), path)
        except UserError:
            continue
        if found != default:
            return text, found
    pytest.fail(f"nothing in CANDIDATES is a value of {name}: add one")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_reached_through_the_chart(read, plain, tmp_path, monkeypatch, name):
    path = tuple(name.split("."))
    text, wanted = sample(tmp_path, plain, name)
    if not SETTINGS[name].repr:  # it lies elsewhere
        monkeypatch.setitem(ENVIRON, "SECRET", text)
        text = "env:SECRET"
    assert at(read(settings=BASE, env={variable(name): text}), path) == wanted
    written = wanted if isinstance(wanted, bool | int | float) else text  # in the tree a number is a number
    assert at(read(settings=merged(BASE, branch(path, written))), path) == wanted


def test_the_settings_of_the_program_were_found():
    assert len(SETTINGS) > 90
    assert {"database.url", "feeds.main-feed.secrets", "classes.news.cap", "api.tokens.shop.hash"} <= SETTINGS.keys()


@pytest.mark.parametrize(
    "name", [name for name, field in SETTINGS.items() if not field.repr and not name.endswith(".hash")]
)
def test_a_secret_never_gets_into_a_config_map(chart, name):
    secret = "postgresql://app:open@db/mail" if name.startswith("database.") else "open-secret"
    path = tuple(name.split("."))
    for written in (secret, [secret], ["file:/run/secrets/esp-reconciler/key", secret]):
        refusal = chart.refusal({"settings": branch(path, written)})
        assert f"settings.{name} holds a secret" in refusal
        assert secret not in refusal


@pytest.mark.parametrize("of", ["env", "receiver.env", "reconciler.env", "migrate.env"])
def test_a_secret_never_gets_into_a_deployment_or_a_job(chart, of):
    for name, secret in (
        ("RECONCILER_DATABASE__URL", "postgresql://app:open@db/mail"),
        ("SENDGRID_KEY", "open-secret"),
    ):
        refusal = chart.refusal(branch((*of.split("."), name), secret))
        assert f"{of}.{name} holds a secret" in refusal
        assert secret not in refusal


@pytest.mark.parametrize("url", ["postgresql://app@db/mail", "https://hooks.example.com:8443/x?a=b"])
def test_a_url_without_a_password_is_no_secret(chart, url):
    assert url in chart.render({"settings": {"database": {"url": url}}}).settings_text()


TEXTS = (
    'quote " and \\ backslash',
    "two\nlines",
    "ümlaut ✓",
    "''' and \"\"\"",
    "a\tb",
    "# no comment",
    "{{ .Values }}",
)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_arrives_as_it_was_written(chart, tmp_path, text):
    rendered = chart.render({"settings": merged(BASE, {"feeds": {"main-feed": {"api_scope": text}}})})
    assert load(tmp_path, rendered.settings_text(), ENVIRON).feeds["main-feed"].api_scope == text


def test_large_and_broken_numbers_arrive_as_they_were_written(chart, tmp_path):
    given = {"receiver": {"queue_bytes": 64_000_001}, "rules": {"max_risk": 0.012345}, "outbox": {"secrets": []}}
    loaded = load(tmp_path, chart.render({"settings": merged(BASE, given)}).settings_text(), ENVIRON)
    assert (loaded.receiver.queue_bytes, loaded.rules.max_risk) == (64_000_001, 0.012345)


def test_an_environment_of_a_component_wins_over_the_common_one_and_both_over_the_file(chart, tmp_path):
    rendered = chart.render(
        {
            "settings": merged(BASE, {"rules": {"grace": "11m", "retry_backoff": "11s"}}),
            "env": {"RECONCILER_RULES__GRACE": "12m", "RECONCILER_RULES__LATE_WINDOW": "12d"},
            "reconciler": {"env": {"RECONCILER_RULES__GRACE": "13m"}},
        }
    )
    found = {}
    for component in ("receiver", "reconciler"):
        environ = rendered.environment("Deployment", component)
        del environ["RECONCILER_CONFIG"]
        rules = load(tmp_path, rendered.settings_text(), {**ENVIRON, **environ}).rules
        found[component] = (rules.grace.seconds // 60, rules.late_window.days, rules.retry_backoff.seconds)
    assert found == {"receiver": (12, 12, 11), "reconciler": (13, 12, 11)}


def test_the_migration_reads_the_same_file(chart):
    rendered = chart.render({"settings": BASE})
    assert rendered.settings_text("migrate") == rendered.settings_text()
