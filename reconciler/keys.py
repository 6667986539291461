# SPDX-License-Identifier: Apache-2.0
"""Send keys: the name of one logical send, the same on every attempt and from any worker. Pure.

    key = send_key("order.receipt", order.id, order.email)          # order.receipt:1234:a@example.com
    job = carry({"order": order.id}, key, fingerprint(request))     # made once, where the job is made
    key, content = carried(job)                                     # and read where it runs

docs/keys.md says which parts a key is made of, and which never.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
import warnings
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

MAX_KEY: Final = 255
"""Longest send key, in UTF-8 bytes: the SQL functions refuse longer ones."""

KEY_FIELD: Final = "send_key"
FINGERPRINT_FIELD: Final = "send_fingerprint"

Part = str | int | UUID

_HASH_DIGITS: Final = 48
_PLAIN_KEY: Final = re.compile(r"[a-z0-9_-]{1,48}")
_ADDRESS_IN_BRACKETS: Final = re.compile(r"<([^<>]+)>\Z")
_SEVERAL: Final = re.compile(r"^[^\"].*@.*[,;].*@")
_BLANK: Final = " \t\r\n"
_MAX_LABEL: Final = 63
_SEPARATORS: Final = str.maketrans({"%": "%25", ":": "%3A"})

# What SendGrid writes at the top level of an event, where the sender's arguments come back too [custom args, event
# webhook reference, django-anymail].
_SENDGRIDS: Final = (
    "asm_group_id attempt bounce_classification category cert_err domain email event from ip message newsletter pool "
    "post_type reason response send_at smtp-id status timestamp tls type url url_offset useragent "
)
# What Mailgun's legacy webhooks have among the sender's variables.
_MAILGUNS: Final = (
    "Message-Id campaign-id campaign-name city client-name client-os client-type code country description device-type "
    "domain error event ip message-headers message-id notification reason recipient region signature tag timestamp "
    "token url user-agent"
)
RESERVED: Final = frozenset((_SENDGRIDS + _MAILGUNS).split()) | {KEY_FIELD}
RESERVED_PREFIXES: Final = ("sg_", "singlesend_", "nlvx_", "marketing_campaign_")


class KeyDrift(UserWarning):
    """A key computed anew differs from the one that the job carries: something that it is made of has changed."""


class Carried(NamedTuple):
    """What a job carries of its send."""

    key: str
    fingerprint: str


def send_key(kind: str, entity: Part, recipient: str, version: Part | None = None, *, fold_local: bool = False) -> str:
    """Return the send key of a message: `order.receipt:1234:a@example.com`, or its hash where that is too long.

    `kind` says what sort of message it is, `entity` what it is about, `version` which of several wanted ones it is.
    Numbers and their digits are the same. Two different messages never have one key: `:` and `%` inside a part are
    escaped. `fold_local` ignores the case of what stands before the @. Raises TypeError and ValueError for parts that
    no key can be made of, without naming their value.
    """
    key = _readable(kind, entity, recipient, version, fold_local)
    return key if len(key.encode()) <= MAX_KEY else _hashed(key)


def hashed_key(
    kind: str, entity: Part, recipient: str, version: Part | None = None, *, fold_local: bool = False
) -> str:
    """Return the send key of the same message as 48 hex digits: no address, and its own wire key.

    It is the wire key of what `send_key` returns, unless the installation has a namespace: who changes from one to the
    other is answered `key_reused` for what was sent, and sends nothing twice. Raises as `send_key` does.
    """
    return _hashed(_readable(kind, entity, recipient, version, fold_local))


def normal_recipient(address: str, *, fold_local: bool = False) -> str:
    """Return an address in its comparable form: bare, its domain in lower case and ASCII.

    What stands before the @ stays as it is, plus and all, unless `fold_local` lowers it. Text without @ is returned
    stripped. Raises TypeError for what is no text, ValueError for blanks and control characters. The SQL function
    `recipient_key` is its twin.
    """
    bare = _typed("recipient", address).strip(_BLANK)
    if found := _ADDRESS_IN_BRACKETS.search(bare):
        bare = found[1].strip(_BLANK)
    local, at, domain = _text("recipient", bare).rpartition("@")
    if not at:
        return bare
    domain = ".".join(_ascii_label(label) for label in domain.lower().split("."))
    return f"{local.lower() if fold_local else local}@{domain}"


def fingerprint(content: Any) -> str:
    """Return a hash of a message's content, for the claim's option `fingerprint`: 64 hex digits.

    Content is what JSON knows, and bytes, at any depth. The order of an object's names does not matter; text and bytes
    count as they are. A number that is whole is the same with and without a decimal point. Raises ValueError for NaN
    and infinity; TypeError for anything else, decimals and times among it, which can be written in more than one way:
    pass the text that the message holds.
    """
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def carry(payload: Mapping[str, Any], key: str, fingerprint: str) -> dict[str, Any]:
    """Return a job's payload with its send key and fingerprint in it, as `send_key` and `send_fingerprint`.

    Raises ValueError where the payload holds something else under these names, or the key can't be one.
    """
    ours = {KEY_FIELD: _carriable(KEY_FIELD, key), FINGERPRINT_FIELD: _carriable(FINGERPRINT_FIELD, fingerprint)}
    for name, value in ours.items():
        if payload.get(name, value) != value:
            raise ValueError(
                f"the payload holds another {name} already: a job is about one send, make one job for each"
            )
    return {**payload, **ours}


def carried(payload: Mapping[str, Any], recomputed: str | None = None) -> Carried:
    """Return the send key and fingerprint that a job carries.

    Where the caller has computed the key again and it differs, a KeyDrift warning says so and the carried one counts:
    it is the one under which an earlier attempt may have been sent. Raises ValueError where the job carries none.
    """
    key, content = (_found(payload, name) for name in (KEY_FIELD, FINGERPRINT_FIELD))
    if recomputed is not None and recomputed != key:
        warnings.warn(
            f"the send key computed now ({_shown(recomputed)}) is not the one that the job carries ({_shown(key)}), "
            "which counts: compute it once, when the job is made, from what doesn't change",
            KeyDrift,
            stacklevel=2,
        )
    return Carried(key, content)


def refuse_reserved(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError where the sender's own metadata has a name that a provider uses for a field of its events.

    Some providers write both into one object: the value would be lost, or taken for theirs. One list serves all
    providers, so that a message may change its feed.
    """
    for name in map(str, metadata):
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"metadata may not be named {name!r}: providers use it in events, take a name of your own")


