# SPDX-License-Identifier: Apache-2.0
"""How single settings are read: durations, sizes, lists, URLs, and secrets that lie in a file or a variable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit
from zoneinfo import available_timezones

from pydantic import AfterValidator, BeforeValidator, PlainValidator, ValidationInfo
from pydantic_settings import PydanticBaseSettingsSource

from reconciler.tokens import HASH
from reconciler.units import parse_duration, parse_size
from webhooks.aws import s3_place
from webhooks.provider import ChecksSettings, Provider
from webhooks.signature import public_key, standard_webhook_keys

MASK: Final = "***"
POSTGRES_SCHEMES: Final = ("postgresql://", "postgres://")
_CREDENTIALS: Final = {
    "basic:": ("basic:user:password", re.compile(r"[^:]+:.*\S.*", re.DOTALL)),
    "bearer:": ("bearer:TOKEN", re.compile(r".*\S.*", re.DOTALL)),
    "header:": ("header:Name=value", re.compile(r"[^=\s]+=.*\S.*", re.DOTALL)),
    "query:": ("query:name=value", re.compile(r"[^=\s]+=.*\S.*", re.DOTALL)),
}
"""The forms of `webhooks.signature.CREDENTIAL_SCHEMES`: an example, and what has to follow the scheme."""
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
SHORTEST_SESSION_KEY: Final = 32
_LINE_ENDS: Final = "\r\n"  # as `echo` and editors leave them, in files and in variables
_PASSWORD: Final = re.compile(r"(://[^:/?#]*:)(.*)(@)")  # to the last @: a password may hold anything, also unescaped
_SECRET_PARAMETER: Final = re.compile(r"([?&][^=&]*(?:password|secret|token|key|sig|signature)=)[^&#]*", re.IGNORECASE)


@dataclass(frozen=True)
class Context:
    """What reading a setting may look at."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    folder: Path = Path()
    """Where relative paths start: the folder of the settings file."""
    providers: Mapping[str, Provider] | None = None
    """The providers that exist; None: not checked."""
    sources: tuple[PydanticBaseSettingsSource, ...] = ()
    """Where settings are written; the first wins."""


CONTEXT: Final = ContextVar("CONTEXT", default=Context())  # noqa: B039 - it is frozen
"""Set while `load_settings` reads. A context variable, since BaseSettings hands no validation context on."""


def _duration(value: object) -> timedelta:
    return value if isinstance(value, timedelta) else parse_duration(str(value))


def _tolerance(value: object) -> timedelta | str:
    return "off" if value == "off" else _duration(value)


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) and not value.isdecimal() else _no_truth_value(value)


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")  # noqa: TRY004 - pydantic reports ValueErrors only
    return value


def _list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _secret(value: object) -> str:
    secret, source = _fetched(value)
    if "\n" in secret and not _is_one(secret):
        raise ValueError(f"has several lines{source}: keep each secret in a file of its own, and list all of them")
    return secret


def _secret_of_any_form(value: object) -> str:
    return _fetched(value)[0]


def _fetched(value: object) -> tuple[str, str]:
    """Return a secret without line ends after it, from where `file:PATH` or `env:NAME` says it lies, and that place."""
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - pydantic reports ValueErrors only
    written = value.rstrip(_LINE_ENDS)
    scheme, _, rest = written.partition(":")
    if scheme == "file":
        secret, source = _from_file(CONTEXT.get().folder / rest), f" in the file {rest}"
    elif scheme == "env":
        secret, source = _from_variable(rest, CONTEXT.get().environ), f" in the variable {rest}"
    else:
        secret, source = written, ""
    secret = secret.rstrip(_LINE_ENDS)
    if not secret.strip():
        raise ValueError(f"is empty{source}: set the secret, or remove the setting")
    return secret, source


def _is_one(lines: str) -> bool:
    """Say whether several lines are one key: any other text of several would verify nothing as one secret."""
    return "-----BEGIN" in lines or public_key(lines) is not None


def _from_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"lies in the file {path}, which can't be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise ValueError(f"lies in the file {path}, which is not text: check the path") from None


