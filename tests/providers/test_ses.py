# SPDX-License-Identifier: Apache-2.0
"""What Amazon SES says, read: each fixture against a table written by hand, each case, and django-anymail's reading."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from anymail_compare import anymail_events
from hypothesis import given
from hypothesis import strategies as st

from webhooks.event import Event, Kind, Testimony, normal_recipient
from webhooks.provider import BadPayload, Delivery, Feed, NoSample, Parsed, Provider
from webhooks.providers.ses import FACTS, PROVIDER, VALIDATION

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "ses"
CASES = HERE.parent / "cases"

KEY = "e15bd8fd5b6b63a6f91c331d3c0702980d93474c2b1c4474"
ONE = "0100019a7c41d2e3-5b0d7c1e-90aa-4f6e-8d21-6a3c9b7fe410-000000"
THREE = "0100019a7c52aa10-1f0e2d3c-4b5a-4968-9788-a6b5c4d3e2f1-000000"
ANA, BO = "ana.reyes@example.com", "bo.lind@example.net"
ACCEPTED, REJECTED, NONE = Testimony.ACCEPTED, Testimony.REJECTED, Testimony.NONE

SENT = "2026-11-02T08:15:04.217Z"
DELIVERED = "2026-11-02T08:15:06.004Z"
BOUNCED = "2026-11-02T08:15:09.880Z"
COMPLAINED = "2026-11-03T17:40:00.000Z"
OPENED = "2026-11-02T09:01:12.507Z"
CLICKED = "2026-11-02T09:01:40.020Z"
DELAYED = "2026-11-02T08:45:04.000Z"
CHANGED = "2026-11-04T10:10:10.100Z"

# Written from the provider's documents before the parser was: file, kind, what it proves, key, message, whom, when.
EVENTS = [
    ("event_send", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("event_send_headers_truncated", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("event_send_without_key", Kind.SENT, ACCEPTED, None, ONE, [ANA], SENT),
    ("event_delivery", Kind.DELIVERED, ACCEPTED, KEY, ONE, [ANA], DELIVERED),
    ("event_delivery_multi_recipient", Kind.DELIVERED, ACCEPTED, KEY, THREE, [ANA, BO], "2026-11-02T08:15:06.400Z"),
    ("event_bounce_permanent", Kind.BOUNCED, ACCEPTED, KEY, ONE, [ANA], BOUNCED),
    ("event_bounce_transient", Kind.BOUNCED, ACCEPTED, KEY, ONE, [ANA], BOUNCED),
    ("event_bounce_undetermined", Kind.BOUNCED, ACCEPTED, KEY, ONE, [ANA], BOUNCED),
    ("event_bounce_account_suppression", Kind.BOUNCED, REJECTED, KEY, ONE, [ANA], BOUNCED),
    ("event_complaint", Kind.COMPLAINED, ACCEPTED, KEY, ONE, [ANA], COMPLAINED),
    ("event_complaint_account_suppression", Kind.COMPLAINED, REJECTED, KEY, ONE, [ANA], "2026-11-02T08:15:05.101Z"),
    ("event_reject", Kind.REJECTED, REJECTED, KEY, ONE, [ANA], SENT),
    ("event_rendering_failure", Kind.FAILED, REJECTED, KEY, ONE, [ANA], SENT),
    ("event_delivery_delay", Kind.DEFERRED, ACCEPTED, KEY, ONE, [ANA], DELAYED),
    ("event_open", Kind.OPENED, ACCEPTED, KEY, ONE, [ANA], OPENED),
    ("event_click", Kind.CLICKED, ACCEPTED, KEY, ONE, [ANA], CLICKED),
    ("event_subscription", Kind.UNSUBSCRIBED, ACCEPTED, KEY, ONE, [ANA], CHANGED),
    ("notification_bounce", Kind.BOUNCED, ACCEPTED, KEY, ONE, [ANA], BOUNCED),
    ("notification_bounce_no_headers", Kind.BOUNCED, ACCEPTED, None, ONE, [ANA], BOUNCED),
    ("notification_complaint", Kind.COMPLAINED, ACCEPTED, KEY, ONE, [ANA], COMPLAINED),
    ("notification_complaint_no_headers", Kind.COMPLAINED, ACCEPTED, None, ONE, [ANA], COMPLAINED),
    ("notification_delivery", Kind.DELIVERED, ACCEPTED, KEY, ONE, [ANA], DELIVERED),
    ("notification_delivery_no_headers", Kind.DELIVERED, ACCEPTED, None, ONE, [ANA], DELIVERED),
    ("eventbridge_send", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("eventbridge_delivery", Kind.DELIVERED, ACCEPTED, KEY, ONE, [ANA], DELIVERED),
    ("eventbridge_bounce_permanent", Kind.BOUNCED, ACCEPTED, KEY, ONE, [ANA], BOUNCED),
    ("eventbridge_complaint", Kind.COMPLAINED, ACCEPTED, KEY, ONE, [ANA], COMPLAINED),
    ("eventbridge_reject", Kind.REJECTED, REJECTED, KEY, ONE, [ANA], SENT),
    ("eventbridge_rendering_failure", Kind.FAILED, REJECTED, KEY, ONE, [ANA], SENT),
    ("eventbridge_delivery_delay", Kind.DEFERRED, ACCEPTED, KEY, ONE, [ANA], DELAYED),
    ("eventbridge_open", Kind.OPENED, ACCEPTED, KEY, ONE, [ANA], OPENED),
    ("eventbridge_click", Kind.CLICKED, ACCEPTED, KEY, ONE, [ANA], CLICKED),
    ("eventbridge_subscription", Kind.UNSUBSCRIBED, ACCEPTED, KEY, ONE, [ANA], CHANGED),
    ("sns_http_notification_send", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("sqs_sns_envelope_send", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("sqs_sns_envelope_send_redelivered", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("sqs_raw_send", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
    ("sqs_eventbridge_send", Kind.SENT, ACCEPTED, KEY, ONE, [ANA], SENT),
]
CONTROLS = [
    ("notification_topic_subscribed", "topic_validation"),
    ("sns_http_topic_validation", "topic_validation"),
    ("sns_http_subscription_confirmation", "subscription_confirmation"),
    ("sns_http_unsubscribe_confirmation", "unsubscribe_confirmation"),
    ("eventbridge_advisor_open", "account_notice"),
]
# One fact, as it comes by different roads.
SAME = [
    [
        "event_send",
        "eventbridge_send",
        "sns_http_notification_send",
        "sqs_sns_envelope_send",
        "sqs_sns_envelope_send_redelivered",
        "sqs_raw_send",
        "sqs_eventbridge_send",
    ],
    ["event_delivery", "eventbridge_delivery", "notification_delivery", "notification_delivery_no_headers"],
    ["event_bounce_permanent", "eventbridge_bounce_permanent", "notification_bounce", "notification_bounce_no_headers"],
    ["event_complaint", "eventbridge_complaint", "notification_complaint", "notification_complaint_no_headers"],
    ["event_reject", "eventbridge_reject"],
    ["event_rendering_failure", "eventbridge_rendering_failure"],
    ["event_delivery_delay", "eventbridge_delivery_delay"],
    ["event_open", "eventbridge_open"],
    ["event_click", "eventbridge_click"],
    ["event_subscription", "eventbridge_subscription"],
]


# What SES's API answers: the id as `send_confirm` stores it, and what the answer proves of the send.
ANSWERS = {
    "api_send_email_response": (ONE, ACCEPTED),
    "api_get_message_insights": (ONE, ACCEPTED),
}


def fixture_body(name: str) -> bytes:
    """Return what a receiver or a queue's consumer would get; of a queue's message that is its Body."""
    body = (FIXTURES / f"{name}.json").read_bytes()
    return json.loads(body)["Body"].encode() if name.startswith("sqs_") else body


def fixture_events(name: str) -> list[Event]:
    return list(parsed(fixture_body(name)).events)


def parsed(body: bytes | str | dict[str, Any]) -> Parsed:
    if isinstance(body, dict):
        body = json.dumps(body)
    return PROVIDER.parse(Delivery(body.encode() if isinstance(body, str) else body, {}))


def only(body: bytes | str | dict[str, Any]) -> Event:
    (event,) = parsed(body).events
    return event


def record(name: str, **mail: Any) -> dict[str, Any]:
    """Return a fixture's record; `mail` replaces fields of its mail object, None takes one away."""
    value: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_bytes())
    value["mail"] = {k: v for k, v in (value["mail"] | mail).items() if v is not None}
    return value


