# SPDX-License-Identifier: Apache-2.0
"""The command line as a test runs it: in this process, on the test's database. conftest gives its fixtures to all."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner, Result

from reconciler.cli.commands import cli

CONFIG = """
[feeds.mg]
provider = "mailgun"
secrets = ["key-0123456789abcdef"]
[feeds.resend-main]
provider = "resend"
secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "reconciler.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def logs_as_before() -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = before[0]
    logging.root.setLevel(before[1])
    structlog.reset_defaults()


class Program:
    """Runs commands on a test's database."""

    def __init__(self, config: Path, dsn: str) -> None:
        self.env: dict[str, str | None] = {"RECONCILER_CONFIG": str(config), "RECONCILER_DATABASE__URL": dsn}

    async def __call__(self, *args: str, stdin: str | None = None) -> Result:
        done = await asyncio.to_thread(CliRunner().invoke, cli, args, input=stdin, env=self.env)
        assert "Traceback" not in done.output
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    async def json(self, *args: str) -> Any:
        done = await self(*args, "--json")
        return json.loads(done.stdout)


@pytest.fixture
def program(config: Path, dsn: str, logs_as_before: None) -> Program:
    return Program(config, dsn)
