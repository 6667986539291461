# SPDX-License-Identifier: Apache-2.0
"""Traces: one for each send, from its claim to its verdict, whoever works at it; and they disturb nobody."""

from __future__ import annotations

import asyncio
import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from collector_kit import Collector, Exported, collecting
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import heard_neighbours, old_claim, reconcile
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv.attributes import db_attributes, error_attributes, http_attributes, url_attributes
from program import Program
from prometheus_client import REGISTRY
from receiver_app import PLAIN, Running, running, signed
from sends_kit import api
from serving import FEEDS, Server, sample, serving, until, write_config
from snippets import block, text_of
from structlog.testing import capture_logs

from reconciler import guard, guard_many, guard_many_sync, guard_sync, otel
from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import ReceiverSettings, TracingSettings
from reconciler.errors import UserError
from reconciler.sending import tracing
from reconciler.sending.tracing import ATTRIBUTES, SPANS, trace_id
from reconciler.serving.daemon import DRAIN_SECONDS, Daemon
from reconciler.serving.traced import MOST_SENDS, Traced
from webhooks.event import Event, Kind, Testimony, wire_key

ROOT = Path(__file__).parent.parent
DOCS = text_of("docs/tracing.md")
KEY = "order.receipt:1:ada@example.org"
WIRE = wire_key(KEY)
TRACE = hashlib.sha256(WIRE.encode()).hexdigest()[:32]
ADA = "ada@example.org"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def sender(collector: Collector) -> Iterator[otel.Spans]:
    """This process's senders are traced; `close` it to see what they noted."""
    spans = otel.trace_sends(collector.url, service_name="shop")
    yield spans
    spans.close()


def sort_of(span: Exported) -> str:
    """The name under which the tables have a span."""
    return re.sub(
        r"^[A-Z]+ (?=/webhooks)", "POST ", span.name.partition(" ")[0] if "verdict" in span.name else span.name
    )


def check(spans: list[Exported]) -> None:
    """Every span is of a sort that is documented, and has only attributes that are documented of it."""
    for span in spans:
        sort = SPANS[sort_of(span)]
        assert (span.kind, span.attributes.keys() - set(sort.attributes)) == (sort.kind, set()), span
        assert span.began <= span.ended, span
        assert span.failed == ("error.type" in span.attributes), span


async def answered(_: Any) -> str:
    return "<1@mg.example.org>"


async def refused(_: Any) -> str:
    raise TimeoutError(f"not for {ADA}")


# The whole way


async def test_one_trace_leads_from_the_claim_over_the_webhook_to_the_verdict(
    dsn: str, db: asyncpg.Pool, tmp_path: Path, collector: Collector, sender: otel.Spans
) -> None:
    config = write_config(tmp_path, f'[tracing]\nendpoint = "{collector.url}/"\nsecrets = ["bearer:open-sesame"]')

    async def lost(_: guard.Claim) -> str:
        raise TimeoutError

    async with serving(config, RECONCILER_DATABASE__URL=dsn, OTEL_BSP_SCHEDULE_DELAY="50") as server:
        await server.becomes(200)
        sent = await guard.send_once(db, KEY, "mg", lost, provider="mailgun", recipient=ADA)
        assert sent.outcome == "waiting"
        assert await server.deliver("mg", sample("mg", "accepted", sent.claim.wire_key)) == 200
        await until(lambda: collector.holds("verdict sent"), "the verdict's span")
        assert await server.stop() == 0
    sender.close()
    spans = collector.spans
    check(spans)
    of_send = [span for span in spans if span.trace == TRACE]
    assert [span.name for span in of_send if span.service == "shop"] == ["claim", "submit", "fail"]
    (posted,), (stored,) = collector.named("POST /webhooks/{feed}"), collector.named("store")
    (verdict,), (passed, *_) = collector.named("verdict sent"), collector.named("pass")
    assert {posted.trace, stored.trace, verdict.trace} == {TRACE} != {passed.trace}
    assert (posted.parent, stored.parent, verdict.parent) == ("", posted.id, "")
    assert verdict.links == [(passed.trace, passed.id)]
    assert {span.service for span in (posted, stored, verdict)} == {"esp-reconciler"}
    ends = [span.ended for span in (*of_send[:3], stored, posted)]
    assert ends == sorted(ends)
    assert posted.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/webhooks/{feed}",
        "reconciler.events": 1,
        "reconciler.feed": "mg",
        "reconciler.provider": "mailgun",
        "reconciler.repeated": 0,
        "reconciler.sends": 1,
        "url.path": "/webhooks/mg",
        "url.scheme": "http",
    }
    assert stored.attributes["reconciler.event.testimonies"] == ["accepted"]
    assert (verdict.attributes["reconciler.reason"], verdict.attributes["reconciler.attempt"]) == ("accepted", 1)
    assert verdict.attributes["reconciler.wire_key"] == WIRE
    assert set(collector.paths) == {"/v1/traces"}
    assert "Bearer open-sesame" in {headers.get("authorization") for headers in collector.headers}
    whole = b"".join(collector.bodies)
    for word in (KEY, "order.receipt", ADA, "example.org", "open-sesame", FEEDS["mg"].secrets[0]):
        assert word.encode() not in whole, word