def notification(message: str) -> dict[str, Any]:
    return {"Type": "Notification", "MessageId": "m", "Message": message, "Timestamp": "2026-11-02T08:15:04.655Z"}


def bridged(detail: dict[str, Any], detail_type: str = "Email Sent") -> dict[str, Any]:
    return {"version": "0", "id": "e", "detail-type": detail_type, "source": "aws.ses", "detail": detail}


def case(number: str) -> dict[str, Any]:
    (path,) = CASES.glob(f"{number}-*.json")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def at_case_time(seconds: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-20T10:00:{seconds}Z")


def case_events(number: str) -> list[Event]:
    value = case(number)
    bodies = [value["body_text"], *(request["body_text"] for request in value.get("requests", []))]
    return [event for body in bodies for event in parsed(body).events]


@pytest.mark.parametrize(
    ("name", "kind", "testimony", "key", "message_id", "recipients", "time"), EVENTS, ids=[row[0] for row in EVENTS]
)
def test_each_fixture_is_read_as_the_table_says(name, kind, testimony, key, message_id, recipients, time):
    events = fixture_events(name)
    assert [event.recipient for event in events] == recipients
    for event in events:
        assert (event.kind, event.testimony, event.send_key) == (kind, testimony, key)
        assert event.message_id == message_id
        assert event.occurred_at == datetime.fromisoformat(time)


@pytest.mark.parametrize(("name", "control"), CONTROLS)
def test_a_control_message_is_named_and_holds_no_event(name, control):
    found = parsed(fixture_body(name))
    assert (list(found.events), found.control) == ([], control)


def test_no_fixture_is_left_out():
    named = {row[0] for row in EVENTS} | {row[0] for row in CONTROLS} | set(ANSWERS)
    assert {path.stem for path in FIXTURES.glob("*.json")} == named


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_the_api_has_the_message_id_of_its_events(name):
    answer = json.loads((FIXTURES / f"{name}.json").read_bytes())
    (event,) = fixture_events("event_send")
    assert (answer["MessageId"].strip("<> "), event.testimony) == ANSWERS[name]
    assert event.message_id == ANSWERS[name][0]


def test_insights_into_a_message_show_its_key_and_its_events_but_take_its_id():
    insights = json.loads((FIXTURES / "api_get_message_insights.json").read_bytes())
    assert {"Name": "send_key", "Value": KEY} in insights["EmailTags"]
    (recipient,) = insights["Insights"]
    assert (recipient["Destination"], [event["Type"] for event in recipient["Events"]]) == (ANA, ["SEND", "DELIVERY"])
    assert "GetMessageInsights takes a message id, which a lost answer did not give" in FACTS.look_up


def test_each_line_of_a_firehose_file_is_a_record():
    lines = (FIXTURES / "firehose_records.ndjson").read_bytes().splitlines()
    assert [only(line).kind for line in lines] == [Kind.SENT, Kind.DELIVERED, Kind.OPENED]
    assert {only(line).send_key for line in lines} == {KEY}


@pytest.mark.parametrize("names", SAME, ids=[names[0] for names in SAME])
def test_one_fact_has_one_identity_by_every_road(names):
    identities = [[(event.message_id, event.event_id) for event in fixture_events(name)] for name in names]
    assert identities == [identities[0]] * len(names)


def test_different_facts_have_different_identities():
    facts = [*(names[0] for names in SAME), "event_bounce_account_suppression", "event_complaint_account_suppression"]
    events = [event for name in [*facts, "event_delivery_multi_recipient"] for event in fixture_events(name)]
    # The two bounces are written with one feedback id and time: nothing tells them apart.
    assert len({(event.message_id, event.event_id) for event in events}) == len(events) - 1


@pytest.mark.parametrize("field", ["ipAddress", "userAgent", "link", "timestamp"])
def test_two_true_clicks_are_two_events(field):
    first = record("event_click")
    second = copy.deepcopy(first)
    second["click"][field] = "2026-11-02T09:01:40.021Z" if field == "timestamp" else "another"
    assert only(first).event_id != only(second).event_id


def test_a_second_bounce_of_one_recipient_is_another_event():
    first = record("event_bounce_permanent")
    second = copy.deepcopy(first)
    second["bounce"]["feedbackId"] = "another"
    assert only(first).event_id != only(second).event_id


def test_the_old_spelling_of_a_time_is_the_same_time():
    value = record("event_bounce_permanent")
    value["bounce"]["timestamp"] = "2026-11-02T09:15:09.880 +0100"
    assert only(value).event_id == fixture_events("event_bounce_permanent")[0].event_id
    assert only(value).occurred_at == datetime.fromisoformat(BOUNCED)


@pytest.mark.parametrize(
    ("sub_type", "testimony"),
    [
        ("General", ACCEPTED),
        ("NoEmail", ACCEPTED),
        ("MailboxFull", ACCEPTED),
        ("Suppressed", REJECTED),
        ("OnAccountSuppressionList", REJECTED),
        (None, ACCEPTED),
    ],
)
def test_a_bounce_without_an_attempt_proves_rejection(sub_type, testimony):
    value = record("event_bounce_permanent")
    value["bounce"]["bounceSubType"] = sub_type
    assert (only(value).kind, only(value).testimony) == (Kind.BOUNCED, testimony)


@pytest.mark.parametrize(
    ("new", "old", "kind"),
    [
        ({"unsubscribeAll": True}, {"unsubscribeAll": False}, Kind.UNSUBSCRIBED),
        ({"unsubscribeAll": False}, {"unsubscribeAll": True}, Kind.SUBSCRIBED),
        ({"topicSubscriptionStatus": [{"topicName": "a", "subscriptionStatus": "OptOut"}]}, None, Kind.UNSUBSCRIBED),
        (
            {"topicSubscriptionStatus": [{"topicName": "a", "subscriptionStatus": "OptIn"}]},
            {"topicSubscriptionStatus": [{"topicName": "a", "subscriptionStatus": "OptOut"}]},
            Kind.SUBSCRIBED,
        ),
        (
            {"topicSubscriptionStatus": [{"topicName": "a", "subscriptionStatus": "OptOut"}, {"topicName": "b"}]},
            {"topicSubscriptionStatus": [{"topicName": "a", "subscriptionStatus": "OptOut"}]},
            Kind.SUBSCRIBED,
        ),
    ],
)
def test_a_changed_subscription_is_read_by_what_changed(new, old, kind):
    value = record("event_subscription")
    value["subscription"] |= {"newTopicPreferences": new, "oldTopicPreferences": old}
    assert only(value).kind is kind


@pytest.mark.parametrize("name", ["event_open", "event_click", "event_subscription"])
def test_an_open_of_a_mail_to_several_names_nobody(name):
    assert only(record(name, destination=[ANA, BO])).recipient is None


@pytest.mark.parametrize("name", ["event_send", "event_reject", "event_rendering_failure"])
def test_what_befalls_a_whole_mail_is_an_event_of_each_recipient(name):
    events = parsed(record(name, destination=[ANA, BO])).events
    assert [event.recipient for event in events] == [ANA, BO]
    assert len({event.event_id for event in events}) == 2


def test_the_tag_goes_before_the_header():
    other = [{"name": "X-Send-Key", "value": "header"}]
    assert only(record("event_send", headers=other)).send_key == KEY
    assert only(record("event_send", headers=other, tags={"app": ["checkout"]})).send_key == "header"


@pytest.mark.parametrize("name", ["x-send-key", "X-SEND-KEY", "X-Send-Key"])
def test_the_header_is_found_however_its_name_is_written(name):
    headers = [{"name": "From"}, None, {"name": name, "value": "k"}]
    assert only(record("notification_bounce", headers=headers)).send_key == "k"


def test_incoming_mail_never_brings_a_key():
    value = record("notification_delivery") | {"notificationType": "Received"}
    event = only(value)
    assert (event.kind, event.testimony, event.send_key) == (Kind.INBOUND, NONE, None)


def test_an_unknown_event_type_is_stored_and_proves_nothing():
    value = record("event_send") | {"eventType": "Teleport", "teleport": {"to": "moon"}}
    event = only(value)
    assert (event.kind, event.testimony, event.reason) == (Kind.UNKNOWN, NONE, "Teleport")
    assert (event.message_id, event.send_key, event.recipient) == (ONE, KEY, ANA)
    assert only(value | {"teleport": {"to": "mars"}}).event_id != event.event_id
    assert only(bridged(value)).event_id == event.event_id


def test_a_record_without_a_type_is_unknown_if_it_has_a_message_id():
    value = record("event_send")
    del value["eventType"]
    assert only(value).kind is Kind.UNKNOWN


def test_a_record_without_a_message_id_is_matched_by_key():
    value = record("event_delivery", messageId=None)
    event = only(value)
    assert (event.message_id, event.send_key, event.testimony) == (None, KEY, ACCEPTED)
    other = record("event_delivery", messageId=None, tags={"send_key": ["another"]}, headers=[])
    assert only(other).event_id != event.event_id


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "42",
        '"text"',
        "prose",
        "{}",
        '{"eventType": "Send"}',
        '{"eventType": "Teleport", "mail": {}}',
        '{"Type": "Notification"}',
        '{"Type": "Notification", "Message": "somebody tries the console"}',
        '{"Type": "Notification", "Message": 7}',
        '{"detail-type": "Scheduled Event", "source": "aws.events", "detail": {}}',
    ],
)
def test_what_is_no_ses_record_is_refused_in_one_line(body):
    with pytest.raises(BadPayload) as refusal:
        parsed(body)
    assert "\n" not in str(refusal.value)


