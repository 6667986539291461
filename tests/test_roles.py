# SPDX-License-Identifier: Apache-2.0
"""Each part of the program does its whole job with the rights that `migrate --grant` gives, and nothing beyond it."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import aiohttp
import asyncpg
import psycopg
import pytest
from campaign_kit import loaded, people
from kit import claim, confirm, event, heard_neighbours, make_older, old_claim
from program import Program
from serving import ROOT, sample, serving, until, write_config

from reconciler import campaign, guard, guard_many, guard_sync
from reconciler.database.grants import KINDS, RIGHTS, functions, grant, relations
from reconciler.database.migrate import MigrationError, default_folder, migrate
from reconciler.idempotency import Store
from reconciler.tokens import hash_of

TOKEN = "espr_of-the-shop"
API = f'[api.tokens.shop]\nhash = ["{hash_of(TOKEN)}"]\nscopes = ["send", "operate"]'
README_OF_OLD = """
GRANT USAGE ON SCHEMA public TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role};
GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role};
"""
Dsns = Mapping[str, str]


@asynccontextmanager
async def made(dsn: str, *kinds: str) -> AsyncIterator[Dsns]:
    """Make a role for each kind; give the URLs by which they log in."""
    names = {kind: f"{kind}_{uuid.uuid4().hex[:12]}" for kind in kinds}
    owner = await asyncpg.connect(dsn)
    for name in names.values():
        await owner.execute(f"CREATE ROLE {name} LOGIN")
    try:
        yield {kind: dsn.replace("postgres@", f"{name}@") for kind, name in names.items()}
    finally:
        for name in names.values():
            await owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")
        await owner.close()


def role_of(dsn: str) -> str:
    return dsn.partition("//")[2].partition("@")[0]


@pytest.fixture
async def roles(dsn: str) -> AsyncIterator[Dsns]:
    """A role for each kind, granted what it needs."""
    async with made(dsn, *KINDS) as dsns:
        await grant(dsn, {role_of(of): [kind] for kind, of in dsns.items()})
        yield dsns


# Each does its whole job


async def test_a_receiver_of_its_role_stores_counts_and_makes_partitions(
    tmp_path: Path, db: asyncpg.Pool, roles: Dsns
) -> None:
    newest = await db.fetchval("SELECT max(month) FROM provider_event_months() AS month")
    await db.execute(f"DROP TABLE provider_event_{newest:%Y%m}")
    config = write_config(tmp_path)
    async with serving(config, "--only", "receiver", RECONCILER_DATABASE__URL=roles["receiver"]) as server:
        await server.becomes(200)
        for feed in ("mg", "sg", "re"):
            assert await server.deliver(feed, sample(feed, "delivered", f"order-{feed}")) == 200
        assert await server.stop() == 0
    assert await db.fetchval("SELECT count(DISTINCT feed) FROM provider_event") == 3
    assert await db.fetchval("SELECT count(*) FROM feed_delivery WHERE outcome = 'stored'") == 3
    assert newest == await db.fetchval("SELECT max(month) FROM provider_event_months() AS month")
    assert complaints(server.lines) == []


async def test_a_reconciler_of_its_role_passes_tells_prunes_and_serves_sends(
    tmp_path: Path, db: asyncpg.Pool, roles: Dsns
) -> None:
    await heard_neighbours(db)
    await old_claim(db, "silent")
    await old_claim(db, "heard")
    await event(db, "heard")
    async with serving(
        write_config(tmp_path, API), "--only", "reconciler", RECONCILER_DATABASE__URL=roles["reconciler"]
    ) as server:
        await server.becomes(200)

        async def decided() -> bool:
            query = "SELECT count(*) FROM verdict WHERE wire_key IN ('silent', 'heard')"
            return await db.fetchval(query) == 2

        await until(decided, "a verdict for both")
        await send_over_http(server.session, server.url, db)
        assert await server.stop() == 0
    assert complaints(server.lines) == []
    assert await db.fetchval("SELECT pruned_at IS NOT NULL FROM installation")
    assert await db.fetchval("SELECT heartbeat > 0 FROM feed_state WHERE feed = '*'")


async def send_over_http(session: aiohttp.ClientSession, url: str, db: asyncpg.Pool) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}

    async def post(path: str, status: int, **body: object) -> dict[str, object]:
        named = headers | {"Idempotency-Key": f'"{uuid.uuid4()}"'}
        async with session.post(f"{url}/v1/{path}", json=body, headers=named) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json(content_type=None)

    claimed = await post("sends", 201, key="order:1", feed="mg")
    await post("sends", 409, key="order:1", feed="mg")
    await post(f"sends/{quote('order:1')}/confirm", 200, fence=claimed["fence"], message_id="m-1")
    await post("enqueue", 201, key="order:2", feed="mg")
    claimed = await post("sends", 201, key="order:3", feed="mg")
    await post("sends/order:3/fail", 200, fence=claimed["fence"], reason="422", not_sent=False)
    await make_older(db, "order:3", timedelta(seconds=61))
    await post("sends/order:3/operator/release", 200, reason="the address was put right")
    async with session.get(f"{url}/v1/sends/order:1", headers=headers) as answer:
        assert (await answer.json())["state"] == "sent"


def complaints(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    return [line for line in lines if line["level"] != "info" and line["event"] != "configuration_warning"]


async def test_a_sender_of_its_role_claims_confirms_and_fails_by_every_road(db: asyncpg.Pool, roles: Dsns) -> None:
    await loaded(db, people(3))
    async with asyncpg.create_pool(roles["sender"], min_size=1, max_size=2) as pool:
        sent = await guard.send_once(pool, "order:1", "mg", answered, provider="mailgun")
        again = await guard.send_once(pool, "order:1", "mg", answered, provider="mailgun")
        assert (sent.outcome, again.outcome) == ("sent", "already_sent")
        many = await guard_many.claim_many(pool, {"order:2": {}, "order:3": {"recipient": "a@example.com"}}, "mg")
        assert await guard.confirm(pool, many[0], "m-2") == "sent"
        assert await guard.fail(pool, many[1], "refused", not_sent=True) == "released"
        (free,) = await guard.claim_released(pool, "mg", 10)
        assert (await guard.submit_claimed(pool, free.claim, answered)).outcome == "sent"
        async with pool.acquire() as connection, connection.transaction():
            assert await guard.enqueue(connection, "order:4", "mg") == "enqueued"
        batch = await pool.fetchval("CALL send_claim_campaign_commit('spring', 2, '{}')")
        assert len(json.loads(batch)) == 2
        assert await campaign.standing(pool, "spring") == "active"
    assert guard_sync_sends(roles["sender"]) == "sent"
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'sent'") == 4


async def answered(_claim: guard.Claim) -> str:
    return "message-id"


def guard_sync_sends(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return guard_sync.send_once(connection, "order:5", "mg", lambda _: "m-5", provider="mailgun").outcome


async def test_an_applications_own_middleware_keeps_its_records(db: asyncpg.Pool, roles: Dsns) -> None:
    await claim(db, "order:1")
    async with asyncpg.create_pool(roles["middleware"], min_size=1, max_size=2) as pool:
        store = Store(pool)
        run = await store.begin("id", "content")
        await store.name(run, "order:1")
        assert await store.give_up(run)
        assert (await store.begin("id", "content"))["send"] == "claimed"
        assert await store.take_over("id", run.number) is None
        await store.free(await store.begin("other", "content"))


COMMANDS_THAT_READ = (
    ("status",),
    ("why", "order:1"),
    ("report", "duplicates"),
    ("report", "vanished"),
    ("report", "unknown"),
    ("report", "drift"),
    ("report", "overlaps"),
    ("report", "sources"),
    ("outbox", "list"),
    ("campaign", "status", "spring"),
    ("campaign", "list"),
    ("prune", "--dry-run"),
    ("what-if", "--rules", "reconciler.toml", "--since", "7d"),
    ("migrate", "--check"),
)
COMMANDS_THAT_WRITE = (
    ("reconcile",),
    ("release", "order:1", "--reason", "not in the log"),
    ("confirm", "order:2", "--reason", "seen"),
    ("fail", "order:3", "--reason", "obsolete"),
    ("pause", "--feed", "mg", "--reason", "incident"),
    ("resume", "--feed", "mg", "--reason", "over"),
    ("outbox", "retry", "--all"),
    ("suppress", "add", "b@example.com", "--reason", "asked to"),
    ("suppress", "list"),
    ("suppress", "remove", "b@example.com"),
    ("campaign", "load", "autumn", "people.csv", "--feed", "mg"),
    ("campaign", "pause", "autumn", "--reason", "wrong picture"),
    ("campaign", "resume", "autumn"),
    ("campaign", "cancel", "autumn", "--yes"),
    ("import", "sends.csv", "--feed", "mg"),
    ("replay", "saved.json", "--feed", "mg"),
    ("prune",),
    ("forget", "a@example.com"),
)


async def test_every_command_of_an_operator_works_as_the_reconcilers_role(
    config: Path, db: asyncpg.Pool, roles: Dsns, logs_as_before: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_bytes(people(3, first=10))
    (tmp_path / "sends.csv").write_text("key,claimed_at\nold:1,2026-11-02T08:00:00Z\n")
    (tmp_path / "saved.json").write_bytes(sample("mg", "delivered", "order-7").body)
    await some_sends(db)
    program = Program(config, roles["reconciler"])
    for command in (*COMMANDS_THAT_READ, *COMMANDS_THAT_WRITE):
        done = await program(*command)
        assert done.exit_code == 0, f"{command}: {done.output}"


async def test_a_reader_sees_what_there_is_to_see_and_moves_nothing(
    config: Path, db: asyncpg.Pool, roles: Dsns, logs_as_before: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    await some_sends(db)
    program = Program(config, roles["reader"])
    for command in COMMANDS_THAT_READ:
        done = await program(*command)
        assert done.exit_code == 0, f"{command}: {done.output}"
    for command in (("release", "order:1", "--reason", "x"), ("pause", "--reason", "x"), ("reconcile",)):
        done = await program(*command)
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
        assert "permission denied" in done.stderr


async def some_sends(db: asyncpg.Pool) -> None:
    await loaded(db, people(3))
    for key in ("order:1", "order:2", "order:3"):
        await old_claim(db, key, recipient="a@example.com")
    await event(db, "order:2", "none", kind="opened")


# None does what it must not

FORBIDDEN = {
    "receiver": (
        "SELECT count(*) FROM send_log",
        "INSERT INTO send_log (wire_key, send_key, feed) VALUES ('k', 'k', 'mg')",
        "UPDATE send_log SET state = 'sent'",
        "DELETE FROM send_log",
        "SELECT * FROM send_claim('k', 'mg', '{}')",
        "SELECT * FROM send_confirm('k', 1, 'm', '{}')",
        "SELECT raw FROM provider_event",
        "SELECT recipient FROM provider_event_undated",
        "UPDATE provider_event SET testimony = 'accepted'",
        "DELETE FROM provider_event",
        "INSERT INTO provider_event (wire_key, source, fence) VALUES ('k', 'sender', 1)",
        "SELECT * FROM verdict",
        "UPDATE feed_state SET breaker_at = NULL",
        "UPDATE installation SET namespace = 'other'",
        "SELECT nextval('send_fence')",
        "SELECT provider_event_drop_month('2020-01-01', '7 days')",
    ),
    "reconciler": (
        "CREATE TABLE mine (id int)",
        "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE SCHEMA mine",
        "DROP TABLE verdict",
        "DROP TABLE provider_event_undated",
        "ALTER TABLE send_log DISABLE TRIGGER send_tell",
        "ALTER TABLE send_log ADD COLUMN mine int",
        "ALTER FUNCTION send_claim(text, text, jsonb) SECURITY INVOKER",
        "TRUNCATE send_log",
        "CREATE INDEX ON send_log (feed)",
        "UPDATE installation SET namespace = 'other'",
        "UPDATE installation SET recipient_salt = NULL",
        "SELECT setval('send_fence', 1)",
        "DELETE FROM feed_state",
        "UPDATE schema_migration SET sha256 = ''",
        "UPDATE provider_event_undated SET raw = ''",
    ),
    "sender": (
        "UPDATE send_log SET state = 'sent'",
        "SELECT recipient FROM send_log",
        "DELETE FROM send_log",
        "SELECT wire_key FROM provider_event",
        "SELECT raw FROM provider_event_undated",
        "INSERT INTO provider_event (wire_key) VALUES ('k')",
        "INSERT INTO verdict (wire_key) VALUES ('k')",
        "UPDATE feed_state SET paused_at = NULL",
        "UPDATE campaign SET state = 'active'",
        "SELECT * FROM suppression",
        "SELECT recipient_salt FROM installation",
        "SELECT body FROM idempotency",
        "SELECT * FROM operator_release('k', 'note', 'me')",
        "SELECT * FROM operator_decide('k', 'sent', 'note', 'me')",
        "SELECT * FROM send_adopt('k', 'mg', '{}')",
        "SELECT send_note_asked_again('k', 'already_sent', now())",
        "SELECT nextval('send_fence')",
        "SELECT provider_event_make_partitions(1000)",
        "CREATE FUNCTION send_heard(text, text, text, text, varchar) RETURNS text LANGUAGE sql AS 'SELECT NULL::text'",
    ),
    "middleware": (
        "SELECT recipient FROM send_log",
        "UPDATE send_log SET state = 'sent'",
        "SELECT * FROM send_claim('k', 'mg', '{}')",
        "SELECT wire_key FROM provider_event",
    ),
    "reader": (
        "UPDATE send_log SET state = 'sent'",
        "SELECT raw FROM provider_event",
        "SELECT recipient_salt FROM installation",
        "SELECT body FROM idempotency",
        "SELECT * FROM send_claim('k', 'mg', '{}')",
        "SELECT * FROM operator_decide('k', 'sent', 'note', 'me')",
        "INSERT INTO feed_state (feed, paused_at) VALUES ('mg', now())",
        "SELECT send_fence_lift('*')",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_role_can_not_do_what_it_must_not(kind: str, db: asyncpg.Pool, roles: Dsns) -> None:
    await claim(db, "k")
    connection = await asyncpg.connect(roles[kind])
    try:
        for statement in FORBIDDEN[kind]:
            assert await refusal(connection, statement) == "42501", statement
    finally:
        await connection.close()


async def refusal(connection: asyncpg.Connection, statement: str) -> str | None:
    """Return PostgreSQL's code for why it refuses a statement, None where it does not."""
    try:
        await connection.fetch(statement)
    except asyncpg.PostgresError as error:
        return error.sqlstate
    return None


