# SPDX-License-Identifier: Apache-2.0
"""The story of one send: what was claimed, said and decided, how it stands, and what happens next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

import asyncpg

from reconciler.insight.status import held_in_words
from reconciler.logs import Redactor
from reconciler.passes.ledger import Decided
from reconciler.passes.reconcile import Policies, Scope, look
from reconciler.rule.in_words import (
    GIVEN_UP,
    WAITS_FOR,
    WORDS,
    percent,
    report_in_words,
    silence_in_words,
    telling_in_words,
    witnesses_in_words,
)
from reconciler.rule.policy import Action, Verdict
from reconciler.units import format_duration

MOST_EVENTS: Final = 500
"""Events of one send that are shown; a newsletter's clicks are endless, and its first events tell the story."""


SAID_IN_WORDS: Final = ("cause", "verdict_reason", "reason", "note")
"""Columns of rows and verdicts in which anything may stand, an address too."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened."""

    at: datetime
    what: str
    """recorded, claim, answer, report, event, verdict, shadow, look-up, duplicate or telling."""
    text: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Next:
    """What the next look at a send will do, or what it waits for."""

    action: str
    """The verdict that a pass would reach now, `none` where nothing is left to decide."""
    reason: str
    at: datetime | None
    """When a pass looks at it next, by the database's clock. Evidence is acted on by every pass, whenever."""
    text: str
    missing: str | None = None
    """Of a held send: what would decide it."""
    silence: Mapping[str, Any] | None = None
    """What its feed's silence is worth now, where that is judged: the risk, and what it is computed from."""


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known of one key. `state` is None where no send has it."""

    wire_key: str
    now: datetime
    state: str | None
    standing: str
    row: Mapping[str, Any]
    timeline: list[Entry]
    next: Next | None


ROW: Final = """
SELECT asked.wire_key AS asked_key, clock_timestamp() AS now, campaign_hold(s.campaign, clock_timestamp()), s.*
FROM (SELECT wire_key($1) AS wire_key) AS asked LEFT JOIN send_log s USING (wire_key)
"""

EVENTS: Final = """
SELECT feed, message_id, event_id, occurred_at, received_at, kind, testimony, recipient, reason, source, fence,
       wire_key <> $1 AS by_message_id
