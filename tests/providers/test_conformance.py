# SPDX-License-Identifier: Apache-2.0
"""What every provider promises. A provider gets all of it from its line in the registry and its fixtures."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from conformance_kit import (
    CARRIED,
    FIXTURES,
    KEY,
    NOW,
    SCHEMES,
    check,
    check_refusal,
    events,
    identity,
    parsed_or_refused,
    webhooks_of,
    with_key,
)
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from spoiling import DELETE, changed, paths, value_at, value_of, with_value

import webhooks.providers
from webhooks.event import Kind, Testimony
from webhooks.provider import Delivery, Feed, NoSample, Refused, Verdict, Verified
from webhooks.registry import PROVIDERS

OTHER = "5484389ddcae99204cde863d5da0d5f5ad84374a056cdeaf"
BODIES = [(name, file) for name in PROVIDERS for file in webhooks_of(name)]
ECHOING = [name for name, provider in PROVIDERS.items() if provider.facts.echoes_key]
KEYED = [(name, file) for name in ECHOING for file in with_key(name)]
each_provider = pytest.mark.parametrize("name", PROVIDERS)
each_body = pytest.mark.parametrize(("name", "file"), BODIES, ids=[f"{name}-{file}" for name, file in BODIES])
each_keyed = pytest.mark.parametrize(("name", "file"), KEYED, ids=[f"{name}-{file}" for name, file in KEYED])
each_scheme = pytest.mark.parametrize("name", SCHEMES)


def first_keyed(name: str) -> Delivery:
    return next(iter(with_key(name).values()))


# -- what belongs to a provider ----------------------------------------------------------------------------------------


def test_each_file_is_registered_under_its_own_name() -> None:
    files = {file.stem for file in Path(webhooks.providers.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(PROVIDERS)
    for name, provider in PROVIDERS.items():
        assert provider.name == name
        assert importlib.import_module(f"webhooks.providers.{name}").PROVIDER is provider


def test_each_folder_of_fixtures_is_a_provider_s() -> None:
    assert {folder.name for folder in FIXTURES.iterdir()} == set(PROVIDERS)


@each_provider
def test_a_provider_has_webhooks_among_its_fixtures_one_of_them_with_our_key(name: str) -> None:
    assert webhooks_of(name)
    assert with_key(name)


def test_who_signs_says_what_is_covered_and_how_a_test_signs() -> None:
    assert set(SCHEMES) == {
        name for name, provider in PROVIDERS.items() if provider.facts.signs_body or provider.facts.signs_time
    }


# -- facts -------------------------------------------------------------------------------------------------------------

SOURCED = ("key_slot", "first_evidence", "event_id", "authentication", "redelivery", "look_up", "registration")
ENDS_A_DELIVERY = {
    "postmark": {403},
    "mailgun": {406},
    "ses": set(range(400, 500)),
    "brevo": {*range(400, 429), *range(430, 600)},
    "azure_acs": {400, 401, 403, 413},
    "mailersend": {*range(400, 429), *range(430, 500)},
}
"""Answers after which a provider does not deliver again, so that they must not mean "later"."""


@each_provider
def test_facts_are_told_with_their_sources(name: str) -> None:
    facts = PROVIDERS[name].facts
    texts = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts) if field.type == "str"}
    assert set(SOURCED) < set(texts)
    for field, text in texts.items():
        assert text.strip() == text != ""
        assert "\n" not in text
        assert field not in SOURCED or re.search(r"\[[^\]]{2,}\]", text), f"{field} names no source"


@each_provider
def test_facts_name_nothing_of_the_machine_they_were_written_on(name: str) -> None:
    text = str(PROVIDERS[name].facts)
    here = (os.uname().nodename, str(Path.home()), str(Path(__file__).parents[2]), "localhost", "file:", "127.0.0.1")
    assert not [place for place in here if len(place) > 1 and place in text]


@each_provider
def test_what_was_not_stored_is_delivered_again(name: str) -> None:
    facts = PROVIDERS[name].facts
    assert facts.busy_status in {429, 503} - ENDS_A_DELIVERY.get(name, set())
    assert facts.refused_status in {401, 429, 503}
    # SNS sends its credentials only after a 401, so there a wrong secret loses what no dead-letter queue takes.
    assert name == "ses" or facts.refused_status not in ENDS_A_DELIVERY.get(name, set())


@each_provider
def test_a_tolerance_is_set_only_where_a_time_is_signed(name: str) -> None:
    facts = PROVIDERS[name].facts
    assert facts.tolerance is None or facts.signs_time


# -- parsing -----------------------------------------------------------------------------------------------------------


@each_body
def test_a_webhook_holds_events_or_names_its_purpose(name: str, file: str) -> None:
    found = PROVIDERS[name].parse(webhooks_of(name)[file])
    check(found)
    assert found.events or found.control


@each_body
def test_parsing_is_pure_and_ids_are_stable(name: str, file: str) -> None:
    delivery = webhooks_of(name)[file]
    before = repr(delivery)
    assert PROVIDERS[name].parse(delivery) == PROVIDERS[name].parse(delivery)
    assert repr(delivery) == before


@each_body
def test_distinct_events_of_a_delivery_have_distinct_ids(name: str, file: str) -> None:
    found = events(name, webhooks_of(name)[file])
    assert len({identity(event) for event in found}) == len(set(found))


@each_provider
def test_one_identity_never_names_two_kinds_of_event_or_two_recipients(name: str) -> None:
    said: dict[Any, Any] = {}
    for delivery in webhooks_of(name).values():
        for event in events(name, delivery):
            assert said.setdefault(identity(event), (event.kind, event.recipient)) == (event.kind, event.recipient)


@each_body
def test_the_bytes_kept_of_an_event_are_read_as_the_same_event(name: str, file: str) -> None:
    delivery = webhooks_of(name)[file]
    for event in events(name, delivery):
        again = {identity(found): found for found in events(name, replace(delivery, body=event.raw))}
        assert again[identity(event)] == event


def check_proof(kind: Kind, testimony: Testimony) -> None:
    """Hold what an event proves against its kind; only of a bounce it depends on whether delivery was tried."""
    match kind:
        case Kind.BOUNCED | Kind.COMPLAINED:
            assert testimony is not Testimony.NONE
        case Kind.REJECTED | Kind.FAILED:
            assert testimony is Testimony.REJECTED
        case Kind.INBOUND | Kind.UNKNOWN:
            assert testimony is Testimony.NONE
        case Kind.AUTORESPONDED | Kind.SUBSCRIBED | Kind.UNSUBSCRIBED:
            assert testimony is not Testimony.REJECTED
        case _:
            assert testimony is Testimony.ACCEPTED


@each_body
def test_what_is_said_of_a_send_proves_something_and_other_things_prove_nothing(name: str, file: str) -> None:
    for event in events(name, webhooks_of(name)[file]):
        if event.message_id:
            check_proof(event.kind, event.testimony)
        else:
            assert event.testimony is not Testimony.NONE or event.kind not in {Kind.QUEUED, Kind.SENT, Kind.DELIVERED}


def meanings(name: str) -> dict[str, tuple[Kind, Testimony]]:
    table = importlib.import_module(f"webhooks.providers.{name}").MEANINGS
    return {own: (kind, testimony) for own, (kind, testimony, *_) in table.items()}


@each_provider
def test_the_table_of_meanings_says_the_same(name: str) -> None:
    assert meanings(name)
    for kind, testimony in meanings(name).values():
        check_proof(kind, testimony)


INCOMING = [(name, own) for name in PROVIDERS for own, (kind, _) in meanings(name).items() if kind is Kind.INBOUND]


@pytest.mark.parametrize(("name", "own"), INCOMING)
def test_incoming_mail_never_brings_our_key(name: str, own: str) -> None:
    delivery = first_keyed(name)
    value = value_of(delivery)
    said = [path for path in paths(value) if isinstance(value_at(value, path), str)]
    found = [parsed_or_refused(name, with_value(delivery, changed(value, path, own))) for path in said]
    keys = {event.send_key for parsed in found if parsed for event in parsed.events if event.kind is Kind.INBOUND}
    assert keys == {None}


@each_body
def test_what_is_kept_of_an_event_reads_as_the_event_did(name: str, file: str) -> None:
    """So that a newer release can read what an older one did not know (`replay --reparse`)."""
    for event in events(name, webhooks_of(name)[file]):
        again = events(name, Delivery(event.raw, {}))
        same = [one for one in again if one.event_id == event.event_id] if len(again) > 1 else again
        assert [replace(one, event_id=event.event_id) for one in same] == [event]


@each_keyed
def test_an_event_of_a_kind_nobody_knows_is_kept_and_proves_nothing(name: str, file: str) -> None:
    delivery = with_key(name)[file]
    value = value_of(delivery)
    (known, *_) = events(name, delivery)
    unknown = []
    for path in paths(value):
        if isinstance(value_at(value, path), str):
            found = parsed_or_refused(name, with_value(delivery, changed(value, path, "Something-New")))
            unknown += [event for event in found.events if event.kind is Kind.UNKNOWN] if found else []
    assert (known.message_id, KEY) in {(event.message_id, event.send_key) for event in unknown}
    assert {event.testimony for event in unknown} == {Testimony.NONE}


@each_keyed
def test_an_event_without_our_key_is_still_an_event(name: str, file: str) -> None:
    delivery = with_key(name)[file]
    value, before = value_of(delivery), events(name, delivery)
    holding = [path for path in paths(value) if value_at(value, path) == KEY]
    for path in reversed(holding):
        value = changed(value, path, DELETE)
    found = events(name, with_value(delivery, value))
    assert [(event.kind, event.message_id) for event in found] == [(event.kind, event.message_id) for event in before]
    assert KEY not in {event.send_key for event in found}


# -- our key -----------------------------------------------------------------------------------------------------------


def stamped(value: Any, wire_key: str) -> list[tuple[str, ...]]:
    """Return the paths of a stamp's body whose value is the key."""
    return [tuple(map(str, path)) for path in paths(value) if value_at(value, path) == wire_key]