async def test_what_is_noted_last_is_exported_before_the_process_ends(
    dsn: str, db: asyncpg.Pool, tmp_path: Path, collector: Collector
) -> None:
    config = write_config(tmp_path, f'[tracing]\nendpoint = "{collector.url}"\nservice_name = "hooks"')
    async with serving(config, "--only", "receiver", RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        for n in range(20):
            assert await server.deliver("mg", sample("mg", "delivered", f"order-{n}")) == 200
        assert await server.stop() == 0
    assert {span.trace for span in collector.named("store")} == {trace_id(f"order-{n}") for n in range(20)}
    assert {span.service for span in collector.spans} == {"hooks"}
    assert "reconciler.wire_key" not in collector.named("store")[0].attributes  # here it is the send key


def said_of(key: str) -> Event:
    return Event(kind=Kind.BOUNCED, testimony=Testimony.ACCEPTED, message_id=key, event_id="e", send_key=key, raw=b"{}")


@asynccontextmanager
async def taking(db: asyncpg.Pool, collector: Collector, **wanted: Any) -> AsyncIterator[tuple[Running, Traced]]:
    """A receiver, and what traces it. At the end all spans are there."""
    traced = Traced(TracingSettings(endpoint=collector.url, **wanted), "here")
    async with running(db, inbox=traced.inbox(ReceiverSettings()), watch=traced.watch) as receiver:
        yield receiver, traced
    await traced.close()


async def test_a_delivery_about_several_sends_has_a_trace_of_its_own_that_theirs_are_linked_with(
    db: asyncpg.Pool, collector: Collector
) -> None:
    async with taking(db, collector) as (receiver, _):
        said = [{"id": str(n), "key": key} for n, key in enumerate(("order-1", "order-2", "order-2"))]
        assert (await receiver.send(*said)).status == 200
    check(collector.spans)
    (posted,) = collector.named("POST /webhooks/{feed}")
    stored = collector.named("store")
    assert {span.trace for span in stored} == {trace_id("order-1"), trace_id("order-2")}
    assert posted.trace not in {span.trace for span in stored}
    assert [(span.links, span.parent) for span in stored] == [([(posted.trace, posted.id)], "")] * 2
    assert (posted.attributes["reconciler.events"], posted.attributes["reconciler.sends"]) == (3, 2)


async def test_a_delivery_about_several_sends_is_traced_exactly_where_one_of_them_is(
    db: asyncpg.Pool, collector: Collector
) -> None:
    keys = [f"order-{n}" for n in range(1000)]
    kept = [key for key in keys if int(trace_id(key)[16:], 16) < (1 << 64) * 0.01]
    left_out = [key for key in keys if key not in kept]
    async with taking(db, collector, ratio=0.01) as (receiver, _):
        await receiver.send(*({"id": key, "key": key} for key in (kept[0], *left_out[:9])))
        await receiver.send(*({"id": key, "key": key} for key in left_out[10:20]))
        await receiver.send({"id": left_out[20], "key": left_out[20]})
    assert [span.name for span in collector.spans] == ["POST /webhooks/{feed}", "store"]
    assert collector.named("store")[0].trace == trace_id(kept[0])


async def test_of_one_delivery_only_so_many_sends_become_spans(db: asyncpg.Pool, collector: Collector) -> None:
    async with taking(db, collector) as (receiver, _):
        await receiver.send(*({"id": str(n), "key": f"order-{n}"} for n in range(MOST_SENDS + 50)))
    assert len(collector.named("store")) == MOST_SENDS
    assert collector.named("POST /webhooks/{feed}")[0].attributes["reconciler.sends"] == MOST_SENDS + 50


async def test_a_release_states_its_risk_and_the_next_claim_is_in_the_same_trace(
    db: asyncpg.Pool, collector: Collector
) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    async with taking(db, collector) as (_, traced):
        report = await reconcile(db)
        await traced.passed(db, "test", report.counts)
        (again,) = await guard.claim_released(db, "mg", 10)
    check(collector.spans)
    (verdict,), (claim,) = collector.named("verdict released"), collector.named("claim")
    assert {verdict.trace, claim.trace} == {TRACE}
    assert (verdict.attributes["reconciler.reason"], verdict.attributes["reconciler.source"]) == ("absent", "inferred")
    assert 0 < verdict.attributes["reconciler.risk"] <= 0.01
    assert verdict.attributes["reconciler.seconds_since_claim"] == pytest.approx(7260, abs=60)
    assert claim.attributes["db.stored_procedure.name"] == "send_claim_released_commit"
    assert claim.attributes["reconciler.attempt"] == again.claim.attempt == 2


async def test_strangers_make_no_spans(db: asyncpg.Pool, collector: Collector) -> None:
    async with taking(db, collector) as (receiver, _):
        assert (await receiver.send({"id": "1", "key": "order-1"})).status == 200
        assert (await receiver.post(PLAIN.name, b'[{"id": "2"}]', {"x-signature": "0"})).status == 401
        assert (await receiver.post(PLAIN.name, b'[{"id": "2"}]')).status == 401
        assert (await receiver.post(PLAIN.name, b"{", signed(b"{"))).status == 400
        assert (await receiver.post("nobody", b"[]")).status == 404
        assert (await receiver.request("GET", f"/webhooks/{PLAIN.name}")).status == 200
    assert [span.name for span in collector.spans] == ["POST /webhooks/{feed}", "store"]


async def test_what_a_queue_brings_and_what_could_not_be_stored_is_traced_too(
    db: asyncpg.Pool, collector: Collector
) -> None:
    async with taking(db, collector) as (receiver, _):
        await receiver.inbox.store("bus", [said_of(KEY)] * 2, "sqs")
        await receiver.inbox.close()
        assert (await receiver.send({"id": "1", "key": "order-2"})).status == 503
        assert (await receiver.send({"id": "2"})).status == 503
    check(collector.spans)
    (by_queue, put_off), posts = collector.named("store"), collector.named("POST /webhooks/{feed}")
    assert (by_queue.trace, by_queue.parent, by_queue.failed) == (TRACE, "", False)
    assert by_queue.attributes["reconciler.source"] == "sqs"
    assert by_queue.attributes["reconciler.event.kinds"] == ["bounced"]
    assert (put_off.trace, put_off.attributes["error.type"]) == (trace_id("order-2"), "busy")
    assert [(post.trace == put_off.trace, post.attributes["error.type"]) for post in posts] == [
        (True, "503"),
        (False, "503"),  # about nobody's send
    ]


# Senders


async def test_a_sender_notes_its_claim_its_submission_and_how_it_went(
    db: asyncpg.Pool, collector: Collector, sender: otel.Spans
) -> None:
    assert (await guard.send_once(db, KEY, "mg", answered, provider="mailgun")).outcome == "sent"
    assert (await guard.send_once(db, KEY, "mg", answered, provider="mailgun")).outcome == "already_sent"
    sender.close()
    spans = collector.spans
    check(spans)
    assert [(span.name, span.trace, span.attributes.get("reconciler.outcome")) for span in spans] == [
        ("claim", TRACE, "claimed"),
        ("submit", TRACE, None),
        ("confirm", TRACE, "sent"),
        ("claim", TRACE, "already_sent"),
    ]
    assert spans[1].attributes == {
        "reconciler.attempt": 1,
        "reconciler.meaning": "accepted",
        "reconciler.provider": "mailgun",
        "reconciler.wire_key": WIRE,
    }


async def test_the_collector_is_shown_the_headers_that_the_sender_was_given(
    db: asyncpg.Pool, collector: Collector
) -> None:
    sender = otel.trace_sends(collector.url, service_name="shop", headers={"Authorization": "Bearer open-sesame"})
    assert (await guard.send_once(db, KEY, "mg", answered)).outcome == "sent"
    sender.close()
    assert [span.name for span in collector.spans] == ["claim", "submit", "confirm"]
    assert {headers.get("authorization") for headers in collector.headers} == {"Bearer open-sesame"}
    assert b"open-sesame" not in b"".join(collector.bodies)


async def test_the_applications_own_processor_gets_the_spans_and_no_collector_does(
    db: asyncpg.Pool, collector: Collector
) -> None:
    memory = InMemorySpanExporter()
    sender = otel.trace_sends(collector.url, service_name="shop", processor=SimpleSpanProcessor(memory))
    assert (await guard.send_once(db, KEY, "mg", answered)).outcome == "sent"
    sender.close()
    spans = memory.get_finished_spans()
    assert [(span.name, f"{span.context.trace_id:032x}") for span in spans] == [
        ("claim", TRACE),
        ("submit", TRACE),
        ("confirm", TRACE),
    ]
    assert {span.resource.attributes["service.name"] for span in spans} == {"shop"}
    assert collector.paths == []


async def test_what_a_client_raised_is_named_and_its_words_are_not(
    db: asyncpg.Pool, collector: Collector, sender: otel.Spans
) -> None:
    sent = await guard.send_once(db, KEY, "mg", refused)
    assert sent.outcome == "waiting"
    with pytest.raises(guard.Rejected):
        async with guard.sending(db, "order-2", "mg"):
            raise guard.Rejected(f"no such person: {ADA}")
    sender.close()
    check(collector.spans)
    submits = collector.named("submit")
    assert [
        (span.failed, span.attributes["error.type"], span.attributes["reconciler.meaning"]) for span in submits
    ] == [
        (True, "TimeoutError", "ambiguous"),
        (True, "Rejected", "rejected"),
    ]
    assert [span.attributes["reconciler.outcome"] for span in collector.named("fail")] == ["waiting", "failed"]
    assert ADA.encode() not in b"".join(collector.bodies)


async def test_the_senders_own_trace_is_linked_with_and_nothing_else_of_it_is_touched(
    db: asyncpg.Pool, collector: Collector, sender: otel.Spans
) -> None:
    memory = InMemorySpanExporter()
    own = TracerProvider(shutdown_on_exit=False)
    own.add_span_processor(SimpleSpanProcessor(memory))
    tracer = own.get_tracer("shop")

    async def submit(_: guard.Claim) -> str:
        with tracer.start_as_current_span("POST provider"):
            return "m-1"

    with tracer.start_as_current_span("checkout") as caller:
        await guard.send_once(db, KEY, "mg", submit)
    sender.close()
    at = caller.get_span_context()
    link = (f"{at.trace_id:032x}", f"{at.span_id:016x}")
    assert [(span.name, span.links, span.parent) for span in collector.spans] == [
        ("claim", [link], ""),
        ("submit", [link], ""),
        ("confirm", [link], ""),
    ]
    called, checkout = memory.get_finished_spans()
    assert called.parent is not None
    assert called.parent.span_id == checkout.context.span_id
    own.shutdown()


async def test_threads_and_many_at_once_are_noted_likewise(
    dsn: str, db: asyncpg.Pool, collector: Collector, sender: otel.Spans
) -> None:
    def in_threads() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            assert guard_sync.send_once(connection, "thread-1", "mg", lambda _: "m-1").outcome == "sent"
            with pytest.raises(TimeoutError), guard_sync.sending(connection, "thread-2", "mg"):
                raise TimeoutError
            many = {"thread-3": {}, "thread-4": {}}
            guard_many_sync.send_many(connection, many, "pm", lambda _: (500, {}, b""))

    await asyncio.to_thread(in_threads)
    many: dict[str, dict[str, Any]] = {"many-1": {}, "many-2": {}}
    assert len(await guard_many.send_many(db, many, "mg", lambda _: answered(None))) == 2
    sender.close()
    check(collector.spans)
    by_trace: dict[str, list[str]] = {}
    for span in collector.spans:
        by_trace.setdefault(span.trace, []).append(span.name)
    told = {key: by_trace[trace_id(key)] for key in ("thread-1", "thread-2", "thread-3", "thread-4", *many)}
    assert told == {
        "thread-1": ["claim", "submit", "confirm"],
        "thread-2": ["claim", "submit", "fail"],
        "thread-3": ["claim", "submit", "fail"],
        "thread-4": ["claim", "submit", "fail"],
        "many-1": told["many-1"],
        "many-2": told["many-1"],
    }
    assert told["many-1"][:2] == ["claim", "submit"]


async def test_a_call_over_http_is_linked_with_its_caller_by_the_w3c_header(
    db: asyncpg.Pool, collector: Collector, sender: otel.Spans
) -> None:
    parent = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
    link = tuple(parent.split("-"))
    async with api(db) as caller:
        headers = {"traceparent": f"00-{parent}-01"}
        status, body = await caller.call(
            "POST", "/v1/sends", {"key": "order-1", "feed": "mg"}, key="call-1", headers=headers
        )
        assert status == 201
        assert (await caller.claim("order-1"))[0] == 409
        said = {"fence": body["fence"], "message_id": "m-1"}
        assert (await caller.call("POST", "/v1/sends/order-1/confirm", said, headers=headers))[0] == 200
        assert (await caller.fail(body["fence"], "order-1"))[1]["outcome"] == "sent"
    sender.close()
    check(collector.spans)
    assert {span.trace for span in collector.spans} == {trace_id("order-1")}
    assert [(span.name, span.links, span.attributes["reconciler.outcome"]) for span in collector.spans] == [
        ("POST /v1/sends", [link], "claimed"),
        ("POST /v1/sends", [], "in_flight"),
        ("POST /v1/sends/{key}/confirm", [link], "sent"),
        ("POST /v1/sends/{key}/fail", [], "sent"),
    ]


# The sample


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=1, max_size=48), st.floats(0, 1))
@settings(max_examples=50)
def test_the_sample_of_a_ratio_holds_the_same_sends_everywhere(key: str, ratio: float) -> None:
    spans = [otel.Spans(TracerProvider(shutdown_on_exit=False), ratio, follow_callers=True) for _ in range(2)]
    assert spans[0].of_send(key) == spans[1].of_send(key)
    whole = otel.Spans(TracerProvider(shutdown_on_exit=False), 1.0, follow_callers=True)
    assert spans[0].of_send(key) in (None, whole.of_send(key))
    assert whole.of_send(key) == int(trace_id(key), 16)


