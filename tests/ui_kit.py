# SPDX-License-Identifier: Apache-2.0
"""The operator's page on a test's database, and a person who reads it and sends its forms, as a browser does."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import asyncpg
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from multidict import CIMultiDict
from sends_kit import token

from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import ApiSettings, FeedSettings
from reconciler.ui.application import add_ui

OPS, READER, SENDER = "espr_ops", "espr_reader", "espr_sender"
TOKENS = {
    "ops": token(OPS, scopes=("operate",)),
    "reader": token(READER, scopes=("read",)),
    "sender": token(SENDER, scopes=("send",)),
}
FEEDS = {
    "mg": FeedSettings(provider="mailgun", secrets=("key-0123456789abcdef",)),
    "sg": FeedSettings(provider="sendgrid"),
}


def settings(**given: Any) -> Settings:
    return Settings(**{"api": ApiSettings(tokens=TOKENS), "feeds": FEEDS, **given})


@dataclass
class Form:
    """A form of a page: where it leads, and its fields as they stand."""

    action: str
    fields: list[tuple[str, str]] = field(default_factory=list)
    choices: list[tuple[str, str]] = field(default_factory=list)
    """Boxes and buttons that may be chosen."""

    def filled(self, **given: str | list[str]) -> list[tuple[str, str]]:
        """Its fields, some of them filled in."""
        found = [(name, value) for name, value in self.fields if name not in given]
        for name, values in given.items():
            found += [(name, value) for value in ([values] if isinstance(values, str) else values)]
        return found


class Page(HTMLParser):
    """An answer, and the forms in it."""

    def __init__(self, status: int, text: str, headers: Any, url: str) -> None:
        super().__init__()
        self.status, self.source, self.headers, self.url = status, text, headers, url
        self.forms: list[Form] = []
        self._words: list[str] = []
        self.feed(text)

    @property
    def text(self) -> str:
        """What a person reads."""
        return " ".join("".join(self._words).split())

    def handle_data(self, data: str) -> None:
        self._words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("td", "th", "dd", "p"):
            self._words.append(" ")
        if tag == "form":
            self.forms.append(Form(given["action"]))
        elif tag in ("input", "button") and "name" in given and self.forms:
            one = (given["name"], given.get("value", ""))
            optional = tag == "button" or (given.get("type") in ("radio", "checkbox") and "checked" not in given)
            (self.forms[-1].choices if optional else self.forms[-1].fields).append(one)

    def form(self, action: str) -> Form:
        """The form that leads somewhere."""
        found = [form for form in self.forms if re.fullmatch(action, form.action) and form.action != "/ui/find"]
        assert found, f"no form to {action} in {[form.action for form in self.forms]}"
        return found[-1]

    def has_form(self, action: str) -> bool:
        return any(re.fullmatch(action, form.action) and ("form_token" in dict(form.fields)) for form in self.forms)


class Person:
    """Reads pages and sends their forms."""

    def __init__(self, client: TestClient[Any, Any], **headers: str) -> None:
        self.client, self.headers = client, headers

    async def get(self, path: str, **more: Any) -> Page:
        return await self._ask("GET", path, **more)

    async def post(self, path: str, data: Any, **more: Any) -> Page:
        return await self._ask("POST", path, data=data, **more)

    async def send(self, form: Form, **given: str | list[str]) -> Page:
        return await self.post(form.action, form.filled(**given))

    async def _ask(self, method: str, path: str, *, headers: Any = None, **more: Any) -> Page:
        given = CIMultiDict(self.headers)
        given.extend(headers or {})
        async with self.client.request(method, path, headers=given, **more) as answer:
            return Page(answer.status, await answer.text(), answer.headers, str(answer.url.relative()))

    async def sign_in(self, bearer: str, path: str = "/ui/") -> Page:
        """Sign in on the way to a page."""
        return await self.send((await self.get(path)).form("/ui/sign-in"), token=bearer)


@asynccontextmanager
async def page(pool: asyncpg.Pool | None, found: Settings | None = None) -> AsyncIterator[Person]:
    """Serve the page on a free port; nobody is signed in."""
    app = web.Application()
    data = add_ui(app, found or settings())
    data.pool = pool
    async with TestClient(TestServer(app)) as client:
        yield Person(client)


async def last_verdict(db: asyncpg.Pool) -> asyncpg.Record:
    """What was recorded last."""
    return await db.fetchrow("SELECT action, reason, source, who, note FROM verdict ORDER BY id DESC LIMIT 1")