@each_keyed
def test_the_key_comes_back_as_it_was_stamped(name: str, file: str) -> None:
    delivery = with_key(name)[file]
    assert stamped(PROVIDERS[name].stamp(KEY).body, KEY)
    assert any(event.send_key == KEY for event in events(name, delivery))
    assert not any(
        event.send_key == KEY
        for event in events(name, replace(delivery, body=delivery.body.replace(KEY.encode(), OTHER.encode())))
    )


@each_provider
@given(wire_key=st.from_regex(r"[a-z0-9_-]{1,48}", fullmatch=True))
def test_a_stamp_fits_the_narrowest_slot_of_any_provider(name: str, wire_key: str) -> None:
    stamp = PROVIDERS[name].stamp(wire_key)
    assert stamp == PROVIDERS[name].stamp(wire_key)
    for header, text in {**stamp.headers, **stamp.smtp_headers}.items():
        assert re.fullmatch(r"[!-9;-~]{1,126}", header)
        assert re.fullmatch(r"[ -~]{1,250}", text)


@each_provider
def test_what_is_stamped_is_plain_data(name: str) -> None:
    stamp = PROVIDERS[name].stamp(KEY)
    assert json.loads(json.dumps(stamp.body)) == stamp.body
    assert stamp.message_id is None or stamp.message_id == str(uuid.UUID(stamp.message_id))
    assert bool(stamp.message_id or stamped(stamp.body, KEY)) is PROVIDERS[name].facts.echoes_key or stamp.message_id