async def test_a_function_that_a_caller_puts_in_the_way_is_not_called(db: asyncpg.Pool, roles: Dsns) -> None:
    """What runs with the owner's right looks for names in the product's schema first, never among temporary ones."""
    fence = (await claim(db, "k"))["fence"]
    connection = await asyncpg.connect(roles["sender"])
    await connection.execute("CREATE TEMP TABLE installation AS SELECT 'other'::text AS namespace")
    await connection.execute("CREATE TEMP TABLE send_log (wire_key text)")
    await connection.execute("SET search_path = pg_temp, public")
    assert await confirm(connection, "k", fence) == "sent"
    await connection.close()
    assert await db.fetchval("SELECT state FROM send_log WHERE wire_key = 'k'") == "sent"


# The list is whole, and may be given again


async def test_the_list_names_all_that_the_schema_has(db: asyncpg.Pool) -> None:
    found = await db.fetch("""
        SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'S')
          AND oid NOT IN (SELECT inhrelid FROM pg_inherits)
          AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = pg_class.oid AND deptype = 'i' AND relkind = 'S')
    """)
    assert {row["relname"] for row in found} == set(relations())


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_has_each_right(kind: str) -> None:
    text = (ROOT / "docs/roles.md").read_text()
    assert f"\n`{kind}`\n\n```text\n" + "\n".join(RIGHTS[kind]) + "\n```\n" in text


