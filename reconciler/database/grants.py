# SPDX-License-Identifier: Apache-2.0
"""Which part of the program may do what in the database: the exact rights of each kind of role, and how they are given.

A right is what stands in a GRANT statement between GRANT and TO. Each table, view, sequence and function with the
owner's right that a role may touch is named here and nowhere else; what is not named, nobody but the owner may touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, get_args

import asyncpg

from reconciler.database.citus import is_distributed
from reconciler.database.migrate import MigrationError, in_transaction, not_the_owner

Kind = Literal["receiver", "reconciler", "sender", "middleware", "reader"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_SENDS: Final = (
    "EXECUTE ON FUNCTION send_claim(text, text, jsonb)",
    "EXECUTE ON FUNCTION send_claim_released(text, int, jsonb)",
    "EXECUTE ON FUNCTION send_claim_campaign(text, int, jsonb)",
    "EXECUTE ON FUNCTION send_confirm(text, bigint, text, jsonb)",
    "EXECUTE ON FUNCTION send_fail(text, bigint, text, boolean)",
    "EXECUTE ON FUNCTION send_enqueue(text, text, jsonb)",
    "EXECUTE ON FUNCTION campaign_standing(text)",
)

RIGHTS: Final[Mapping[Kind, tuple[str, ...]]] = {
    # `serve --only receiver`: stores what providers say, and can neither read it again nor touch a send. Without fence
    # and attempt, which are a sender's word.
    "receiver": (
        "SELECT ON schema_migration",
        "SELECT (namespace, recipient_salt) ON installation",
        "SELECT (wire_key, message_id, event_id, feed) ON provider_event",
        "INSERT (wire_key, message_id, event_id, feed, kind, testimony, source, recipient) ON provider_event",
        "INSERT (reason, partition_at, occurred_at, raw) ON provider_event",
        "SELECT, INSERT, UPDATE ON feed_delivery",
        "SELECT, INSERT, UPDATE, DELETE ON finding",  # that the archive can't be uploaded
        "EXECUTE ON FUNCTION provider_event_make_partitions(int)",
    ),
    # `serve --only reconciler`, `/v1/sends` and the operator's commands: all rows, and no table is made, changed or
    # dropped. The name of the installation and the salt of its addresses stay as they are.
    "reconciler": (
        "SELECT ON schema_migration",
        "SELECT, UPDATE (memory, tell, pruned_until, pruned_at, prune_left) ON installation",
        "USAGE ON SEQUENCE send_fence",
        "SELECT, INSERT, UPDATE, DELETE ON send_log",
        "SELECT, INSERT, UPDATE, DELETE ON provider_event",
        "SELECT, INSERT, UPDATE, DELETE ON feed_delivery",
        "SELECT, INSERT, UPDATE, DELETE ON finding",
        "SELECT, INSERT, UPDATE, DELETE ON pass",
        "SELECT, INSERT, UPDATE, DELETE ON verdict",
        "SELECT, INSERT, DELETE ON shadow_verdict",
        "SELECT, INSERT, UPDATE ON feed_state",
        "SELECT, UPDATE, DELETE ON release_outbox",  # written by a trigger, with the owner's right
        "SELECT, INSERT, UPDATE, DELETE ON backfill",
        "SELECT, INSERT, DELETE ON duplicate",
        "SELECT, INSERT, UPDATE, DELETE ON look_up",
        "SELECT ON asked_again",
        "SELECT, INSERT, UPDATE, DELETE ON idempotency",
        "SELECT, INSERT, UPDATE ON campaign",
        "SELECT, INSERT, UPDATE ON campaign_load",
        "SELECT, INSERT, DELETE ON suppression",
        "SELECT, INSERT, UPDATE, DELETE ON frequency_cap",
        "SELECT, UPDATE, DELETE ON cap_taken",
        "SELECT ON control, ambiguous, feed_event",
        "EXECUTE ON FUNCTION provider_event_make_partitions(int)",
        "EXECUTE ON FUNCTION provider_event_drop_month(date, interval)",
        "EXECUTE ON FUNCTION send_fence_lift(text)",
        "EXECUTE ON FUNCTION send_note_asked_again(text, text, timestamptz)",
        *_SENDS,
    ),
    # Whoever sends, in any language: the functions, and what makes a wire key of a send key.
    "sender": ("SELECT (namespace) ON installation", *_SENDS),
    # An application's own requests with an Idempotency-Key (reconciler.idempotency): their records, how a send stands.
    "middleware": (
        "SELECT (namespace) ON installation",
        "SELECT, INSERT, UPDATE, DELETE ON idempotency",
        "SELECT (wire_key, state, next_check_at) ON send_log",
    ),
    # `status`, `why`, `report`, `what-if`: what there is to know, but raw events, the salt and kept answers.
    "reader": (
        "SELECT ON schema_migration",
        "SELECT (only_row, namespace, memory, tell, pruned_until, pruned_at, prune_left) ON installation",
        "SELECT ON send_log",
        "SELECT (wire_key, message_id, event_id, feed, kind, testimony, source, recipient) ON provider_event",
        "SELECT (reason, partition_at, occurred_at, received_at, attempt, fence) ON provider_event",
        "SELECT ON feed_delivery, finding, pass, verdict, shadow_verdict, feed_state, release_outbox, backfill",
        "SELECT ON duplicate, look_up, asked_again, campaign, campaign_load, frequency_cap",
        "SELECT ON control, ambiguous, feed_event",
        "EXECUTE ON FUNCTION campaign_standing(text)",
    ),
}


ON_CITUS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "reconciler": ("USAGE ON SEQUENCE verdict_id_seq, shadow_verdict_id_seq, look_up_id_seq",)
}
"""What a kind needs besides where the tables are distributed: there an identity is a sequence like any other."""


async def grant(dsn: str, wanted: Mapping[str, Iterable[Kind]], *, apply: bool = True) -> list[str]:
    """Give each role the rights of its kinds and no others, all at once; return the statements that do it.

    They hold for the schema that the connection's search_path begins with. `apply` False: they are only returned.
    Rights on what is ours that a role has beyond its kinds are taken away. Raises MigrationError where a role isn't
    there, or may do anything whatever it is granted, or somebody else owns the tables, and DatabaseUnavailable.
    """
    async with in_transaction(dsn) as connection:
        if apply:  # of another's GRANT the server only warns that it gave nothing
            _refuse(await not_the_owner(connection))
        statements = [await connection.fetchval(SET_PATH)]
        for role, kinds in wanted.items():
            _refuse(await connection.fetchval(REFUSALS, role))
            rights = [right for kind in kinds for right in RIGHTS[kind]]
            if await is_distributed(connection):
                rights += [right for kind in kinds for right in ON_CITUS.get(kind, ())]
            statements += await _statements(connection, role, rights)
        if apply:
            for statement in statements:
                await connection.execute(statement)
            for role in wanted:
                _refuse(await connection.fetchval(LEFT_OVER, role, relations()))
    return ["BEGIN", *statements, "COMMIT"]


SET_PATH: Final = "SELECT format('SET LOCAL search_path = %I, pg_temp', current_schema())"

REFUSALS: Final = """
SELECT CASE
    WHEN r.oid IS NULL THEN format('there is no role %I: CREATE ROLE %I LOGIN first', $1::text, $1::text)
    WHEN r.rolsuper THEN format('%I is a superuser, whom no grant bounds: take another role', $1::text)
    WHEN pg_has_role(r.oid, c.relowner, 'USAGE')
    THEN format('%I owns the tables, or may act as their owner, and so may do anything: take another role', $1::text)
