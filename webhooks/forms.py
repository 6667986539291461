# SPDX-License-Identifier: Apache-2.0
"""Reads HTML forms, as a few providers post them: url-encoded or multipart. Pure."""

from __future__ import annotations

from email.message import EmailMessage, Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Final
from urllib.parse import parse_qsl

from webhooks.provider import BadPayload, Delivery

MAX_FIELDS: Final = 1_000
"""Fields of one form; no provider sends as many."""


def form_fields(delivery: Delivery) -> list[tuple[str, str]]:
    """Return the fields of a delivery's form in their order, without files. Raises BadPayload where it is no form.

    Bytes that are no UTF-8 become lone surrogates, as in headers.
    """
    content_type = delivery.headers.get("content-type", "")
    if content_type.lower().startswith("multipart/form-data"):
        return _multipart(content_type, delivery.body)
    return query_fields(delivery.body)


def query_fields(encoded: bytes | str) -> list[tuple[str, str]]:
    """Return the fields of a url-encoded form or query string, empty ones too. Raises BadPayload."""
    text = encoded if isinstance(encoded, str) else encoded.decode("utf-8", "surrogateescape")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="surrogateescape")
    except ValueError:
        raise BadPayload(f"a form of more than {MAX_FIELDS} fields") from None


def _multipart(content_type: str, body: bytes) -> list[tuple[str, str]]:
    head = f"Content-Type: {content_type}\r\n\r\n".encode("utf-8", "surrogateescape")
    try:
        whole = BytesParser(EmailMessage, policy=HTTP).parsebytes(head + body)
        parts = list(whole.iter_parts())[: MAX_FIELDS + 1] if whole.is_multipart() else []
        fields = [(name, _text(part)) for part in parts if (name := _field_name(part)) is not None]
    except Exception:  # noqa: BLE001 - the parser has raised a dozen kinds of errors for hostile headers
        raise BadPayload("a multipart form that can't be read") from None
    if not fields or len(parts) > MAX_FIELDS:
        raise BadPayload("a multipart form without fields, or with too many")
    return fields


def _field_name(part: Message) -> str | None:
    disposition = part.get_param("name", header="content-disposition")
    return disposition if isinstance(disposition, str) and part.get_filename() is None else None


def _text(part: Message) -> str:
    payload = part.get_payload(decode=True)
    return payload.decode("utf-8", "surrogateescape") if isinstance(payload, bytes) else ""