# -- hostile bodies ----------------------------------------------------------------------------------------------------

HOSTILE = [
    *(b"", b" ", b"\x00", b"null", b"true", b"7", b'"text"', b"{}", b"[]", b"[[]]", b"[{}]", b"[null]", b"prose"),
    *(b"[" * 100_000, b"{" * 9000, b'{"a":' * 50_000, b"[" * 9000 + b"]" * 9000, b'[{"a":' * 900 + b"1" + b"}]" * 900),
    *(
        b'{"Type":"Notification","\\ud83d":1}',
        b'{"event-data":{"event":"opened","\\ud83d":1}}',
        b'{"event-data":"\\ud83d"}',
    ),
    *(b"9" * 10_000, b"1e999", b"-", b"NaN", b'{"event":NaN}', b'{"type":' + b"9" * 5000 + b"}"),
    *(b"\xef\xbb\xbf", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"\xff", b'"\xff"', b'{"type":"\\ud83d"}'),
    *(b'{"type":"a","type":"b"}', b'{"\\u0000":"\\u0000"}', b"\x00" * 1000, b'{"event":"', b"a=b&c=d", b"[7,null,[]]"),
]


@each_provider
@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: repr(body[:20]) + str(len(body)))
async def test_no_body_raises_anything_but_a_refusal(name: str, body: bytes) -> None:
    parsed_or_refused(name, Delivery(body, {}))
    await judged_unlike_itself(name, Delivery(body, {}))


