# SPDX-License-Identifier: Apache-2.0
"""Postmark: what its webhooks mean, prove and carry. Expectations were written from its documents by hand."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from anymail_compare import anymail_events
from case_files import FIXTURES, case, delivery, fixture, no_fetch
from hypothesis import given
from hypothesis import strategies as st

from webhooks.event import Event
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Refused, Verdict, Verified
from webhooks.providers.postmark import PROVIDER

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
OUR_KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
MESSAGE = "3f9d2c1b-7a60-4e58-9c47-0b1a2d3e4f50"
ADA = "ana.reyes@example.com"


def basic(credential: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(credential.encode()).decode()}


def feed(*secrets: str) -> Feed:
    return Feed("postmark-main", "postmark", secrets)


async def verify(request: Delivery, of: Feed) -> Verdict:
    return await PROVIDER.verify(request, of, NOW, no_fetch)


def parse(**record: Any) -> Event:
    return parse_body(json.dumps(record).encode())


def parse_body(body: bytes) -> Event:
    (event,) = PROVIDER.parse(Delivery(body, {})).events
    return event


class Expected(NamedTuple):
    kind: str
    testimony: str
    occurred_at: str | None
    event_id: str | None = None
    message_id: str | None = MESSAGE
    send_key: str | None = OUR_KEY
    recipient: str | None = ADA
    reason: str | None = None


BOUNCED_AT = "2026-11-02T08:15:12.880000+00:00"
NO_SUCH = "smtp;550 5.1.1 no such mailbox"
WEBHOOKS = {
    "delivery": Expected("delivered", "accepted", "2026-11-02T08:15:06.004123+00:00"),
    "bounce_hard": Expected("bounced", "accepted", BOUNCED_AT, "692560173001", reason=f"HardBounce {NO_SUCH}"),
    "bounce_soft": Expected("bounced", "accepted", BOUNCED_AT, "692560173002", reason=f"SoftBounce {NO_SUCH}"),
    "bounce_transient": Expected("deferred", "accepted", BOUNCED_AT, "692560173003", reason=f"Transient {NO_SUCH}"),
    "bounce_blocked": Expected("bounced", "accepted", BOUNCED_AT, "692560173004", reason=f"Blocked {NO_SUCH}"),
    "bounce_smtp_api_error": Expected(
        "failed",
        "rejected",
        BOUNCED_AT,
        "692560173005",
        reason="SMTPApiError The message could not be accepted by the API",
    ),
    "bounce_template_rendering_failed": Expected(
        "failed", "rejected", BOUNCED_AT, "692560173006", reason=f"TemplateRenderingFailed {NO_SUCH}"
    ),
    "bounce_auto_responder": Expected(
        "autoresponded", "accepted", BOUNCED_AT, "692560173007", reason=f"AutoResponder {NO_SUCH}"
    ),
    "spam_complaint": Expected("complained", "accepted", "2026-11-03T17:40:00+00:00", "692560173008"),
    "open": Expected("opened", "accepted", "2026-11-02T09:01:12.507000+00:00"),
    "click": Expected("clicked", "accepted", "2026-11-02T09:01:40.020000+00:00"),
    "subscription_change_recipient": Expected(
        "unsubscribed", "accepted", "2026-11-04T10:10:10+00:00", reason="ManualSuppression"
    ),
    "subscription_change_bounce": Expected("bounced", "accepted", "2026-11-02T08:15:13+00:00", reason="HardBounce"),
    "subscription_change_manual": Expected(
        "unsubscribed",
        "none",
        "2026-11-04T11:00:00+00:00",
        message_id=None,
        send_key=None,
        reason="ManualSuppression",
    ),
    "subscription_change_reactivate": Expected(
        "subscribed", "none", "2026-11-05T11:00:00+00:00", message_id=None, send_key=None
    ),
    "inbound": Expected(
        "inbound", "none", None, message_id="11112222-3333-4444-8555-666677778888", send_key=None, recipient=None
    ),
}


def test_every_webhook_fixture_is_expected() -> None:
    listed = {"api_messages_outbound_by_metadata", "api_messages_outbound_none"}
    assert {file.stem for file in (FIXTURES / "postmark").glob("*")} == {*WEBHOOKS, *ANSWERS, *listed}


ANSWERS = {
    "api_email_ok": (MESSAGE, "accepted"),
    "api_email_delayed_no_errorcode": (MESSAGE, "accepted"),
    "api_email_partly_inactive": (MESSAGE, "accepted"),  # of the others no event will come
    "api_email_inactive_422": (None, "rejected"),
}
"""What a send is answered: the id as a confirmation stores it, and what the answer proves."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_message_id_of_its_events_or_says_that_nothing_is_sent(name: str) -> None:
    answer = json.loads(fixture(f"postmark/{name}.json"))
    message_id, proves = ANSWERS[name]
    assert answer.get("MessageID", "").strip("<> ") == (message_id or "")
    assert (message_id == parse_body(fixture("postmark/delivery.json")).message_id) == (proves == "accepted")
    assert answer.get("ErrorCode", 0) == (0 if proves == "accepted" else 406)