def test_envelopes_are_opened_to_a_bounded_depth():
    value = record("event_send")
    twice = bridged(notification(json.dumps(bridged(value))))
    assert only(notification(json.dumps(twice))).send_key == KEY
    for _ in range(5):
        value = notification(json.dumps(value))
    with pytest.raises(BadPayload):
        parsed(value)


def test_a_text_within_a_text_is_opened():
    assert only(json.dumps(json.dumps(record("event_send")))).send_key == KEY


def test_a_confirmation_inside_a_message_confirms_nothing():
    topic = "arn:aws:sns:eu-west-1:000000000000:ses-events"
    inner = json.loads(fixture_body("sns_http_subscription_confirmation"))
    assert parsed(inner).confirm_url == inner["SubscribeURL"]
    with pytest.raises(BadPayload):
        parsed(notification(json.dumps(inner)) | {"TopicArn": topic})


def test_nothing_is_confirmed_after_a_removal():
    found = parsed(fixture_body("sns_http_unsubscribe_confirmation"))
    assert found.confirm_url is None
    assert found.anomalies == {"unsubscribed": 1}


@pytest.mark.parametrize("body", [VALIDATION, f"{VALIDATION}\n", json.dumps(VALIDATION)])
def test_the_validation_sentence_is_known_without_its_envelope_too(body):
    assert parsed(body).control == "topic_validation"


