# SPDX-License-Identifier: Apache-2.0
"""A send key is the same on every attempt and another one for every other message; jobs carry it; names are ours."""

from __future__ import annotations

import enum
import json
import re
import subprocess
import sys
import warnings
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reconciler import keys
from reconciler.keys import (
    Carried,
    KeyDrift,
    carried,
    carry,
    fingerprint,
    hashed_key,
    refuse_reserved,
    send_key,
)
from webhooks import event

ROOT = Path(__file__).parents[1]
ADA = "a@example.com"
RECEIPT = "order.receipt:1234:a@example.com"


class Kind(enum.StrEnum):
    RECEIPT = "order.receipt"


class OldKind(str, enum.Enum):  # noqa: UP042 - applications have such, and their str() is another
    RECEIPT = "order.receipt"


class Order(enum.IntEnum):
    FIRST = 1234


# The key


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        (("order.receipt", 1234, ADA), RECEIPT),
        (("order.receipt", "1234", ADA), RECEIPT),
        ((Kind.RECEIPT, Order.FIRST, ADA), RECEIPT),
        ((OldKind.RECEIPT, 1234, ADA), RECEIPT),
        (("order.receipt", 1234, ADA, 2), "order.receipt:1234:a@example.com:v2"),
        (("order.receipt", 1234, ADA, "2"), "order.receipt:1234:a@example.com:v2"),
        (("order.receipt", 0, ADA, 0), "order.receipt:0:a@example.com:v0"),
        (("order.receipt", -7, ADA), "order.receipt:-7:a@example.com"),
        (
            ("order.receipt", UUID("6BA7B810-9DAD-11D1-80B4-00C04FD430C8"), ADA),
            "order.receipt:6ba7b810-9dad-11d1-80b4-00c04fd430c8:a@example.com",
        ),
        (("shop:order", "eu:1234", ADA), "shop%3Aorder:eu%3A1234:a@example.com"),
        (("shop%3Aorder", 1, ADA), "shop%253Aorder:1:a@example.com"),
        (("welcome", "ü 1", "a@[IPv6:2001:db8::1]"), "welcome:ü 1:a@[ipv6%3A2001%3Adb8%3A%3A1]"),
    ],
)
def test_a_key_reads_as_what_it_names(parts: tuple[Any, ...], key: str) -> None:
    assert send_key(*parts) == key


@pytest.mark.parametrize(
    ("recipient", "folded", "plain"),
    [
        ("Ada <a@Example.COM>", "a@example.com", "a@example.com"),
        ('"Ada, B" <Ada@EXAMPLE.org>\r\n', "ada@example.org", "Ada@example.org"),
        ("Ada+News@example.org", "ada+news@example.org", "Ada+News@example.org"),
        (" info@Bücher.example ", "info@xn--bcher-kva.example", "info@xn--bcher-kva.example"),
        ("info@xn--bcher-kva.example", "info@xn--bcher-kva.example", "info@xn--bcher-kva.example"),
        ("Jörg@_dmarc.example", "jörg@_dmarc.example", "Jörg@_dmarc.example"),
        ("Customer-77", "Customer-77", "Customer-77"),
    ],
)
def test_a_recipient_is_one_however_it_is_written(recipient: str, folded: str, plain: str) -> None:
    assert send_key("k", 1, recipient) == f"k:1:{plain}"
    assert send_key("k", 1, recipient, fold_local=True) == f"k:1:{folded}"


some = st.text(alphabet=":%v1Aa@. ü", min_size=1, max_size=6).filter(str.strip)
versions = st.none() | some | st.integers()


@given(some, some | st.integers(), some, versions)
@example("a:b", "c", "d@e", None).via("a separator in one part")
@example("a", "b:c", "d@e", None).via("the same in the next one")
@example("a", "b", "c:v1", None).via("a version in the recipient")
@example("a%3A", "b", "c", "v1").via("what is escaped, escaped")
def test_two_messages_never_have_one_key(
    kind: str, entity: str | int, recipient: str, version: str | int | None
) -> None:
    parts = [kind, str(entity), event.normal_recipient(recipient)]
    if version is not None:
        parts.append(f"v{version}")
    assert [unquote(part) for part in send_key(kind, entity, recipient, version).split(":")] == parts


@given(st.text(max_size=40) | st.builds("{} <{}@{}>".format, some, some, st.text(max_size=12)))
@example("info@BÜCHER.example").via("IDN in capitals")
@example(" <a@b> ").via("only brackets")
@example("@").via("nothing on either side")
@example("a@" + "ü" * 64).via("longer than a label may be")
def test_the_recipient_of_a_key_is_the_one_that_events_are_compared_with(address: str) -> None:
    try:
        made = keys.normal_recipient(address)
    except ValueError as error:
        assert str(error).startswith(("recipient is blank", "recipient holds a control character"))  # noqa: PT017
    else:
        assert made == event.normal_recipient(address)


def test_what_can_be_an_address_is_refused_for_nothing() -> None:
    assert keys.normal_recipient("\t<a@b.example>\n") == "a@b.example"


