# SPDX-License-Identifier: Apache-2.0
"""`why` tells what happened to a send in its order, and foresees exactly what a pass will do."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import kit
from kit import (
    claim,
    confirm,
    event,
    fail,
    heard_neighbours,
    make_due,
    make_older,
    old_claim,
    reconcile,
    row,
    stored_delivery,
)

from reconciler.insight.why import Story, tell, witnesses_in_words
from reconciler.rule.policy import Rules


async def why(db: asyncpg.Pool, key: str, rules: Rules = kit.RULES, **named: bool) -> Story:
    return await tell(db, kit.policies(rules), key, **named)


def told(story: Story) -> list[str]:
    return [f"{entry.what}: {entry.text}" for entry in story.timeline]


async def test_a_claim_that_may_still_be_submitted_waits_for_its_sender(db: asyncpg.Pool) -> None:
    await claim(db, "order:1", claimed_by="worker-7", campaign="may")
    story = await why(db, "order:1")
    submit_by = f"{(await row(db, 'order:1'))['submit_by']:%Y-%m-%dT%H:%M:%SZ}"
    assert told(story) == [
        "recorded: recorded for feed mg, class default, campaign may",
        f"claim: attempt 1 claimed by worker-7, to be submitted until {submit_by}",
    ]
    assert story.next is not None
    assert (story.next.action, story.next.reason) == ("waiting", "submitting")
    assert submit_by in story.next.text
    assert story.standing == "claimed, its sender may be submitting it; 1 attempt"
    await fail(db, "order:1", (await row(db, "order:1"))["fence"], "time-out", not_sent=None)
    assert (await why(db, "order:1")).standing == (
        "claimed, nobody knows whether it was accepted; 1 attempt, the sender reported: time-out"
    )


async def test_a_send_is_found_by_its_send_key_and_its_wire_key_and_under_a_namespace(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET namespace = 'shop'")
    await claim(db, "plain-key")
    story = await why(db, "plain-key")
    assert story.wire_key != "plain-key"
    assert (await why(db, story.wire_key)).row["send_key"] == "plain-key"


async def test_the_timeline_holds_each_attempt_event_and_verdict_in_order(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, "order:1")
    await fail(db, "order:1", fence, "connection refused", not_sent=True)
    second = (await claim(db, "order:1"))["fence"]
    await confirm(db, "order:1", second, "m-2")
    await event(db, "order:1", kind="delivered", message_id="m-2", reason="250 ok")
    story = await why(db, "order:1")
    assert [(entry.what, entry.text.split(",")[0].split(" (")[0]) for entry in story.timeline] == [
        ("claim", "attempt 1 claimed"),
        ("recorded", "recorded for feed mg"),  # the tests made the claim older, not the row
        ("report", f"the sender reported of claim {fence}: connection refused; it was not sent"),
        ("verdict", "released: not_sent"),
        ("claim", "attempt 2 claimed"),
        ("answer", f"the sender told the provider's answer to claim {second}: accepted [message m-2]"),
        ("verdict", "sent: answered"),
        ("event", "delivered from mg by http"),
    ]
    assert story.standing == "sent after 2 attempts: answered"
    assert story.next is not None
    assert (story.next.action, story.next.at) == ("none", None)


async def test_a_held_send_says_what_it_waits_for_and_until_when(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await heard_neighbours(db)
    await db.execute("DELETE FROM provider_event WHERE message_id IN ('n-448', 'n-449', 'n-450')")
    await reconcile(db)
    story = await why(db, "order:1")
    assert "held (risk) since" in story.standing
    assert story.next is not None
    assert (story.next.action, story.next.reason) == ("held", "risk")
    assert story.next.at == (await row(db, "order:1"))["next_check_at"]
    assert story.next.missing is not None
    assert story.next.silence is not None
    risk = f"{100 * story.next.silence['risk']:.2g} %"
    assert "the risk that it was accepted all the same is above its ceiling (max_risk)" in story.next.missing
    assert "near it 25 answered before and 25 after it, 3 not heard of" in story.next.missing
    assert f"risk {risk} against a ceiling of 1 % (assumed beforehand: accepted in 50 % of cases)" in story.next.missing
    given_up_at = (await row(db, "order:1"))["submit_by"] + kit.RULES.give_up_after
    since = f"from {given_up_at:%Y-%m-%dT%H:%M:%SZ} on (give_up_after 24h)"
    assert f"{since} its message class decides: it stays held" in story.next.missing


async def test_a_held_send_with_too_few_neighbours_says_how_many_there_are(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await stored_delivery(db)
    story = await why(db, "order:1")
    assert story.next is not None
    assert story.next.reason == "few_controls"
    assert "100 answered sends are missing in the history" in str(story.next.missing)
    assert "near it 0 answered before and 0 after it" in str(story.next.missing)


async def test_after_give_up_only_a_person_or_evidence_decides(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", timedelta(days=2))
    story = await why(db, "order:1")
    missing = str(story.next and story.next.missing)
    assert "give_up_after is over: evidence, a witness of absence or you decide it now" in missing


async def test_verdicts_show_what_their_witnesses_answered(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await heard_neighbours(db)
    foreseen = (await why(db, "order:1")).next
    assert foreseen is not None
    assert (foreseen.action, foreseen.reason) == ("released", "absent")
    await make_due(db, "order:1")
    await reconcile(db)
    story = await why(db, "order:1")
    (verdict,) = [text for text in told(story) if text.startswith("verdict")]
    assert "released: absent (inferred, by test)" in verdict
    assert "the feed's answer: absent; at the age of" in verdict
    assert "near it 25 answered before and 25 after it, all heard of, risk 0.6" in verdict
    assert "against a ceiling of 1 % (assumed beforehand: accepted in 50 % of cases); risk of a duplicate" in verdict
    assert story.standing.startswith("free to be sent again (absent) since")


async def test_what_why_foresees_is_what_the_next_pass_does(db: asyncpg.Pool) -> None:
    rules = replace(kit.RULES, on_unknown="fail")
    await old_claim(db, "accepted")
    await event(db, "accepted")
    await old_claim(db, "rejected")
    await event(db, "rejected", "rejected", message_id="m-2", kind="failed", reason="no such user")
    await old_claim(db, "unclear")
    await event(db, "unclear", "none", message_id="m-3", kind="unknown")
    await old_claim(db, "given-up", timedelta(days=2))
    foreseen = {key: (await why(db, key, rules)).next for key in ("accepted", "rejected", "unclear", "given-up")}
    await reconcile(db, rules)
    for key, expected in foreseen.items():
        assert expected is not None
        verdict = await db.fetchrow("SELECT action, reason FROM verdict WHERE wire_key = $1 ORDER BY id DESC", key)
        assert (verdict["action"], verdict["reason"]) == (expected.action, expected.reason), key


async def test_how_a_send_stands_does_not_contradict_what_comes_next(db: asyncpg.Pool) -> None:
    await old_claim(db, "accepted")
    await event(db, "accepted")
    await old_claim(db, "rejected")
    await event(db, "rejected", "rejected", message_id="m-2", kind="failed")
    failed = await old_claim(db, "failed")
    await fail(db, "failed", failed, "422", not_sent=False)
    await event(db, "failed", message_id="m-3", feed="other")
    free = await old_claim(db, "free")
    await fail(db, "free", free, "refused", not_sent=True)
    await event(db, "free", message_id="m-4")
    stories = {key: await why(db, key) for key in ("accepted", "rejected", "failed", "free")}
    assert {key: story.standing for key, story in stories.items()} == {
        "accepted": "claimed; accepted according to mg, to be settled by the next pass; 1 attempt",
        "rejected": "claimed; rejected according to mg, to be settled by the next pass; 1 attempt",
        "failed": "failed; accepted according to other, to be settled by the next pass; 1 attempt",
        "free": "pending; accepted according to mg, to be settled by the next pass; 1 attempt",
    }
    assert [story.next and story.next.action for story in stories.values()] == ["sent", "failed", "sent", "sent"]
    await reconcile(db)
    assert [(await row(db, key))["state"] for key in stories] == ["sent", "failed", "sent", "sent"]


async def test_late_evidence_beyond_the_window_promises_nothing(db: asyncpg.Pool) -> None:
    await fail(db, "order:1", await old_claim(db, "order:1"), "422", not_sent=False)
    await event(db, "order:1")
    await make_older(db, "order:1", timedelta(days=8))
    assert (await why(db, "order:1")).standing == "failed after 1 attempt: 422, the sender reported: 422"


async def test_a_released_send_waits_for_the_application_and_its_next_look_does_not_move(db: asyncpg.Pool) -> None:
    await fail(db, "order:1", await old_claim(db, "order:1"), "refused", not_sent=True)
    await reconcile(db)
    first, second = (await why(db, "order:1")).next, (await why(db, "order:1")).next
    assert first is not None
    assert first == second
    assert first.at == (await row(db, "order:1"))["next_check_at"]
    assert first.text == ('waits for the application to claim it again (see docs/sending.md, "Sending again")')


async def test_a_refused_delivery_is_told_of_as_the_feeds_and_not_as_the_sends(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await stored_delivery(db)
    await stored_delivery(db, outcome="refused:signature")
    await reconcile(db)
    story = await why(db, "order:1")
    assert "held (refused: the feed's newest delivery was refused) since" in story.standing
    (verdict,) = [text for text in told(story) if text.startswith("verdict")]
    assert verdict.startswith("verdict: held: refused: the feed's newest delivery was refused (inferred, by test)")


async def test_looking_changes_nothing(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await event(db, "order:1")
    before = await row(db, "order:1")
    await why(db, "order:1")
    assert await row(db, "order:1") == before
    assert await db.fetchval("SELECT count(*) FROM verdict") == 0


async def test_a_failed_send_says_until_when_late_evidence_still_counts(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, "order:1")
    await fail(db, "order:1", fence, "422 bad address", not_sent=False)
    story = await why(db, "order:1")
    until = (await row(db, "order:1"))["failed_at"] + timedelta(days=7)
    assert story.next is not None
    assert f"{until:%Y-%m-%dT%H:%M:%SZ}" in story.next.text
    assert "verdict: failed: 422 bad address (sender, by send_fail)" in told(story)


def reports(story: Story) -> list[tuple[str, Any]]:
    return [(entry.text, entry.details["not_sent"]) for entry in story.timeline if entry.what == "report"]


async def test_what_the_sender_reported_of_an_attempt_is_told_with_what_it_says_of_it(db: asyncpg.Pool) -> None:
    fences = {key: await old_claim(db, key, cause=None) for key in ("never-left", "refused", "unclear")}
    for key, not_sent in (("never-left", True), ("refused", False), ("unclear", None)):
        await fail(db, key, fences[key], "HTTP 503", not_sent=not_sent)
    said = {key: reports(await why(db, key)) for key in fences}
    before = "the sender reported of claim"
    assert said == {
        "never-left": [(f"{before} {fences['never-left']}: HTTP 503; it was not sent", True)],
        "refused": [(f"{before} {fences['refused']}: HTTP 503; the provider refused it", False)],
        "unclear": [
            (f"{before} {fences['unclear']}, then or before: HTTP 503; it can't tell whether it was sent", None)
        ],
    }
    for key in fences:
        (entry,) = [entry for entry in (await why(db, key)).timeline if entry.what == "report"]
        told_at = await db.fetchval("SELECT decided_at FROM verdict WHERE wire_key = $1", key)
        assert entry.at == (told_at or (await row(db, key))["updated_at"])
        assert (entry.details["reason"], entry.details["exact"]) == ("HTTP 503", told_at is not None)


async def test_a_report_is_told_no_later_than_what_was_decided_with_it(db: asyncpg.Pool) -> None:
    await old_claim(db, "held")
    await heard_neighbours(db)
    await db.execute("DELETE FROM provider_event WHERE message_id IN ('n-448', 'n-449', 'n-450')")
    await reconcile(db)
    held_at = await db.fetchval("SELECT decided_at FROM verdict WHERE wire_key = 'held' AND action = 'held'")
    await make_due(db, "held")
    await reconcile(db)
    assert (await row(db, "held"))["updated_at"] > held_at
    await old_claim(db, "free")
    await db.fetch("SELECT * FROM operator_release('free', 'why', 'ann')")
    await reconcile(db)  # which notes when it looks again
    for key, latest in (("held", held_at), ("free", (await row(db, "free"))["released_at"])):
        (at,) = [entry.at for entry in (await why(db, key)).timeline if entry.what == "report"]
        assert at == latest


async def test_a_report_of_what_was_heard_of_already_says_no_more_than_is_known(db: asyncpg.Pool) -> None:
    fence = (await claim(db, "order:1"))["fence"]
    await event(db, "order:1")
    assert await fail(db, "order:1", fence, "timed out", not_sent=True) == "sent"
    story = await why(db, "order:1")
    assert [(e.text, "not_sent" in e.details) for e in story.timeline if e.what == "report"] == [
        (f"the sender reported of claim {fence}: timed out", False)
    ]


async def test_what_the_application_was_told_is_told(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET tell = '{released, sent, failed, held}'")
    for key in ("delivered", "dead", "waiting", "new", "overtaken"):
        await fail(db, key, (await claim(db, key))["fence"], not_sent=True)
    await db.execute("""
        UPDATE release_outbox SET
            tries = CASE WHEN wire_key = 'new' THEN 0 ELSE 2 END,
            delivered_at = CASE WHEN wire_key = 'delivered' THEN timestamptz '2026-11-02T08:00:00Z' END,
            dead_at = CASE WHEN wire_key = 'dead' THEN timestamptz '2026-11-02T09:00:00Z' END,
            next_try_at = '2026-11-02T10:00:00Z', created_at = '2026-11-02T07:00:00Z',
            last_error = CASE WHEN wire_key IN ('dead', 'waiting') THEN 'HTTP 500' END
    """)
    await claim(db, "overtaken")
    found = {}
    for key in ("delivered", "dead", "waiting", "new", "overtaken"):
        ((found[key], at),) = [(e.text, e.at) for e in (await why(db, key)).timeline if e.what == "telling"]
        (telling,) = await db.fetch("SELECT * FROM release_outbox WHERE wire_key = $1", key)
        ended = telling["delivered_at"] or telling["cancelled_at"] or telling["dead_at"]
        assert at == (ended or telling["created_at"])
    assert found == {
        "delivered": "the application was told: released (2 tries)",
        "dead": "given up to tell the application: released (2 tries, HTTP 500); tell it with reconciler outbox retry",
        "waiting": "to be told to the application: released (2 tries, HTTP 500), next at 2026-11-02T10:00:00Z",
        "new": "to be told to the application: released",
        "overtaken": "no longer to be told to the application: released (2 tries)",
    }


async def test_the_words_of_senders_show_addresses_only_on_demand(db: asyncpg.Pool) -> None:
    refusal = "550 <ann@example.com> unknown"
    for key, not_sent in (("never-left", True), ("refused", False), ("unclear", None)):
        await fail(db, key, (await claim(db, key))["fence"], refusal, not_sent=not_sent)
        assert "ann@example.com" not in repr(await why(db, key))
        shown = await why(db, key, show_recipient=True)
        assert refusal in str(told(shown))
        assert refusal in (shown.row["cause"], shown.standing)


async def test_an_operators_note_is_told_with_its_author(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await db.fetch("SELECT * FROM operator_decide('order:1', 'failed', 'not in the log', 'ann@desk')")
    assert "verdict: failed: operator (by ann@desk); note: not in the log" in told(await why(db, "order:1"))


async def test_recipients_are_shown_only_on_demand(db: asyncpg.Pool) -> None:
    address = "ann@example.com"
    await claim(db, "order:1", recipient=address, payload={"to": address})
    await event(db, "order:1", event_id="e-1", recipient=address, reason=f"550 <{address}> unknown")
    assert address not in repr(await why(db, "order:1"))
    shown = await why(db, "order:1", show_recipient=True)
    assert address in str(told(shown))
    assert shown.row["recipient"] == address


async def test_an_event_without_a_key_is_told_where_its_message_id_fits(db: asyncpg.Pool) -> None:
    fence = (await claim(db, "order:1"))["fence"]
    await confirm(db, "order:1", fence, "m-1")
    await event(db, None, message_id="m-1", kind="bounced")
    (bounced,) = [text for text in told(await why(db, "order:1")) if text.startswith("event")]
    assert "bounced from mg by http" in bounced
    assert "carries no key, found by message id" in bounced


async def test_an_event_whose_send_is_unknown_is_told(db: asyncpg.Pool) -> None:
    await event(db, "order:1")
    story = await why(db, "order:1")
    assert (story.state, story.next) == (None, None)
    assert [entry.what for entry in story.timeline] == ["event"]
    assert "events do (1)" in story.standing


async def test_a_send_that_waits_for_its_first_claim_says_so(db: asyncpg.Pool) -> None:
    await db.fetch("""SELECT * FROM send_enqueue('order:1', 'mg', '{"not_before": "2099-01-01T00:00:00Z"}')""")
    story = await why(db, "order:1")
    assert story.standing == "pending, not claimed yet; 0 attempts"
    assert story.next is not None
    assert story.next.text == "waits for the application to claim it, not before 2099-01-01T00:00:00Z"


async def test_a_paused_feed_is_named_as_what_a_send_waits_for(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1")
    await db.execute("UPDATE feed_state SET paused_at = now() WHERE feed = '*'")
    story = await why(db, "order:1")
    assert story.next is not None
    assert (story.next.reason, "reconciler resume" in str(story.next.missing)) == ("paused", True)


async def test_a_same_key_retry_is_foreseen_as_safe(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", fingerprint="f")
    policies = kit.policies(key_window=timedelta(hours=24))
    story = await tell(db, policies, "order:1")
    assert story.next is not None
    assert (story.next.action, story.next.reason) == ("released", "same_key_retry")
    await make_older(db, "order:1", timedelta(days=1))  # the provider forgets the key
    later = await tell(db, policies, "order:1")
    assert later.next is not None
    assert later.next.action == "held"


def test_witnesses_that_were_not_asked_are_not_told_of() -> None:
    assert witnesses_in_words({}) == ""
    assert (
        witnesses_in_words({"feed": {"answer": "silent", "reason": "refused"}}) == "the feed's answer: silent (refused)"
    )