def test_the_facts_say_what_an_answer_proves() -> None:
    said = PROVIDER.facts.native_key
    assert "A MessageID proves that it was taken, with ErrorCode 0 or none" in said
    assert "422 with ErrorCode 406 that all its recipients are inactive and nothing is sent" in said
    assert any("Inactive recipients of a message to several get no event" in step for step in PROVIDER.facts.setup)


@pytest.mark.parametrize("name", WEBHOOKS)
def test_a_webhook_means_and_proves_what_postmark_says_of_it(name: str) -> None:
    body = fixture(f"postmark/{name}.json")
    event, expected = parse_body(body), WEBHOOKS[name]
    assert (event.kind, event.testimony) == (expected.kind, expected.testimony)
    assert (event.message_id, event.send_key, event.recipient) == (
        expected.message_id,
        expected.send_key,
        expected.recipient,
    )
    assert (event.occurred_at.isoformat() if event.occurred_at else None) == expected.occurred_at
    assert event.reason == expected.reason
    assert event.event_id == (expected.event_id or event.event_id)
    assert event.raw == body


def test_no_two_webhooks_are_the_same_event() -> None:
    events = [parse_body(fixture(f"postmark/{name}.json")) for name in WEBHOOKS]
    assert len({(event.message_id, event.event_id) for event in events}) == len(WEBHOOKS)


ACCEPTED_BOUNCES = {
    "HardBounce": "bounced",
    "Transient": "deferred",
    "AutoResponder": "autoresponded",
    "AddressChange": "autoresponded",
    "DnsError": "deferred",
    "SpamNotification": "complained",
    "OpenRelayTest": "deferred",
    "Unknown": "unknown",
    "SoftBounce": "bounced",
    "VirusNotification": "bounced",
    "ChallengeVerification": "autoresponded",
    "Blocked": "bounced",
    "DMARCPolicy": "bounced",
    "Unconfirmed": "rejected",
    "SpamComplaint": "complained",
    "Subscribe": "subscribed",
    "Unsubscribe": "unsubscribed",
}
REJECTED_BOUNCES = {
    "BadEmailAddress": "rejected",
    "ManuallyDeactivated": "rejected",
    "SMTPApiError": "failed",
    "TemplateRenderingFailed": "failed",
}


@pytest.mark.parametrize("bounce_type", ACCEPTED_BOUNCES)
def test_a_bounce_of_a_message_that_was_taken_proves_acceptance(bounce_type: str) -> None:
    event = parse(RecordType="Bounce", Type=bounce_type, ID=1, MessageID=MESSAGE)
    assert (event.kind, event.testimony) == (ACCEPTED_BOUNCES[bounce_type], "accepted")


@pytest.mark.parametrize("bounce_type", REJECTED_BOUNCES)
def test_a_bounce_of_a_message_that_postmark_will_not_send_is_a_rejection(bounce_type: str) -> None:
    event = parse(RecordType="Bounce", Type=bounce_type, ID=1, MessageID=MESSAGE)
    assert (event.kind, event.testimony) == (REJECTED_BOUNCES[bounce_type], "rejected")