def test_a_key_that_the_database_would_refuse_becomes_its_hash() -> None:
    longest = "ü" * 119 + "x"
    assert send_key("k", longest, ADA) == f"k:{longest}:{ADA}"
    assert len(send_key("k", longest, ADA).encode()) == 255
    assert send_key("k", "ü" * 120, ADA) == hashed_key("k", "ü" * 120, ADA)


def test_a_hashed_key_holds_no_address_and_is_its_own_wire_key() -> None:
    hashed = hashed_key("order.receipt", 1234, "Ada <a@EXAMPLE.com>")
    assert hashed == "650ba0372f29e9511bec772185dd5076c6845a8093997059"  # sha256sum of the readable key
    assert event.wire_key(hashed) == hashed == event.wire_key(RECEIPT)
    assert event.wire_key(hashed, "staging") == hashed
    assert hashed_key("order.receipt", 1234, ADA, 2) != hashed
    assert hashed_key("order.receipt", 1234, "A@example.com", fold_local=True) == hashed


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((None, 1, ADA), "kind must be text, not NoneType"),
        ((7, 1, ADA), "kind must be text, not int"),
        (("k", None, ADA), "entity must be text, a whole number or a UUID, not NoneType"),
        (("k", 1.5, ADA), "entity must be text, a whole number or a UUID, not float"),
        (("k", True, ADA), "entity must be text, a whole number or a UUID, not bool"),
        (("k", datetime.now(UTC), ADA), "entity must be text, a whole number or a UUID, not datetime"),
        (("k", date(2026, 11, 2), ADA), "entity must be text, a whole number or a UUID, not date"),
        (("k", b"1", ADA), "entity must be text, a whole number or a UUID, not bytes"),
        (("k", Decimal(1), ADA), "entity must be text, a whole number or a UUID, not Decimal"),
        (("k", 1, None), "recipient must be text, not NoneType"),
        (("k", 1, [ADA]), "recipient must be text, not list"),
        (("k", 1, ADA, 0.5), "version must be text, a whole number or a UUID, not float"),
    ],
)
def test_a_part_of_the_wrong_type_is_refused_by_name(parts: tuple[Any, ...], said: str) -> None:
    for make in (send_key, hashed_key):
        with pytest.raises(TypeError) as refused:
            make(*parts)
        assert str(refused.value) == said


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("", 1, ADA), "kind is blank"),
        (("k", " ", ADA), "entity is blank"),
        (("k", 1, ""), "recipient is blank"),
        (("k", 1, "Ada < >"), "recipient is blank"),
        (("k", 1, ADA, ""), "version is blank"),
        (("k\n", 1, ADA), "kind holds a control character"),
        (("k", "1\x00", ADA), "entity holds a control character"),
        (("k", "\ud800", ADA), "entity holds a control character, or half of a surrogate pair"),
        (("k", 1, "a\x85b@example.com"), "recipient holds a control character"),
        (("k", 1, "a@example.com, b@example.com"), "recipient holds several addresses"),
    ],
)
def test_a_part_that_says_nothing_or_steers_something_is_refused(parts: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}") as refused:
        send_key(*parts)
    assert "example.com" not in str(refused.value)


# The fingerprint


def test_a_fingerprint_minds_neither_the_order_of_names_nor_how_they_were_spaced() -> None:
    one = {"to": ADA, "tags": ["a", "b"], "text": {"plain": "Hi", "n": 1}}
    other = json.loads('{ "text": {"n":1,   "plain": "Hi"}, "tags": ["a","b"], "to": "a@example.com" }')
    assert fingerprint(one) == fingerprint(other)
    assert re.fullmatch("[0-9a-f]{64}", fingerprint(one))
    assert fingerprint({"n": 1, "f": 2.0, "t": ("a",)}) == fingerprint({"n": 1.0, "f": 2, "t": ["a"]})


