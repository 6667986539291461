# SPDX-License-Identifier: Apache-2.0
"""What is written twice, in Python and in SQL, is equal: for any text that both can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reconciler.database.postgres import EmbeddedPostgres
from webhooks.event import Kind, hashed_recipient, normal_recipient, stand_in_key, wire_key

# PostgreSQL text holds neither NUL nor lone surrogates; `wire_key` of those is the receiver's alone.
texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=80)
plain = st.from_regex(r"[a-z0-9_-]{1,50}", fullmatch=True)
hashes = st.from_regex(r"[0-9a-f]{48}", fullmatch=True)
# Letters whose lower case is one letter in both worlds; a final sigma and a dotted I are not.
letters = st.characters(categories=["Ll", "Nd"], exclude_characters="ſςıİ")
domains = st.lists(st.text(letters, min_size=1, max_size=12), min_size=1, max_size=3).map(".".join)
addresses = st.builds("{}@{}".format, st.text(letters, min_size=1, max_size=12), domains)


class Sql:
    """One connection, asked from tests that are not asynchronous."""

    def __init__(self, dsn: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.connection = self.loop.run_until_complete(asyncpg.connect(dsn))

    def ask(self, query: str, *args: Any) -> Any:
        return self.loop.run_until_complete(self.connection.fetchval(query, *args))

    def close(self) -> None:
        self.loop.run_until_complete(self.connection.close())
        self.loop.close()


@pytest.fixture(scope="module")
def sql(pg: EmbeddedPostgres, template: str) -> Iterator[Sql]:
    """A database that is only asked, never written."""
    maker = Sql(pg.dsn())
    maker.loop.run_until_complete(
        maker.connection.execute(f"CREATE DATABASE twins TEMPLATE {template} STRATEGY file_copy")
    )
    asked = Sql(pg.dsn("twins"))
    yield asked
    asked.close()
    maker.loop.run_until_complete(maker.connection.execute("DROP DATABASE twins"))
    maker.close()


@given(st.one_of(texts, plain, hashes).filter(bool), st.sampled_from(["", "staging", "zürich"]))
@example("a" * 48, "").via("as long as a plain key may be")
@example("a" * 49, "").via("longer")
@example("abc\n", "").via("a line feed at the end is no plain key")
@settings(deadline=None)
def test_the_wire_key_is_the_same_and_maps_to_itself(sql: Sql, key: str, namespace: str) -> None:
    made = wire_key(key, namespace)
    assert sql.ask("SELECT wire_key($1, $2)", key, namespace) == made
    assert wire_key(made, namespace) == made
    assert len(made) <= 48


@given(plain, texts)
@settings(deadline=None)
def test_the_stand_in_of_an_event_without_key_is_the_same_and_no_wire_key(sql: Sql, feed: str, message_id: str) -> None:
    made = stand_in_key(feed, message_id)
    assert sql.ask("SELECT stand_in_key($1, $2)", feed, message_id) == made
    assert wire_key(made) != made


@given(st.one_of(addresses, addresses.map("Ada <{}>".format), texts))
@example("info@Bücher.example").via("IDN")
@example("info@BÜCHER.example").via("IDN in capitals")
@example("info@İstanbul.example").via("a capital whose lower case depends on the locale")
@example('"Ada B" <ada@EXAMPLE.org>').via("display name")
@example("ada+news@example.org").via("plus address")
@example("@").via("nothing on either side")
@example("münchen").via("no domain")
@settings(deadline=None, max_examples=200)
def test_the_comparable_form_of_an_address_is_the_same(sql: Sql, address: str) -> None:
    if any(folds_differently(c) for c in address):
        return
    assert sql.ask("SELECT recipient_key($1)", address) == normal_recipient(address)


@pytest.mark.parametrize("address", ["info@İstanbul.example", "info@BÜCHER.example", "Ada@EXAMPLE.org"])
def test_an_address_as_it_comes_is_hashed_alike(sql: Sql, address: str) -> None:
    salt, normal = b"s" * 32, normal_recipient(address)
    assert normal is not None
    assert sql.ask("SELECT recipient_hash(recipient_key($1), $2)", address, salt) == hashed_recipient(normal, salt)


forms = st.from_regex(r"[0-9a-f]{39,41}(@[0-9a-f]{15,17})?", fullmatch=True)


@given(st.one_of(texts, addresses, forms), st.binary(min_size=16, max_size=40))
@example("Ada@example.org", b"s" * 32).via("the case of ASCII letters")
@example("Ämilie@example.org", b"s" * 32).via("that of others")
@example("@", b"s" * 32).via("nothing on either side")
@example("Customer-77", b"s" * 32).via("no domain")
@example("a" * 40 + "\n", b"s" * 32).via("a line feed at the end is no hash")
@settings(deadline=None, max_examples=200)
def test_the_hash_of_an_address_is_the_same_maps_to_itself_and_keeps_what_is_equal(
    sql: Sql, address: str, salt: bytes
) -> None:
    made = hashed_recipient(address, salt)
    assert sql.ask("SELECT recipient_hash($1, $2)", address, salt) == made
    assert hashed_recipient(made, salt) == made
    local, at, domain = address.rpartition("@")
    assert (sql.ask("SELECT recipient_domain($1)", made) is None) == (not at)
    if made != address:
        other = hashed_recipient(f"x{local}{at}{domain}", salt)
        assert other.partition("@")[2] == made.partition("@")[2]
        assert other != made


def folds_differently(c: str) -> bool:
    """Python and PostgreSQL fold these in ways of their own; no provider has been seen to send them."""
    return (len(c.lower()) > 1 and c != "İ") or c in "ςſıΣ" or (c.isspace() and not c.isascii())


def test_every_kind_has_its_place_among_outcomes(sql: Sql) -> None:
    outcomes = {kind: sql.ask("SELECT delivery_name(delivery_rank($1))", str(kind)) for kind in Kind}
    assert {k: v for k, v in outcomes.items() if v != "delivered"} == {
        Kind.QUEUED: None,
        Kind.SENT: None,
        Kind.INBOUND: None,
        Kind.UNKNOWN: None,
        Kind.DEFERRED: "deferred",
        Kind.FAILED: "failed",
        Kind.REJECTED: "rejected",
        Kind.BOUNCED: "bounced",
        Kind.COMPLAINED: "complained",
    }