async def test_what_runs_with_the_owners_right_is_granted_by_name_and_pins_its_path(db: asyncpg.Pool) -> None:
    rows = await db.fetch("""
        SELECT oid::regprocedure::text AS name, has_function_privilege('public', oid, 'EXECUTE') AS anybody,
               array_to_string(proconfig, ' ') LIKE '%search_path=public, pg_temp%' AS pinned,
               prorettype = 'trigger'::regtype AS fires
        FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND prosecdef
    """)
    named = {row["name"] for row in rows if not row["fires"]}
    assert named == {row[0] for row in await db.fetch("SELECT unnest($1::text[]::regprocedure[])::text", functions())}
    assert [row["name"] for row in rows if (row["anybody"] and not row["fires"]) or not row["pinned"]] == []


async def test_granting_again_gives_the_same_and_takes_what_was_too_much(dsn: str, db: asyncpg.Pool) -> None:
    async with made(dsn, "sender") as dsns:
        role = role_of(dsns["sender"])
        await db.execute(README_OF_OLD.format(role=role))
        await db.execute(f"GRANT UPDATE (recipient) ON send_log TO {role}")
        await grant(dsn, {role: ["sender"]})
        once = await rights(db, role)
        assert len([right for right in once if "EXECUTE" in right]) == len(RIGHTS["sender"]) - 1
        assert [right for right in once if "EXECUTE" not in right] == ["installation.namespace SELECT"]
        await grant(dsn, {role: ["sender"]})
        assert await rights(db, role) == once


