# SPDX-License-Identifier: Apache-2.0
"""Who looks at the page: signed in by a token, or named by a trusted proxy; and what he may do.

A session is a signed cookie, so that any process with the same `ui.session_key` knows it. It names the token's table
and its hash: without these in the settings it is over, and what it may do is looked up there each time.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, Final
from urllib.parse import unquote

from aiohttp import web

from reconciler.api.application import callers
from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import ApiSettings, UiSettings
from reconciler.tokens import Scope, Tokens, hash_of

COOKIE: Final = "reconciler_session"
FORWARDED_FOR: Final = "X-Forwarded-For"
MAY_LOOK: Final = frozenset[Scope]({"read", "operate"})
EVERYBODY: Final = "*"
LONGEST_NAME: Final = 200
LONGEST_COOKIE: Final = 2000

TRIES: Final = 5
"""How often one address may sign in wrongly ..."""
TRIES_SECONDS: Final = 60.0
"""... within so long."""
MOST_ADDRESSES: Final = 1000


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks."""

    who: str
    """As what he does is recorded: ui:NAME by a token, proxy:NAME by a proxy."""
    may_act: bool
    form_token: str
    """What each form of his carries, and nobody else's page knows."""
    session: bool
    """He signed in here, so he can sign out."""


def is_wanted(settings: Settings) -> bool:
    """Say whether anybody may look at the page."""
    return bool(settings.ui.proxy_header) or may_look_by_token(settings.api)


def may_look_by_token(api: ApiSettings) -> bool:
    """Say whether any token leads to the page."""
    return any(MAY_LOOK & set(token.scopes) for token in api.tokens.values())


class Viewers:
    """Knows who sent a request. Tokens are the API's as they are now; `seconds` is the clock of sessions' ends."""

    def __init__(
        self, ui: UiSettings, api: Callable[[], ApiSettings], seconds: Callable[[], float] = time.time
    ) -> None:
        self._ui, self._api, self._seconds = ui, api, seconds
        self._key = (ui.session_key or secrets.token_urlsafe(32)).encode()
        self.lasts = round(ui.session.total_seconds())

    @property
    def by_token(self) -> bool:
        """Whether there is a token to sign in with."""
        return may_look_by_token(self._api())

    def of(self, request: web.Request) -> Viewer | None:
        """Return who sent a request; None: nobody known."""
        return self._named_by_proxy(request) or self._of_session(request.cookies.get(COOKIE, ""))

    def session(self, token: str) -> str | None:
        """Return the cookie of a new session; None where the token is not known or may not look."""
        caller = Tokens(callers(self._api())).caller(f"Bearer {token.strip()}")
        if caller is None or not caller.scopes & MAY_LOOK:
            return None
        until = int(self._seconds()) + self.lasts
        said = [caller.name, _digest(hash_of(token.strip())), until, secrets.token_urlsafe(8)]
        text = base64.urlsafe_b64encode(json.dumps(said).encode()).decode()
        return f"{text}.{self._signature('session', text)}"

    def address(self, request: web.Request) -> str:
        """Return where a request comes from, as the proxy says where there is one."""
        peer = request.remote or ""
        told = request.headers.getall(FORWARDED_FOR, []) if self._is_proxy(peer) else []
        return told[-1].rpartition(",")[2].strip() if told else peer

    def _named_by_proxy(self, request: web.Request) -> Viewer | None:
        header = self._ui.proxy_header
        names = request.headers.getall(header, []) if header and self._is_proxy(request.remote or "") else []
        if len(names) != 1 or not 0 < len(names[0]) <= LONGEST_NAME or not names[0].isprintable():
            return None
        operators = self._ui.proxy_operators
        may_act = names[0] in operators or EVERYBODY in operators
        return Viewer(f"proxy:{names[0]}", may_act, self._signature("proxy's form", names[0]), session=False)

    def _is_proxy(self, peer: str) -> bool:
        return _lies_in(peer, self._ui.proxy_networks)

    def _of_session(self, cookie: str) -> Viewer | None:
        text, _, signature = cookie[:LONGEST_COOKIE].partition(".")
        if not hmac.compare_digest(self._signature("session", text).encode(), signature.encode(errors="replace")):
            return None
        name, digest, until, _ = json.loads(base64.urlsafe_b64decode(text))
        token = self._api().tokens.get(name)
        if token is None or self._seconds() >= until or digest not in map(_digest, token.hash):
            return None
        scopes = MAY_LOOK & set(token.scopes)
        form_token = self._signature("session's form", text)
        return Viewer(f"ui:{name}", "operate" in scopes, form_token, session=True) if scopes else None

    def _signature(self, purpose: str, text: str) -> str:
        said = f"{purpose}\0{text}".encode(errors="replace")
        return hmac.new(self._key, said, hashlib.sha256).hexdigest()


def _digest(hashed: str) -> str:
    return hashlib.sha256(hashed.encode()).hexdigest()[:16]


def _lies_in(peer: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    try:
        address: Any = ip_address(peer)
    except ValueError:  # a Unix socket's has none
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address.version == network.version and address in network for network in networks)


class Throttle:
    """Turns away addresses whose sign-ins failed too often. `seconds` is its clock."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def wait(self, address: str) -> float | None:
        """Return in how many seconds an address may try again; None: now."""
        failures = self._failures.get(address)
        if failures is None or len(failures) < TRIES:
            return None
        left = failures[0] + TRIES_SECONDS - self._seconds()
        return left if left > 0 else None

    def note_failure(self, address: str) -> None:
        """Remember a failure. Of many addresses those that failed last are remembered."""
        self._failures.setdefault(address, deque(maxlen=TRIES)).append(self._seconds())
        self._failures.move_to_end(address)
        if len(self._failures) > MOST_ADDRESSES:
            self._failures.popitem(last=False)


def is_from_elsewhere(request: web.Request) -> bool:
    """Say whether another site's page made a request, where the browser tells."""
    return request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none")


def local_path(path: str) -> str:
    """Return where to go after signing in: a path of the page, whatever was asked for."""
    leads_up = {".", ".."} & set(unquote(re.split("[?#]", path)[0]).split("/"))
    return path if path.startswith("/ui/") and path.isprintable() and "\\" not in path and not leads_up else "/ui/"