async def judged_unlike_itself(name: str, delivery: Delivery) -> None:
    """Verify what nobody signed: it must be refused, and nothing may be raised."""
    scheme = SCHEMES.get(name)
    feed = scheme.feed(name, 0) if scheme else Feed("main", name, ("basic:user:throw-away",))
    assert isinstance(await verify(name, delivery, feed), Refused)


SUBSTITUTES = [
    *(DELETE, None, True, "", " ", 7, -1, 1e300, 10**400, "9" * 400, [], {}, [[]], [{}], [None, 7, "x"], {"": ""}),
    *(
        "\x00",
        "\ud83d",
        "größe",
        "two\nlines",
        "word " * 300,
        "k" * 3000,
        "0001-01-01T00:00:00Z",
        "9999-12-31T23:59:59-14:00",
    ),
    *(
        "2026-11-02T10:15:04.5+02:00",
        "2026-11-02T10:15:04",
        "2026-11-02",
        "1793607305",
        1793607305.25,
        1793607305000,
        "null",
    ),
]


@each_body
def test_no_field_that_is_missing_or_odd_breaks_an_event(name: str, file: str) -> None:
    delivery = webhooks_of(name)[file]
    value = value_of(delivery)
    for path in paths(value):
        inner = value_at(value, path)
        for substitute in [*SUBSTITUTES, *([{**inner, "\ud83d": "\ud83d"}] if isinstance(inner, dict) else [])]:
            parsed_or_refused(name, with_value(delivery, changed(value, path, substitute)))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(
        ["\ud83d", "\x00", "", " ", 10**400, "9" * 400, [], {}, [{}], [[]], "Suppressed", -1, 2**63, "{}"]
    )
)
ODD = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@each_provider
@given(data=st.data())
async def test_no_field_of_an_odd_type_raises_anything_but_a_refusal(name: str, data: st.DataObject) -> None:
    delivery = data.draw(st.sampled_from(list(webhooks_of(name).values())))
    value = value_of(delivery)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([(), *paths(value)]))
        if path or isinstance(value, (dict, list)):
            value = changed(value, path, data.draw(ODD | st.just(DELETE) if path else ODD))
    delivery = with_value(delivery, value, ascii_only=data.draw(st.booleans()))
    parsed_or_refused(name, delivery)
    await judged_unlike_itself(name, delivery)


@each_provider
@given(data=st.data())
def test_no_damage_to_the_bytes_raises_anything_but_a_refusal(name: str, data: st.DataObject) -> None:
    delivery = data.draw(st.sampled_from(list(webhooks_of(name).values())))
    body = bytearray(delivery.body)
    start = data.draw(st.integers(0, len(body)))
    body[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8) | st.just(b'"\\ud83d"'))
    parsed_or_refused(name, replace(delivery, body=bytes(body)))


# -- signatures --------------------------------------------------------------------------------------------------------


async def verify(name: str, delivery: Delivery, feed: Feed) -> Verdict:
    fetch = SCHEMES[name].fetch if name in SCHEMES else next(iter(SCHEMES.values())).fetch
    verdict = await PROVIDERS[name].verify(delivery, feed, NOW, fetch)
    if isinstance(verdict, Refused):
        assert re.fullmatch("[a-z_]+", verdict.reason)
        check_refusal(verdict.hint, *feed.secrets, *(secret.rpartition(":")[2] for secret in feed.secrets))
    return verdict


async def is_verified(name: str, delivery: Delivery, feed: Feed) -> bool:
    verdict = await verify(name, delivery, feed)
    assert isinstance(verdict, Verified | Refused)
    return verdict == Verified()


