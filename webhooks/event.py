# SPDX-License-Identifier: Apache-2.0
"""What a provider said about one message and one recipient, in one vocabulary for all providers. Pure."""

from __future__ import annotations

import hashlib
import re
from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

MAX_ID: Final = 255
"""Longest id kept as it came, in UTF-8 bytes. Longer ones become a hash: a PostgreSQL index entry has a limit."""

MAX_LABEL: Final = 63
"""Longest label of a domain name, in characters. A longer one is no domain, and punycode takes quadratic time."""

PLAIN_KEY: Final = re.compile(r"[a-z0-9_-]{1,48}")
"""What a wire key looks like."""

HASHED_KEY: Final = re.compile(r"[0-9a-f]{48}")
"""What one looks like that was hashed: in a slot that others use too, nothing else is taken for a key of ours."""

HASHED_RECIPIENT: Final = re.compile(r"[0-9a-f]{40}(@[0-9a-f]{16})?")
"""What a recipient looks like that was hashed."""

_PLAIN_ADDRESS: Final = re.compile(r"(?!.*xn--)[a-z0-9._+-]+@[a-z0-9.-]+")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_ADDRESS_IN_BRACKETS: Final = re.compile(r"<([^<>]+)>\Z")
_BLANK: Final = " \t\r\n"


class Kind(StrEnum):
    """Normalised event names, the ones the Python world knows from django-anymail."""

    QUEUED = "queued"
    SENT = "sent"
    REJECTED = "rejected"
    FAILED = "failed"
    BOUNCED = "bounced"
    DEFERRED = "deferred"
    DELIVERED = "delivered"
    AUTORESPONDED = "autoresponded"
    OPENED = "opened"
    CLICKED = "clicked"
    COMPLAINED = "complained"
    UNSUBSCRIBED = "unsubscribed"
    SUBSCRIBED = "subscribed"
    INBOUND = "inbound"
    UNKNOWN = "unknown"


class Testimony(StrEnum):
    """What an event proves of the send it names. Stated by each adapter for each event, never derived from the kind."""

    __test__ = False  # not a pytest class

    ACCEPTED = "accepted"
    """The provider took the message; whatever happens downstream proves it too."""
    REJECTED = "rejected"
    """The provider took the request but will never send the message."""
    NONE = "none"


class Answer(StrEnum):
    """What a witness says of one send."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    ABSENT = "absent"
    SILENT = "silent"
    """The witness can't tell. Never a reason to release."""


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One thing a provider said about one message and one recipient.

    `(message_id, event_id)` identify it within its feed. `message_id` is None where the event belongs to no message.
    `send_key` is whatever came back in our slot, not yet put through `wire_key`. `raw` holds the event's exact bytes.
    Text fields may still hold characters that PostgreSQL refuses; the inbox cleans them.
    """

    kind: Kind
    testimony: Testimony
    message_id: str | None
    event_id: str
    send_key: str | None = None
    recipient: str | None = None
    occurred_at: datetime | None = None
    reason: str | None = None
    raw: bytes = b""


def wire_key(key: str, namespace: str = "") -> str:
    """Return the form of a send key that travels with the message and comes back in events.

    Without a namespace a key made of `[a-z0-9_-]{1,48}` is its own wire key, any other is the first 48 hex digits of
    SHA-256 over its UTF-8 bytes. With one, 48 hex digits are kept as they are and everything else is hashed with it.
    A wire key maps to itself. The SQL function of the same name is its twin.
    """
    keep = HASHED_KEY if namespace else PLAIN_KEY
    if keep.fullmatch(key):
        return key
    salt = namespace.encode() + b"\0" if namespace else b""
    return hashlib.sha256(salt + key.encode("utf-8", "surrogatepass")).hexdigest()[:48]


def stand_in_key(feed: str, message_id: str) -> str:
    """Return what stands for the wire key of an event that carries none, so that its message id finds it.

    No wire key looks like it (`~`). The SQL function of the same name is its twin.
    """
    return "~" + hashlib.sha256(f"{feed}\n{message_id}".encode("utf-8", "surrogatepass")).hexdigest()[:47]


def unread(raw: bytes, provider: str = "unread") -> Event:
    """Return what keeps the bytes of a delivery, or of an element of one, that can't be read: it proves nothing."""
    return Event(
        kind=Kind.UNKNOWN,
        testimony=Testimony.NONE,
        message_id=None,
        event_id=derived_id(provider, raw.decode("latin-1")),
        reason="damaged",
        raw=raw,
    )


