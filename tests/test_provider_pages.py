# SPDX-License-Identifier: Apache-2.0
"""docs/providers says what the code says, and what its pages show works as they show it."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path

import provider_pages as pages
import pytest
from conformance_kit import NOW, SCHEMES
from program import Program
from snippets import blocks

from reconciler import composition
from reconciler.configuration.settings import Settings, load_settings
from webhooks.asking import Registers
from webhooks.fetch import open_fetch
from webhooks.registry import PROVIDERS

each_provider = pytest.mark.parametrize("name", PROVIDERS)
TRIGGER = re.compile(r"`reconciler trigger ([\w. ]+) --feed ([\w-]+) --key KEY`")
TITLES = ("Set it up", "Try it", "Change the secret", "Traps", "The stamp", "Events", "All that is known")
UNSIGNED = "query:secret=0123456789"


def text(name: str) -> str:
    return pages.page(name).read_text("utf-8")


@pytest.mark.parametrize(("path", "name"), pages.pages().items(), ids=lambda one: getattr(one, "stem", ""))
def test_what_a_page_takes_from_the_code_is_as_the_code_says(path: Path, name: str) -> None:
    assert pages.made(path.read_text("utf-8"), name) == path.read_text("utf-8"), "make docs writes it anew"


def test_every_provider_has_a_page_with_all_of_its_parts_and_no_page_is_left_over() -> None:
    assert {path.stem for path in pages.FOLDER.iterdir()} == {*PROVIDERS, "index"}
    for name in PROVIDERS:
        assert pages.PART.findall(text(name)) == ["steps", "stamp", "events", "facts"]
        assert tuple(re.findall(r"^## (.*)$", text(name), re.MULTILINE)) == TITLES


def settings_of(name: str, folder: Path) -> Settings:
    """Load the settings that a provider's page shows, with a secret that verifies."""
    (shown,) = blocks(f"docs/providers/{name}.md", "toml")
    scheme = SCHEMES.get(name)
    secret = scheme.secrets[0] if scheme and scheme.setting == "secrets" else UNSIGNED
    for file in re.findall(r"file:/run/secrets/([\w-]+)", shown):
        (folder / file).write_text(secret if f'secrets = ["file:/run/secrets/{file}"]' in shown else "api-key")
    file = folder / "reconciler.toml"
    file.write_text(
        f'[receiver]\npublic_url = "https://hooks.example.com"\n{shown}'.replace("/run/secrets", str(folder))
    )
    return load_settings(file, {"HOME": str(folder)}, PROVIDERS)


@each_provider
def test_the_settings_of_a_page_are_one_feed_of_it_without_a_warning(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    assert [(feed, one.provider) for feed, one in settings.feeds.items()] == [(pages.feed(name), name)]
    assert settings.feeds[pages.feed(name)].secrets or settings.feeds[pages.feed(name)].topics
    assert settings.warnings() == []


@each_provider
async def test_the_sample_that_a_page_names_is_signed_and_proves_acceptance(name: str, tmp_path: Path) -> None:
    feed = composition.feeds(settings_of(name, tmp_path))[pages.feed(name)]
    named = TRIGGER.findall(text(name))
    assert bool(named) == ("can't sign" not in text(name))
    for kind, target in named:
        assert target == feed.name
        sample = PROVIDERS[name].sample(kind, "e" * 48, feed, NOW + timedelta(seconds=1))
        async with open_fetch() as fetch:
            verdict = await PROVIDERS[name].verify(sample, feed, NOW, fetch)
        assert type(verdict).__name__ == "Verified", verdict
        assert {event.testimony for event in PROVIDERS[name].parse(sample).events} == {"accepted"}


@each_provider
async def test_the_stamp_of_a_page_is_what_the_program_prints(name: str, program: Program, config: Path) -> None:
    config.write_text(f'[feeds.{pages.feed(name)}]\nprovider = "{name}"\n')
    command = re.search(r"`reconciler (stamp --json [^`]+)`", text(name))
    assert command is not None
    printed = json.loads((await program(*command[1].split())).stdout)
    (shown,) = blocks(f"docs/providers/{name}.md", "json")
    assert json.loads(shown) == printed


@each_provider
def test_a_page_offers_to_register_the_webhook_only_where_the_program_can(name: str) -> None:
    by_hand, _, _ = text(name).partition("## All that is known")
    assert ("reconciler endpoints apply" in by_hand) == isinstance(PROVIDERS[name], Registers)


@each_provider
def test_a_page_offers_a_back_fill_and_a_key_of_the_api_only_where_the_program_can_use_it(name: str) -> None:
    facts = PROVIDERS[name].facts
    assert "reconciler backfill --feed" not in text(name) or facts.lists
    (shown,) = blocks(f"docs/providers/{name}.md", "toml")
    assert ("api_key" in shown) == (facts.finds_by != "nothing" or facts.lists)
