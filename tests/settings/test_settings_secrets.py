# SPDX-License-Identifier: Apache-2.0
"""Secrets: where they may lie, which are refused, and that nothing shows one."""

from __future__ import annotations

import base64
import json
import textwrap

import pytest
from contract import CONTRACT
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from reconciler.configuration.values import masked_url


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


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_line_end_after_a_secret_is_none_of_it_wherever_it_lies(load, tmp_path, end):
    (tmp_path / "key").write_bytes(f"whsec_YQ=={end}".encode())
    secrets = ["file:key", "env:KEY", f"whsec_YQ=={end}"]
    text = f"[feeds]\nb.provider = 'resend'\na = {{ provider = 'resend', secrets = {json.dumps(secrets)} }}"
    feeds = load(text, KEY=f"whsec_YQ=={end}", RECONCILER_FEEDS__B__SECRETS=f"env:KEY{end}").feeds
    assert feeds["a"].secrets == ("whsec_YQ==",) * 3
    assert feeds["b"].secrets == ("whsec_YQ==",)


KEYS = (ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(public_exponent=65537, key_size=2048))


def public(key):
    return base64.b64encode(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()


@pytest.mark.parametrize(("provider", "key"), [("sendgrid", KEYS[0]), ("postal", KEYS[1])])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_public_key_without_armour_may_be_wrapped(load, tmp_path, provider, key, line_end):
    wrapped = line_end.join(textwrap.wrap(public(key), 64))
    (tmp_path / "key").write_bytes(f"{wrapped}{line_end}".encode())
    text = f"[feeds.a]\nprovider = '{provider}'\nsecrets = ['file:key', 'env:KEY']"
    assert load(text, KEY=wrapped).feeds["a"].secrets == (wrapped,) * 2


def test_a_key_that_signs_sessions_may_be_wrapped(load):
    key = f"{'A' * 64}\n{'B' * 22}=="
    assert load("[ui]\nsession_key = 'env:KEY'", KEY=f"{key}\n").ui.session_key == key


TWO = ("the-old-key\nthe-new-key\n", f"{'0a' * 32}\n{'1b' * 32}", "\n".join(map(public, KEYS)))


@pytest.mark.parametrize("two", TWO, ids=["words", "hex", "public keys"])
def test_a_file_with_two_secrets_is_refused_and_a_key_in_pem_is_one(load, problems, tmp_path, two):
    text = "[feeds.a]\nprovider = 'mailgun'\nsecrets = 'file:keys'"
    (tmp_path / "keys").write_text(two)
    (line,) = problems(text)
    assert line.endswith(
        "has several lines in the file keys: keep each secret in a file of its own, and list all of them"
    )
    pem = "-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----"
    (tmp_path / "keys").write_text(pem + "\n")
    assert load(text).feeds["a"].secrets == (pem,)


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


@pytest.mark.parametrize("secret", ["whpk_YWJj", "whsec_", "whsec_no base64", "re_an_api_key"])
def test_a_secret_that_can_verify_nothing_is_refused_with_the_one_that_is_wanted(problems, secret):
    (line,) = problems(f"[feeds.a]\nprovider = 'resend'\nsecrets = ['whsec_YQ==', '{secret}', 'bearer:t']")
    assert line == (
        "reconciler.toml:3: feeds.a.secrets[1] is no signing secret of a webhook, so it verifies nothing: "
        "set the one that begins with whsec_, whole"
    )


def test_a_topic_that_is_no_arn_is_refused(problems):
    (line,) = problems("[feeds.a]\nprovider = 'ses'\ntopics = ['ses-events']")
    assert line == (
        "reconciler.toml:3: feeds.a.topics[0] is no ARN of an SNS topic: write arn:aws:sns:REGION:ACCOUNT:NAME"
    )


def test_no_error_repeats_a_secret(problems):
    text = (
        "[database]\nurl = 'mysql://u:hidden@h/d'\n"
        "[feeds.a]\nprovider = 'ses'\nsecrets = ['basic:hidden', {hidden = 1}]\n"
        "[feeds.b]\nprovider = 'ses'\nsecrets = {hidden = 'hidden'}\n"
        "[feeds.d]\nprovider = 'resend'\nsecrets = 'whpk_hidden'"
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


def test_the_database_in_use_is_named_without_its_password(load, tmp_path):
    url = "postgresql://app:s3cret@db.internal/mail"
    assert load(RECONCILER_DATABASE__URL=url).database_in_use() == "postgresql://app:***@db.internal/mail"
    assert load('database.data_dir = "here"').database_in_use() == f"embedded in {tmp_path / 'here'}"