def derived_id(*parts: str | None) -> str:
    """Return an event id for a provider that gives none: a hash over what tells two true events apart.

    Parts are length-prefixed, so that no two lists of parts collide by concatenation; None differs from "".
    """
    digest = hashlib.sha256()
    for part in parts:
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"-;" if part is None else b"%d:%b;" % (len(data), data))
    return digest.hexdigest()[:40]


def bounded_id(value: str) -> str:
    """Return an id that fits an index entry: itself, or `sha256:` and its hash when it is longer than MAX_ID bytes."""
    data = value.encode("utf-8", "surrogatepass")
    return value if len(data) <= MAX_ID else "sha256:" + hashlib.sha256(data).hexdigest()


def storable(text: str) -> str:
    """Return text that PostgreSQL can hold: NUL and lone surrogates become U+FFFD. The raw bytes keep what came."""
    return _UNSTORABLE.sub("\ufffd", text)


def normal_recipient(address: str | None) -> str | None:
    """Return an address in its comparable form: bare, domain lower-case and in IDNA form, local part as it is.

    Plus addresses and the case of the local part are never folded. What can't be normalised is returned stripped;
    blank becomes None. The SQL function `recipient_key` is its twin.
    """
    if address is None:
        return None
    bare = address.strip(_BLANK)
    if found := _ADDRESS_IN_BRACKETS.search(bare):
        bare = found[1].strip(_BLANK)
    local, at, domain = bare.rpartition("@")
    return f"{local}@{_ascii_domain(domain)}" if at else bare or None


def hashed_recipient(normal: str, salt: bytes) -> str:
    """Return what is kept of an address in its comparable form where recipients are stored hashed.

    160 bits of SHA-256 over salt and address, whatever the case of its ASCII letters, and where it has a domain, 64
    bits over that: equal recipients, and equal domains, stay equal. A hashed one maps to itself. The SQL function
    `recipient_hash` is its twin.
    """
    if HASHED_RECIPIENT.fullmatch(normal):
        return normal
    _, at, domain = normal.rpartition("@")
    whole = _salted(normal, salt)[:40]
    return f"{whole}@{_salted(domain, salt)[:16]}" if at else whole


def _salted(text: str, salt: bytes) -> str:
    # Bytes are lowered in ASCII alone, which no locale of a database disputes.
    return hashlib.sha256(salt + b"\0" + text.encode("utf-8", "surrogatepass").lower()).hexdigest()


def is_plain_address(address: str) -> bool:
    """Say whether an address can be written in one way only, so that an API's filter by it can't miss it.

    Whether a provider folds the case of an address, or keeps punycode, is documented nowhere.
    """
    return _PLAIN_ADDRESS.fullmatch(address) is not None


def same_mailbox(one: str | None, other: str | None) -> bool:
    """Say whether two addresses may be one mailbox: alike in all but case. Used where missing one would mislead."""
    return (normal_recipient(one) or "").casefold() == (normal_recipient(other) or "").casefold()


def _ascii_domain(domain: str) -> str:
    return ".".join(_ascii_label(label) for label in domain.lower().split("."))


def _ascii_label(label: str) -> str:
    # Punycode by label rather than the IDNA codec, which refuses labels that mail systems do accept (such as `_dmarc`).
    if label.isascii() or len(label) > MAX_LABEL:
        return label
    return "xn--" + label.encode("punycode", "replace").decode("ascii")