def _from_variable(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise ValueError(f"lies in the variable {name}, which is not set: set it")
    return environ[name]


def _feed_secret(secret: str, info: ValidationInfo) -> str:
    scheme, colon, rest = secret.partition(":")
    example, form = _CREDENTIALS.get(scheme + colon, ("", None))
    if form and not form.fullmatch(rest):
        raise ValueError(f"is half a credential, which anybody could send: write {example}")
    return _unobjected("secrets", secret, info)


def _collector_secret(secret: str) -> str:
    scheme, colon, rest = secret.partition(":")
    example, form = _CREDENTIALS.get(scheme + colon, ("", None))
    if scheme == "query" or form is None:
        raise ValueError("is no credential: write bearer:TOKEN, basic:user:password or header:Name=value")
    if not form.fullmatch(rest):
        raise ValueError(f"is half a credential: write {example}")
    return secret


def _webhook_secret(secret: str) -> str:
    if not standard_webhook_keys((secret,)):
        raise ValueError("can't sign a webhook: write whsec_ and 24 to 64 random bytes in base64")
    return secret


def _topic(topic: str, info: ValidationInfo) -> str:
    return _unobjected("topics", topic, info)


def _unobjected(setting: Literal["secrets", "topics"], value: str, info: ValidationInfo) -> str:
    provider = (CONTEXT.get().providers or {}).get(info.data.get("provider", ""))
    objection = provider.objection(setting, value) if isinstance(provider, ChecksSettings) else None
    if objection:
        raise ValueError(objection)
    return value


def _database_url(url: str) -> str:
    if not url.startswith(POSTGRES_SCHEMES):
        raise ValueError("is no PostgreSQL URL: write postgresql://user:password@host/database")
    return url


def _http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        fine = False
    if not fine:
        raise ValueError("is no URL: write it in full, as in https://hooks.example.com")
    return url


def _s3_url(url: str) -> str:
    s3_place(url, None, None)
    return url


def _path(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("is empty: write a path, or remove the setting")
    if "\0" in value:
        raise ValueError("holds a zero byte: write a path")
    try:
        return CONTEXT.get().folder / Path(value).expanduser()
    except RuntimeError:
        raise ValueError("begins with ~, and there is no such home directory: write the path in full") from None


def masked_url(url: str) -> str:
    """Return a URL with `***` for its password and for any query parameter whose name sounds like a secret."""
    return _SECRET_PARAMETER.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}\3", url))


def url_password(url: str) -> str:
    """Return the password in a URL as it was meant, or nothing."""
    found = _PASSWORD.search(url)
    return unquote(found[2]) if found else ""


def credential_value(secret: str) -> str:
    """Return the part of a `basic:`, `bearer:`, `header:` or `query:` secret that is secret; nothing for others."""
    scheme, _, rest = secret.partition(":")
    match scheme:
        case "bearer":
            return rest
        case "basic":
            return rest.partition(":")[2]
        case "header" | "query":
            return rest.partition("=")[2]
    return ""


def _token_hash(text: str) -> str:
    if not HASH.fullmatch(text):
        raise ValueError("is no hash of a token: write what reconciler token prints, sha256: and 64 hex digits")
    return text


def _cap_window(value: object) -> object:
    if value in get_args(Calendar):
        return value
    with suppress(ValueError):
        if (length := _duration(value)) > timedelta(0):
            return length
    raise ValueError('is no window: write "day", "week", "month", or how long a send counts, as in "24h"')


def _network(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return ip_network(value)
    except ValueError:
        raise ValueError('is no network: write "10.0.0.0/8", or "192.0.2.7" for one address') from None


def _header_name(name: str) -> str:
    if not _TOKEN.fullmatch(name):
        raise ValueError("is no name of a header: write one as in X-Forwarded-User")
    return name


def _host_name(name: str) -> str:
    if not name.strip():  # for sockets all addresses: a variable that is not set would open them
        raise ValueError("is empty: write the address to listen on, 0.0.0.0 for all of this machine")
    return name


def _session_key(secret: str) -> str:
    if len(secret) < SHORTEST_SESSION_KEY:
        raise ValueError(f"is too short to sign with: write {SHORTEST_SESSION_KEY} random characters or more")
    return secret


def _time_zone(name: str) -> str:
    known = available_timezones()
    if known and name not in known:  # where the machine has no list of its own, the database says it
        raise ValueError('is no time zone: write one as in "Europe/Vienna"')
    return name


T = TypeVar("T")

Duration = Annotated[timedelta, BeforeValidator(_duration)]
Calendar = Literal["day", "week", "month"]
CapWindow = Annotated[timedelta | Calendar, PlainValidator(_cap_window)]
TimeZone = Annotated[str, AfterValidator(_time_zone)]
Tolerance = Annotated[timedelta | Literal["off"] | None, PlainValidator(_tolerance)]
Size = Annotated[int, BeforeValidator(_size)]
Whole = Annotated[int, BeforeValidator(_no_truth_value)]
Number = Annotated[float, BeforeValidator(_no_truth_value)]
OneOrMany = Annotated[tuple[T, ...], BeforeValidator(_list)]
Secret = Annotated[str, BeforeValidator(_secret)]
"""Text that may lie in a file or a variable. Fields of this type are declared with `repr=False`, and so are masked."""
TokenHash = Annotated[Secret, AfterValidator(_token_hash)]
FeedSecret = Annotated[Secret, AfterValidator(_feed_secret)]
CollectorSecret = Annotated[Secret, AfterValidator(_collector_secret)]
WebhookSecret = Annotated[Secret, AfterValidator(_webhook_secret)]
Topic = Annotated[str, AfterValidator(_topic)]
DatabaseUrl = Annotated[Secret, AfterValidator(_database_url)]
Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HostName = Annotated[str, AfterValidator(_host_name)]
SessionKey = Annotated[str, BeforeValidator(_secret_of_any_form), AfterValidator(_session_key)]
"""Any text signs, also random bytes in base64 that `openssl rand` wrapped."""
HttpUrl = Annotated[str, AfterValidator(_http_url)]
S3Url = Annotated[str, AfterValidator(_s3_url)]
RelativePath = Annotated[Path, BeforeValidator(_path)]
