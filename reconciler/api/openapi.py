# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document of `/v1/sends`. Requests are described by the very types that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http.client import BAD_REQUEST, UNAUTHORIZED
from importlib.metadata import version
from typing import Any, Final

import msgspec

from reconciler.api.requests import LARGEST_BODY, LONGEST_KEY, Claim, Confirm, Decide, Enqueue, Fail
from reconciler.api.routes import CLAIM_ANSWERS, FAIL_STATES
from reconciler.problem import MEDIA_TYPE

Schema = dict[str, Any]

ABOUT: Final = """
Lets a sender in any language use the guard: claim a send, submit it if the claim was granted, say how it went.

1. `POST /v1/sends` before the provider is called. 201: submit now, within `seconds_left`, counted from before this call
   was made, on a clock that nobody sets; merge `stamp` into the provider's call. Anything else: don't submit.
2. `POST /v1/sends/{key}/confirm` when the provider took it, `.../fail` when it did not or when you can't tell.
   Repeat these until they are answered.

A send key may hold a slash or an at sign: percent-encode it in a path, or use the `wire_key` instead.
""".strip()

CLAIM_KEY: Final = """
Names the job, or the call. A repeat with the same value and content is told how the send stands: it is never granted
the same claim a second time (by a `nonce` it is), and where the send was given free since then, it is granted the next
attempt (201, another `fence`). Another content is refused. Quoted as a structured field, or bare.
""".strip()

ONCE: Final = """
Optional. A repeat with the same value and content gets the stored answer, with `Idempotent-Replayed: true`; where none
was stored, `confirm`, `fail` and `enqueue` are performed again, and an operator's word is `ambiguous`: look how the
send stands, and decide anew with another value. Quoted as a structured field, or bare.
""".strip()

KEY_PATTERN: Final = r"""^("([ !#-\[\]-~]|\\["\\]){1,255}"|[A-Za-z0-9!#$%&'*+./:=@^_|~-]{1,255})$"""
RETRY_AFTER: Final = {"Retry-After": {"description": "When to ask again, in seconds.", "schema": {"type": "integer"}}}
STATES: Final = ("pending", "claimed", "ambiguous", "sent", "failed")


def document(feeds: Sequence[str]) -> Schema:
    """Return the document of a server that has these feeds."""
    _, schemas = msgspec.json.schema_components(
        [Claim, Enqueue, Confirm, Fail, Decide], ref_template="#/components/schemas/{name}"
    )
    for name in ("Claim", "Enqueue"):
        if feeds:
            schemas[name]["properties"]["feed"]["enum"] = list(feeds)
    return {
        "openapi": "3.1.0",
        "info": {"title": "esp-reconciler", "version": version("esp-reconciler"), "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas | _answers(),
        },
    }


def _paths() -> Schema:
    claims: dict[int, list[str]] = {}
    for outcome, answer in CLAIM_ANSWERS.items():
        claims.setdefault(answer.status, []).append(outcome)
    return {
        "/v1/sends": {
            "post": _operation(
                "claim",
                "Claim a send",
                Claim,
                {
                    201: ("claimed: submit it now", "Claimed"),
                    200: ("already_sent", "NotNeeded"),
                    **{status: (", ".join(names), None) for status, names in claims.items() if status >= BAD_REQUEST},
                },
                key=CLAIM_KEY,
                key_required=True,
            )
        },
        "/v1/enqueue": {
            "post": _operation(
                "enqueue",
                "Write a send that is to be claimed later",
                Enqueue,
                {201: ("enqueued", "Enqueued"), 200: ("exists", "Enqueued")},
            )
        },
        "/v1/sends/{key}": {
            "get": _operation("look", "How a send stands", None, {200: ("its state", "Send"), **_UNKNOWN})
        },
        "/v1/sends/{key}/confirm": {
            "post": _operation(
                "confirm",
                "The provider took the message. Stored in every case",
                Confirm,
                {
                    200: ("sent, sent_late, duplicate; with a reason where there is more to know", "Confirmed"),
                    **_UNKNOWN,
                },
            )
        },
        "/v1/sends/{key}/fail": {
            "post": _operation(
                "fail",
                "How a submission failed",
                Fail,
                {200: (", ".join(FAIL_STATES), "Done"), 409: ("not_yours", None)},
            )
        },
        **{
            f"/v1/sends/{{key}}/operator/{verb}": {"post": _operation(verb, summary, Decide, _DECIDED)}
            for verb, summary in _VERBS.items()
        },
    }


