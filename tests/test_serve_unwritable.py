# SPDX-License-Identifier: Apache-2.0
"""`reconciler serve` where it may write nothing: it takes events all the same, or says in one line what it needs."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from serving import sample, serving, start, write_config

from reconciler.database.migrate import migrate
from reconciler.database.postgres import EmbeddedPostgres

NOWHERE = Path("/proc/self/task")
"""A folder that is there, and in which nobody can make anything, not even root."""

ARCHIVE = '[archive]\nurl = "s3://mail/raw"\nregion = "eu-west-1"\nendpoint_url = "http://127.0.0.1:9"\n'
pytestmark = pytest.mark.skipif(not NOWHERE.exists(), reason="there is no /proc here")
AWAY = "postgresql://postgres@127.0.0.1:1/nowhere"


def settings(folder: Path, data_dir: Path, archive: str) -> Path:
    config = write_config(folder, archive)
    config.write_text(config.read_text().replace(str(folder / "pg"), str(data_dir)))
    return config


async def test_a_folder_that_can_not_be_written_keeps_no_event_out_once_the_database_is_there(tmp_path: Path) -> None:
    """Neither of the whole process nor of a mere receiver."""
    database = EmbeddedPostgres(tmp_path / "own", fast=True)
    database.start()
    await migrate(database.dsn())
    database.stop()
    config = settings(tmp_path, NOWHERE, f'{ARCHIVE}spool = "{tmp_path / "spool"}"\n')
    url = {"RECONCILER_DATABASE__URL": database.dsn()}
    try:
        async with serving(config, **url) as whole, serving(config, "--only", "receiver", **url) as half:
            for server in (whole, half):
                await server.told("database_unavailable")
                assert await server.deliver("mg", sample("mg", "accepted", "key-0")) == 503
            database.start()
            for server in (whole, half):
                await server.becomes(200)
                assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200
                assert await server.stop() == 0
                assert server.errors == []
    finally:
        database.remove()


@pytest.mark.parametrize("data_dir", [NOWHERE, NOWHERE / "folder"], ids=["there", "not there"])
async def test_a_spool_that_can_not_be_written_ends_it_with_one_line_though_the_database_is_away(
    tmp_path: Path, data_dir: Path
) -> None:
    config = settings(tmp_path, data_dir, f'{ARCHIVE}spool = "{data_dir}"\n')
    async with aiohttp.ClientSession() as session:
        server = await start(config, session, "--only", "receiver", RECONCILER_DATABASE__URL=AWAY)
        assert await server.ended() == 1
    (line,) = server.errors
    assert line.startswith("reconciler: archive.spool can't be used (")
    assert line.endswith("set it to a folder of ours")