def test_the_exact_bytes_of_the_record_are_kept():
    text = json.dumps(record("event_bounce_permanent"), indent=3, ensure_ascii=False) + "\n"
    assert only(text).raw == text.encode()
    assert only(notification(text)).raw == text.encode()
    envelope = json.dumps(bridged(record("event_send")))
    assert only(notification(envelope)).raw == envelope.encode()


def test_odd_characters_lose_no_event():
    value = record("event_bounce_permanent")
    value["bounce"]["bouncedRecipients"][0]["diagnosticCode"] = "half \ud83d and \x00"
    assert only(notification(json.dumps(value))).send_key == KEY
    assert only(notification(json.dumps(value, ensure_ascii=False))).send_key == KEY
    assert only(json.dumps(value)).reason == "Permanent/General: half \ud83d and \x00"


def test_a_reason_is_short_and_names_nobody():
    value = record("event_bounce_permanent")
    value["bounce"]["bouncedRecipients"][0]["diagnosticCode"] = f"smtp; 550 <{ANA}>... User unknown " + "x" * 100_000
    reason = only(value).reason or ""
    assert reason.startswith("Permanent/General: smtp; 550 <<address>>... User unknown")
    assert len(reason) <= 200
    assert ANA not in reason
    assert fixture_events("event_reject")[0].reason == "Bad content"
    assert fixture_events("event_complaint")[0].reason == "abuse"
    assert fixture_events("event_delivery")[0].reason is None


