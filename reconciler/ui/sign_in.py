# SPDX-License-Identifier: Apache-2.0
"""Signing in by a token that may look, and out."""

from __future__ import annotations

import math
from typing import Final

import structlog
from aiohttp import hdrs, web

from reconciler.ui.forms import FORM
from reconciler.ui.render import Renderer
from reconciler.ui.viewers import COOKIE, Throttle, Viewers, local_path
from webhooks.quiet import Quiet

SIGN_IN: Final = "/ui/sign-in"

_log: Final = structlog.get_logger()


class SignIn:
    """The way in."""

    def __init__(self, viewers: Viewers, renderer: Renderer, *, secure: bool) -> None:
        self._viewers, self._renderer, self._secure = viewers, renderer, secure
        self._throttle, self._quiet = Throttle(), Quiet()

    async def form(self, request: web.Request) -> web.Response:
        """Show where to sign in."""
        return self._page(request, local_path(request.query.get("next", "")))

    async def enter(self, request: web.Request) -> web.Response:
        """Begin a session, or say that the token is not right."""
        form, address = request[FORM], self._viewers.address(request)
        path = local_path(str(form.get("next", "")))
        if (wait := self._throttle.wait(address)) is not None:
            minute = f"too many wrong tokens: try again in {math.ceil(wait)} s"
            response = self._page(request, path, alert=minute, status=429)
            response.headers[hdrs.RETRY_AFTER] = str(math.ceil(wait))
            return response
        session = self._viewers.session(str(form.get("token", "")))
        if session is None:
            self._throttle.note_failure(address)
            self._note_refusal(address)
            wrong = "no token with the scope read or operate is known by that: see reconciler token"
            return self._page(request, path, alert=wrong, status=403)
        return self._gone(path, session, self._viewers.lasts)

    async def leave(self, _: web.Request) -> web.Response:
        """End the session."""
        return self._gone(SIGN_IN, "", 0)

    def _gone(self, path: str, session: str, lasts: int) -> web.Response:
        response = web.Response(status=303, headers={hdrs.LOCATION: path, hdrs.CACHE_CONTROL: "no-store"})
        response.set_cookie(
            COOKIE, session, max_age=lasts, path="/ui", httponly=True, samesite="Strict", secure=self._secure
        )
        return response

    def _note_refusal(self, address: str) -> None:
        if (before := self._quiet.silenced("ui", "sign-in")) is not None:
            _log.warning("ui_sign_in_refused", address=address, unlogged_before=before)

    def _page(self, request: web.Request, path: str, *, alert: str | None = None, status: int = 200) -> web.Response:
        by_token = self._viewers.by_token
        return self._renderer.page(request, "sign_in.html", status=status, next=path, alert=alert, by_token=by_token)