RIGHTS_OF = """
SELECT concat(relname, ' ', privilege_type) FROM pg_class, aclexplode(relacl) WHERE grantee = $1::text::regrole
UNION ALL SELECT concat(attrelid::regclass, '.', attname, ' ', privilege_type) FROM pg_attribute, aclexplode(attacl)
WHERE grantee = $1::text::regrole
UNION ALL SELECT concat(proname, ' ', privilege_type) FROM pg_proc, aclexplode(proacl) WHERE grantee = $1::text::regrole
ORDER BY 1
"""


async def rights(db: asyncpg.Pool, role: str) -> list[str]:
    return [row[0] for row in await db.fetch(RIGHTS_OF, role)]


async def test_one_role_may_have_several_kinds(dsn: str, db: asyncpg.Pool, tmp_path: Path) -> None:
    async with made(dsn, "daemon") as dsns:
        await grant(dsn, {role_of(dsns["daemon"]): ["receiver", "reconciler"]})
        async with serving(write_config(tmp_path), RECONCILER_DATABASE__URL=dsns["daemon"]) as server:
            await server.becomes(200)
            assert await server.deliver("mg", sample("mg", "delivered", "k")) == 200
            assert await server.stop() == 0
        assert complaints(server.lines) == []
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 1


async def test_roles_work_in_a_schema_of_the_installations_own(empty_dsn: str) -> None:
    mail = f"{empty_dsn}&options=-csearch_path%3Dmail"
    owner = await asyncpg.connect(empty_dsn)
    await owner.execute("CREATE SCHEMA mail; CREATE TABLE public.send_log (theirs int)")
    await migrate(mail)
    async with made(mail, "sender") as dsns:
        role = role_of(dsns["sender"])
        await owner.execute(f"GRANT SELECT ON public.send_log TO {role}")
        await grant(mail, {role: ["sender"]})
        connection = await asyncpg.connect(dsns["sender"])
        claimed = await guard.claim(connection, "order:1", "mg")
        assert await guard.confirm(connection, claimed, "m") == "sent"
        await connection.fetch("SELECT theirs FROM public.send_log")  # of another application: left alone
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch("SELECT * FROM mail.send_log")
        await connection.close()
    await owner.close()