def test_the_time_of_publishing_counts_only_where_the_record_has_none():
    value = record("event_send", timestamp=None)
    assert only(value).occurred_at is None
    assert only(notification(json.dumps(value))).occurred_at == datetime(2026, 11, 2, 8, 15, 4, 655000, UTC)
    assert only(notification(json.dumps(record("event_send")))).occurred_at == datetime.fromisoformat(SENT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)


@given(
    name=st.sampled_from([row[0] for row in EVENTS if row[0].startswith(("event_", "notification_"))]),
    path=st.lists(
        st.sampled_from(["mail", "tags", "headers", "destination", "bounce", "delivery", "click"]), max_size=2
    ),
    value=JSON,
)
def test_a_field_of_another_shape_never_breaks_the_parser(name, path, value):
    fields = json.loads((FIXTURES / f"{name}.json").read_bytes())
    target = fields
    for step in path[:-1]:
        target = target.get(step) if isinstance(target.get(step), dict) else fields
    if path:
        target[path[-1]] = value
    try:
        found = parsed(fields)
    except BadPayload:
        return
    assert found.events


def nested(depth: int) -> str:
    return '{"eventType": "Teleport", "x": ' + "[" * depth + "]" * depth + ', "mail": {"messageId": "m"}}'


def test_a_deeply_nested_record_is_read_or_refused():
    assert only(nested(100)).kind is Kind.UNKNOWN
    refused = []
    for depth in range(600, 1010):  # somewhere there it can still be read but no longer be written
        try:
            assert only(nested(depth)).kind is Kind.UNKNOWN
        except BadPayload:
            refused.append(depth)
    assert refused
    with pytest.raises(BadPayload):
        parsed(nested(100_000))


