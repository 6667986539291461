# SPDX-License-Identifier: Apache-2.0
"""Log lines: JSON for machines, colours for a terminal, one chain for our own and the libraries' lines, and no secrets.

Whoever logs leaves out addresses and secrets by himself; what this module blots out is the last guard, not the first.
"""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

MASK: Final = "***"
DEEPEST: Final = 6
"""Nesting below this is cut off, so that a value that holds itself ends."""

LONGEST: Final = 8000
"""Characters of one text that are kept."""

_SECRET_NAME: Final = re.compile(r"secret|passw|token|authorization|api_?key|cookie|credential", re.IGNORECASE)
_SECRETS: Final = (
    (re.compile(r"://[^/\s]+@"), f"://{MASK}@"),
    (re.compile(r"\b(Basic |Bearer |basic:|bearer:|(?:header|query):[\w-]+=)[^\s\"',]+"), rf"\1{MASK}"),
    (re.compile(r"\b(?:whsec_|SG\.)[\w+/=.-]{8,}|\bkey-[0-9a-f]{32}"), MASK),
    (re.compile(r"((?:secret|passw(?:or)?d|token|api_?key|signature)=)[^&\s\"']+", re.IGNORECASE), rf"\1{MASK}"),
)
_EDGE: Final = r"\s@<>()\[\]\"',;:"
_ADDRESS: Final = re.compile(
    rf'(?:"[^"]*"|(?<![^{_EDGE}])(?!//\*\*\*@)[^{_EDGE}]+)@(?:\[[^\]]*\]|[^{_EDGE}]+)|(?<![\w.+%-])[\w.+%-]+%40[\w.-]+'
)
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MANY_LINES: Final = ("exception", "stack")

EventDict = MutableMapping[str, Any]


class _OurHandler(logging.StreamHandler[TextIO]):
    """The handler that `configure` replaces when it is called again; those of others stay."""

    def __init__(self, stream: TextIO, redact: Redactor) -> None:
        super().__init__(stream)
        self.redact = redact


def configure(log_format: str, level: str, stream: TextIO, secrets: Iterable[str] = ()) -> None:
    """Send every log line of this process to a stream.

    `log_format` is `json`, `console`, or `auto`, which means `console` exactly if the stream is a terminal. `secrets`
    are texts that are blotted out wherever they occur (`Settings.secret_values`).
    """
    pretty = log_format == "console" or (log_format == "auto" and stream.isatty())
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 must not lose lines
    handler = _OurHandler(stream, Redactor(secrets))
    handler.setFormatter(_formatter(stream, handler.redact, pretty=pretty))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _OurHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.getLogger("pydantic_settings").setLevel(logging.WARNING)  # below, it tells every raw value, secrets too
    logging.getLogger("apscheduler").setLevel(max(root.level, logging.WARNING))  # it tells of every single run
    # Its traceback at each try of a database that is away: whoever uses the pool says so in one line.
    for library in ("botocore", "aiobotocore"):  # they tell requests and answers, and where credentials were found
        logging.getLogger(library).setLevel(max(root.level, logging.WARNING))
    logging.getLogger("asyncpg.pool").setLevel(max(root.level, logging.ERROR))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
    )


def hide(secrets: Iterable[str]) -> None:
    """Blot out further texts from now on, beside those that `configure` was given."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _OurHandler):
            handler.redact.add(secrets)


def _shared() -> list[structlog.typing.Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _formatter(stream: TextIO, redact: Redactor, *, pretty: bool) -> logging.Formatter:
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if pretty:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,  # before the redaction: a traceback may quote an address
            redact,
            renderer,
        ],
    )


class Redactor:
    """A structlog processor that blots out addresses and secrets in every value, however deep. It never raises."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: set[str] = set()
        self._known: re.Pattern[str] | None = None
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Blot out these, too."""
        self._secrets.update(filter(None, secrets))
        known = sorted(self._secrets, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, _logger: object, _method: str, event: EventDict) -> EventDict:
        """Return the line without what must not be in it; where even that fails, a line that says so."""
        try:
            return self._mapping(event, 0)
        except Exception as error:  # noqa: BLE001 - losing a line is better than losing the program
            return {"event": "log_line_unreadable", "reason": type(error).__name__}

    def _mapping(self, values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        return {self._text(str(name)): self._named(str(name), value, depth) for name, value in values.items()}

    def _named(self, name: str, value: object, depth: int) -> object:
        if value and _SECRET_NAME.search(name) and not isinstance(value, bool | int | float):
            return MASK
        if name in _MANY_LINES and isinstance(value, str):
            return "\n".join(map(self._text, value.splitlines()))
        return self._value(value, depth + 1)

    def _value(self, value: object, depth: int) -> object:
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if depth > DEEPEST:
            return "..."
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value(part, depth + 1) for part in value]
        if isinstance(value, bytes | bytearray):
            return self._text(bytes(value).decode("utf-8", "backslashreplace"))
        return self._text(str(value))

    def _text(self, text: str) -> str:
        if self._known:
            text = self._known.sub(MASK, text)
        if len(text) > LONGEST:
            text = text[:LONGEST] + "..."
        for pattern, instead in _SECRETS:
            text = pattern.sub(instead, text)
        return _UNPRINTABLE.sub(_escaped, _ADDRESS.sub(MASK, text))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