@pytest.mark.parametrize(
    ("bounce_type", "message_id", "kind"),
    [
        ("Subscribe", None, "subscribed"),
        ("Unsubscribe", None, "unsubscribed"),
        ("InboundError", MESSAGE, "inbound"),
        ("SomethingNew", MESSAGE, "bounced"),
        (None, MESSAGE, "bounced"),
    ],
)
def test_a_bounce_of_no_message_or_of_an_unknown_type_proves_nothing(
    bounce_type: str | None, message_id: str | None, kind: str
) -> None:
    event = parse(RecordType="Bounce", Type=bounce_type, ID=1, MessageID=message_id)
    assert (event.kind, event.testimony) == (kind, "none")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"SuppressSending": True, "SuppressionReason": "ManualSuppression"}, "unsubscribed"),
        ({"SuppressSending": True, "SuppressionReason": "HardBounce"}, "bounced"),
        ({"SuppressSending": True, "SuppressionReason": "SpamComplaint"}, "complained"),
        ({"SuppressSending": True, "SuppressionReason": "SomethingNew"}, "unsubscribed"),
        ({"SuppressSending": False, "SuppressionReason": None}, "subscribed"),
        ({}, "unsubscribed"),
    ],
)
def test_a_subscription_change_proves_acceptance_only_of_the_message_it_names(
    change: dict[str, Any], kind: str
) -> None:
    of_a_message = parse(RecordType="SubscriptionChange", MessageID=MESSAGE, **change)
    assert (of_a_message.kind, of_a_message.testimony) == (kind, "accepted")
    of_the_account = parse(RecordType="SubscriptionChange", MessageID=None, **change)
    assert (of_the_account.kind, of_the_account.testimony, of_the_account.message_id) == (kind, "none", None)


@pytest.mark.parametrize("record_type", ["SomethingNew", "delivery", "", None, 7, ["Delivery"]])
def test_a_record_that_is_not_known_is_kept_and_proves_nothing(record_type: Any) -> None:
    event = parse(RecordType=record_type, MessageID=MESSAGE, Metadata={"send_key": "k"})
    assert (event.kind, event.testimony, event.message_id, event.send_key) == ("unknown", "none", MESSAGE, "k")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b"RecordType=Delivery", b"{}", b'{"event-data": {}}', b"[" * 9999]
)
def test_what_is_no_webhook_of_postmark_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(BadPayload) as refusal:
        PROVIDER.parse(Delivery(body, {}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({"send_key": "order-1"}, "order-1"),
        ({"Send_Key": "order-1"}, "order-1"),
        ({"SEND_KEY": "order-1"}, "order-1"),
        ({"SEND_KEY": "other", "send_key": "order-1"}, "order-1"),
        ({"Send_Key": None, "SEND_KEY": "order-1"}, "order-1"),
        ({"send_key": 123}, "123"),
        ({"send_key": ""}, None),
        ({"send_key": ["order-1"]}, None),
        ({"another": "x"}, None),
        ({}, None),
        ([], None),
        ("text", None),
        (None, None),
    ],
)
def test_the_key_is_found_in_every_spelling_of_its_name(metadata: Any, key: str | None) -> None:
    assert parse(RecordType="Delivery", Metadata=metadata).send_key == key


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-02T08:15:06.0041239Z", datetime(2026, 11, 2, 8, 15, 6, 4123, UTC)),
        ("2026-11-02T04:15:06.0041239-04:00", datetime(2026, 11, 2, 8, 15, 6, 4123, UTC)),
        ("2026-11-02T08:15:06Z", datetime(2026, 11, 2, 8, 15, 6, 0, UTC)),
        ("2026-11-02T08:15:06", datetime(2026, 11, 2, 8, 15, 6, 0, UTC)),
        ("0001-01-01T00:00:00Z", None),
        ("yesterday", None),
        (7, None),
        (None, None),
    ],
)
def test_times_are_read_in_every_form_that_postmark_has_used(text: Any, time: datetime | None) -> None:
    assert parse(RecordType="Delivery", DeliveredAt=text).occurred_at == time


CLICK = {"RecordType": "Click", "MessageID": MESSAGE, "Recipient": ADA, "ReceivedAt": "2026-11-02T09:01:40.0200001Z"}


@pytest.mark.parametrize(
    "change",
    [
        {"RecordType": "Open"},
        {"MessageID": "another"},
        {"Recipient": "bo@example.net"},
        {"ReceivedAt": "2026-11-02T09:01:40.0200002Z"},
        {"OriginalLink": "https://a.example"},
        {"SuppressionReason": "HardBounce"},
        {"SuppressSending": False},
    ],
)
def test_without_an_id_a_repeat_is_the_same_event_and_another_event_is_not(change: dict[str, Any]) -> None:
    one, other = parse(**CLICK), parse(**{**CLICK, **change})
    assert one.event_id == parse(**CLICK, Geo={"City": "looked up anew"}).event_id
    assert one.event_id != other.event_id