async def test_a_ratio_keeps_that_share_and_of_each_send_all_or_nothing(db: asyncpg.Pool, collector: Collector) -> None:
    """Sender, receiver and pass, which asks the database for the sample, agree without a word."""
    keys = [f"order-{n}" for n in range(40)]
    async with taking(db, collector, ratio=0.5) as (receiver, traced):
        for key in keys:
            assert (await guard.send_once(db, key, "mg", refused)).outcome == "waiting"
        said = [{"id": key, "key": key} for key in keys]
        assert (await receiver.send(*said)).status == 200
        report = await reconcile(db)
        assert report.counts["sent:accepted"] == 40
        await traced.passed(db, "test", report.counts)
    check(collector.spans)
    kept = {trace_id(key) for key in keys if int(trace_id(key)[16:], 16) < 1 << 63}
    assert 5 < len(kept) < 35
    for name in ("claim", "submit", "fail", "store", "verdict sent"):
        assert {span.trace for span in collector.named(name)} == kept, name
    (posted,) = collector.named("POST /webhooks/{feed}")
    assert posted.attributes["reconciler.sends"] == 40


@pytest.mark.parametrize("follow", [True, False])
async def test_a_caller_whose_own_span_is_sampled_is_followed_unless_that_is_switched_off(
    db: asyncpg.Pool, collector: Collector, follow: bool
) -> None:
    sender = otel.trace_sends(collector.url, service_name="api", ratio=0.0, follow_callers=follow)
    async with api(db) as caller:
        for n, flags in enumerate(("00", "01")):
            headers = {"traceparent": f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}"}
            await caller.call("POST", "/v1/sends", {"key": f"order-{n}", "feed": "mg"}, key=f"{n}", headers=headers)
        await caller.claim("order-2")
    sender.close()
    assert [span.trace for span in collector.spans] == [trace_id("order-1")] * follow