FROM provider_event WHERE wire_key = ANY (ARRAY[$1, stand_in_key($2, $3), stand_in_key($2, $4)])
ORDER BY received_at, message_id, event_id LIMIT $5
"""

VERDICTS: Final = "SELECT * FROM verdict WHERE wire_key = $1 ORDER BY id"
SHADOW_VERDICTS: Final = "SELECT * FROM shadow_verdict WHERE wire_key = $1 ORDER BY id"
LOOK_UPS: Final = "SELECT feed, asked_at, who, answer, reason FROM look_up WHERE wire_key = $1 ORDER BY id LIMIT 100"
TELLINGS: Final = """
SELECT what, fence, created_at, tries, next_try_at, delivered_at, cancelled_at, dead_at, last_error
FROM release_outbox WHERE wire_key = $1 ORDER BY id LIMIT 100
"""
DUPLICATES: Final = "SELECT sort, found_at, feed, evidence ->> 'because' AS because FROM duplicate WHERE wire_key = $1"


async def tell(pool: asyncpg.Pool, policies: Policies, key: str, *, show_recipient: bool = False) -> Story:
    """Return the story of a send key or wire key. Changes nothing."""
    async with pool.acquire() as connection:
        found = await connection.fetchrow(ROW, key)
        assert found is not None  # noqa: S101 - a LEFT JOIN of one row
        row = _readable(found, show_recipient)
        wire_key, now, known = row["asked_key"], row["now"], row["state"] is not None
        events = await connection.fetch(
            EVENTS, wire_key, row["feed"], row["provider_message_id"], row["known_message_id"], MOST_EVENTS
        )
        verdicts, shadows = [
            [_readable(verdict, show_recipient) for verdict in await connection.fetch(statement, wire_key)]
            for statement in (VERDICTS, SHADOW_VERDICTS)
        ]
        entries = [*_event_entries(events, show_recipient), *_report_entries(row, verdicts)]
        entries += [*_verdict_entries(verdicts), *_verdict_entries(shadows, what="shadow")]
        entries += _telling_entries(await connection.fetch(TELLINGS, wire_key))
        entries += _look_up_entries(await connection.fetch(LOOK_UPS, wire_key))
        entries += _duplicate_entries(await connection.fetch(DUPLICATES, wire_key))
    if not known:
        return Story(wire_key, now, None, _unknown(events), {}, sorted(entries, key=_when), None)
    entries += _row_entries(row, verdicts)
    report = await look(pool, policies, Scope(wire_key=wire_key))
    decided = next(iter(report.decided), None)
    verdict = decided.verdict if decided else None
    hidden = () if show_recipient else ("recipient", "recipient_key", "payload", "response")
    facts = {name: value for name, value in row.items() if name not in ("asked_key", "now", "campaign_hold", *hidden)}
    unsettled = _unsettled(row, verdict, events, policies)
    foreseen = _foresee(row, decided, policies, revived=unsettled is not None)
    standing = _standing(row, unsettled)
    return Story(wire_key, now, row["state"], standing, facts, sorted(entries, key=_when), foreseen)


def _readable(record: asyncpg.Record, show_recipient: bool) -> dict[str, Any]:
    """Return a row or verdict, without the addresses in its words unless they are wanted."""
    said = {name: record[name] for name in SAID_IN_WORDS if record.get(name)}
    return {**record, **({} if show_recipient else Redactor()(None, "", said))}


def _when(entry: Entry) -> datetime:
    return entry.at


def _unknown(events: list[asyncpg.Record]) -> str:
    if not events:
        return "no send and no event has this key"
    return (
        f"no send has this key, and yet events do ({len(events)}): they came before the row, the row was forgotten, or "
        "another installation sent it"
    )


def _row_entries(row: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    words = [f"recorded for feed {row['feed']}, class {row['message_class']}"]
    words += [f"{name} {row[name]}" for name in ("campaign", "source") if row[name]]
    yield Entry(row["created_at"], "recorded", ", ".join(words), {"feed": row["feed"]})
    for claim in _claims(row, verdicts):
        text = f"attempt {claim['attempt']} claimed{_by(claim)}, to be submitted until {_clock(claim['submit_by'])}"
        yield Entry(claim["claimed_at"], "claim", text, claim)
    if not any(verdict["action"] == row["state"] for verdict in verdicts) and row["verdict_reason"]:
        # The sender's own calls write no verdict where they only confirm what was expected.
        text = f"{row['state']}: {row['verdict_reason']} ({row['verdict_source']})"
        yield Entry(row["sent_at"] or row["failed_at"], "verdict", text, {"source": row["verdict_source"]})


def _claims(row: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every claim that is still known of. The row keeps its newest, and of its first the time."""
    found = {}
    for source in (*verdicts, row):
        if source["claimed_at"] and source["submit_by"]:
            names = ("attempt", "fence", "feed", "claimed_at", "submit_by")
            found[source["claimed_at"]] = {name: source[name] for name in names}
    if row["claimed_at"]:
        found[row["claimed_at"]]["claimed_by"] = row["claimed_by"]
    first = row["first_claimed_at"]
    if first and first not in found:
        found[first] = {"attempt": 1, "fence": None, "feed": row["feed"], "claimed_at": first, "submit_by": None}
    return [found[at] for at in sorted(found)]


def _by(claim: Mapping[str, Any]) -> str:
    return f" by {claim['claimed_by']}" if claim.get("claimed_by") else ""


def _clock(at: datetime | None) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}" if at else "an unknown time"


def _event_entries(events: list[asyncpg.Record], show_recipient: bool) -> Iterator[Entry]:
    redact = Redactor()
    for event in events:
        reason = event["reason"]
        if reason and not show_recipient:
            reason = redact(None, "", {"reason": reason})["reason"]
        details = {**event, "reason": reason, "recipient": event["recipient"] if show_recipient else None}
        what = "answer" if event["source"] == "sender" else "event"
        yield Entry(
            event["received_at"], what, _event_text({**details, "by_message_id": event["by_message_id"]}), details
        )


def _event_text(event: Mapping[str, Any]) -> str:
    if event["source"] == "sender":
        return (
            f"the sender told the provider's answer to claim {event['fence']}: accepted{_message(event['message_id'])}"
        )
    proves = {"accepted": "proves acceptance", "rejected": "proves rejection", "none": "proves nothing"}
    words = [f"{event['kind']} from {event['feed']} by {event['source']}, {proves[event['testimony']]}"]
    if event["occurred_at"]:
        words.append(f"provider's time {_clock(event['occurred_at'])}")
    if event["by_message_id"]:
        words.append("carries no key, found by message id")
    if event["recipient"]:
        words.append(f"for {event['recipient']}")
    if event["reason"]:
        words.append(f"reason: {event['reason']}")
    return ", ".join(words) + _message(event["message_id"])


