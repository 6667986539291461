# SPDX-License-Identifier: Apache-2.0
"""What a message of a queue holds: what a provider put there by itself, or a request as a gateway wrote it down.

A gateway writes a request in one of two ways: the body is the message and its attributes are headers (API Gateway's
own integration with SQS, with a mapping), or the message is the whole request as JSON, as a proxy hands it to a
function: `{"headers": {...}, "body": "...", "isBase64Encoded": false}`.
Sources: Amazon API Gateway developer guide, "AWS service integrations with SQS" and "Lambda proxy integrations".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from webhooks.body import ENCODINGS, MAX_RATIO, SMALL, BodyRefusedError, inflate
from webhooks.payload import at, load_object, text_at
from webhooks.provider import BadPayload, Delivery
from webhooks.signature import decode_base64


class QueueMessage(NamedTuple):
    """One message as it was received."""

    receipt: str
    """By this it is deleted or hidden; it is another one each time."""
    raw: bytes
    """The exact bytes of its body."""
    headers: Mapping[str, str]
    """Its attributes, their names in lower case."""
    receives: int
    """How often it was received, this time included."""


class Carried(NamedTuple):
    """What a message carries."""

    delivery: Delivery
    by_gateway: bool
    """Whether it is a request that a gateway wrote down, which anybody may have made."""


def read_message(message: Mapping[str, Any]) -> QueueMessage:
    """Return a message of SQS, as its client hands it out, in the form that is used here."""
    return QueueMessage(
        receipt=message["ReceiptHandle"],
        raw=message.get("Body", "").encode("utf-8", "surrogatepass"),
        headers={name.lower(): _value(value) for name, value in message.get("MessageAttributes", {}).items()},
        receives=int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
    )


def carried(message: QueueMessage) -> Carried:
    """Return the delivery that a message carries. Raises BadPayload where a gateway's envelope can't be opened."""
    request = _request(message.raw)
    if request is None:
        return Carried(Delivery(message.raw, message.headers), by_gateway=False)
    headers = {**message.headers, **_headers(request["headers"])}
    delivery = Delivery(_body(request, headers), headers, _method(request), _query(request))
    return Carried(delivery, by_gateway=True)


def body_of(message: QueueMessage) -> bytes:
    """Return what of a message may be kept: of a gateway's envelope only the body, since headers hold credentials."""
    request = _request(message.raw)
    return message.raw if request is None else str(request["body"] or "").encode("utf-8", "surrogatepass")


def _value(attribute: Mapping[str, Any]) -> str:
    binary: bytes = attribute.get("BinaryValue", b"")
    text: str = attribute.get("StringValue", "")
    return text or binary.decode("utf-8", "surrogateescape")


def _request(raw: bytes) -> dict[str, Any] | None:
    try:
        value = load_object(raw)
    except BadPayload:
        return None
    is_request = isinstance(value.get("headers"), dict) and isinstance(value.get("body", 0), str | None)
    return value if is_request else None


def _headers(given: Mapping[str, Any]) -> dict[str, str]:
    firsts = {name.lower(): value[0] if isinstance(value, list) and value else value for name, value in given.items()}
    return {name: value for name, value in firsts.items() if isinstance(value, str)}


def _body(request: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    text = request["body"] or ""
    if request.get("isBase64Encoded") is not True:
        return bytes(text.encode("utf-8", "surrogatepass"))
    body = decode_base64(text)
    if body is None:
        raise BadPayload("the gateway's isBase64Encoded is true, and its body is no base64")
    encoding = headers.get("content-encoding", "").strip().lower()
    return _inflated(body, encoding) if body and encoding in ENCODINGS else body


def _inflated(body: bytes, encoding: str) -> bytes:
    try:
        inflated = inflate(body, encoding, max(SMALL, MAX_RATIO * len(body)))
    except BodyRefusedError as error:
        raise BadPayload(str(error)) from None
    if inflated is None:
        raise BadPayload("the compressed body inflates to too much")
    return inflated


def _method(request: Mapping[str, Any]) -> str:
    return text_at(request, "httpMethod") or text_at(request, "requestContext", "http", "method") or "POST"


def _query(request: Mapping[str, Any]) -> str:
    raw, parameters = text_at(request, "rawQueryString"), at(request, "queryStringParameters")
    if raw or not isinstance(parameters, dict):
        return raw or ""
    return urlencode({name: value for name, value in parameters.items() if isinstance(value, str)}, errors="replace")
