# SPDX-License-Identifier: Apache-2.0
"""What `serve` lets be traced: verified deliveries, verdicts of its passes, and calls of `/v1/sends`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import asyncpg
import structlog

from reconciler import metrics
from reconciler.configuration.tables import ReceiverSettings, TracingSettings
from reconciler.errors import UserError
from reconciler.sending.tracing import RECORDERS, key_of
from webhooks.database import BoundedPool
from webhooks.event import Event
from webhooks.inbox import Inbox
from webhooks.quiet import Quiet
from webhooks.receiver import Watch
from webhooks.signature import credential_headers
from webhooks.watched import Answered, Heard, WatchedInbox, watched

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from reconciler.otel import Spans

MOST_SENDS: Final = 1000
"""Sends of one delivery, and verdicts of one pass, that become spans."""
FAULT: Final = 500

_log: Final = structlog.get_logger()


class Traced:
    """The traces of one process; where `tracing.endpoint` is not set it does nothing.

    Raises UserError where the extra is not installed.
    """

    def __init__(self, settings: TracingSettings, instance: str) -> None:
        self._spans = _open(settings, instance) if settings.endpoint else None

    def inbox(self, settings: ReceiverSettings) -> Inbox:
        """Return the inbox to use."""
        limits = {"queue_events": settings.queue_events, "queue_bytes": settings.queue_bytes}
        return WatchedInbox(partial(_tell, self._spans), **limits) if self._spans else Inbox(**limits)

    @property
    def watch(self) -> Watch | None:
        """What the receiver is watched with."""
        return partial(watched, partial(_tell, self._spans)) if self._spans else None

    async def passed(self, pool: BoundedPool, who: str, counts: Mapping[str, int]) -> None:
        """Trace the verdicts of the newest pass of `who`. Whatever fails here costs their spans and never the pass."""
        if self._spans is None or not any(n and ":" in verdict for verdict, n in counts.items()):
            return
        try:
            await _trace_pass(self._spans, pool, who)
        except Exception as error:  # noqa: BLE001 - whatever it is: the pass is done, and nothing may fail for its trace
            _log.warning("verdicts_not_traced", error=type(error).__name__)

    async def close(self) -> None:
        """Export what waits, within a few seconds."""
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


def _open(settings: TracingSettings, instance: str) -> Spans:
    try:
        from reconciler import otel  # noqa: PLC0415 - of an extra, and costly to load
    except ImportError as error:
        raise UserError(f"tracing.endpoint: {error}") from None
    assert settings.endpoint is not None  # noqa: S101 - else nobody calls this
    log = logging.getLogger(otel.EXPORTER_LOG)
    log.handlers = [_InOurWords()]
    log.propagate = False
    headers: dict[str, str] = {}
    for secret in settings.secrets:
        headers |= credential_headers((secret,))[0]
    processor = otel.batches(settings.endpoint, headers, metrics.SPANS_LOST.inc)
    spans = otel.open_spans(
        processor,
        service_name=settings.service_name,
        instance=instance,
        ratio=settings.ratio,
        follow_callers=settings.follow_callers,
    )
    RECORDERS.append(spans)
    return spans


class _InOurWords(logging.Handler):
    """Says once a minute why spans are not exported, where the exporter has a line for each batch and try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._quiet = Quiet()

    def emit(self, record: logging.LogRecord) -> None:
        if (before := self._quiet.silenced("", "")) is not None:
            _log.warning("spans_not_exported", reason=record.getMessage(), unlogged_before=before)


# Deliveries


def _tell(spans: Spans, answered: Answered | None, heard: Heard) -> None:
    """Trace a delivery. One about a single send is in that send's trace, with how it was stored below it.

    Any other has a trace of its own, which is linked with the traces of its sends.
    """
    keys = {key for key, _ in heard.events}
    traces = {key: trace for key in keys if key is not None and (trace := spans.of_send(key)) is not None}
    unkeyed = None in keys
    if not traces and keys != {None}:
        return
    single = len(keys) == 1 and not unkeyed
    own: int | None
    if single:
        (own,) = traces.values()
    else:
        own = spans.new_trace() if traces else spans.new_trace_of_sample()
    posted = _posted(spans, own, answered, heard, len(keys) - unkeyed) if answered and own else None
    parent, links = (posted, ()) if single else (None, (posted,) if posted else ())
    by_key: dict[str | None, list[Event]] = {}
    for key, event in heard.events:
        by_key.setdefault(key, []).append(event)
    for key, trace in [*traces.items()][:MOST_SENDS]:
        times, about = (heard.began, heard.ended), _stored(heard, key, by_key[key])
        spans.add("store", trace, times, about, parent=parent, links=links, error=heard.error)