def _message(message_id: str | None) -> str:
    return f" [message {message_id}]" if message_id and not message_id.startswith("~") else ""


def _look_up_entries(look_ups: list[asyncpg.Record]) -> Iterator[Entry]:
    for asked in look_ups:
        because = f" ({asked['reason']})" if asked["reason"] else ""
        said = f"{asked['answer']}{because}" if asked["answer"] else "no answer"
        yield Entry(
            asked["asked_at"], "look-up", f"{asked['who']} asked the API of {asked['feed']}: {said}", dict(asked)
        )


def _duplicate_entries(duplicates: list[asyncpg.Record]) -> Iterator[Entry]:
    for found in duplicates:
        text = {
            "duplicate": f"found accepted twice ({found['because']}): the releases of {found['feed']} were stopped",
            "ids_differ": f"more than one message id is known of it ({found['because']}), which proves nothing",
        }[found["sort"]]
        yield Entry(found["found_at"], "duplicate", text, dict(found))


def _report_entries(row: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yield what the sender said with send_fail, which its verdict holds, or of the newest claim the row."""
    reports = [verdict for verdict in verdicts if verdict["who"] == "send_fail"]
    for verdict in reports:
        known = {"released": {"not_sent": True}, "failed": {"not_sent": False}}.get(verdict["action"], {})
        reason = verdict["reason"] if verdict["action"] == "failed" else verdict["note"]
        yield _report(verdict["decided_at"], verdict, {"reason": reason, "exact": True, **known})
    if row["cause"] and row["fence"] not in [verdict["fence"] for verdict in reports]:
        yield _report(_reported_by(row, verdicts), row, {"reason": row["cause"], "exact": False, "not_sent": None})


def _report(at: datetime, claim: Mapping[str, Any], said: Mapping[str, Any]) -> Entry:
    facts = {"attempt": claim["attempt"], "fence": claim["fence"], **said}
    return Entry(at, "report", report_in_words(facts), facts)


def _reported_by(row: Mapping[str, Any], verdicts: Sequence[Mapping[str, Any]]) -> datetime:
    """Return a time before which the sender reported; the row keeps none of its own, and each change of it is later."""
    later: list[datetime] = [row[name] for name in ("updated_at", "released_at", "failed_at", "sent_at") if row[name]]
    judged = [verdict for verdict in verdicts if verdict["fence"] == row["fence"] and verdict["inputs"]]
    later += [verdict["decided_at"] for verdict in judged if json.loads(verdict["inputs"]).get("reported")]
    return min(later)


def _telling_entries(tellings: list[asyncpg.Record]) -> Iterator[Entry]:
    for telling in tellings:
        facts = dict(telling)
        at = telling["delivered_at"] or telling["cancelled_at"] or telling["dead_at"] or telling["created_at"]
        yield Entry(at, "telling", telling_in_words(facts, _clock(telling["next_try_at"])), facts)


def _verdict_entries(
    verdicts: Sequence[Mapping[str, Any]], what: Literal["verdict", "shadow"] = "verdict"
) -> Iterator[Entry]:
    for verdict in verdicts:
        witnesses = json.loads(verdict["witnesses"]) if verdict["witnesses"] else {}
        would = "would be " if what == "shadow" else ""
        words = [f"{would}{verdict['action']}: {held_in_words(verdict['reason'])} ({_source(verdict)})"]
        if seen := witnesses_in_words(witnesses):
            words.append(seen)
        inputs = json.loads(verdict["inputs"] or "null")
        if inputs:
            words.append(silence_in_words(inputs))
        if verdict["risk"]:
            words.append(f"risk of a duplicate {percent(verdict['risk'])}")
        if verdict["note"]:
            words.append(f"note: {verdict['note']}")
        details = {**verdict, "witnesses": witnesses, "inputs": inputs}
        yield Entry(verdict["decided_at"], what, "; ".join(words), details)


def _source(verdict: Mapping[str, Any]) -> str:
    known_by = "" if verdict["source"] == "operator" else f"{verdict['source']}, "
    return f"{known_by}by {verdict['who']}"


def _unsettled(
    row: Mapping[str, Any], verdict: Verdict | None, events: list[asyncpg.Record], policies: Policies
) -> str | None:
    """Return what was said of a send and not acted upon yet; None where nothing is left for a pass to settle."""
    heard = [event for event in events if not event["by_message_id"]] if verdict is None else events
    by = {said: _sayers(said, heard) for said in ("accepted", "rejected")}
    if verdict and verdict.action is Action.SENT:
        said = "accepted"
    elif verdict and (verdict.action, verdict.reason) == (Action.FAILED, "rejected"):
        said = "rejected"
    elif row["state"] == "failed" and by["accepted"] and row["now"] < row["failed_at"] + policies.late_window:
        said = "accepted"
    else:
        return None
    return f"{said} according to {by[said] or 'a provider'}, to be settled by the next pass"


def _sayers(testimony: str, events: list[asyncpg.Record]) -> str:
    return " and ".join(
        dict.fromkeys(
            "its sender" if event["source"] == "sender" else event["feed"]
            for event in events
            if event["testimony"] == testimony
        )
    )


def _standing(row: Mapping[str, Any], unsettled: str | None) -> str:
    """Return how a send stands, in one sentence."""
    attempts = f"{row['attempt']} attempt{'s' if row['attempt'] != 1 else ''}"
    if unsettled:
        return f"{row['state']}; {unsettled}; {attempts}"
    reason = held_in_words(row["held_reason"]) if row["held_reason"] else None
    held = f", held ({reason}) since {_clock(row['held_since'])}" if reason else ""
    cause = f", the sender reported: {row['cause']}" if row["cause"] and row["state"] != "sent" else ""
    match row["state"]:
        case "sent":
            became = f", delivery: {row['delivery']}" if row["delivery"] else ""
            return f"sent after {attempts}: {row['verdict_reason']}{became}"
        case "failed":
            return f"failed after {attempts}: {row['verdict_reason']}{cause}"
        case "claimed" if row["now"] < row["submit_by"] and not cause:
            return f"claimed, its sender may be submitting it; {attempts}"
        case "claimed":
            return f"claimed, nobody knows whether it was accepted; {attempts}{held}{cause}"
    if row["released_at"]:
        free = f"free to be sent again ({row['release_basis']}) since {_clock(row['released_at'])}"
        return f"{free}; {attempts}{held}{cause}"
    return f"pending, not claimed yet; {attempts}{held}"


def _foresee(row: Mapping[str, Any], decided: Decided | None, policies: Policies, *, revived: bool) -> Next:
    """Return what happens next. The verdict is the policy's own; only its words are found here."""
    if decided is None and revived:
        return Next("sent", "accepted", None, WORDS["sent"])
    if decided is None:
        return Next("none", row["state"], None, _at_rest(row, policies))
    verdict = decided.verdict
    words = {"until": _clock(verdict.next_check_at), "submit_by": _clock(row["submit_by"])}
    text = WORDS.get(f"{verdict.action}:{verdict.reason}", WORDS[verdict.action]).format(**words)
    if row["feed"] not in policies.live:
        text = f"its feed is in shadow mode: nothing is done. Live: {text}"
    missing = _missing(row, decided, policies) if verdict.action is Action.HELD else None
    return Next(
        verdict.action, verdict.reason, row["next_check_at"], text, missing, json.loads(decided.inputs or "null")
    )


def _at_rest(row: Mapping[str, Any], policies: Policies) -> str:
    match row["state"]:
        case "sent":
            return "nothing: sent is final. Later events only change what became of it (delivery)"
        case "failed":
            until = _clock(row["failed_at"] + policies.late_window)
            return f"nothing, unless a provider says that it was accepted: until {until} that makes it sent"
    if row["campaign_hold"]:
        return f"its campaign is {row['campaign_hold']}: every claim is refused; see reconciler campaign status"
    after = f", not before {_clock(row['not_before'])}" if row["not_before"] else ""
    if row["capped_until"] and row["capped_until"] > row["now"]:
        after += f", nor before {_clock(row['capped_until'])}: its recipient has had what the cap of its class allows"
    return f"waits for the application to claim it{after}"


def _missing(row: Mapping[str, Any], decided: Decided, policies: Policies) -> str:
    words = [WAITS_FOR.get(decided.verdict.reason, "it waits for evidence")]
    if decided.inputs:
        words.append("now: " + silence_in_words(json.loads(decided.inputs)))
    rules = policies.rules_for(row["feed"], row["message_class"])
    if row["state"] == "claimed":
        given_up_at = row["submit_by"] + rules.give_up_after
        if row["now"] < given_up_at:
            since = f"from {_clock(given_up_at)} on (give_up_after {format_duration(rules.give_up_after)})"
            words.append(f"{since} its message class decides: {GIVEN_UP[rules.on_unknown]}")
        else:
            words.append("give_up_after is over: evidence, a witness of absence or you decide it now")
    words.append("by hand: reconciler release, confirm or fail")
    return "; ".join(words)