# Nobody is disturbed


class Unfinished(Exception):
    pass


async def work(server: Server, db: asyncpg.Pool, sends: int = 30) -> None:
    """Claim, submit, confirm and hear of sends."""
    for n in range(sends):
        sent = await guard.send_once(db, f"order-{n}", "mg", answered)
        assert (sent.outcome, sent.recorded) == ("sent", True)
        assert await server.deliver("mg", sample("mg", "delivered", f"order-{n}")) == 200


@pytest.mark.parametrize("fault", ["away", "hangs"])
async def test_a_collector_that_ails_costs_spans_and_nothing_else(
    dsn: str, db: asyncpg.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "30")  # so that several wait, each for its time-out

    def close(spans: otel.Spans) -> float:
        began = time.monotonic()
        spans.close()
        return time.monotonic() - began

    with collecting(None) as hanging:
        url = hanging.url if fault == "hangs" else "http://127.0.0.1:9"  # discard: nobody listens
        config = write_config(tmp_path, f'[tracing]\nendpoint = "{url}"')
        sender = otel.trace_sends(url, service_name="shop")
        async with serving(config, RECONCILER_DATABASE__URL=dsn, OTEL_BSP_SCHEDULE_DELAY="20") as server:
            await server.becomes(200)
            await work(server, db)
            if fault == "hangs":
                assert await asyncio.to_thread(hanging.asked.wait, 20)
            else:
                assert "refused" in (await server.told("spans_not_exported"))["reason"]
            assert await server.status("/readyz") == 200
            closing = asyncio.create_task(asyncio.to_thread(close, sender))
            assert await server.stop() == 0
        assert await closing < otel.CLOSE_SECONDS + 5
        threads = [thread for thread in threading.enumerate() if thread.name == "close spans"]
    stopped = server.events("stopped")[0]["timestamp"], server.events("stopping")[0]["timestamp"]
    ended, began = map(datetime.fromisoformat, stopped)
    assert (ended - began).total_seconds() < DRAIN_SECONDS + otel.CLOSE_SECONDS
    assert len(server.events("spans_not_exported")) <= 1
    assert [line for line in server.lines if line["level"] == "error"] == []
    assert server.errors == []
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'sent'") == 30
    for thread in threads:  # the collector is gone now
        thread.join(20)