def test_an_id_is_kept_to_its_last_digit() -> None:
    assert parse(RecordType="Bounce", ID=9007199254740993).event_id == "9007199254740993"
    assert parse(RecordType="Bounce", ID=0).event_id == "0"


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
)
FIELDS = st.sampled_from(
    [
        "RecordType", "Type", "ID", "MessageID", "Email", "Recipient", "Metadata", "BouncedAt", "DeliveredAt",
        "ChangedAt", "ReceivedAt", "Details", "Description", "SuppressSending", "SuppressionReason", "OriginalLink",
    ]
)  # fmt: skip
RECORD_FILES = st.sampled_from(["bounce_hard", "delivery", "click", "subscription_change_recipient", "inbound"])


@given(RECORD_FILES, FIELDS, ODD)
def test_no_field_of_an_odd_type_loses_the_event(file: str, name: str, value: Any) -> None:
    record = json.loads(fixture(f"postmark/{file}.json"))
    assert len(PROVIDER.parse(Delivery(json.dumps({**record, name: value}).encode(), {})).events) == 1


@pytest.mark.parametrize("secret", ["basic:hook:throwaway", "header:X-Hook=throwaway", "query:token=throwaway"])
async def test_a_credential_that_postmark_can_carry_verifies(secret: str) -> None:
    carried = Delivery(b"{}", {**basic("hook:throwaway"), "x-hook": "throwaway"}, query="a=1&token=throwaway")
    assert await verify(carried, feed(secret)) == Verified()
    assert await verify(carried, feed("basic:hook:old", secret)) == Verified()


@pytest.mark.parametrize("secret", ["basic:hook:throwaway", "header:X-Hook=throwaway", "query:token=throwaway"])
@pytest.mark.parametrize(
    "request_",
    [
        Delivery(b"{}", {**basic("hook:another"), "x-hook": "another"}, query="token=another"),
        Delivery(b"{}", {**basic("hook:throwawaÿ"), "x-hook": "throwawaÿ"}, query="token=throwawa%FF"),
        Delivery(b"{}", {**basic("hook:"), "x-hook": ""}, query="token="),
        Delivery(b"{}", {"authorization": "Basic not base64", "x-hook": "\udcff"}, query="%"),
        Delivery(b"{}", {"authorization": "Basic \udcff"}, query="token"),
    ],
)
async def test_a_wrong_or_malformed_credential_is_refused(request_: Delivery, secret: str) -> None:
    verdict = await verify(request_, feed(secret))
    assert isinstance(verdict, Refused)
    assert verdict.reason == "signature"
    assert "throwaway" not in verdict.hint


@pytest.mark.parametrize("secret", ["basic:hook:throwaway", "header:X-Hook=throwaway", "query:token=throwaway"])
async def test_a_delivery_without_a_credential_is_refused_whatever_signature_it_has(secret: str) -> None:
    for headers in ({}, {"x-postmark-signature": "00" * 32}):
        verdict = await verify(Delivery(b"{}", headers), feed(secret))
        assert isinstance(verdict, Refused)
        assert verdict.reason == "missing"


def test_a_secret_that_no_request_carries_is_objected_to() -> None:
    assert PROVIDER.objection("secrets", "a-signing-key") == (
        "verifies nothing, since Postmark signs no webhook: write basic:user:password, header:Name=value or"
        " query:name=value"
    )
    assert PROVIDER.objection("secrets", "basic:hook:throwaway") is None
    assert PROVIDER.objection("topics", "anything") is None


@pytest.mark.parametrize("secrets", [(), ("a-signing-key",)])
async def test_without_a_credential_configured_every_delivery_is_refused(secrets: tuple[str, ...]) -> None:
    verdict = await verify(Delivery(b"{}", basic(":")), feed(*secrets))
    assert isinstance(verdict, Refused)
    assert verdict.reason == "no_secret"


def test_absence_means_less_as_no_event_comes_before_the_recipients_server_answered() -> None:
    assert PROVIDER.facts.first_event_is_delivery


@pytest.mark.parametrize(
    ("number", "kind", "send_key", "recipient"),
    [
        ("012", "unsubscribed", None, None),
        ("013", "unsubscribed", None, "ada@example.org"),
        ("014", "failed", "order.receipt:1001", "ada@example.org"),
    ],
)
async def test_a_reported_oddity_is_read_as_it_should_be(
    number: str, kind: str, send_key: str | None, recipient: str | None
) -> None:
    reported = case(number)
    request = delivery(reported)
    assert await verify(request, feed("basic:" + reported["config"]["basic_auth"])) == Verified()
    (event,) = PROVIDER.parse(request).events
    assert (event.kind, event.testimony) == (kind, reported["expect"]["evidence"])
    assert (event.message_id, event.send_key, event.recipient) == (
        reported["expect"]["message_id"],
        send_key,
        recipient,
    )


