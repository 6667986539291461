# SPDX-License-Identifier: Apache-2.0
"""What verdicts, witnesses and figures of risk mean, in sentences for a person. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from reconciler.rule.history import ENOUGH
from reconciler.rule.risk import A_SIDE
from reconciler.units import roughly

WORDS: Final = {
    "sent": "a provider said that it was accepted: the next pass makes it sent",
    "failed:rejected": "a provider rejected it: the next pass makes it failed",
    "failed:expired": "its expires_at has passed and nothing proves acceptance: the next look makes it failed",
    "failed:attempts": "nothing was heard of it and no attempt is left: the next look makes it failed",
    "failed": "its class gives up on unknown sends: the next look makes it failed",
    "released:same_key_retry": "the provider keeps its key, so it can be sent again safely: the next look releases it",
    "released:gave_up": "nobody could tell, and its class gives up by releasing: the next look does, risking two",
    "released": "its silence says enough, or its provider's API does not know it: the next look releases it",
    "waiting:submitting": "its sender may still submit it until {submit_by}; nothing is judged before",
    "waiting:backoff": "waits until {until}, then it is released to be sent again with the same key",
    "waiting:grace": "silence is not judged before {until}; an event until then decides",
    "waiting:told_again": 'waits for the application to claim it again (see docs/sending.md, "Sending again")',
    "waiting": "waits for the application to claim it",
    "held": "nothing decides it yet; it is looked at again and again, less often as it ages",
}
"""What a verdict means for the send that it is about, by action and reason, else by action."""

GIVEN_UP: Final = {"hold": "it stays held", "fail": "it fails", "release": "it is released"}
"""What becomes of a send that is undecided at give_up_after, by what its message class asked for (on_unknown)."""

WAITS_FOR: Final = {
    "paused": "an operator paused its feed (or all): it waits for reconciler resume",
    "breaker": "its feed's breaker is open (reconciler status says why): it waits for reconciler resume",
    "suspect": "the database may have gone back in time: it waits for reconciler resume",
    "rejection": "it was rejected, but another attempt may have been accepted: it waits for a witness of absence",
    "unknown_event": "a provider spoke of it without saying whether it was accepted: a clearer event decides, or you",
    "refused": "the feed's newest delivery was refused: see reconciler status, then put right the feed's secrets",
    "few_controls": (
        f"{ENOUGH} answered sends behind it, and {A_SIDE} before and after it within an hour, of its class or feed, "
        "would show how far its feed's silence can be trusted"
    ),
    "risk": (
        "the risk that it was accepted all the same is above its ceiling (max_risk): it falls with age where webhooks "
        "come late, but not where too few answered sends came before it"
    ),
    "burst": "so many sends around it are ambiguous too that a fault is likely for which no answered send speaks",
    "no_echo": "the feed never spoke of an answered send of its class: look whether that is stamped (selftest)",
    "unstamped": "it was imported without `stamped`: its message carried no key by which it could be heard of",
    "long_window": "it had an hour or more to leave, so that nobody knows beside which other sends it did",
    "budget": "its feed released all that its budget allows an hour: see reconciler status",
    "canary": "a few others were released first: it follows once nothing was heard of those for a grace",
    "unnamed": "its provider's API shows a send to the same recipient that bears no key and may be this one",
    "look_up": "its rules want the provider's API to be asked first, and that has not answered yet",
    "queue": "its feed's queue can't be read: see reconciler status, and the log line queue_failed",
    "filling": "a replay, back-fill or import of its feed runs or has just ended; its silence counts again soon",
    "silent": "its feed does not tell of the sends around it either, or of none for a day: its silence proves nothing",
}


FATES: Final = {
    True: "; it was not sent",
    False: "; the provider refused it",
    None: "; it can't tell whether it was sent",
}
"""What a sender says of an attempt with send_fail, by `not_sent`."""


def report_in_words(report: Mapping[str, Any]) -> str:
    """Return what a sender reported of an attempt. Without `not_sent`, what it said of that is not known any more."""
    when = "" if report["exact"] else ", then or before"
    fate = FATES[report["not_sent"]] if "not_sent" in report else ""
    return f"the sender reported of claim {report['fence']}{when}: {report['reason']}{fate}"


def telling_in_words(telling: Mapping[str, Any], next_try: str) -> str:
    """Return what became of a message to the application, an entry of the outbox."""
    tries = f"{telling['tries']} tr{'y' if telling['tries'] == 1 else 'ies'}" if telling["tries"] else ""
    how = ", ".join(filter(None, (tries, telling["last_error"])))
    what = telling["what"] + (f" ({how})" if how else "")
    if telling["delivered_at"]:
        return f"the application was told: {what}"
    if telling["cancelled_at"]:
        return f"no longer to be told to the application: {what}"
    if telling["dead_at"]:
        return f"given up to tell the application: {what}; tell it with reconciler outbox retry"
    return f"to be told to the application: {what}" + (f", next at {next_try}" if how else "")


def witnesses_in_words(witnesses: Mapping[str, Any]) -> str:
    """Return what the witnesses of a verdict answered, as a sentence; nothing where none was asked."""
    parts = []
    for name, who in (("feed", "the feed"), ("look_up", "the provider's API")):
        if said := witnesses.get(name):
            because = f" ({said['reason']})" if said["reason"] not in ("", said["answer"]) else ""
            parts.append(f"{who}'s answer: {said['answer']}{because}")
    return ", ".join(parts)


def silence_in_words(inputs: Mapping[str, Any]) -> str:
    """Return what a feed's silence about a send is worth, from what `Assessment.stored` keeps."""
    history, recent, proved = inputs["history"], inputs["recent"], inputs["ambiguous"]
    words = [f"at the age of {roughly(timedelta(seconds=inputs['age']))}"]
    if history["n"]:
        words.append(f"{_heard(history, 'answered sends')} by that age")
    if history["missing"]:
        words.append(f"{history['missing']} answered sends are missing in the history")
    if proved["n"]:
        words.append(_heard(proved, "ambiguous ones that were accepted"))
    near = f"{recent['before']} answered before and {recent['after']} after it"
    unheard = f"{recent['k']} not heard of" if recent["k"] else "all heard of"
    words.append(f"near it {near}" + (f", {unheard}" if recent["n"] else ""))
    if inputs["burst"]["excess"]:
        words.append("many sends beside it are ambiguous too")
    if inputs["reason"] in ("few_controls", "no_echo"):
        return ", ".join([*words, "the risk can't be judged"])
    words.append(
        f"risk {percent(inputs['risk'])} against a ceiling of {percent(inputs['max_risk'])} (assumed beforehand: "
        f"accepted in {percent(inputs['p0'])} of cases)"
    )
    return ", ".join(words)


def _heard(sends: Mapping[str, Any], what: str) -> str:
    """Return how many of n sends had been heard of, from n and k that had not."""
    if sends["k"]:
        return f"{sends['k']} of {sends['n']} {what} had not been heard of"
    return f"all {sends['n']} {what} had been heard of"


ALMOST_ONE: Final = 0.995
"""From here on two digits would read 1e+02."""


def percent(share: float) -> str:
    """Return a probability with two digits that count."""
    return f"{100 * share:.2g} %" if share < ALMOST_ONE else "100 %"
