# SPDX-License-Identifier: Apache-2.0
"""The way of SES's events - configuration set, topic, URL or queue - is looked after, on an AWS of moto's."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from aws_server import REGION, client

from webhooks.api import HttpApi
from webhooks.asking import ApiError, Change
from webhooks.aws import ask
from webhooks.provider import Feed
from webhooks.providers.ses import PROVIDER

URL = "https://hooks.example.com/webhooks/ses-eu"
ACCOUNT = "123456789012"
TOPIC = f"arn:aws:sns:{REGION}:{ACCOUNT}:ses-events"
QUEUE = f"arn:aws:sqs:{REGION}:{ACCOUNT}:ses-events"
SET = f"arn:aws:ses:{REGION}:{ACCOUNT}:configuration-set/shop"
TYPES = ["SEND", "REJECT", "BOUNCE", "COMPLAINT", "DELIVERY", "RENDERING_FAILURE", "DELIVERY_DELAY", "SUBSCRIPTION"]
EVERY = ", ".join(TYPES)
SIGN = "topic: sign with SHA-256 (SignatureVersion 2)"
PUBLISH = "topic: let the configuration set publish to it"
SEND_TO_QUEUE = "queue: let the topic send to it"
DESTINATION = re.compile(r"/v2/email/configuration-sets/([^/]+)/event-destinations(?:/([^/]+))?")


@dataclass
class Aws:
    """Moto behind a door that knows what moto doesn't: event destinations of SES v2, and SignatureVersion of topics."""

    moto: str
    url: str = ""
    destinations: list[dict[str, Any]] = field(default_factory=list)
    version: str = "1"
    pending: bool = False
    """Whether subscriptions wait to be confirmed."""
    status: int = 0
    """What everything is answered with, if anything."""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.status:
            return web.Response(
                text="<ErrorResponse><Error><Code>Invented</Code></Error></ErrorResponse>", status=self.status
            )
        if found := DESTINATION.fullmatch(request.path):
            return self._destinations(request.method, found[1], found[2], json.loads(body or b"{}"))
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with (
            ClientSession(self.moto) as session,
            session.request(request.method, request.path_qs, headers=headers, data=body) as answer,
        ):
            text, status = await answer.text(), answer.status
        return web.Response(text=self._completed(parse_qs(body.decode()), text), status=status)

    def _destinations(self, method: str, name: str, destination: str | None, body: dict[str, Any]) -> web.Response:
        if name != "shop":
            return web.json_response({}, status=404, headers={"x-amzn-ErrorType": "NotFoundException"})
        if method == "GET":
            return web.json_response({"EventDestinations": self.destinations})
        if method == "POST":
            self.destinations.append({"Name": body["EventDestinationName"], **body["EventDestination"]})
        else:
            next(one for one in self.destinations if one["Name"] == destination).update(body["EventDestination"])
        return web.json_response({})

    def _completed(self, asked: dict[str, list[str]], text: str) -> str:
        action = asked.get("Action", [""])[0]
        if action == "SetTopicAttributes" and asked["AttributeName"] == ["SignatureVersion"]:
            self.version = asked["AttributeValue"][0]
        if action == "ListSubscriptionsByTopic" and self.pending:
            return re.sub("<SubscriptionArn>.*?<", "<SubscriptionArn>PendingConfirmation<", text)
        entry = f"<entry><key>SignatureVersion</key><value>{self.version}</value></entry></Attributes>"
        return text.replace("</Attributes>", entry) if action == "GetTopicAttributes" else text


@pytest.fixture
async def cloud(aws: str) -> AsyncIterator[Aws]:
    """AWS with a topic and a queue, and nothing that leads from one to the other."""
    found = Aws(aws)
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", found.handle)
    async with TestServer(app) as server:
        found.url = str(server.make_url("")).rstrip("/")
        async with client("sns", aws) as sns, client("sqs", aws) as sqs:
            await sns.create_topic(Name="ses-events")
            await sqs.create_queue(QueueName="ses-events")
        yield found


