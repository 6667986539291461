# SPDX-License-Identifier: Apache-2.0
"""Spans by OpenTelemetry, exported over OTLP/HTTP. Needs the extra `otel`; see docs/tracing.md.

A sender's process begins with one call, and then `guard` and its kin note what they do:

    traces = otel.trace_sends("http://collector:4318", service_name="shop", ratio=0.1)

Spans are made when what they tell of is over, and wait in memory for a thread that exports them. A collector that is
away, slow or full costs spans, and nothing else.
"""

from __future__ import annotations

import atexit
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from typing import Final

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
    from opentelemetry.trace import (
        Link,
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        get_current_span,
        set_span_in_context,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as missing:
    raise ImportError(f"tracing needs an extra ({missing}): install the extra otel of esp-reconciler") from missing

from reconciler.sending.tracing import RECORDERS, SPANS, Attributes, Noted, trace_number

EXPORT_SECONDS: Final = 5.0
"""How long one batch is tried."""
CLOSE_SECONDS: Final = 3.0
"""How long spans that wait may take to be exported at the end."""
LONGEST: Final = 200
"""Characters of an attribute that are kept."""
EXPORTER_LOG: Final = "opentelemetry.exporter"

_KINDS: Final = {"client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL, "server": SpanKind.SERVER}
_LAST_64: Final = TraceIdRatioBased.TRACE_ID_LIMIT
_TRACE: Final = ContextVar("_TRACE", default=0)
"""The trace of the span that is being made."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class _Ids(RandomIdGenerator):
    """Puts a span into the trace that was chosen for it."""

    def generate_trace_id(self) -> int:
        return _TRACE.get() or super().generate_trace_id()


class _Exporter(OTLPSpanExporter):
    """Tells how many spans no collector took."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], lost: Callable[[int], None]) -> None:
        super().__init__(f"{endpoint.rstrip('/')}/v1/traces", headers=headers, timeout=EXPORT_SECONDS)
        self._lost = lost

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; says itself whether that worked."""
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost(len(spans))
        return result


class Spans:
    """Makes the spans of one process, of those sends that are in the sample."""

    def __init__(self, provider: TracerProvider, ratio: float, *, follow_callers: bool) -> None:
        self.bound: Final = TraceIdRatioBased.get_bound_for_rate(ratio)
        """A trace is in the sample where the last 64 bits of its id are less."""
        self._provider, self._follow_callers = provider, follow_callers
        self._tracer = provider.get_tracer("reconciler", version("esp-reconciler"))

    def of_send(self, wire_key: str) -> int | None:
        """Return the trace of a send; None where it isn't in the sample."""
        trace = trace_number(wire_key)
        return trace if self._keeps(trace) else None

    def new_trace(self) -> int:
        """Return a new trace, of nobody's send."""
        return random.getrandbits(128) or 1

    def new_trace_of_sample(self) -> int | None:
        """Return a new trace, of nobody's send; None where it isn't in the sample."""
        trace = self.new_trace()
        return trace if self._keeps(trace) else None

    def _keeps(self, trace: int) -> bool:
        return trace & _LAST_64 < self.bound

    def note(self, noted: Noted) -> None:
        """Make the span of what a sender did, with a link to his own. See `tracing.Recorder`."""
        trace = trace_number(noted.wire_key)
        caller = _caller(noted.caller)
        followed = caller is not None and self._follow_callers and caller.trace_flags.sampled
        if followed or self._keeps(trace):
            links = [caller] if caller else []
            self.add(noted.span, trace, (noted.began, noted.ended), noted.attributes, links=links, error=noted.error)

    def add(
        self,
        span: str,
        trace: int,
        times: tuple[int, int],
        attributes: Attributes,
        *,
        name: str | None = None,
        links: Collection[SpanContext] = (),
        parent: SpanContext | None = None,
        error: str | None = None,
    ) -> SpanContext:
        """Make a span of what is over; `times` are its ends, in nanoseconds. Others may link to what is returned."""
        context = Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
        token = _TRACE.set(trace)
        try:
            made = self._tracer.start_span(
                name or span,
                context,
                _KINDS[SPANS[span].kind],
                attributes if error is None else {**attributes, "error.type": error},
                [Link(link) for link in links],
                start_time=times[0],
            )
        finally:
            _TRACE.reset(token)
        if error is not None:
            made.set_status(Status(StatusCode.ERROR))
        made.end(times[1])
        return made.get_span_context()

    def close(self) -> None:
        """Export what waits, as far as that is done in CLOSE_SECONDS. May be called twice, from any thread."""
        atexit.unregister(self.close)
        if self in RECORDERS:
            RECORDERS.remove(self)
        # A collector that hangs must hold up nobody's end, and the SDK waits for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="close spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _caller(traceparent: str | None) -> SpanContext | None:
    """Return the caller's span: of his header, or else the one that this process is in."""
    context = None if traceparent is None else _PROPAGATOR.extract({"traceparent": traceparent}, Context())
    found = get_current_span(context).get_span_context()
    return found if found.is_valid else None


def open_spans(
    processor: SpanProcessor, *, service_name: str, instance: str | None, ratio: float, follow_callers: bool
) -> Spans:
    """Return what makes spans for a processor of them."""
    about = {"service.name": service_name, "service.version": version("esp-reconciler")}
    provider = TracerProvider(
        ALWAYS_ON,  # whoever adds a span has asked whether it is in the sample
        Resource.create(about | ({"service.instance.id": instance} if instance else {})),
        shutdown_on_exit=False,  # it would wait half a minute for a collector that hangs
        id_generator=_Ids(),
        span_limits=SpanLimits(max_attribute_length=LONGEST),
    )
    provider.add_span_processor(processor)
    return Spans(provider, ratio, follow_callers=follow_callers)


def batches(endpoint: str, headers: Mapping[str, str], lost: Callable[[int], None]) -> BatchSpanProcessor:
    """Return what exports spans to a collector in a thread of its own; `lost` is told how many could not be."""
    return BatchSpanProcessor(_Exporter(endpoint, headers, lost))


def trace_sends(
    endpoint: str = "http://localhost:4318",
    *,
    service_name: str,
    ratio: float = 1.0,
    follow_callers: bool = True,
    headers: Mapping[str, str] | None = None,
    processor: SpanProcessor | None = None,
) -> Spans:
    """Let this process's senders be traced, until its end or `close`.

    `ratio` is the share of sends in the sample: the same ones in every process that has the same ratio. With
    `follow_callers` those are traced, too, that are claimed or submitted within a span that is sampled. `headers` are
    what the collector wants to be shown. `processor`, where the application has one, gets the spans instead.
    """
    processor = processor or batches(endpoint, headers or {}, lambda _: None)
    spans = open_spans(processor, service_name=service_name, instance=None, ratio=ratio, follow_callers=follow_callers)
    RECORDERS.append(spans)
    atexit.register(spans.close)
    return spans