def test_a_fingerprint_is_the_same_in_every_release() -> None:
    # printf '{"a":[1,null,true,"\u00fc"],"b":0.5}' | sha256sum, with the letter written as JSON's escape
    assert (
        fingerprint({"b": 0.5, "a": [1, None, True, "ü"]})
        == "7c8835824fbd6c8682d6d94a909bf20532ecf836a873ac512732a982ef794d5d"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_what_went_through_json_has_the_same_fingerprint(value: Any) -> None:
    assert fingerprint(json.loads(json.dumps(value))) == fingerprint(value)


def test_different_content_has_different_fingerprints() -> None:
    contents: list[Any] = [
        None, False, True, 0, 1, 0.5, "", "0", "null", "b", b"", b"0", b"b", [], [0], [[]], [None], {}, {"": 0},
        {"0": 0}, {"a": [1, 2]}, {"a": [2, 1]}, {"a": 1, "b": 2}, [{"a": 1}, {"b": 2}], '{"a":1}', {"a": 1},
        "ü", "u\u0308",
    ]  # fmt: skip
    assert len({fingerprint(content) for content in contents}) == len(contents)
    assert fingerprint(b"x") == fingerprint(bytearray(b"x")) == fingerprint(memoryview(b"x"))


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ({"total": Decimal("12.50")}, TypeError, "not of Decimal: pass it as text"),
        ([datetime.now(UTC)], TypeError, "not of datetime: pass it as text"),
        ({1, 2}, TypeError, "not of set: pass it as text"),
        ({"a": {1: "x"}}, TypeError, "the names in an object are text, not int"),
        (float("nan"), ValueError, "NaN and infinity"),
        ({"a": float("-inf")}, ValueError, "NaN and infinity"),
    ],
)
def test_content_that_can_be_written_in_several_ways_is_refused(
    content: object, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        fingerprint(content)


# Carried by a job


def test_a_job_carries_its_key_and_fingerprint_beside_what_it_had() -> None:
    payload = {"order": 1234}
    job = carry(payload, RECEIPT, "f" * 64)
    assert job == {"order": 1234, "send_key": RECEIPT, "send_fingerprint": "f" * 64}
    assert payload == {"order": 1234}
    assert carry(job, RECEIPT, "f" * 64) == job
    assert carried(json.loads(json.dumps(job)), RECEIPT) == Carried(RECEIPT, "f" * 64)


@pytest.mark.parametrize("name", ["send_key", "send_fingerprint"])
def test_a_job_is_never_given_another_key(name: str) -> None:
    with pytest.raises(ValueError, match=f"the payload holds another {name} already"):
        carry({name: "something else"}, "key", "f")
    with pytest.raises(ValueError, match=f"the payload holds another {name} already"):
        carry({name: None}, "key", "f")


@pytest.mark.parametrize("key", ["", "k" * 256, "ü" * 128])
def test_a_job_is_given_no_key_that_the_database_would_refuse(key: str) -> None:
    with pytest.raises(ValueError, match="send_key must have 1 to 255 bytes"):
        carry({}, key, "f")
    with pytest.raises(TypeError, match="send_fingerprint must be text, not NoneType"):
        carry({}, "key", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("job", [{}, {"send_key": ""}, {"send_key": 7}, {"send_key": "key"}])
def test_a_job_without_key_is_told_where_it_is_made(job: dict[str, Any]) -> None:
    missing = "send_fingerprint" if job.get("send_key") == "key" else "send_key"
    with pytest.raises(ValueError, match=f"carries no {missing}: compute it once, where the job is made"):
        carried(job)


def test_a_key_computed_again_warns_without_an_address_and_the_carried_one_counts() -> None:
    job = carry({}, RECEIPT, "f")
    with pytest.warns(KeyDrift) as warned:
        assert carried(job, "order.receipt:1234:A@example.com") == Carried(RECEIPT, "f")
    (warning,) = warned
    assert "650ba0372f29e9511bec772185dd5076c6845a8093997059" in str(warning.message)
    assert "example.com" not in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings(action="error"), pytest.raises(KeyDrift, match="once, when the job is made"):
        carried(carry({}, "plain-key", "f"), "plain-key-2")


@given(st.text(min_size=1, max_size=60) | st.from_regex(r"[a-z0-9_-]{1,50}", fullmatch=True))
def test_a_warning_names_the_wire_key(key: str) -> None:
    assert keys._shown(key) == event.wire_key(key)


# Reserved names


def fields_at_the_top() -> set[str]:
    """What SendGrid's and Mailgun's flat events hold in the fixtures, the sender's own variable left out."""
    names: set[str] = set()
    for path in (ROOT / "tests/providers/fixtures/sendgrid").glob("[!a]*.json"):
        loaded = json.loads(path.read_text("utf-8"))
        for one in loaded if isinstance(loaded, list) else [loaded]:
            names |= one.keys()
    for path in (ROOT / "tests/providers/fixtures/mailgun").glob("legacy_*.form"):
        names |= set(re.findall(r"(?:^|&)([\w-]+)=", path.read_text("utf-8")))
    return names - {"app"}


def test_case_011_metadata_has_no_name_that_a_provider_uses_beside_it() -> None:
    names = fields_at_the_top()
    assert {"event", "email", "timestamp", "sg_event_id", "sg_message_id", "smtp-id", "recipient", "send_key"} <= names
    for name in names | {"sg_template_id", "singlesend_name", "nlvx_campaign_id", "marketing_campaign_name"}:
        with pytest.raises(ValueError, match=f"^metadata may not be named '{name}'"):
            refuse_reserved({"shop": 1, name: "vip"})
    refuse_reserved({"shop": 1, "app": "checkout", "order_id": "1234"})


# What a sender imports, and what it reads


def test_a_sender_that_makes_keys_imports_nothing_but_python(tmp_path: Path) -> None:
    (tmp_path / "webhooks").mkdir()
    (tmp_path / "webhooks" / "__init__.py").write_text("raise SystemExit('the application started')\n")
    script = "import sys; from reconciler import keys; print(*(m for m in sys.modules if '.' not in m))"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; {script}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert set(ran.stdout.split()) - sys.stdlib_module_names == {"__main__", "reconciler"}