# -- cases from public trouble reports ---------------------------------------------------------------------------------


def test_case_001_the_validation_sentence_is_a_control_message():
    assert parsed(case("001")["body_text"]) == Parsed(control="topic_validation")


def test_case_002_the_old_spelling_is_the_same_event():
    body = case("002")["body_text"]
    (event,) = case_events("002")
    expect = case("002")["expect"]
    assert (event.kind, event.message_id, event.send_key) == (expect["type"], expect["message_id"], expect["send_key"])
    assert event.testimony == expect["evidence"]
    assert only(body.replace("notificationType", "eventType")).event_id == event.event_id


def test_case_022_each_recipient_has_a_fate_of_its_own():
    events = case_events("022")
    assert {event.recipient: event.kind for event in events} == case("022")["expect"]["recipients"]
    assert {event.send_key for event in events} == {"minutes:44"}
    assert {event.testimony for event in events} == {ACCEPTED}
    assert len({(event.message_id, event.event_id) for event in events}) == 3


def test_case_023_envelopes_within_envelopes_hold_one_event():
    (event,) = case_events("023")
    expect = case("023")["expect"]
    assert (event.kind, event.message_id, event.send_key) == (expect["type"], expect["message_id"], expect["send_key"])
    without_id = re.sub(
        r'\\\\\\"messageId\\\\\\":\\\\\\"[^"]*\\\\\\",|\\"messageId\\":\\"[^"]*\\",', "", case("023")["body_text"]
    )
    assert without_id != case("023")["body_text"]
    (event,) = parsed(without_id).events
    assert (event.message_id, event.send_key, event.testimony) == (None, expect["send_key"], ACCEPTED)


