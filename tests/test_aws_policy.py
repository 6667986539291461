# SPDX-License-Identifier: Apache-2.0
"""An access policy says whether it lets a service in, and is completed without losing what others wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from webhooks.aws_policy import grant, grants, with_grant

TOPIC, SET = "arn:aws:sns:eu-west-1:123456789012:t", "arn:aws:ses:eu-west-1:123456789012:configuration-set/shop"
WANTED = grant("ses.amazonaws.com", "sns:Publish", TOPIC, {"AWS:SourceArn": SET})


def policy(*statements: Any) -> str:
    return json.dumps({"Version": "2008-10-17", "Statement": list(statements)})


def by_hand(**changed: Any) -> dict[str, Any]:
    principal = {"Service": "ses.amazonaws.com"}
    return {"Effect": "Allow", "Principal": principal, "Action": "SNS:Publish", "Resource": TOPIC, **changed}


def test_a_grant_is_to_one_service_for_one_source() -> None:
    assert {name: WANTED[name] for name in WANTED if name != "Sid"} == {
        "Effect": "Allow",
        "Principal": {"Service": "ses.amazonaws.com"},
        "Action": "sns:Publish",
        "Resource": TOPIC,
        "Condition": {"StringEquals": {"AWS:SourceArn": SET}},
    }
    assert WANTED["Sid"].isalnum()
    assert WANTED["Sid"] != grant("ses.amazonaws.com", "sns:Publish", TOPIC, {"AWS:SourceArn": SET + "2"})["Sid"]


@pytest.mark.parametrize(
    ("statement", "enough"),
    [
        (by_hand(), True),
        (by_hand(Action=["sns:Publish", "sns:Subscribe"]), True),
        (by_hand(Principal={"Service": ["events.amazonaws.com", "ses.amazonaws.com"]}), True),
        (by_hand(Condition={"StringEquals": {"AWS:SourceArn": SET}}), True),
        (by_hand(Condition={"StringEquals": {"AWS:SourceArn": SET + "2"}}), False),
        (by_hand(Effect="Deny"), False),
        (by_hand(Action="sns:Subscribe"), False),
        (by_hand(Principal={"AWS": "*"}), False),
        ({}, False),
        (7, False),
    ],
)
def test_only_a_statement_that_lets_this_service_do_it_for_this_source_is_enough(statement: Any, enough: bool) -> None:
    assert grants(policy(statement), WANTED) is enough
    assert grants(json.dumps({"Statement": statement}), WANTED) is enough  # one alone needs no list


@pytest.mark.parametrize("nothing", [None, "", "{}", policy()])
def test_no_policy_grants_nothing_and_is_made(nothing: str | None) -> None:
    assert not grants(nothing, WANTED)
    made = with_grant(nothing, WANTED)
    assert grants(made, WANTED)
    assert json.loads(made)["Statement"] == [WANTED]


def test_a_policy_is_completed_once_and_others_statements_stay() -> None:
    theirs = by_hand(Sid="theirs", Effect="Deny")
    once = with_grant(policy(theirs), WANTED)
    assert json.loads(once) == {"Version": "2008-10-17", "Statement": [theirs, WANTED]}
    assert with_grant(once, WANTED) == once