def feed(cloud: Aws, *, queue: bool = False, **more: Any) -> Feed:
    settings: dict[str, Any] = {"topics": (TOPIC,), "api_scope": "shop", "endpoint_url": cloud.url}
    if queue:
        settings["queue_url"] = f"https://sqs.{REGION}.amazonaws.com/{ACCOUNT}/ses-events"
    return Feed("ses-eu", "ses", **{**settings, **more})


async def changes(of: Feed) -> list[Change]:
    async with ClientSession() as session:
        api = HttpApi(session, lambda: pytest.fail("SES has clients of its own"))
        return await PROVIDER.changes(URL, of, api)


async def looked_after(of: Feed) -> list[str]:
    """Return what was changed, having seen that nothing is left to change."""
    found = await changes(of)
    for change in found:
        assert await change.make() is None
    assert await changes(of) == []
    return [change.text for change in found]


async def only(about: str, of: Feed) -> list[str]:
    """Return what was changed of one part of the way, having seen that nothing is left to change there."""
    found = [change for change in await changes(of) if change.text.startswith(about)]
    for change in found:
        await change.make()
    assert not [change.text for change in await changes(of) if change.text.startswith(about)]
    return [change.text for change in found]


def destination(**changed: Any) -> dict[str, Any]:
    return {
        "Name": "ours",
        "Enabled": True,
        "MatchingEventTypes": TYPES,
        "SnsDestination": {"TopicArn": TOPIC},
        **changed,
    }


async def subscriptions(cloud: Aws) -> list[tuple[str, str]]:
    async with client("sns", cloud.moto) as sns:
        answer = await sns.list_subscriptions_by_topic(TopicArn=TOPIC)
    return [(found["Protocol"], found["Endpoint"]) for found in answer["Subscriptions"]]


async def topic_policy(cloud: Aws) -> dict[str, Any]:
    async with client("sns", cloud.moto) as sns:
        return dict(json.loads((await sns.get_topic_attributes(TopicArn=TOPIC))["Attributes"]["Policy"]))


async def set_topic_policy(cloud: Aws, *statements: dict[str, Any]) -> None:
    policy = json.dumps({"Version": "2008-10-17", "Id": "theirs", "Statement": list(statements)})
    async with client("sns", cloud.moto) as sns:
        await sns.set_topic_attributes(TopicArn=TOPIC, AttributeName="Policy", AttributeValue=policy)


async def test_from_nothing_the_whole_way_to_the_url_is_made_once(cloud: Aws) -> None:
    made = await looked_after(feed(cloud))
    name = cloud.destinations[0]["Name"]
    assert made == [
        SIGN,
        PUBLISH,
        f"topic: subscribe {URL}",
        f"configuration set: create event destination {name} with {EVERY}",
    ]
    assert cloud.destinations == [destination(Name=name)]
    assert re.fullmatch(r"esp-reconciler-[0-9a-f]{8}", name)
    assert cloud.version == "2"
    assert await subscriptions(cloud) == [("https", URL)]


async def test_from_nothing_the_whole_way_to_the_queue_is_made_once(cloud: Aws) -> None:
    made = await looked_after(feed(cloud, queue=True))
    assert made[:-1] == [SIGN, PUBLISH, SEND_TO_QUEUE, f"topic: subscribe {QUEUE}"]
    assert await subscriptions(cloud) == [("sqs", QUEUE)]
    async with client("sns", cloud.moto) as sns, client("sqs", cloud.moto) as sqs:
        await sns.publish(TopicArn=TOPIC, Message='{"eventType":"Send"}')
        url = (await sqs.get_queue_url(QueueName="ses-events"))["QueueUrl"]
        (message,) = (await sqs.receive_message(QueueUrl=url))["Messages"]
        policy = json.loads(
            (await sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["Policy"]))["Attributes"]["Policy"]
        )
    assert json.loads(message["Body"])["Message"] == '{"eventType":"Send"}'
    (statement,) = policy["Statement"]
    assert (statement["Principal"], statement["Action"]) == ({"Service": "sns.amazonaws.com"}, "sqs:SendMessage")
    assert (statement["Resource"], statement["Condition"]) == (QUEUE, {"StringEquals": {"aws:SourceArn": TOPIC}})