@pytest.mark.parametrize("number", ["032", "034"])
def test_cases_032_and_034_prove_acceptance_of_both_sends(number):
    assert {event.send_key: event.testimony for event in case_events(number)} == case(number)["expect"]["evidence"]


def test_case_044_a_bounce_after_the_delivery_is_a_second_event():
    delivery, bounce = case_events("044")
    assert (delivery.kind, bounce.kind) == (Kind.DELIVERED, Kind.BOUNCED)
    assert delivery.testimony == bounce.testimony == ACCEPTED
    assert delivery.event_id != bounce.event_id
    assert (delivery.occurred_at, bounce.occurred_at) == (at_case_time("02.000"), at_case_time("19.400"))


def test_case_100_the_recipient_is_the_one_of_the_row():
    (event,) = case_events("100")
    assert normal_recipient(event.recipient) == normal_recipient(case("100")["setup"][0]["recipient"])


# -- django-anymail's reading ------------------------------------------------------------------------------------------

DIFFERENT = {
    "event_delivery_delay": "anymail does not know DeliveryDelay",
    "event_subscription": "anymail does not know Subscription",
}
RECORDS = [row[0] for row in EVENTS if row[0].startswith(("event_", "notification_", "sns_"))]


@pytest.mark.parametrize("name", RECORDS)
def test_django_anymail_reads_the_same(name):
    ours = fixture_events(name)
    theirs = anymail_events("ses", Delivery(fixture_body(name), {}))
    assert [(event.message_id, event.recipient) for event in ours] == [
        (event.message_id, event.recipient) for event in theirs
    ]
    agree = [event.kind.value for event in ours] == [event.event_type for event in theirs]
    assert agree is (name not in DIFFERENT)


def test_django_anymail_names_everybody_where_ses_names_nobody():
    body = json.dumps(record("event_open", destination=[ANA, BO])).encode()
    assert [event.recipient for event in anymail_events("ses", Delivery(body, {}))] == [ANA, BO]
    assert [event.recipient for event in parsed(body).events] == [None]


# -- the other facts ---------------------------------------------------------------------------------------------------


def test_a_stamp_comes_back_in_the_events():
    stamp = PROVIDER.stamp(KEY)
    (tag,) = stamp.body["EmailTags"]
    (header,) = stamp.body["Content"]["Simple"]["Headers"]
    tags = {tag["Name"]: [tag["Value"]]}
    headers = [{"name": header["Name"], "value": header["Value"]}]
    assert only(record("event_send", tags=tags, headers=None)).send_key == KEY
    assert only(record("event_send", tags=None, headers=headers)).send_key == KEY
    assert stamp.smtp_headers == {"X-Send-Key": KEY, "X-SES-MESSAGE-TAGS": f"send_key={KEY}"}
    assert not stamp.headers


def test_there_is_no_sample_and_the_refusal_says_what_to_do():
    with pytest.raises(NoSample, match="mailbox simulator"):
        PROVIDER.sample("delivered", KEY, Feed("ses-eu", "ses"), datetime(2026, 11, 2, tzinfo=UTC))


def test_ses_is_a_provider_that_keeps_no_key_and_signs_the_time_of_publishing():
    provider: Provider = PROVIDER
    assert provider.name == "ses"
    assert FACTS.same_key_window is None
    assert FACTS.tolerance is not None
    assert FACTS.tolerance.total_seconds() == 8 * 3600
    assert (FACTS.busy_status, FACTS.refused_status) == (503, 401)
