# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens: made by a command, kept as hashes, read from file and environment, served by the right process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program import Program
from serving import serving, write_config

from reconciler.configuration.settings import load_settings
from reconciler.configuration.sources import ConfigError
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.tokens import Caller, Tokens, hash_of, new_token
from webhooks.registry import PROVIDERS

ANN, BOB = Caller("ann", frozenset({"send"})), Caller("bob", frozenset({"operate"}))
EMPTY = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
OTHER = "sha256:" + "0" * 64


def test_a_token_is_known_by_its_hash() -> None:
    first, second, other = new_token(), new_token(), new_token()
    tokens = Tokens([(hash_of(first), ANN), (hash_of(second), ANN), (hash_of(other), BOB)])
    assert [tokens.caller(f"Bearer {token}") for token in (first, second, other)] == [ANN, ANN, BOB]
    assert tokens.caller(f"bearer  {first}") == ANN
    for wrong in (None, "", f"Bearer {first[:-1]}", f"Bearer {first} ", f"Bearer {hash_of(first)}", f"Basic {first}"):
        assert tokens.caller(wrong) is None


def test_the_hash_of_nothing_lets_nobody_in() -> None:
    tokens = Tokens([(EMPTY, ANN)])
    assert [tokens.caller(given) for given in (None, "", "Bearer", "Bearer ")] == [None] * 4


def test_tokens_are_long_and_never_the_same() -> None:
    made = {new_token() for _ in range(1000)}
    assert len(made) == 1000
    assert min(map(len, made)) >= 48


async def test_the_command_prints_a_token_and_the_lines_that_let_it_in(program: Program, tmp_path: Path) -> None:
    shown = (await program("token", "--name", "shop", "--scope", "send", "--scope", "operate")).stdout
    token = next(line for line in shown.splitlines() if line.startswith("#")).rpartition(" ")[2]
    config = tmp_path / "tokens.toml"
    config.write_text(shown)
    known = load_settings(config, {}, PROVIDERS).api.tokens["shop"]
    assert (known.hash, known.scopes) == ((hash_of(token),), ("send", "operate"))
    made = await program.json("token")
    assert made["hash"] == hash_of(made["token"])
    assert "letters, digits, _ and - only" in (await program("token", "--name", "we ird")).stderr


def test_tokens_are_named_in_the_environment_too(tmp_path: Path) -> None:
    config = tmp_path / "reconciler.toml"
    config.write_text(f'[api.tokens."shop.eu"]\nhash = "{EMPTY}"')
    environment = {
        "RECONCILER_API__TOKENS__SHOP_EU__SCOPES": "send,operate",
        "RECONCILER_API__TOKENS__NIGHT_JOB__HASH": "env:HASH",
        "HASH": OTHER,
        "RECONCILER_API__IDEMPOTENCY_RETENTION": "48h",
    }
    settings = load_settings(config, environment, PROVIDERS)
    assert settings.api.tokens["shop.eu"].scopes == ("send", "operate")
    assert settings.api.tokens["night-job"].hash == (OTHER,)
    assert settings.masked()["api"]["idempotency_retention"] == "2d"
    assert settings.masked()["api"]["tokens"]["night-job"]["hash"] == ["***"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[api.tokens.shop]\nhash = "my password"', "api.tokens.shop.hash[0] is no hash of a token"),
        ('[api.tokens.shop]\nhsah = "x"', "did you mean api.tokens.shop.hash?"),
        (f'[api.tokens.shop]\nhash = "{EMPTY}"\nscopes = "admin"', "must be 'send', 'operate' or 'read'"),
        ('[api]\nidempotency_retention = "1m"', "idempotency_retention"),
        ("[api.tokens.shop]\nhash = []", "api.tokens.shop.hash is empty"),
        (f'[api.tokens.shop]\nhash = "{EMPTY}"\nscopes = []', "api.tokens.shop.scopes is empty"),
        (
            f'[api.tokens.shop]\nhash = "{EMPTY}"\n[api.tokens.ops]\nhash = ["{OTHER}", "{EMPTY}"]',
            'api.tokens has one hash under "shop" and "ops"',
        ),
    ],
)
def test_a_mistaken_token_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "reconciler.toml"
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(config, {}, PROVIDERS)
    assert f"{config}:" in str(caught.value)
    assert says in str(caught.value)
    assert "my password" not in str(caught.value)


@pytest.mark.parametrize(("arguments", "served"), [((), True), (("--only", "receiver"), False)])
async def test_the_process_that_runs_passes_serves_the_api(
    tmp_path: Path, dsn: str, arguments: tuple[str, ...], served: bool
) -> None:
    token = new_token()
    config = write_config(tmp_path, f'[rules]\nsubmit_within = "50s"\n[api.tokens.shop]\nhash = "{hash_of(token)}"')
    async with serving(config, *arguments, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "call-1"}
        body = {"key": "order:1", "feed": "mg"}
        async with server.session.post(f"{server.url}/v1/sends", json=body, headers=headers) as answer:
            assert answer.status == (201 if served else 404)
            assert not served or 40 < (await answer.json())["seconds_left"] <= 50
        assert await server.status("/v1/openapi.json") == (200 if served else 404)
        assert await server.status("/v1/sends/order:1") == (401 if served else 404)
        assert await server.stop() == 0
    assert token not in json.dumps(server.lines)
    EmbeddedPostgres(tmp_path / "pg").stop()


async def test_before_the_database_was_reached_callers_are_asked_to_repeat(tmp_path: Path) -> None:
    token = new_token()
    config = write_config(tmp_path, f'[api.tokens.shop]\nhash = "{hash_of(token)}"')
    away = "postgresql://nobody@127.0.0.1:1/none"
    async with serving(config, RECONCILER_DATABASE__URL=away) as server:
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "call-1"}
        body = {"key": "order:1", "feed": "mg"}
        async with server.session.post(f"{server.url}/v1/sends", json=body, headers=headers) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert await server.stop() == 0