async def test_a_role_that_was_granted_tables_before_goes_on_after_the_upgrade(empty_dsn: str, tmp_path: Path) -> None:
    for path in sorted(default_folder().glob("*.sql"))[:24]:
        shutil.copy(path, tmp_path)
    await migrate(empty_dsn, folder=tmp_path)
    owner = await asyncpg.connect(empty_dsn)
    async with made(empty_dsn, "app", "stranger") as dsns:
        await owner.execute(README_OF_OLD.format(role=role_of(dsns["app"])))
        await owner.execute(f"GRANT USAGE ON SCHEMA public TO {role_of(dsns['stranger'])}")
        await migrate(empty_dsn)
        for kind in dsns:
            connection = await asyncpg.connect(dsns[kind])
            if kind == "app":
                claimed = await guard.claim(connection, "order:1", "mg")
                assert await guard.confirm(connection, claimed, "m") == "sent"
                await connection.fetch("SELECT provider_event_make_partitions()")
            else:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await claim(connection, "order:2")
            await connection.close()
    await owner.close()


async def test_a_role_may_have_any_name(dsn: str, db: asyncpg.Pool) -> None:
    name = f'Shop "{uuid.uuid4().hex[:8]}"; --'
    quoted = await db.fetchval("SELECT quote_ident($1)", name)
    await db.execute(f"CREATE ROLE {quoted}")
    await grant(dsn, {name: ["sender"]})
    assert await db.fetchval("SELECT has_function_privilege($1, 'send_claim(text, text, jsonb)', 'EXECUTE')", name)
    await db.execute(f"DROP OWNED BY {quoted}; DROP ROLE {quoted}")


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        (None, "there is no role"),
        ("SUPERUSER", "is a superuser"),
        ("IN ROLE postgres", "may act as their owner"),
    ],
)
async def test_a_role_that_no_grant_can_bound_is_refused_in_one_line(
    attributes: str | None, says: str, dsn: str, db: asyncpg.Pool
) -> None:
    role = f"wide_{uuid.uuid4().hex[:12]}"
    if attributes:
        await db.execute(f"CREATE ROLE {role} {attributes}")
    with pytest.raises(MigrationError, match=says):
        await grant(dsn, {role: ["sender"]})
    await db.execute(f"DROP ROLE IF EXISTS {role}")