SPOILS: dict[str, Callable[[str], Any]] = {
    "missing": lambda _: DELETE,
    "empty": lambda _: "",
    "blank": lambda _: " ",
    "truncated": lambda given: given[:-1],
    "halved": lambda given: given[: len(given) // 2],
    "longer": lambda given: given + "x",
    "other": lambda given: given.swapcase() if given.swapcase() != given else given[::-1] + "7",
    "no signature at all": lambda _: "****",
    "not ASCII": lambda given: "größe" + given,
    "bytes that are no UTF-8": lambda given: "\udce9\udcff" + given,
    "half an emoji": lambda given: given + "\ud83d",
    "NUL": lambda given: given + "\x00",
    "a megabyte": lambda _: "A" * 1_048_576,
    "a megabyte of spaces": lambda _: " " * 1_048_576,
    "many": lambda _: "v1,AAAA " * 10_000,
}


@each_scheme
async def test_what_is_signed_is_accepted(name: str) -> None:
    scheme = SCHEMES[name]
    for delivery in webhooks_of(name).values():
        signed = scheme.sign(delivery.body, scheme.secrets[0], NOW)
        assert await is_verified(name, signed, scheme.feed(name, 0, tolerance=timedelta(minutes=5)))


@each_scheme
@pytest.mark.parametrize("spoil", SPOILS)
async def test_a_spoilt_signature_is_refused_and_raises_nothing(name: str, spoil: str) -> None:
    scheme = SCHEMES[name]
    signed = scheme.sign(first_keyed(name).body, scheme.secrets[0], NOW)
    spoilt = list(scheme.spoilt(signed, SPOILS[spoil]))
    assert len(spoilt) == len([*scheme.headers, *scheme.fields]) > 0
    for delivery in spoilt:
        assert not await is_verified(name, delivery, scheme.feed(name, 0, 1))


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.headers])
@pytest.mark.parametrize("spoil", SPOILS)
def test_odd_headers_lose_no_event(name: str, spoil: str) -> None:
    scheme = SCHEMES[name]
    signed = scheme.sign(first_keyed(name).body, scheme.secrets[0], NOW)
    for delivery in scheme.spoilt(signed, SPOILS[spoil]):
        check(PROVIDERS[name].parse(delivery))
        assert [event.send_key for event in events(name, delivery)] == [
            event.send_key for event in events(name, signed)
        ]


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.fields])
async def test_a_part_of_a_signature_that_is_no_text_is_refused(name: str) -> None:
    scheme = SCHEMES[name]
    signed = scheme.sign(first_keyed(name).body, scheme.secrets[0], NOW)
    for odd in (None, True, [], {}, ["x"], 1.5, -7):
        for delivery in scheme.spoilt(signed, lambda _, odd=odd: odd):
            assert not await is_verified(name, delivery, scheme.feed(name, 0))


@each_scheme
async def test_either_of_two_secrets_is_enough_and_a_third_is_not(name: str) -> None:
    scheme = SCHEMES[name]
    body = first_keyed(name).body
    verdicts = [await is_verified(name, scheme.sign(body, key, NOW), scheme.feed(name, 0, 1)) for key in scheme.secrets]
    assert verdicts == [True, True, False]


@each_scheme
@pytest.mark.parametrize(
    "empty", ["", " ", "\n", "whsec_", "basic:", "basic::", "bearer:", "header:X-Own=", "query:own="]
)
async def test_without_a_secret_nothing_is_accepted(name: str, empty: str) -> None:
    scheme = SCHEMES[name]
    body = first_keyed(name).body
    bare = {"authorization": "Basic Og==", "x-own": ""}
    nothing = "" if empty.strip() else empty
    for delivery in (scheme.sign(body, scheme.secrets[0], NOW), scheme.sign(body, nothing, NOW)):
        assert not await is_verified(name, delivery, scheme.feed(name))
        feed = Feed("main", name, **{scheme.setting: (empty,)})
        assert not await is_verified(name, delivery, feed)
        carrying = replace(delivery, headers={**delivery.headers, **bare}, query="own=")
        assert not await is_verified(name, carrying, feed)


AGES = [0, 290, -290, 310, -310, 86_400 * 300, -86_400 * 300]


@each_scheme
@pytest.mark.parametrize("seconds", AGES)
async def test_without_a_tolerance_age_is_not_looked_at(name: str, seconds: int) -> None:
    scheme = SCHEMES[name]
    signed = scheme.sign(first_keyed(name).body, scheme.secrets[0], NOW + timedelta(seconds=seconds))
    assert await is_verified(name, signed, scheme.feed(name, 0))


@pytest.mark.parametrize("name", [name for name in SCHEMES if PROVIDERS[name].facts.signs_time])
@pytest.mark.parametrize("seconds", AGES)
async def test_what_was_signed_too_early_or_too_late_is_stale(name: str, seconds: int) -> None:
    scheme = SCHEMES[name]
    signed = scheme.sign(first_keyed(name).body, scheme.secrets[0], NOW + timedelta(seconds=seconds))
    verdict = await verify(name, signed, scheme.feed(name, 0, tolerance=timedelta(minutes=5)))
    assert getattr(verdict, "reason", "fresh") == ("fresh" if abs(seconds) < 300 else "stale")


