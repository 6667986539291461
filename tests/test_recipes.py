# SPDX-License-Identifier: Apache-2.0
"""What docs/recipes.md tells users of Django, SQLAlchemy and Celery to write works as it stands there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent

import asyncpg
import pytest
from snippets import ROOT, block

from reconciler.breakable.esp import Esp, esp


@pytest.fixture
async def provider() -> AsyncIterator[Esp]:
    async with esp("mailgun") as running:
        yield running


async def run(folder: Path, script: str, dsn: str, url: str) -> list[object]:
    """Run a script in a process of its own; return what it printed, a JSON value a line."""
    (folder / "main.py").write_text(script)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "main.py",
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "DSN": dsn, "URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in out.splitlines()]


DJANGO = dedent("""
    import json, os
    import django
    from urllib.parse import parse_qs, urlsplit
    from django.conf import settings

    dsn = urlsplit(os.environ["DSN"])
    settings.configure(DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": dsn.path[1:], "USER": dsn.username,
        "HOST": dsn.hostname or parse_qs(dsn.query)["host"][0], "PORT": dsn.port or "",
    }})
    django.setup()
    from django.db import connection, transaction
    from reconciler.guard_sync import GuardError
    from receipts import sending
    from receipts.orders import place_order

    sending.URL = os.environ["URL"]
    print(json.dumps(sending.send_receipt(1, "ada@example.com", "thanks").outcome))
    print(json.dumps(sending.send_receipt(1, "ada@example.com", "thanks").outcome))
    with transaction.atomic():
        try:
            sending.send_receipt(2, "ada@example.com", "thanks")
        except GuardError as error:
            print(json.dumps(str(error)))
    place_order(3, "ada@example.com", "thanks")
    connection.close()
    sending.session.close()
""")


async def test_a_django_application_sends_each_receipt_once(
    db: asyncpg.Pool, dsn: str, provider: Esp, tmp_path: Path
) -> None:
    (tmp_path / "receipts").mkdir()
    (tmp_path / "receipts/sending.py").write_text(block("docs/recipes.md", "python", "# receipts/sending.py"))
    (tmp_path / "receipts/orders.py").write_text(block("docs/recipes.md", "python", "# receipts/orders.py"))
    first, again, refused = await run(tmp_path, DJANGO, dsn, provider.url)
    assert (first, again) == ("sent", "already_sent")
    assert "inside a transaction" in str(refused)
    rows = await db.fetch("SELECT send_key, state FROM send_log ORDER BY send_key")
    assert [tuple(row) for row in rows] == [
        ("order.receipt:1:ada@example.com", "sent"),
        ("order.receipt:3:ada@example.com", "sent"),
    ]
    assert sorted(provider.taken.values()) == [1, 1]


SQLALCHEMY = dedent("""
    import json, os
    import requests
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session
    from reconciler import guard_sync
    from recipe import Connections

    engine = create_engine(os.environ["DSN"].replace("postgresql://", "postgresql+psycopg://"))
    pool = Connections(engine)
    held = []

    def submit(claim):
        held.append(engine.pool.checkedout())
        with requests.Session() as session:
            return session.post(os.environ["URL"], data=claim.stamp.into({"to": "a@example.com"}))

    for key in ("order:1", "order:1"):
        print(json.dumps(guard_sync.send_once(pool, key, "mailgun-main", submit, provider="mailgun").outcome))
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        inside = session.connection().connection.driver_connection
        print(json.dumps(guard_sync.enqueue(inside, "order:2", "mailgun-main")))
        session.rollback()
    print(json.dumps(held))
    engine.dispose()
""")


async def test_the_engine_of_sqlalchemy_lends_its_connections_and_gets_them_back_before_the_call(
    db: asyncpg.Pool, dsn: str, provider: Esp, tmp_path: Path
) -> None:
    (tmp_path / "recipe.py").write_text(block("docs/recipes.md", "python", "class Connections"))
    printed = await run(tmp_path, SQLALCHEMY, dsn, provider.url)
    assert printed == ["sent", "already_sent", "enqueued", [0]]
    assert await db.fetchval("SELECT string_agg(send_key, ' ') FROM send_log") == "order:1"  # rolled back, the other


CELERY = dedent("""
    import json, os
    import requests
    from celery.contrib.testing.worker import start_worker
    import recipe

    answers = []

    def post(form, seconds):
        answers.append(None)
        url = "http://127.0.0.1:1/" if len(answers) == 1 else os.environ["URL"]  # where nobody listens
        with requests.Session() as session:
            return session.post(url, data=form, timeout=seconds / 2)

    recipe.DSN, recipe.post = os.environ["DSN"], post
    recipe.app.conf.update(result_backend="cache+memory://", worker_hijack_root_logger=False)
    retry = recipe.send_mail.retry
    recipe.send_mail.retry = lambda countdown: retry(countdown=0.1)
    with start_worker(recipe.app, perform_ping_check=False, pool="solo"):
        recipe.enqueue_receipt(1, "ada@example.com")
        recipe.enqueue_receipt(1, "ada@example.com")
        recipe.enqueue_receipt(2, "ada@example.com")
        import psycopg, time
        with psycopg.connect(recipe.DSN, autocommit=True) as connection:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                sent = connection.execute("SELECT count(*) FROM send_log WHERE state = 'sent'").fetchone()[0]
                if sent == 2:
                    break
                time.sleep(0.05)
    print(json.dumps(sent))
""")


async def test_a_celery_job_that_comes_again_sends_nothing_twice(
    db: asyncpg.Pool, dsn: str, provider: Esp, tmp_path: Path
) -> None:
    (tmp_path / "recipe.py").write_text(block("docs/recipes.md", "python", "Celery("))
    assert await run(tmp_path, CELERY, dsn, provider.url) == [2]
    assert sorted(provider.taken.values()) == [1, 1]
    rows = await db.fetch("SELECT attempt - not_sent_attempts AS reached FROM send_log")
    assert [row["reached"] for row in rows] == [1, 1]