def _readable(kind: str, entity: Part, recipient: str, version: Part | None, fold_local: bool) -> str:
    address = normal_recipient(recipient, fold_local=fold_local)
    if _SEVERAL.search(address):
        raise ValueError("recipient holds several addresses: a send is to one, make a key for each")
    parts = [_text("kind", kind), _part("entity", entity), address]
    if version is not None:
        parts.append(f"v{_part('version', version)}")
    return ":".join(part.translate(_SEPARATORS) for part in parts)


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:_HASH_DIGITS]


def _part(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)  # an IntEnum's too
    return str(value) if isinstance(value, UUID) else _text(name, value, "text, a whole number or a UUID")


def _text(name: str, value: object, wanted: str = "text") -> str:
    text = _typed(name, value, wanted)
    if not text.strip():
        raise ValueError(f"{name} is blank: a send key needs it")
    if any(unicodedata.category(c) in {"Cc", "Cs"} for c in text):
        raise ValueError(f"{name} holds a control character, or half of a surrogate pair: take it out")
    return text


def _typed(name: str, value: object, wanted: str = "text") -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}")
    return str.__str__(value)  # the own one of an Enum of texts gives its name


def _ascii_label(label: str) -> str:
    # Punycode by label rather than the IDNA codec, which refuses labels that mail systems do accept (such as `_dmarc`).
    if label.isascii() or len(label) > _MAX_LABEL:
        return label
    return "xn--" + label.encode("punycode").decode("ascii")


def _canonical(value: Any) -> str:
    match value:
        case None | bool() | str():
            return json.dumps(value)
        case int():
            return int.__repr__(value)
        case float():
            return _number(value)
        case bytes() | bytearray() | memoryview():
            return f"b{bytes(value).hex()}"  # no JSON begins with b
        case Mapping():
            return "{" + ",".join(sorted(f"{_name(name)}:{_canonical(part)}" for name, part in value.items())) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_canonical, value)) + "]"
    raise TypeError(f"a fingerprint is taken of JSON and bytes, not of {type(value).__name__}: pass it as text")


def _number(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError("a fingerprint is taken of numbers, and NaN and infinity are none")
    return repr(int(value)) if value.is_integer() else float.__repr__(value)


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the names in an object are text, not {type(name).__name__}: JSON knows no others")
    return json.dumps(name)


def _carriable(name: str, value: str) -> str:
    if not 0 < len(_typed(name, value).encode(errors="replace")) <= MAX_KEY:
        raise ValueError(f"{name} must have 1 to {MAX_KEY} bytes")
    return value


def _found(payload: Mapping[str, Any], name: str) -> str:
    value = payload.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"this job carries no {name}: compute it once, where the job is made, and put it in with keys.carry. "
            "Computed where the job runs it may differ from attempt to attempt"
        )
    return value


def _shown(key: str) -> str:
    """Return the wire key that a key has without a namespace: a warning must not name an address."""
    return key if _PLAIN_KEY.fullmatch(key) else hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:48]