@pytest.mark.parametrize("name", [name for name in SCHEMES if PROVIDERS[name].facts.signs_body])
@given(data=st.data())
async def test_a_changed_byte_of_a_signed_body_is_refused(name: str, data: st.DataObject) -> None:
    scheme = SCHEMES[name]
    body = first_keyed(name).body
    signed = scheme.sign(body, scheme.secrets[0], NOW)
    place, flip = data.draw(st.integers(0, len(body) - 1)), data.draw(st.integers(1, 127))
    other = body[:place] + bytes([body[place] ^ flip]) + body[place + 1 :]
    assert not await is_verified(name, scheme.with_body(signed, other), scheme.feed(name, 0))


@each_scheme
async def test_another_key_under_the_same_signature_passes_only_where_facts_say_so(name: str) -> None:
    scheme = SCHEMES[name]
    signed = scheme.sign(first_keyed(name).body, scheme.secrets[0], NOW)
    other = replace(signed, body=signed.body.replace(KEY.encode(), OTHER.encode()))
    assert (other != signed) is (name in ECHOING)
    assert await is_verified(name, other, scheme.feed(name, 0)) is not (
        PROVIDERS[name].facts.signs_body and other != signed
    )


# -- credentials that the request carries ------------------------------------------------------------------------------


def carrying(name: str, secret: str, text: str) -> Delivery:
    return replace(CARRIED[secret](text), body=first_keyed(name).body)


@each_provider
@pytest.mark.parametrize("secret", CARRIED)
async def test_a_carried_credential_is_accepted_and_so_is_either_of_two(name: str, secret: str) -> None:
    third = secret.replace("throw-away", "third")
    right = carrying(name, secret, "throw-away")
    assert await is_verified(name, right, Feed("main", name, (secret,)))
    assert await is_verified(name, right, Feed("main", name, (third, secret)))
    assert not await is_verified(name, right, Feed("main", name, (third,)))
    assert not await is_verified(name, right, Feed("main", name))
    assert not await is_verified(name, Delivery(right.body, {}), Feed("main", name, (secret,)))


@each_provider
@pytest.mark.parametrize("secret", CARRIED)
@pytest.mark.parametrize("spoil", [spoil for spoil in SPOILS if spoil != "missing"])
async def test_a_spoilt_credential_is_refused_and_raises_nothing(name: str, secret: str, spoil: str) -> None:
    spoilt = SPOILS[spoil]("throw-away")
    assert not await is_verified(name, carrying(name, secret, spoilt), Feed("main", name, (secret,)))


@each_provider
@pytest.mark.parametrize("authorization", ["Basic", "Basic ", "Basic é", "Basic \udcff", "Basic ****", "x" * 1_048_576])
async def test_a_malformed_authorization_is_refused_and_raises_nothing(name: str, authorization: str) -> None:
    delivery = Delivery(first_keyed(name).body, {"authorization": authorization})
    assert not await is_verified(name, delivery, Feed("main", name, ("basic:user:throw-away",)))


# -- samples -----------------------------------------------------------------------------------------------------------


@each_provider
@pytest.mark.parametrize("kind", [*Kind, "no such kind"])
async def test_a_sample_is_accepted_and_means_what_was_asked_for_or_says_why_there_is_none(
    name: str, kind: str
) -> None:
    signing = SCHEMES[name].feed(name, 0, tolerance=timedelta(minutes=5)) if name in SCHEMES else None
    for feed in [Feed("main", name, (secret,)) for secret in CARRIED] + ([signing] if signing else []):
        try:
            sample = PROVIDERS[name].sample(kind, KEY, feed, NOW)
        except NoSample as refusal:
            check_refusal(str(refusal).replace("; there are", "\n;").splitlines()[0], *feed.secrets)
            continue
        assert await is_verified(name, sample, feed)
        (event,) = events(name, sample)
        own_name = f'"{kind}"'.encode() in sample.body  # a provider's own name goes first
        assert own_name or event.kind == kind or {event.kind, kind} == {Kind.SENT, Kind.QUEUED}
        assert (event.send_key, event.occurred_at) == (KEY if name in ECHOING else None, NOW)
        assert event.testimony is not Testimony.NONE
