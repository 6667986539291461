# SPDX-License-Identifier: Apache-2.0
"""Reads a file of recipients, CSV or JSON lines, into rows that are ready to be stored. Errors name lines only.

Millions of lines: an address that is plain ASCII takes a short road to its keys; a test holds both roads equal.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from reconciler import keys
from reconciler.errors import UserError
from webhooks.event import hashed_recipient, wire_key

ADDRESS_NAMES: Final = ("recipient", "email")
LONGEST_ADDRESS: Final = 1000

_PLAIN: Final = re.compile(r"[A-Za-z0-9!#$&'*+/=?^_`{|}~.-]+@[A-Za-z0-9.-]+")
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING: Final = msgspec.json.Decoder(str)
_encode: Final = msgspec.json.Encoder().encode


class _Unread(Exception):
    """The reader gave up a record, and with it the lines that it had read of it."""

    def __init__(self, first: int, last: int, why: object) -> None:
        self.lines = [Bad(line, f"is no CSV ({why})") for line in range(first, last + 1)]


class Bad(NamedTuple):
    """A line that is no recipient, and what is wrong with it, without the address."""

    line: int
    why: str


Line = tuple[int, str, str | None]
"""What a line says: its number, an address, and whatever else it holds, as the text of a JSON object."""

Row = tuple[int, str, str, str | None, str, str | None, str | None]
"""One recipient's send: its line, and then as it is stored wire key, send key, recipient, comparable recipient, message
id known before the call, payload. Plain tuples: for millions of them the garbage collector asks less."""


def read_lines(file: BinaryIO) -> Iterator[Line | Bad]:
    """Yield what the lines of a file say; blank ones are passed over.

    A file that begins with a bracket is JSON lines, another is CSV with a header. The address is what is called
    `recipient`, or else `email`. Raises UserError for a header without an address.
    """
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    start = buffered.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    return _json_lines(buffered) if start.startswith((b"{", b"[")) else _csv_lines(buffered)


def _json_lines(file: BinaryIO) -> Iterator[Line | Bad]:
    for number, raw in enumerate(file, 1):
        text = raw.removeprefix(b"\xef\xbb\xbf").strip()
        if not text:
            continue
        try:
            said = _OBJECT.decode(text)
            name = next((name for name in ADDRESS_NAMES if name in said), None)
            address = "" if name is None else _STRING.decode(said.pop(name))
            rest = _encode(said).decode() if said else None
        except (msgspec.DecodeError, ValueError, RecursionError):
            yield Bad(number, "is no JSON object with an address")
            continue
        yield number, address, rest


def _csv_lines(file: BinaryIO) -> Iterator[Line | Bad]:
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    rows = csv.reader(text, strict=True)
    try:
        names = _header(rows)
        while True:
            try:
                yield from _records(rows, names)
            except _Unread as error:
                yield from error.lines
            else:
                return
    finally:
        with suppress(ValueError):  # closed by whoever opened it
            text.detach()


def _records(rows: Any, names: list[str]) -> Iterator[Line | Bad]:
    """Yield records until the end. Raises _Unread where the reader gives up one."""
    place = next(names.index(name) for name in ADDRESS_NAMES if name in names)
    others = [name for name in names if name != names[place]]
    while True:
        before = rows.line_num
        try:
            cells = next(rows, None)
        except csv.Error as error:
            raise _Unread(before + 1, rows.line_num, error) from None
        if cells is None:
            return
        if len(cells) != len(names):
            if cells:  # of several lines where a quotation was not closed
                why = f"has {len(cells)} cells, and the header {len(names)}"
                yield from (Bad(line, why) for line in range(before + 1, rows.line_num + 1))
            continue
        address = cells.pop(place)
        try:
            rest = _encode(dict(zip(others, cells, strict=True))).decode() if others else None
        except ValueError:
            yield Bad(rows.line_num, "is not UTF-8")
            continue
        yield rows.line_num, address, rest


def _header(rows: Iterator[list[str]]) -> list[str]:
    try:
        names = [name.strip() for name in next(rows, [])]
    except csv.Error as error:
        raise UserError(f"its first line is no CSV header ({error})") from None
    if not set(names) & set(ADDRESS_NAMES):
        raise UserError("the CSV header names no column recipient or email (JSON lines begin with a bracket)")
    if len(set(names)) < len(names):
        raise UserError("the CSV header names a column twice")
    return names


def address_problem(address: str) -> str | None:
    """Return what is wrong with one recipient's address; None: it can be written to, for all that we know."""
    if not address.strip():
        return "names no recipient"
    if len(address) > LONGEST_ADDRESS:
        return "names a recipient that is too long"
    if "," in address:
        return "names several recipients: give each a line"
    try:
        local, at, domain = keys.normal_recipient(address).rpartition("@")
    except ValueError:
        return "names a recipient with a control character, or is not UTF-8"
    if not (local and at and domain) or re.search(r"\s", domain):
        return "names a recipient that is no address"
    return None


def row_maker(
    campaign: str, namespace: str, known_message_id: Callable[[str], str | None] | None, salt: bytes | None = None
) -> Callable[[Line], Row | Bad]:
    """Return what makes a campaign's rows. The send key is `campaign:NAME:ADDRESS`, whatever the case of the address.

    `known_message_id` gives the id that a provider lets us choose, for a send key. With `salt`, the installation's,
    nothing of a row holds the address: the send key is its own hash, and a line that says nothing else is refused.
    """
    prefix = keys.send_key("campaign", campaign, "@").removesuffix("@")
    room = keys.MAX_KEY - len(prefix)

    def row(said: Line) -> Row | Bad:
        line, address, rest = said
        if len(address) <= room and _PLAIN.fullmatch(address):
            local, _, domain = address.rpartition("@")
            key, comparable = prefix + address.lower(), f"{local}@{domain.lower()}"
        elif problem := address_problem(address):
            return Bad(line, problem)
        else:
            key = keys.send_key("campaign", campaign, address, fold_local=True)
            comparable = keys.normal_recipient(address)
        known = known_message_id(key) if known_message_id else None
        wire = wire_key(key, namespace)
        if salt is None:
            return line, wire, key, address, comparable, known, rest
        if rest is None:
            return Bad(line, "says nothing but an address, which is not kept here: a worker could not find it again")
        return line, wire, wire, None, hashed_recipient(comparable, salt), known, rest

    return row
