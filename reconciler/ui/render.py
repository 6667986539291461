# SPDX-License-Identifier: Apache-2.0
"""How pages are made: templates that escape whatever they are given, tables, and the two static files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any, Final
from unicodedata import category
from urllib.parse import quote

from aiohttp import hdrs, web
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reconciler.insight.findings import Finding
from reconciler.logs import Redactor
from reconciler.ui.viewers import Viewer
from reconciler.units import roughly

VIEWER: Final = web.RequestKey("ui_viewer", Viewer)
SEND: Final = "/ui/sends/{}"

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
STATIC: Final = {"ui.css": "text/css", "ui.js": "text/javascript", "icon.svg": "image/svg+xml"}
FOR_EVER: Final = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class Link:
    """A cell that leads somewhere."""

    text: str
    href: str


@dataclass(frozen=True, slots=True)
class Code:
    """A cell with a name that only machines made."""

    text: str


@dataclass(frozen=True, slots=True)
class Sends:
    """A cell with wire keys, each of which leads to its send's page."""

    wire_keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below their header. `empty` is said where there are none."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    empty: str


def visible(value: Any) -> Any:
    """Return text with what is not seen, or turns text around, by its number; anything else, markup too, as it is."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(one if one.isprintable() or category(one) == "Zs" else _numbered(one) for one in value)


def _numbered(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii").replace(" ", r"\x20")


def whole(key: str) -> str:
    """Return a key with every character seen, the spaces around it too: keys that look alike are not the same."""
    inner = key.strip()
    begin = key.index(inner) if inner else len(key)
    odd = re.sub(r"[^\S ]", lambda found: _numbered(found[0]), visible(inner))
    return _numbered(key[:begin]) + odd + _numbered(key[begin + len(inner) :])


def redacted(key: str) -> str:
    """Return a key without the addresses in it: send keys often hold one."""
    return whole(str(Redactor()(None, "", {"text": key})["text"]))


def ago(at: datetime, now: datetime) -> str:
    """Return how far a time is from now."""
    return f"{roughly(now - at)} ago" if at <= now else f"in {roughly(at - now)}"


PLACES: Final = {
    "held": "/ui/sends?state=held&feed={}",
    "unclaimed": "/ui/sends?state=released&feed={}",
    "duplicates": "/ui/reports/duplicates",
    "vanished": "/ui/reports/vanished",
    "foreign": "/ui/reports/unknown",
    "no_pass": "/ui/passes",
}
"""Where the page shows what a finding is about."""


def place(found: Finding) -> str | None:
    """Return where what a finding is about is shown; None: nowhere else."""
    return PLACES.get(found.code, "").format(quote(found.feed or "", safe="")) or None


def shown(value: object, now: datetime) -> Markup:
    """Return a value as a page shows it."""
    match value:
        case None | "":
            return Markup('<span class="none">&ndash;</span>')
        case datetime():
            times = (value.isoformat(), f"{value:%Y-%m-%d %H:%M:%S}", ago(value, now))
            return Markup('<time datetime="{}">{}</time> <small>{}</small>').format(*times)
        case Link():
            return Markup('<a href="{}">{}</a>').format(value.href, visible(value.text))
        case Code():
            return Markup("<code>{}</code>").format(visible(value.text))
        case Sends():
            return Markup(" ").join(_send(key) for key in value.wire_keys)
        case float():
            return Markup(f"{value:.4g}")  # noqa: S704 - digits
    return Markup("{}").format(visible(value))


def _send(wire_key: str) -> Markup:
    return Markup('<a class="key" href="{}"><code>{}</code></a>').format(SEND.format(wire_key), wire_key)


def percent_of(part: int, whole: int) -> str | None:
    """Return a share as people read it; None of nothing."""
    return f"{100 * part / whole:.0f} % ({part} of {whole})" if whole else None


class Renderer:
    """Makes answers of templates."""

    def __init__(self) -> None:
        self._static = {name: files("reconciler.ui").joinpath("static", name).read_bytes() for name in STATIC}
        self._versions = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in self._static.items()}
        self._environment = Environment(
            loader=PackageLoader("reconciler.ui"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=visible,  # what a form sends is written as `|e`, and stays as it is
        )
        self._environment.filters |= {"shown": shown, "ago": ago, "redacted": redacted, "whole": whole, "place": place}
        self._environment.globals["static"] = {
            name: f"/ui/static/{name}?v={version}" for name, version in self._versions.items()
        }

    def page(self, request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
        """Return a page. It is kept nowhere: it may show a recipient."""
        given = {"viewer": request.get(VIEWER), "path": request.path, **values}
        text = self._environment.get_template(template).render(given)
        return web.Response(
            text=text, status=status, content_type="text/html", headers={hdrs.CACHE_CONTROL: "no-store"}
        )

    async def static(self, request: web.Request) -> web.Response:
        """Answer with a static file, which a browser may keep under the address that changes with it."""
        name = request.match_info["name"]
        if name not in STATIC:
            raise web.HTTPNotFound
        body = self._static[name]
        kept = FOR_EVER if request.query.get("v") == self._versions[name] else "no-cache"
        return web.Response(body=body, content_type=STATIC[name], headers={hdrs.CACHE_CONTROL: kept})


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> Table:
    """Return a table."""
    return Table(caption, columns, list(rows), empty)