def test_the_stamp_is_metadata() -> None:
    stamp = PROVIDER.stamp(OUR_KEY)
    assert stamp.body == {"Metadata": {"send_key": OUR_KEY}}
    assert stamp.headers == {}
    assert stamp.smtp_headers == {"X-PM-Metadata-send_key": OUR_KEY}


SAMPLES = {
    "Delivery": ("delivered", "accepted"),
    "delivered": ("delivered", "accepted"),
    "Bounce": ("bounced", "accepted"),
    "bounced": ("bounced", "accepted"),
    "Transient": ("deferred", "accepted"),
    "deferred": ("deferred", "accepted"),
    "ManuallyDeactivated": ("rejected", "rejected"),
    "rejected": ("rejected", "rejected"),
    "SMTPApiError": ("failed", "rejected"),
    "failed": ("failed", "rejected"),
    "Open": ("opened", "accepted"),
    "opened": ("opened", "accepted"),
    "Click": ("clicked", "accepted"),
    "clicked": ("clicked", "accepted"),
    "SpamComplaint": ("complained", "accepted"),
    "complained": ("complained", "accepted"),
    "SubscriptionChange": ("unsubscribed", "accepted"),
    "unsubscribed": ("unsubscribed", "accepted"),
}


@pytest.mark.parametrize("secret", ["basic:hook:throwaway", "query:token=throwaway"])
@pytest.mark.parametrize("kind", SAMPLES)
async def test_a_sample_is_taken_and_means_what_it_is_asked_for(kind: str, secret: str) -> None:
    sample = PROVIDER.sample(kind, OUR_KEY, feed(secret), NOW)
    assert await verify(sample, feed(secret)) == Verified()
    (event,) = PROVIDER.parse(sample).events
    assert (event.kind, event.testimony) == SAMPLES[kind]
    assert (event.send_key, event.occurred_at, event.recipient) == (OUR_KEY, NOW, "sample@example.com")
    assert event.message_id is not None


def test_a_sample_asked_for_again_is_another_event_of_the_same_message() -> None:
    later = NOW.replace(second=1)
    for kind in ("Delivery", "Bounce"):
        one, other = (parse_body(PROVIDER.sample(kind, OUR_KEY, feed("basic:a:b"), t).body) for t in (NOW, later))
        assert one.message_id == other.message_id
        assert one.event_id != other.event_id


def test_no_sample_says_why_in_one_line() -> None:
    with pytest.raises(NoSample, match=r"^postmark has no sample 'bounce'; there are Delivery, .*, delivered, .*"):
        PROVIDER.sample("bounce", OUR_KEY, feed("basic:a:b"), NOW)
    with pytest.raises(NoSample, match="no credential"):
        PROVIDER.sample("Delivery", OUR_KEY, feed(), NOW)


ANYMAIL_DIFFERS = {
    "bounce_blocked": "anymail says rejected; it is the recipient's server that refused: Postmark had tried",
}


@pytest.mark.parametrize("name", sorted(WEBHOOKS.keys() - {"inbound"}))  # anymail reads inbound mail at another address
def test_django_anymail_reads_the_same(name: str) -> None:
    request = Delivery(fixture(f"postmark/{name}.json"), {"content-type": "application/json"})
    (ours,), (theirs,) = PROVIDER.parse(request).events, anymail_events("postmark", request)
    assert (theirs.message_id, theirs.recipient, theirs.timestamp) == (
        ours.message_id,
        ours.recipient,
        ours.occurred_at,
    )
    assert theirs.metadata.get("send_key") == ours.send_key
    assert theirs.event_id in (ours.event_id, None)
    assert (theirs.event_type != ours.kind) == (name in ANYMAIL_DIFFERS)


ANYMAIL_SAYS_REJECTED = {"Blocked", "DMARCPolicy"}  # the recipient's server refused: Postmark had taken and tried it


@pytest.mark.parametrize("bounce_type", [*ACCEPTED_BOUNCES, *REJECTED_BOUNCES])
def test_django_anymail_reads_every_type_of_bounce_the_same(bounce_type: str) -> None:
    body = json.dumps({"RecordType": "Bounce", "Type": bounce_type, "MessageID": MESSAGE, "ID": 1}).encode()
    (theirs,) = anymail_events("postmark", Delivery(body, {"content-type": "application/json"}))
    kind = parse_body(body).kind
    assert (
        (kind, theirs.event_type) == ("bounced", "rejected") if bounce_type in ANYMAIL_SAYS_REJECTED else (kind, kind)
    )
