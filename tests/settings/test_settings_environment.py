# SPDX-License-Identifier: Apache-2.0
"""Settings by environment variables: they win over the file, and a misspelt one is refused."""

from __future__ import annotations

from datetime import timedelta

import pytest
from contract import CONTRACT


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


@pytest.mark.parametrize("service", ["", "RECEIVER_", "DATABASE_POOL_"])
def test_variables_of_kubernetes_are_none_of_ours(load, service):
    settings = load(
        **{
            f"RECONCILER_{service}PORT": "tcp://10.0.0.1:8080",
            f"RECONCILER_{service}SERVICE_HOST": "10.0.0.1",
            f"RECONCILER_{service}SERVICE_PORT": "9000",
            f"RECONCILER_{service}SERVICE_PORT_HTTP": "9000",
            f"RECONCILER_{service}PORT_9000_TCP": "tcp://10.0.0.1:9000",
            f"RECONCILER_{service}PORT_9000_TCP_ADDR": "10.0.0.1",
            f"RECONCILER_{service}PORT_9000_TCP_PORT": "9000",
            f"RECONCILER_{service}PORT_9000_TCP_PROTO": "tcp",
            f"RECONCILER_{service}PORT_53_UDP": "udp://10.0.0.1:53",
        },
        OTHER__THING="x",
    )
    assert settings.receiver.port == 8080


def test_a_variable_with_one_underscore_too_few_is_refused_with_what_was_meant(problems):
    advice = {
        "RECONCILER_DATABASE_URL": "RECONCILER_DATABASE__URL",
        "RECONCILER_DATABSE_URL": "RECONCILER_DATABASE__URL",
        "RECONCILER_CONFIGG": "RECONCILER_CONFIG",
        "RECONCILER_RECEIVER_PORT": "RECONCILER_RECEIVER__PORT",
        "RECONCILER_FEEDS_SENDGRID_MAIN_SECRETS": "RECONCILER_FEEDS__SENDGRID_MAIN__SECRETS",
        "RECONCILER_CLASSES_MARKETING_ON_UNKNOWN": "RECONCILER_CLASSES__MARKETING__ON_UNKNOWN",
        "RECONCILER_API_TOKENS_SHOP_HASH": "RECONCILER_API__TOKENS__SHOP__HASH",
    }
    token = f'[api.tokens.shop]\nhash = "sha256:{"0" * 64}"\nscopes = ["read"]\n'
    found = problems(CONTRACT + token, **dict.fromkeys(advice, "s3cret"))
    assert found == [f"{wrong}: is no setting; did you mean {right}?" for wrong, right in sorted(advice.items())]


def test_a_variable_that_resembles_no_setting_is_somebody_elses(load):
    others = ("VERSION", "IMAGE_TAG", "REPLICAS", "HOME", "ENV", "NAMESPACE", "POD_NAME")
    assert load(**{f"RECONCILER_{name}": "x" for name in others}).receiver.port == 8080


def test_variables_that_are_no_settings_and_yet_ours_or_named_by_one_are_not_refused(load):
    for name in ("CONFIG", "PG_BIN", "CITUS_BIN", "SELFTEST_URL", "SELFTEST_SMTP"):
        load(**{f"RECONCILER_{name}": "x"})
    named = load('[feeds.a]\nprovider = "ses"\nsecrets = ["env:RECONCILER_A_KEY"]', RECONCILER_A_KEY="s")
    assert named.feeds["a"].secrets == ("s",)
    url = "postgresql://a@b/c"
    assert load(RECONCILER_DATABASE__URL="env:RECONCILER_DB", RECONCILER_DB=url).database.url == url


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
