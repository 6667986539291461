# SPDX-License-Identifier: Apache-2.0
"""Access policies of AWS's topics and queues: does one allow what is wanted, and one that does. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from webhooks.event import derived_id
from webhooks.payload import at


def grant(service: str, action: str, resource: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the statement that lets a service of AWS do something to a resource, on behalf of the sources only."""
    return {
        "Sid": "EspReconciler" + derived_id(service, *sources.values())[:16],
        "Effect": "Allow",
        "Principal": {"Service": service},
        "Action": action,
        "Resource": resource,
        "Condition": {"StringEquals": dict(sources)},
    }


def grants(policy: str | None, wanted: Mapping[str, Any]) -> bool:
    """Say whether a statement of the policy allows what is wanted, under no other conditions."""
    return any(
        at(statement, "Effect") == "Allow"
        and set(_texts(wanted["Principal"])) <= set(_texts(at(statement, "Principal")))
        and wanted["Action"].lower() in {action.lower() for action in _texts(at(statement, "Action"))}
        and set(_texts(at(statement, "Condition"))) <= set(_texts(wanted["Condition"]))
        for statement in _statements(policy)
    )


def with_grant(policy: str | None, wanted: Mapping[str, Any]) -> str:
    """Return the policy with the wanted statement in it; its other statements stay as they are."""
    others = [statement for statement in _statements(policy) if at(statement, "Sid") != wanted["Sid"]]
    return json.dumps({"Version": "2012-10-17", **json.loads(policy or "{}"), "Statement": [*others, wanted]})


def _statements(policy: str | None) -> list[Any]:
    found = json.loads(policy or "{}").get("Statement", [])
    return found if isinstance(found, list) else [found]


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]