async def test_notes_that_can_not_be_taken_fail_no_send(db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def note(self, _: tracing.Noted) -> None:
            raise Unfinished

    monkeypatch.setattr(tracing, "RECORDERS", [Broken()])
    assert (await guard.send_once(db, KEY, "mg", answered)).outcome == "sent"


async def test_a_pass_whose_trace_fails_for_whatever_reason_is_done_nevertheless(
    db: asyncpg.Pool, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OverflowError(f"not for {ADA}")

    await old_claim(db, KEY)
    await heard_neighbours(db)
    monkeypatch.setattr(otel.Spans, "add", broken)
    async with taking(db, collector) as (_, traced):
        report = await reconcile(db)
        with capture_logs() as logs:
            await traced.passed(db, "test", report.counts)
    told = [(line["event"], line["error"]) for line in logs if line["log_level"] == "warning"]
    assert told == [("verdicts_not_traced", "OverflowError")]


async def test_spans_that_are_lost_are_counted_and_told_once(db: asyncpg.Pool) -> None:
    before = REGISTRY.get_sample_value("reconciler_spans_lost_total") or 0
    with capture_logs() as logs, collecting(401) as refusing:
        async with taking(db, refusing) as (receiver, _):
            for n in range(600):
                await receiver.inbox.store("bus", [said_of(f"order-{n}")], "sqs")
    assert (REGISTRY.get_sample_value("reconciler_spans_lost_total") or 0) - before == 600
    told = [line for line in logs if line["event"] == "spans_not_exported"]
    assert len(told) == 1
    assert "401" in told[0]["reason"]


# Settings


def test_without_the_extra_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "reconciler.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    monkeypatch.delattr("reconciler.otel", raising=False)
    wanted = Settings.model_validate({"tracing": {"endpoint": "http://127.0.0.1:4318"}})
    with pytest.raises(UserError) as caught:
        Daemon(wanted, None)
    assert str(caught.value).startswith("tracing.endpoint: tracing needs an extra (")
    assert str(caught.value).endswith("): install the extra otel of esp-reconciler")
    assert "\n" not in str(caught.value)
    Daemon(Settings(), None)


LOADED = """
import sys
import reconciler.serving.daemon, reconciler.guard_many
from reconciler.configuration.settings import Settings
reconciler.serving.daemon.Daemon(Settings(), None)
print([name for name in sys.modules if name.startswith(("opentelemetry", "google.protobuf"))])
"""


def test_where_it_is_not_set_nothing_of_it_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("open-sesame", "is no credential: write bearer:TOKEN"),
        ("query:token=x", "is no credential: write bearer:TOKEN"),
        ("bearer: ", "is half a credential: write bearer:TOKEN"),
        ("header:X-Key", "is half a credential: write header:Name=value"),
    ],
)
def test_what_is_no_credential_for_a_collector_is_refused(secret: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.model_validate({"tracing": {"secrets": [secret]}})


def test_the_collectors_credentials_are_masked_and_reach_no_log() -> None:
    held = Settings.model_validate({"tracing": {"secrets": ["header:X-Key=open-sesame", "basic:a:open-wide"]}})
    assert held.masked()["tracing"]["secrets"] == ["***", "***"]
    assert {"open-sesame", "open-wide"} <= set(held.secret_values())


async def test_why_tells_the_trace_where_there_are_traces(program: Program, db: asyncpg.Pool) -> None:
    await guard.claim(db, KEY, "mg")
    assert "trace " not in (await program("why", KEY)).stdout
    program.env["RECONCILER_TRACING__ENDPOINT"] = "http://127.0.0.1:4318"
    assert f"trace     {TRACE}\n" in (await program("why", KEY)).stdout


# The documents


def test_the_tables_of_the_documents_are_those_of_the_code() -> None:
    rows = [line for line in DOCS.splitlines() if line.startswith("| `")]
    spans = [
        f"| `{name}` | {span.kind} | {span.meaning} | {', '.join(f'`{one}`' for one in sorted(span.attributes))} |"
        for name, span in SPANS.items()
    ]
    assert rows == [*spans, *(f"| `{name}` | {meaning} |" for name, meaning in ATTRIBUTES.items())]
    assert {one for span in SPANS.values() for one in span.attributes} == ATTRIBUTES.keys()
    assert list(ATTRIBUTES) == sorted(ATTRIBUTES)


def test_names_that_are_not_ours_are_those_of_the_semantic_conventions() -> None:
    modules = (db_attributes, error_attributes, http_attributes, url_attributes)
    known = {value for module in modules for name, value in vars(module).items() if name.isupper()}
    assert {name for name in ATTRIBUTES if not name.startswith("reconciler.")} <= known


async def test_the_documents_say_how_a_trace_and_a_key_are_found(db: asyncpg.Pool) -> None:
    script = block("docs/tracing.md", "sh").replace("KEY", "order-1", 1)
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == trace_id("order-1")
    await guard.claim(db, "order-1", "mg")
    sql = block("docs/tracing.md", "sql").replace("TRACE", trace_id("order-1"))
    assert await db.fetchval(sql) == "order-1"


async def test_what_the_documents_say_in_python_traces_senders(db: asyncpg.Pool, collector: Collector) -> None:
    code = block("docs/tracing.md", "python").replace("http://collector:4318", collector.url).replace("0.1", "1")
    exec(compile(code, "docs/tracing.md", "exec"), {})  # noqa: S102 - our own page
    await guard.claim(db, KEY, "mg")
    for spans in list(tracing.RECORDERS):
        assert isinstance(spans, otel.Spans)
        spans.close()
    assert [(span.service, span.name) for span in collector.spans] == [("shop", "claim")]