async def test_a_role_that_may_create_where_the_functions_look_is_refused_and_granted_nothing(
    dsn: str, db: asyncpg.Pool
) -> None:
    async with made(dsn, "sender") as dsns:
        role = role_of(dsns["sender"])
        await db.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        with pytest.raises(MigrationError, match="REVOKE CREATE ON SCHEMA public"):
            await grant(dsn, {role: ["sender"]})
        assert await rights(db, role) == []


async def test_a_role_that_may_more_by_a_group_is_refused_and_granted_nothing(dsn: str, db: asyncpg.Pool) -> None:
    async with made(dsn, "sender", "group") as dsns:
        role, group = role_of(dsns["sender"]), role_of(dsns["group"])
        await db.execute(f"GRANT {group} TO {role}; GRANT UPDATE ON send_log TO {group}")
        with pytest.raises(MigrationError, match="may UPDATE send_log by PUBLIC or a group"):
            await grant(dsn, {role: ["sender"]})
        assert await rights(db, role) == []


async def test_migrate_grants_and_prints_what_it_would_run(program: Program, dsn: str, db: asyncpg.Pool) -> None:
    async with made(dsn, "sender", "reader") as dsns:
        sender, reader = map(role_of, dsns.values())
        named = ("--grant", f"sender={sender}", "--grant", f"reader={reader}")
        printed = (await program("migrate", "--grants", *named)).stdout
        assert await rights(db, sender) == []
        assert printed.startswith("BEGIN;\nSET LOCAL search_path = public, pg_temp;\n")
        assert f"GRANT EXECUTE ON FUNCTION send_claim(text, text, jsonb) TO {sender};\n" in printed
        await db.execute(printed)
        by_hand = await rights(db, sender)
        assert f"granted  {sender}: sender\n" in (await program("migrate", *named)).stdout
        assert await rights(db, sender) == by_hand != []


async def test_whoever_does_not_own_the_tables_grants_nothing_and_is_told_who_does(
    config: Path, db: asyncpg.Pool, dsn: str, roles: Dsns, logs_as_before: None
) -> None:
    async with made(dsn, "stranger") as dsns:
        stranger, reader = role_of(dsns["stranger"]), role_of(roles["reader"])
        as_reader = Program(config, roles["reader"])
        done = await as_reader("migrate", "--grant", f"reader={stranger}")
        told = f"reconciler: {reader} does not own the tables here, postgres does: migrate as postgres, who can also "
        assert (done.exit_code, done.stderr) == (1, f"{told}give {reader} its rights (migrate --grant)\n")
        assert await rights(db, stranger) == []
        assert (await as_reader("migrate", "--grants", "--grant", f"reader={stranger}")).exit_code == 0


@pytest.mark.parametrize(
    "args",
    [("--grants",), ("--grant", "sender"), ("--grant", "king=k"), ("--grant", "sender=a", "--check"),
     ("--grants", "--grant", "sender=a", "--namespace", "x")],
)  # fmt: skip
async def test_wrong_grants_are_wrong_usage(program: Program, args: tuple[str, ...]) -> None:
    assert (await program("migrate", *args)).exit_code == 2