def _posted(spans: Spans, trace: int, answered: Answered, heard: Heard, sends: int) -> SpanContext:
    attributes = {
        "http.request.method": answered.method,
        "http.response.status_code": answered.status,
        "http.route": "/webhooks/{feed}",
        "reconciler.events": len(heard.events),
        "reconciler.feed": answered.feed.name,
        "reconciler.provider": answered.feed.provider,
        "reconciler.repeated": heard.stored.repeated if heard.stored else 0,
        "reconciler.sends": sends,
        "url.path": f"/webhooks/{answered.feed.name}",
        "url.scheme": answered.scheme,
    }
    name, error = f"{answered.method} /webhooks/{{feed}}", str(answered.status) if answered.status >= FAULT else None
    times = (answered.began, answered.ended)
    return spans.add("POST /webhooks/{feed}", trace, times, attributes, name=name, error=error)


def _stored(heard: Heard, key: str, events: Sequence[Event]) -> dict[str, Any]:
    return {
        "db.collection.name": "provider_event",
        "db.system.name": "postgresql",
        "reconciler.event.kinds": sorted({event.kind for event in events}),
        "reconciler.event.testimonies": sorted({event.testimony for event in events}),
        "reconciler.feed": heard.feed,
        "reconciler.source": heard.source,
        **key_of(key),
    }


# Passes


NEWEST_PASS: Final = "SELECT id, started_at, ended_at FROM pass WHERE who = $1 ORDER BY started_at DESC LIMIT 1"

# Which sends are in the sample follows from the last 64 bits of the id of their trace; see reconciler.sending.tracing.
VERDICTS: Final = """
SELECT wire_key, attempt, action, reason, source, risk, feed, claimed_at, decided_at
FROM verdict
WHERE decided_at >= $2 AND pass = $1
  AND ($3::bytea IS NULL OR substr(sha256(convert_to(wire_key, 'UTF8')), 9, 8) < $3)
ORDER BY decided_at, wire_key LIMIT $4
"""


async def _trace_pass(spans: Spans, pool: BoundedPool, who: str) -> None:
    this = await pool.fetchrow(NEWEST_PASS, who)
    if this is None:
        return
    bound = spans.bound.to_bytes(8, "big") if spans.bound < 1 << 64 else None
    verdicts = await pool.fetch(VERDICTS, this["id"], this["started_at"], bound, MOST_SENDS)
    if not verdicts:
        return
    attributes = {"reconciler.pass": this["id"], "reconciler.verdicts": len(verdicts)}
    times = _ns(this["started_at"]), _ns(this["ended_at"] or verdicts[-1]["decided_at"])
    passed = spans.add("pass", spans.new_trace(), times, attributes)
    for verdict in verdicts:
        if (trace := spans.of_send(verdict["wire_key"])) is not None:
            times, name = (times[0], _ns(verdict["decided_at"])), f"verdict {verdict['action']}"
            spans.add("verdict", trace, times, _verdict(verdict), name=name, links=(passed,))


def _verdict(verdict: asyncpg.Record) -> dict[str, Any]:
    claimed_at = verdict["claimed_at"]
    attributes = {
        "reconciler.attempt": verdict["attempt"],
        "reconciler.feed": verdict["feed"],
        "reconciler.reason": verdict["reason"],
        "reconciler.risk": verdict["risk"],
        "reconciler.seconds_since_claim": claimed_at and (verdict["decided_at"] - claimed_at).total_seconds(),
        "reconciler.source": verdict["source"],
    }
    return {name: value for name, value in attributes.items() if value is not None} | key_of(verdict["wire_key"])


_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def _ns(at: datetime) -> int:
    since = at - _EPOCH
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000
