# SPDX-License-Identifier: Apache-2.0
"""`/ui/` as an application: its routes, and what meets a request before them.

In this order: without anybody who may look there is no page; errors become pages, and each answer gets the headers that
keep foreign code out; who looks (else: sign in); of a POST its size and form, that our own page made it, and that its
sender may act.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Final, NoReturn
from urllib.parse import quote

import asyncpg
import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from reconciler.configuration.settings import Settings
from reconciler.ui.actions import Actions
from reconciler.ui.data import Data
from reconciler.ui.forms import FORM, is_of, read_form
from reconciler.ui.pages import Pages
from reconciler.ui.render import HEADERS, VIEWER, Renderer
from reconciler.ui.sign_in import SIGN_IN, SignIn
from reconciler.ui.viewers import Viewers, is_from_elsewhere, is_wanted
from webhooks.database import FAILURES
from webhooks.quiet import Quiet

_log: Final = structlog.get_logger()


def add_ui(app: web.Application, settings: Settings) -> Data:
    """Serve the page, as long as somebody may look at it. Set `pool` of what is returned once there is one."""
    data, renderer = Data(settings), Renderer()
    viewers = Viewers(settings.ui, lambda: data.settings.api)
    pages = Pages(data, renderer)
    actions = Actions(data, renderer, pages)
    entrance = SignIn(viewers, renderer, secure=(settings.receiver.public_url or "").startswith("https:"))
    ui = web.Application(middlewares=[_wanted(data), _answered(renderer), _entered(viewers), _meant(actions)])
    ui.add_routes(
        [
            web.get("/", pages.overview),
            web.get("/sends", pages.claims),
            web.get("/sends/{key}", pages.send),
            web.get("/feeds", pages.feeds),
            web.get("/reports/{name}", pages.report),
            web.get("/passes", pages.passes),
            web.post("/find", actions.find),
            web.post("/sends", actions.decide_many),
            web.post("/sends/{key}", actions.decide),
            web.post("/feeds", actions.hold),
            web.get("/sign-in", entrance.form),
            web.post("/sign-in", entrance.enter),
            web.post("/sign-out", entrance.leave),
            web.get("/static/{name}", renderer.static),
        ]
    )
    app.router.add_get("/ui", partial(_to_the_page, data))
    app.add_subapp("/ui", ui)
    return data


NOBODY_MAY: Final = "nobody may look yet: run reconciler token --scope operate, and add what it prints to the settings"
"""What is answered until the settings name somebody."""


async def _to_the_page(data: Data, _: web.Request) -> NoReturn:
    raise web.HTTPFound("/ui/") if is_wanted(data.settings) else web.HTTPNotFound(text=NOBODY_MAY)


def _wanted(data: Data) -> Middleware:
    """Answer as where no page is while nobody may look, by the settings as they are now."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_wanted(data.settings):
            raise web.HTTPNotFound(text=NOBODY_MAY)
        return await handler(request)

    return middleware


def _answered(renderer: Renderer) -> Middleware:
    """Give every answer its headers; make a page of every error, and log what nobody foresaw, seldom enough."""
    quiet = Quiet()

    def note(error: Exception) -> None:
        if (before := quiet.silenced("ui", type(error).__name__)) is not None:
            _log.error("ui_request_failed", reason=type(error).__name__, unlogged_before=before)
            _log.debug("traceback", of="ui_request_failed", exc_info=error)

    def page(request: web.Request, error: Exception) -> web.StreamResponse:
        match error:
            case web.HTTPRedirection():
                return web.Response(status=error.status, headers={hdrs.LOCATION: error.headers[hdrs.LOCATION]})
            case web.HTTPException():
                known = error.text if error.text and not error.text.startswith(f"{error.status}: ") else error.reason
                response = renderer.page(request, "message.html", status=error.status, text=known)
                response.headers.update({n: v for n, v in error.headers.items() if n in (hdrs.RETRY_AFTER, hdrs.ALLOW)})
                return response
            case asyncpg.DataError() | UnicodeError():
                text = "that can't be stored or looked for: it holds characters that no text has"
                return renderer.page(request, "message.html", status=422, text=text)
        note(error)
        away = isinstance(error, FAILURES)
        status = HTTPStatus.SERVICE_UNAVAILABLE if away else HTTPStatus.INTERNAL_SERVER_ERROR
        text = "the database is not available now" if away else "the server made a mistake: its log says which"
        return renderer.page(request, "message.html", status=status, text=f"{text}. {_whether_done(request)}")

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is answered, and logged
            response = page(request, error)
        response.headers.update(HEADERS)
        return response

    return middleware


def _whether_done(request: web.Request) -> str:
    if request.method == hdrs.METH_POST:
        return "Whether what you asked for was done is not known: look before you repeat it"
    return "Load the page again in a moment"


def _is_open(request: web.Request) -> bool:
    if request.path == SIGN_IN:
        return True
    return request.path.startswith("/ui/static/") and request.method != hdrs.METH_POST


def _entered(viewers: Viewers) -> Middleware:
    """Let in who is known; the others are shown where to sign in."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        viewer = viewers.of(request)
        if viewer is not None:
            request[VIEWER] = viewer
        elif _is_open(request):
            return await handler(request)
        elif request.method == hdrs.METH_POST:
            raise web.HTTPForbidden(text="you are not signed in (any more), so nothing was done: sign in and repeat it")
        else:
            raise web.HTTPSeeOther(f"{SIGN_IN}?next={quote(request.raw_path, safe='')}")
        return await handler(request)

    return middleware


def _meant(actions: Actions) -> Middleware:
    """Read the form of a POST, and refuse what our own page did not make or its sender may not do."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != hdrs.METH_POST:
            return await handler(request)
        if is_from_elsewhere(request):
            raise web.HTTPForbidden(text="another site's page asked for this, so nothing was done")
        form = request[FORM] = await read_form(request)
        if request.path != SIGN_IN and not is_of(request[VIEWER], form):
            raise web.HTTPForbidden(text="the form is not from this page, or too old: nothing was done, load it again")
        if request.match_info.handler in actions.acting and not request[VIEWER].may_act:
            raise web.HTTPForbidden(text="you may look, not act")
        return await handler(request)

    return middleware