async def test_asking_changes_nothing(cloud: Aws) -> None:
    before = await topic_policy(cloud)
    await changes(feed(cloud))
    assert (cloud.destinations, cloud.version, await subscriptions(cloud)) == ([], "1", [])
    assert await topic_policy(cloud) == before


@pytest.mark.parametrize(
    ("as_it_is", "off"),
    [
        ({"Enabled": False}, EVERY),
        ({"MatchingEventTypes": TYPES[2:]}, "SEND, REJECT"),
        ({"MatchingEventTypes": ["OPEN", *TYPES[1:]]}, "SEND"),
    ],
)
async def test_a_destination_that_is_off_or_lacks_types_is_completed(
    cloud: Aws, as_it_is: dict[str, Any], off: str
) -> None:
    cloud.destinations[:] = [destination(**as_it_is)]
    made = await only("configuration set", feed(cloud))
    assert made == [f"configuration set: update event destination ours with {off}"]
    wanted = {*TYPES, *as_it_is.get("MatchingEventTypes", [])}
    (found,) = cloud.destinations
    assert (found["Name"], found["Enabled"], set(found["MatchingEventTypes"])) == ("ours", True, wanted)


async def test_types_may_be_split_between_two_destinations_to_the_topic(cloud: Aws) -> None:
    cloud.destinations[:] = [destination(MatchingEventTypes=TYPES[:3]), destination(MatchingEventTypes=TYPES[3:])]
    assert await only("configuration set", feed(cloud)) == []


async def test_what_leads_elsewhere_is_left_alone(cloud: Aws) -> None:
    others = [
        destination(Name="theirs", SnsDestination={"TopicArn": TOPIC + "-theirs"}, Enabled=False),
        {
            "Name": "bus",
            "Enabled": True,
            "MatchingEventTypes": ["SEND"],
            "EventBridgeDestination": {"EventBusArn": "x"},
        },
    ]
    cloud.destinations[:] = [dict(other) for other in others]
    theirs = {"Sid": "theirs", "Effect": "Allow", "Principal": "*", "Action": "sns:Subscribe", "Resource": TOPIC}
    await set_topic_policy(cloud, theirs)
    async with client("sns", cloud.moto) as sns:
        await sns.subscribe(TopicArn=TOPIC, Protocol="https", Endpoint="https://other.example.org/hook")
    await looked_after(feed(cloud))
    assert cloud.destinations[:2] == others
    assert await subscriptions(cloud) == [("https", "https://other.example.org/hook"), ("https", URL)]
    policy = await topic_policy(cloud)
    assert (policy["Version"], policy["Id"], policy["Statement"][0]) == ("2008-10-17", "theirs", theirs)
    assert len(policy["Statement"]) == 2


def ses_may(**changed: Any) -> dict[str, Any]:
    by_hand = {"Effect": "Allow", "Principal": {"Service": "ses.amazonaws.com"}, "Action": "SNS:Publish"}
    return {"Sid": "by-hand", **by_hand, "Resource": TOPIC, **changed}


@pytest.mark.parametrize(
    "statement",
    [
        ses_may(),
        ses_may(Principal={"Service": ["ses.amazonaws.com", "events.amazonaws.com"]}, Action=["sns:Publish", "sns:X"]),
        ses_may(Condition={"StringEquals": {"AWS:SourceAccount": ACCOUNT, "AWS:SourceArn": SET}}),
    ],
)
async def test_a_policy_that_somebody_wrote_is_enough(cloud: Aws, statement: dict[str, Any]) -> None:
    await set_topic_policy(cloud, statement)
    assert await only(PUBLISH, feed(cloud)) == []


