# SPDX-License-Identifier: Apache-2.0
"""Writes what the pages of docs/providers take from the code: python -m tests.provider_pages (`make docs` runs it).

A page is written by hand but for its made parts, each between `<!-- made: NAME -->` and `<!-- /made -->`. The facts are
those of `reconciler providers NAME`, so that a page never says another thing than the program.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from reconciler.units import format_duration
from webhooks.asking import Registers
from webhooks.event import wire_key
from webhooks.provider import JOINED_BY_ID, Facts
from webhooks.registry import PROVIDERS

FOLDER: Final = Path(__file__).parent.parent / "docs/providers"
INDEX: Final = FOLDER / "index.md"
SEND_KEY: Final = "order.receipt:1234:a@example.com"

PART: Final = re.compile(r"<!-- made: (\w+) -->\n.*?<!-- /made -->\n", re.DOTALL)
ISSUE: Final = re.compile(r"(?<![\w/.])(?:github\.com/)?([\w.-]+/[\w.-]+)#(\d+)")
ADDRESS: Final = re.compile(r"(?<![\w/.@-])((?:[a-z0-9-]+\.)+(?:com|io|so|net|info|org)/[\w/.#-]*[\w#-])")
URL: Final = re.compile(r"\{url\}([^\s,;)]*)")

FINDS_BY: Final = {
    "key": "our key",
    "recipient": "recipient and time, then compared (so not where recipients are stored hashed)",
    "id": "the message id that we chose",
    "nothing": "it can't be asked",
}
BY_TYPE: Final = {"postmark": ("_BOUNCES", "the `Type` of a Bounce")}
"""Tables of meanings beside the first one, and what their names are."""


def page(name: str) -> Path:
    """Return where a provider's page is."""
    return FOLDER / f"{name}.md"


def feed(name: str) -> str:
    """Return the name of the feed in a provider's page."""
    return f"{name.replace('_', '-')}-main"


def linked(text: str) -> str:
    """Return a fact as Markdown: signs that mean something there are escaped, and addresses of sources are links."""
    plain = text.replace("\\", "\\\\").replace("*", "\\*").replace("|", "\\|").replace("<", "&lt;").replace("$", "\\$")
    plain = ISSUE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", plain)
    return ADDRESS.sub(r"<https://\1>", plain)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = (header, ["---"] * len(header), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def steps(name: str) -> str:
    """Return what is to be done at the provider, as `reconciler endpoints show` says it."""
    texts = (text.replace("<name>", feed(name)) for text in PROVIDERS[name].facts.setup)
    url = rf"`https://hooks.example.com/webhooks/{feed(name)}\1`"
    return "".join(f"{n}. {URL.sub(url, linked(text))}\n" for n, text in enumerate(texts, 1))


def stamp(name: str) -> str:
    """Return what `reconciler stamp --json` prints for the example's key."""
    key = wire_key(SEND_KEY)
    shown = {"wire_key": key, **dataclasses.asdict(PROVIDERS[name].stamp(key))}
    return f"```json\n{json.dumps(shown, indent=2)}\n```\n"


def events(name: str) -> str:
    """Return what each event is called, means and proves."""
    module = importlib.import_module(f"webhooks.providers.{name}")
    found = _meanings("its name for the event", module.MEANINGS)
    if name in BY_TYPE:
        private, title = BY_TYPE[name]
        found += "\n" + _meanings(title, getattr(module, private))
    return found


def _meanings(title: str, meanings: Mapping[str, Sequence[str]]) -> str:
    rows = ([f"`{own}`", str(kind), str(testimony)] for own, (kind, testimony, *_) in meanings.items())
    return table((title, "kind", "proves"), rows)


def facts(name: str) -> str:
    """Return all that is known of a provider."""
    known = PROVIDERS[name].facts
    rows = [
        ("where our key goes and comes back", known.key_slot),
        ("events that bear it", known.key_is_echoed_in),
        ("first event that proves acceptance", known.first_evidence),
        ("what names an event", known.event_id),
        ("how a delivery is proved", known.authentication),
        ("what a signature covers", _covered(known)),
        ("greatest age of a delivery (`tolerance`)", _duration(known.tolerance, "not checked, unless you set it")),
        ("answer to what nothing proves", str(known.refused_status)),
        ("answer to what can't be stored just now", str(known.busy_status)),
        ("delivered again", known.redelivery),
        ("so the receiver may be down for", _down(known)),
        ("its own idempotency key", known.native_key),
        ("retry with the same key", _duration(known.same_key_window, "never made")),
        ("its API finds a send by", FINDS_BY[known.finds_by]),
        ("look-up", known.look_up),
        ("a send that it doesn't show proves nothing", _blind(known)),
        ("`reconciler backfill`", "yes" if known.lists else "no: its API doesn't list events"),
        ("webhook by its API", known.registration),
        ("`reconciler endpoints check` and `apply`", _applied(name)),
        ("sources", known.sources),
    ]
    return table(("", ""), ((title, linked(text)) for title, text in rows)) + f"\n{JOINED_BY_ID}\n"


def _covered(known: Facts) -> str:
    parts = [part for part, signed in (("the body", known.signs_body), ("a time", known.signs_time)) if signed]
    return " and ".join(parts) or "nothing: the request carries a credential"


def _duration(value: object, none: str = "") -> str:
    return none if value is None else str(format_duration(value))  # type: ignore[arg-type]


def _down(known: Facts) -> str:
    return _duration(known.redelivers_for) if known.redelivers_for else "no time that is known"


def _blind(known: Facts) -> str:
    if known.finds_by == "nothing":
        return "it can't be asked"
    return f"within {_duration(known.settles_after)} of `submit_by`, and after {_duration(known.kept_for)}"


def _applied(name: str) -> str:
    return "yes" if isinstance(PROVIDERS[name], Registers) else "no: set it up by hand"


def listing(_: str) -> str:
    """Return the table of all providers."""
    rows = []
    for name, provider in PROVIDERS.items():
        known = provider.facts
        rows.append(
            [
                f"[`{name}`]({name}.md)",
                known.title,
                _down(known),
                _duration(known.same_key_window, "-"),
                "its delivery" if known.first_event_is_delivery else "its acceptance",
                "yes" if known.echoes_key else "no",
                {"nothing": "-"}.get(known.finds_by) or FINDS_BY[known.finds_by].partition(",")[0],
                "yes" if known.lists else "-",
                "yes" if isinstance(provider, Registers) else "by hand",
            ]
        )
    header = (
        *("name", "provider", "gives up redelivering after", "keeps our key for", "first event of a message"),
        *("our key comes back", "asked about one send by", "lists for a back-fill", "`endpoints apply`"),
    )
    return table(header, rows)


PARTS: Final[Mapping[str, Callable[[str], str]]] = {
    "steps": steps,
    "stamp": stamp,
    "events": events,
    "facts": facts,
    "listing": listing,
}


def made(text: str, name: str) -> str:
    """Return a page with its made parts made anew. Raises KeyError for a part that there is not."""
    return PART.sub(lambda part: f"<!-- made: {part[1]} -->\n\n{PARTS[part[1]](name)}\n<!-- /made -->\n", text)


def pages() -> dict[Path, str]:
    """Return every page with made parts, and the provider that it is about."""
    return {INDEX: ""} | {page(name): name for name in PROVIDERS}


def main() -> None:
    """Write the made parts of all pages anew."""
    for path, name in pages().items():
        path.write_text(made(path.read_text("utf-8"), name), "utf-8")


if __name__ == "__main__":
    main()
