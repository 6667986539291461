# SPDX-License-Identifier: Apache-2.0
"""The way from a topic of SNS to our URL or queue: what is missing on it, and what puts that right.

Topic and queue have to exist. What leads elsewhere is left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, NamedTuple

from webhooks.asking import Change, credential
from webhooks.aws import ask, do
from webhooks.aws_policy import grant, grants, with_grant
from webhooks.provider import Feed


class Way(NamedTuple):
    """From a feed's topic to where its messages are taken."""

    feed: Feed
    topic: str
    protocol: str
    endpoint: str
    """Our URL, or the ARN of our queue."""


async def way_to(url: str, feed: Feed) -> Way:
    """Return the way to the feed's queue, or to `url` where it has none. Raises ApiError."""
    topic = credential("".join(feed.topics[:1]), "topics", feed)
    if not feed.queue_url:
        return Way(feed, topic, url.partition(":")[0], url)
    return Way(feed, topic, "sqs", (await _queue(feed))["QueueArn"])


async def _topic(way: Way) -> dict[str, str]:
    return dict((await ask(way.feed, "sns", "get_topic_attributes", TopicArn=way.topic))["Attributes"])


async def _queue(feed: Feed) -> dict[str, str]:
    asked = {"QueueUrl": feed.queue_url, "AttributeNames": ["QueueArn", "Policy"]}
    return dict((await ask(feed, "sqs", "get_queue_attributes", **asked))["Attributes"])


def _set_topic(way: Way, name: str, value: str) -> Awaitable[None]:
    attribute = {"TopicArn": way.topic, "AttributeName": name, "AttributeValue": value}
    return do(way.feed, "sns", "set_topic_attributes", **attribute)


async def topic_changes(way: Way, publisher: str, wanted: Mapping[str, Any]) -> list[Change]:
    """Return what the topic lacks to sign well, and to be published to; `wanted` is the publisher's grant."""
    attributes, changes = await _topic(way), []
    if attributes.get("SignatureVersion") != "2":
        signs = partial(_set_topic, way, "SignatureVersion", "2")
        changes.append(Change("topic: sign with SHA-256 (SignatureVersion 2)", signs))
    if not grants(attributes.get("Policy"), wanted):
        changes.append(Change(f"topic: let {publisher} publish to it", partial(_open_topic, way, wanted)))
    return changes


async def _open_topic(way: Way, wanted: Mapping[str, Any]) -> None:
    await _set_topic(way, "Policy", with_grant((await _topic(way)).get("Policy"), wanted))


async def queue_changes(way: Way) -> list[Change]:
    """Return what lets the topic send to our queue, if there is one."""
    wanted = grant("sns.amazonaws.com", "sqs:SendMessage", way.endpoint, {"aws:SourceArn": way.topic})
    if way.protocol != "sqs" or grants((await _queue(way.feed)).get("Policy"), wanted):
        return []
    return [Change("queue: let the topic send to it", partial(_open_queue, way.feed, wanted))]


async def _open_queue(feed: Feed, wanted: Mapping[str, Any]) -> None:
    policy = with_grant((await _queue(feed)).get("Policy"), wanted)
    await do(feed, "sqs", "set_queue_attributes", QueueUrl=feed.queue_url, Attributes={"Policy": policy})


async def subscription_changes(way: Way) -> list[Change]:
    """Return what subscribes us, or lets the messages to our URL come signed."""
    arn = await _subscription(way)
    if arn is None:
        ours = {"TopicArn": way.topic, "Protocol": way.protocol, "Endpoint": way.endpoint}
        return [Change(f"topic: subscribe {way.endpoint}", partial(do, way.feed, "sns", "subscribe", **ours))]
    found = await ask(way.feed, "sns", "get_subscription_attributes", SubscriptionArn=arn)
    if way.protocol == "sqs" or found["Attributes"].get("RawMessageDelivery") != "true":
        return []
    off = {"SubscriptionArn": arn, "AttributeName": "RawMessageDelivery", "AttributeValue": "false"}
    change = partial(do, way.feed, "sns", "set_subscription_attributes", **off)
    return [Change("subscription: switch raw message delivery off, which has no signature", change)]


async def _subscription(way: Way) -> str | None:
    """Return the ARN of our subscription; one that waits to be confirmed has none yet, and is subscribed again."""
    asked = {"TopicArn": way.topic}
    while True:
        page = await ask(way.feed, "sns", "list_subscriptions_by_topic", **asked)
        for found in page.get("Subscriptions", []):
            ours = (found["Protocol"], found["Endpoint"]) == (way.protocol, way.endpoint)
            if ours and found["SubscriptionArn"].startswith("arn:"):
                return str(found["SubscriptionArn"])
        if not page.get("NextToken"):
            return None
        asked["NextToken"] = page["NextToken"]
