# SPDX-License-Identifier: Apache-2.0
"""A clock for one database that is moved by hand, so that hours of sends take minutes.

The product reads no clock but the database's, through functions that it calls by their bare names. A schema before
`pg_catalog` on the search_path holds others of the same names; the product's tables and functions are made in this
schema, and none of them is changed but for its search_path and the defaults of its columns. The hand stands still
while nobody looks: each look moves it a little, so that no two looks see the same time, whatever the machine's speed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

SCHEMA: Final = "simulated"

# The hand counts microseconds since 1970. Two functions are stable, as those are whose names they bear: an index may
# be searched by what they return.
INSTALL: Final = """
CREATE SCHEMA simulated;
CREATE SEQUENCE simulated.hand AS bigint INCREMENT BY 200;
CREATE FUNCTION simulated.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
    SELECT pg_catalog.to_timestamp(pg_catalog.nextval('simulated.hand'::pg_catalog.regclass)::pg_catalog.float8 / 1e6)
$$;
CREATE FUNCTION simulated.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT pg_catalog.to_timestamp(
        pg_catalog.pg_sequence_last_value('simulated.hand'::pg_catalog.regclass)::pg_catalog.float8 / 1e6)
$$;
CREATE FUNCTION simulated.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT simulated.statement_timestamp()
$$;
DO $$ BEGIN
    EXECUTE pg_catalog.format('ALTER DATABASE %I SET search_path = simulated, pg_catalog, pg_temp',
                              pg_catalog.current_database());
END $$
"""


async def install(connection: Any, begin: datetime) -> None:
    """Give an empty database a clock that shows `begin`; connections made from then on read it. Migrate afterwards."""
    await connection.execute(INSTALL)
    await move(connection, begin)


# What the migrations made is pinned to a search_path without our clock, and made for the months of another one.
ADOPT: Final = """
DO $$
DECLARE
    found record;
BEGIN
    FOR found IN
        SELECT oid::regprocedure::text AS name FROM pg_proc
        WHERE pronamespace = 'simulated'::regnamespace AND array_to_string(proconfig, ' ') LIKE '%search_path=%'
    LOOP
        EXECUTE format('ALTER ROUTINE %s SET search_path = simulated, pg_catalog, pg_temp', found.name);
    END LOOP;
    FOR found IN
        SELECT adrelid::regclass::text AS relation, attname
        FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
        JOIN pg_class ON pg_class.oid = adrelid
        WHERE relnamespace = 'simulated'::regnamespace AND NOT relispartition
          AND pg_get_expr(adbin, adrelid) IN ('clock_timestamp()', 'pg_catalog.clock_timestamp()')
    LOOP
        EXECUTE format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT simulated.clock_timestamp()',
                       found.relation, found.attname);
    END LOOP;
    FOR found IN SELECT inhrelid::regclass::text AS part FROM pg_inherits
        WHERE inhparent = 'provider_event'::regclass AND inhrelid <> 'provider_event_undated'::regclass
    LOOP
        EXECUTE format('DROP TABLE %s', found.part);
    END LOOP;
    PERFORM provider_event_make_partitions();
END $$
"""


async def adopt(connection: Any) -> None:
    """Let the migrated schema read the clock, and have the partitions of its months instead of ours."""
    await connection.execute(ADOPT)


MOVE: Final = """
SELECT setval('simulated.hand', greatest(last_value, (extract(epoch FROM $1::timestamptz) * 1e6)::bigint))
FROM simulated.hand
"""


async def move(connection: Any, to: datetime) -> None:
    """Move the hand forward to a moment, or leave it where it is later already."""
    await connection.execute(MOVE, to)


READ: Final = "SELECT simulated.clock_timestamp()"


async def read(connection: Any) -> datetime:
    """Return the time."""
    at: datetime = await connection.fetchval(READ)
    return at
