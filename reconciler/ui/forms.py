# SPDX-License-Identifier: Apache-2.0
"""What a form holds, checked: it is small, soon there, of our own page, and what it says can be stored."""

from __future__ import annotations

import asyncio
import hmac
from typing import Final
from urllib.parse import parse_qsl

from aiohttp import web
from multidict import MultiDict

from reconciler.api.requests import LONGEST_KEY
from reconciler.ui.viewers import Viewer

FORM: Final = web.RequestKey("ui_form", MultiDict)
FORM_TYPE: Final = "application/x-www-form-urlencoded"
BODY_SECONDS: Final = 10.0
LARGEST_FORM: Final = 256 * 1024
MOST_FIELDS: Final = 2000
LONGEST_REASON: Final = 1000


async def read_form(request: web.Request) -> MultiDict[str]:
    """Return the fields of a form. Raises an HTTPException where it is none of ours."""
    if request.content_type != FORM_TYPE:
        raise web.HTTPUnsupportedMediaType(text="this is no form of the page")
    too_large = web.HTTPRequestEntityTooLarge(LARGEST_FORM, text="the form is too large: choose fewer sends at once")
    if (request.content_length or 0) > LARGEST_FORM:
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the form did not arrive in time") from None
    if len(body) > LARGEST_FORM:
        raise too_large
    try:
        fields = parse_qsl(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError:
        raise web.HTTPBadRequest(text="the form can't be read") from None
    if any("\0" in value for _, value in fields):
        raise web.HTTPUnprocessableEntity(text="the form holds a zero byte, which can't be stored")
    return MultiDict(fields)


def is_of(viewer: Viewer, form: MultiDict[str]) -> bool:
    """Say whether a form was made for who sends it."""
    return hmac.compare_digest(viewer.form_token.encode(), str(form.get("form_token", "")).encode())


def reason_of(form: MultiDict[str]) -> str:
    """Return why something is done. Raises HTTPUnprocessableEntity where that isn't said."""
    reason = str(form.get("reason", "")).strip()
    if not 0 < len(reason) <= LONGEST_REASON:
        raise web.HTTPUnprocessableEntity(text=f"say why, in at most {LONGEST_REASON} characters: it is recorded")
    return reason


def key_of(text: str) -> str:
    """Return a send key or wire key. Raises HTTPUnprocessableEntity where no send can have it."""
    if not 0 < len(text.encode(errors="replace")) <= LONGEST_KEY:
        raise web.HTTPUnprocessableEntity(text=f"a key is text of 1 to {LONGEST_KEY} bytes")
    return text
