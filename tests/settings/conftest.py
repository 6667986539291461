# SPDX-License-Identifier: Apache-2.0
"""Fixtures that load settings from a text."""

from __future__ import annotations

import pytest

from reconciler.configuration.settings import ConfigError, load_settings
from reconciler.errors import UserError
from webhooks.registry import PROVIDERS


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load settings from a text, in a folder of their own."""
    monkeypatch.chdir(tmp_path)

    def from_text(text="", **environ):
        file = tmp_path / "reconciler.toml"
        file.write_text(text, encoding="utf-8")
        return load_settings(file, environ, PROVIDERS)

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
