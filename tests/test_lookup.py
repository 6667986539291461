# SPDX-License-Identifier: Apache-2.0
"""What a look-up's answer is worth: each condition of absence by itself, over a provider that lists what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from webhooks.event import Answer, Event, Kind, Testimony, wire_key
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)
KEY, CONTROL_KEY = "a" * 48, "c" * 48
ADA, BEN = "ada@example.org", "ben@example.org"
FEED = Feed("main", "listing")
SOUGHT = Sought(KEY, NOW - timedelta(hours=3), NOW - timedelta(hours=2), ADA, "id-a")
CONTROL = Sought(CONTROL_KEY, NOW - timedelta(hours=2), NOW - timedelta(hours=1), BEN, "id-c")


def event(key: str | None, recipient: str | None = BEN, testimony: str = "accepted", **more: Any) -> Event:
    given = {"kind": Kind.SENT, "message_id": "id-x", "event_id": f"{key}{recipient}{testimony}", **more}
    return Event(testimony=Testimony(testimony), send_key=key, recipient=recipient, **given)


class Listing:
    """Lists the same events whatever is asked, as an API that ignores a filter does."""

    name = "listing"

    def __init__(self, *events: Event, finds_by: str = "recipient", echoes_key: bool = True) -> None:
        self.events = events
        self.facts = replace(PROVIDERS["mailgun"].facts, finds_by=finds_by, echoes_key=echoes_key)

    async def search(self, *_: Any) -> AsyncIterator[Event]:
        for one in self.events:
            yield one


async def asked(
    *events: Event,
    sought: Sought = SOUGHT,
    control: Sought | None = CONTROL,
    now: datetime = NOW,
    namespace: str = "",
    **facts: Any,
) -> Found:
    provider: Any = Listing(*events, **facts)
    return await look_up(provider, FEED, None, sought, control, now, namespace)  # type: ignore[arg-type]


def said(found: Found) -> tuple[Answer, str]:
    return found.answer, found.reason


THE_CONTROL = event(CONTROL_KEY)


async def test_not_found_while_the_control_is_means_absent() -> None:
    assert said(await asked(THE_CONTROL)) == (Answer.ABSENT, "")


@pytest.mark.parametrize("recipient", [ADA, "Ada@Example.ORG", "Ada <ADA@example.org>"])
async def test_a_send_to_the_recipient_that_shows_no_key_may_be_the_one(recipient: str) -> None:
    assert said(await asked(THE_CONTROL, event(None, recipient))) == (Answer.SILENT, "unnamed")
    assert said(await asked(THE_CONTROL, event(None, BEN))) == (Answer.ABSENT, ""), "somebody else's is not"


async def test_beside_the_sought_one_what_shows_no_key_does_no_harm() -> None:
    assert said(await asked(event(None, ADA), event(KEY, ADA))) == (Answer.ACCEPTED, "")


async def test_what_comes_back_is_compared_as_this_installation_s_key() -> None:
    ours = wire_key("order:1", "shop-a")
    sought = replace(SOUGHT, wire_key=ours)
    assert said(await asked(event("order:1", ADA), sought=sought, namespace="shop-a"))[0] is Answer.ACCEPTED
    assert said(await asked(event("order:1", ADA), THE_CONTROL, sought=sought))[0] is Answer.ABSENT


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        (None, "no_control"),
        (replace(CONTROL, claimed_at=SOUGHT.submit_by - timedelta(seconds=1)), "no_control"),
        (replace(CONTROL, recipient=None), "no_control"),
        (replace(CONTROL, recipient=f"{BEN}, {ADA}"), "no_control"),
        (replace(CONTROL, wire_key="d" * 48), "control_not_found"),
    ],
)
async def test_a_control_that_could_not_be_found_alike_proves_nothing(control: Sought | None, reason: str) -> None:
    assert said(await asked(THE_CONTROL, control=control)) == (Answer.SILENT, reason)


@pytest.mark.parametrize(
    ("finds_by", "sought", "reason"),
    [
        ("recipient", replace(SOUGHT, recipient=None), "no_recipient"),
        ("recipient", replace(SOUGHT, recipient=f"{ADA}, {BEN}"), "several_recipients"),
        ("id", replace(SOUGHT, message_id=None), "no_message_id"),
        ("nothing", SOUGHT, "unsupported"),
    ],
)
async def test_who_can_t_be_asked_for_is_not_absent(finds_by: str, sought: Sought, reason: str) -> None:
    assert said(await asked(THE_CONTROL, sought=sought, finds_by=finds_by)) == (Answer.SILENT, reason)


async def test_a_word_that_proves_nothing_is_not_absence() -> None:
    found = await asked(event(KEY, ADA, "none"), THE_CONTROL)
    assert (*said(found), len(found.events)) == (Answer.SILENT, "unknown_event", 1)


async def test_accepted_goes_before_rejected() -> None:
    assert (await asked(event(KEY, ADA, "rejected"))).answer is Answer.REJECTED
    assert (await asked(event(KEY, ADA, "rejected"), event(KEY, ADA))).answer is Answer.ACCEPTED


async def test_an_id_of_ours_is_another_recipient_s_where_both_are_known() -> None:
    facts = {"finds_by": "id", "echoes_key": False}
    theirs = [event(None, who, message_id="id-a") for who in (ADA, BEN, None)]
    control = event(None, BEN, message_id="id-c")
    assert said(await asked(theirs[0], **facts))[0] is Answer.ACCEPTED
    assert said(await asked(theirs[1], control, **facts))[0] is Answer.ABSENT
    assert said(await asked(theirs[2], **facts))[0] is Answer.ACCEPTED


async def test_what_is_found_bears_the_send_s_key() -> None:
    found = await asked(event(None, ADA, message_id="id-a"), finds_by="id", echoes_key=False)
    assert [one.send_key for one in found.events] == [KEY]


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (SOUGHT.submit_by + timedelta(minutes=29, seconds=59), "not_settled"),
        (SOUGHT.submit_by + timedelta(minutes=30), ""),
        (SOUGHT.claimed_at + timedelta(days=1), "too_old"),
    ],
)
async def test_absence_has_its_time(now: datetime, reason: str) -> None:
    found = await asked(THE_CONTROL, now=now)
    assert said(found) == (Answer.SILENT if reason else Answer.ABSENT, reason)