END
FROM pg_class c LEFT JOIN pg_roles r ON r.rolname = $1 WHERE c.oid = 'schema_migration'::regclass
"""

# Who may create here could put a function in the way of those that run with the owner's right. Taking that away, or
# what a group or everybody may, might stop others: a person has to.
LEFT_OVER: Final = """
SELECT format('%I may create in schema %I, by itself, PUBLIC or a group: REVOKE CREATE ON SCHEMA %I there first, or '
    || 'migrate into a schema of its own', $1::text, current_schema(), current_schema())
WHERE has_schema_privilege($1::text, current_schema(), 'CREATE')
UNION ALL
SELECT format('%I may %s %I by PUBLIC or a group: REVOKE that there first', $1::text, privilege, relname)
FROM pg_class c CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS privilege
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p', 'v') AND relname = ANY ($2::text[])
  AND has_table_privilege($1::text, c.oid, privilege)
  AND NOT EXISTS (SELECT FROM aclexplode(relacl) AS a
                  WHERE a.privilege_type = privilege AND pg_get_userbyid(a.grantee) = $1::text)
LIMIT 1
"""


def _refuse(objection: str | None) -> None:
    if objection:
        raise MigrationError(objection)


# What a role has by its own name on what is ours, the months of events among it: GRANT ... ON ALL TABLES gave it those.
REVOKES: Final = """
WITH relation AS (
    SELECT c.oid, c.relname, c.relkind, c.relacl FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'S')
      AND (c.relname = ANY ($2::text[])
           OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'provider_event'::regclass)
           OR c.relkind = 'S' AND EXISTS (
               SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.refobjid = ANY ($2::text[]::regclass[]::oid[])))
), acl AS (
    SELECT format('%s %I', CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, relname) AS what, a.grantee
    FROM relation CROSS JOIN aclexplode(relacl) AS a
    UNION
    SELECT format('TABLE %I', relname), a.grantee
    FROM relation JOIN pg_attribute t ON attrelid = oid CROSS JOIN aclexplode(attacl) AS a
    UNION
    SELECT format('FUNCTION %s', p.oid::regprocedure), a.grantee FROM pg_proc p CROSS JOIN aclexplode(proacl) AS a
    WHERE p.pronamespace = current_schema()::regnamespace AND p.oid = ANY ($3::text[]::regprocedure[]::oid[])
)
SELECT format('REVOKE ALL ON %s FROM %I', what, $1::text) FROM acl
WHERE grantee = (SELECT oid FROM pg_roles WHERE rolname = $1) ORDER BY what
"""

GRANTS: Final = """
SELECT format('GRANT %s TO %I', given, $1::text)
FROM unnest(array_prepend(format('USAGE ON SCHEMA %I', current_schema()), $2::text[])) AS given
"""


async def _statements(connection: asyncpg.Connection, role: str, rights: list[str]) -> list[str]:
    revokes = await connection.fetch(REVOKES, role, relations(), functions())
    grants = await connection.fetch(GRANTS, role, list(dict.fromkeys(rights)))
    return [text for (text,) in (*revokes, *grants)]


def relations() -> list[str]:
    """Return the tables, views and sequences that any kind has a right to."""
    ours = (_object(right).removeprefix("SEQUENCE ").split(", ") for right in _all() if "ON FUNCTION " not in right)
    return sorted({name for names in ours for name in names})


def functions() -> list[str]:
    """Return the functions that run with the owner's right and that any kind may call."""
    return sorted({_object(right).removeprefix("FUNCTION ") for right in _all() if "ON FUNCTION " in right})


def _all() -> Iterable[str]:
    return (right for rights in RIGHTS.values() for right in rights)


def _object(right: str) -> str:
    return right.rpartition(" ON ")[2]