@pytest.mark.parametrize(
    "statement",
    [
        ses_may(Effect="Deny"),
        ses_may(Action="sns:Subscribe"),
        ses_may(Principal={"AWS": "*"}),
        ses_may(Condition={"StringEquals": {"AWS:SourceArn": SET + "-other"}}),
    ],
)
async def test_a_policy_that_does_not_let_ses_publish_is_completed(cloud: Aws, statement: dict[str, Any]) -> None:
    await set_topic_policy(cloud, statement)
    assert await only(PUBLISH, feed(cloud)) == [PUBLISH]
    (theirs, ours) = (await topic_policy(cloud))["Statement"]
    assert theirs == statement
    assert ours["Condition"] == {"StringEquals": {"AWS:SourceAccount": ACCOUNT, "AWS:SourceArn": SET}}


async def test_raw_delivery_is_switched_off_as_nothing_signs_it(cloud: Aws) -> None:
    async with client("sns", cloud.moto) as sns:
        raw = {"RawMessageDelivery": "true"}
        await sns.subscribe(TopicArn=TOPIC, Protocol="https", Endpoint=URL, Attributes=raw)
    assert await only("subscription", feed(cloud)) == [
        "subscription: switch raw message delivery off, which has no signature",
    ]


async def test_a_subscription_that_waits_to_be_confirmed_is_made_again(cloud: Aws) -> None:
    await only("topic: subscribe", feed(cloud))
    cloud.pending = True
    assert f"topic: subscribe {URL}" in [change.text for change in await changes(feed(cloud))]


async def test_our_subscription_is_found_on_whichever_page(cloud: Aws) -> None:
    async with client("sns", cloud.moto) as sns:
        for i in range(101):
            await sns.subscribe(TopicArn=TOPIC, Protocol="https", Endpoint=f"https://other.example.org/{i}")
    await only("topic: subscribe", feed(cloud))


async def test_what_is_missing_in_settings_or_at_aws_is_told(cloud: Aws) -> None:
    for of, message in (
        (feed(cloud, api_scope=""), r"^unconfigured: set feeds\.ses-eu\.api_scope"),
        (feed(cloud, topics=()), r"^unconfigured: set feeds\.ses-eu\.topics"),
        (feed(cloud, topics=(TOPIC + "-gone",)), "^not_found"),
        (feed(cloud, api_scope="gone"), "^not_found"),
        (feed(cloud, queue_url=f"https://sqs.{REGION}.amazonaws.com/{ACCOUNT}/gone"), "^not_found"),
        (feed(cloud, endpoint_url="http://127.0.0.1:9"), "^unreachable"),
    ):
        with pytest.raises(ApiError, match=message):
            await changes(of)


@pytest.mark.parametrize(("status", "reason"), [(403, "forbidden"), (400, "refused")])
async def test_what_aws_refuses_is_told(cloud: Aws, status: int, reason: str) -> None:
    found = await changes(feed(cloud))
    cloud.status = status
    with pytest.raises(ApiError, match=f"^{reason}"):
        await changes(feed(cloud))
    for change in found:
        with pytest.raises(ApiError, match=f"^{reason}"):
            await change.make()


async def test_a_fault_of_ours_is_not_called_aws_s(cloud: Aws) -> None:
    with pytest.raises(AttributeError):
        await ask(feed(cloud), "sns", "teleport")


def test_its_facts_say_that_it_cannot_be_asked_and_fills_queues() -> None:
    facts = PROVIDER.facts
    assert (facts.finds_by, facts.lists, facts.same_key_window, facts.fills_queues) == ("nothing", False, None, True)
    assert any("{url}" in step for step in facts.setup)