_UNKNOWN: Final = {404: ("unknown_key", None)}
_DECIDED: Final = {
    200: ("released, sent, failed", "Done"),
    **_UNKNOWN,
    409: ("refused, with the reason; in_progress, ambiguous", None),
}
_VERBS: Final = {
    "release": "Give a send free for another attempt, as an operator (scope operate)",
    "sent": "Say that a send was sent, as an operator (scope operate)",
    "failed": "Say that a send never will be sent, as an operator (scope operate)",
}
_EVERYWHERE: Final = {
    401: ("no known bearer token", None),
    403: ("the token lacks the scope", None),
    422: ("what is asked for can't be", None),
    503: ("the database is away or busy: nothing was performed, or repeating it is safe", None),
}
_WITH_BODY: Final = {
    400: ("no JSON, or a bad Idempotency-Key", None),
    408: ("the body came too slowly", None),
    413: (f"the body is larger than {LARGEST_BODY // 1024} KiB", None),
    415: ("the body has a content encoding", None),
}


def _operation(
    name: str,
    summary: str,
    body: type | None,
    answers: Mapping[int, tuple[str, str | None]],
    *,
    key: str = ONCE,
    key_required: bool = False,
) -> Schema:
    """Return one operation; `answers` are its own statuses: what they mean, and their schema, else a problem's."""
    parameters: list[Schema] = []
    if name not in ("claim", "enqueue"):
        parameters.append(_KEY_IN_PATH)
    operation: Schema = {"operationId": name, "summary": summary, "parameters": parameters}
    statuses = dict(answers)
    for status, (meaning, schema) in {**_EVERYWHERE, **(_WITH_BODY if body else {})}.items():
        own = statuses.get(status)
        statuses[status] = (f"{own[0]}; {meaning}" if own else meaning, schema)
    if body:
        parameters.append(_header(key, required=key_required))
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    operation["responses"] = {str(status): _answer(status, *told) for status, told in sorted(statuses.items())}
    return operation


_KEY_IN_PATH: Final = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "The send key, percent-encoded, or the wire key.",
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
}


def _header(description: str, *, required: bool) -> Schema:
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "required": required,
        "description": description,
        "schema": {"type": "string", "pattern": KEY_PATTERN},
    }


def _answer(status: int, meaning: str, schema: str | None) -> Schema:
    headers: Schema = {}
    if status in (409, 429, 503):
        headers |= RETRY_AFTER
    if status == UNAUTHORIZED:
        headers["WWW-Authenticate"] = {"required": True, "schema": {"type": "string"}}
    media = "application/json" if schema else MEDIA_TYPE
    content = {media: {"schema": {"$ref": f"#/components/schemas/{schema or 'Problem'}"}}}
    return {"description": meaning, "content": content} | ({"headers": headers} if headers else {})


def _answers() -> Schema:
    """Return the schemas of what is answered."""
    text, number, moment = {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"], "format": "date-time"}
    maybe = {"type": ["string", "null"]}
    state = {"type": "string", "enum": list(STATES)}
    outcomes = {name: {"type": "string", "enum": list(values)} for name, values in _OUTCOMES.items()}
    times = (
        "created_at",
        "claimed_at",
        "submit_by",
        "next_check_at",
        "capped_until",
        "released_at",
        "sent_at",
        "failed_at",
        "delivery_at",
    )
    texts = ("release_basis", "held_reason", "verdict_source", "verdict_reason", "message_id", "delivery")
    stamp = {"body": {"type": "object"}, "headers": {"type": "object"}, "smtp_headers": {"type": "object"}}
    return {
        "Claimed": _object(
            outcome={"const": "claimed"},
            state={"const": "claimed"},
            wire_key=text,
            attempt=number,
            fence=number,
            seconds_left={"type": "number"},
            stamp=_object(**stamp, message_id=maybe),
        ),
        "NotNeeded": _object(
            outcome={"const": "already_sent"}, state={"const": "sent"}, wire_key=text, reason=maybe, retry_at=moment
        ),
        "Enqueued": _object(outcome=outcomes["enqueue"], wire_key=text),
        "Confirmed": _object(outcome=outcomes["confirm"], state={"const": "sent"}, reason=maybe),
        "Done": _object(outcome=outcomes["done"], state=state),
        "Send": _object(
            wire_key=text,
            feed=text,
            message_class=text,
            attempt=number,
            state=state,
            **dict.fromkeys(times, moment),
            **dict.fromkeys(texts, maybe),
        ),
        "Problem": {
            "type": "object",
            "properties": {
                "type": text,
                "title": text,
                "status": number,
                "detail": text,
                "outcome": {**text, "description": "Tells apart what shares a status."},
                "state": state,
                "wire_key": text,
                "reason": text,
                "retry_at": {"type": "string", "format": "date-time"},
            },
            "required": ["type", "title", "status", "detail"],
        },
    }


_OUTCOMES: Final = {
    "enqueue": ("enqueued", "exists"),
    "confirm": ("sent", "sent_late", "duplicate"),
    "done": ("sent", "failed", "released", "waiting"),
}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
