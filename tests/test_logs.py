# SPDX-License-Identifier: Apache-2.0
"""What a log line looks like, and what never gets into one."""

from __future__ import annotations

import io
import json
import logging
import time
from datetime import UTC, datetime

import pytest
import structlog

from reconciler.logs import LONGEST, Redactor, configure


@pytest.fixture(autouse=True)
def _logging_as_before():
    root = logging.getLogger()
    handlers, level, library = root.handlers[:], root.level, logging.getLogger("apscheduler").level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("apscheduler").setLevel(library)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def redacted(**values):
    return Redactor()(None, "info", values)


def test_off_a_terminal_each_line_is_one_json_object():
    configure("auto", "info", stream := io.StringIO())
    structlog.get_logger("webhooks.inbox").info("batch_stored", feed="sendgrid-main", stored=2)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "batch_stored",
        "feed": "sendgrid-main",
        "stored": 2,
        "level": "info",
        "logger": "webhooks.inbox",
    }


def test_times_are_utc_whatever_the_zone_of_the_host(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        configure("json", "info", stream := io.StringIO())
        structlog.get_logger().info("started")
    finally:
        monkeypatch.undo()
        time.tzset()
    stamped = datetime.fromisoformat(lines(stream)[0]["timestamp"])
    assert abs((datetime.now(UTC) - stamped).total_seconds()) < 60


def test_on_a_terminal_people_read_it():
    configure("auto", "info", stream := Terminal())
    structlog.get_logger().info("batch_stored", stored=2)
    assert "batch_stored" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_the_format_can_be_forced_either_way():
    configure("json", "info", terminal := Terminal())
    structlog.get_logger().info("started")
    assert lines(terminal)[0]["event"] == "started"
    configure("console", "info", stream := io.StringIO())
    structlog.get_logger().info("started")
    assert "[info" in stream.getvalue()
    assert "\x1b" not in stream.getvalue(), "no colours into a file"


def test_lines_of_libraries_come_in_the_same_form():
    configure("json", "info", stream := io.StringIO())
    logging.getLogger("aiohttp.server").error("Error handling request from %s", "ada@example.org")
    (line,) = lines(stream)
    assert line["logger"] == "aiohttp.server"
    assert line["level"] == "error"
    assert line["event"] == "Error handling request from ***"


def test_a_level_hides_what_lies_below_it():
    configure("json", "warning", stream := io.StringIO())
    structlog.get_logger().info("hidden")
    logging.getLogger("aiohttp").info("hidden")
    structlog.get_logger().warning("shown")
    assert [line["event"] for line in lines(stream)] == ["shown"]


def test_the_scheduler_does_not_tell_of_every_run():
    configure("json", "info", stream := io.StringIO())
    logging.getLogger("apscheduler.executors.default").info("Running job")
    logging.getLogger("apscheduler.executors.default").warning("Run time was missed")
    assert [line["event"] for line in lines(stream)] == ["Run time was missed"]


def test_configured_twice_a_line_is_written_once():
    configure("json", "info", io.StringIO())
    configure("json", "info", stream := io.StringIO())
    structlog.get_logger().info("started")
    assert len(lines(stream)) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ada@example.org", "***"),
        ("mail to Ada <ada.l+x@mail.example.org>, now", "mail to Ada <***>, now"),
        ('"ada lovelace"@example.org', "***"),
        ("ada@[192.0.2.1]", "***"),
        ("bounce-ada=example.org@lists.example", "***"),
        ("jörg@exämple.de", "***"),
        ("/u?to=ada%40example.org&n=1", "/u?to=***&n=1"),
        ("ada@localhost", "***"),
        ("postgresql://app:pass@word@db/mail", "postgresql://***@db/mail"),
        ("postgresql://app@db/mail", "postgresql://***@db/mail"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("Basic dXNlcjpwYXNz", "Basic ***"),
        ("basic:user:pass", "basic:***"),
        ("header:X-Token=abc", "header:X-Token=***"),
        ("whsec_dGhyb3dhd2F5LXRlc3Q=", "***"),
        ("key-0123456789abcdef0123456789abcdef", "***"),
        ("GET /webhooks/x?token=abc&n=1", "GET /webhooks/x?token=***&n=1"),
        ("f936d22e0d35ac13707a9b5423307a4c28961e19b7eb9ee8", "f936d22e0d35ac13707a9b5423307a4c28961e19b7eb9ee8"),
        ("no_secret", "no_secret"),
        ("https://hooks.example.com/webhooks/ses-eu", "https://hooks.example.com/webhooks/ses-eu"),
        ("arn:aws:sns:eu-west-1:000000000000:ses-events", "arn:aws:sns:eu-west-1:000000000000:ses-events"),
    ],
)
def test_addresses_and_secrets_are_blotted_out_and_the_rest_stays(text, shown):
    assert redacted(event="x", reason=text)["reason"] == shown
    assert redacted(event=text)["event"] == shown


def test_they_are_found_however_deep_they_lie():
    line = redacted(event="x", a={"b": [("ada@example.org", b"to ada@example.org")], "ada@example.org": 1})
    assert line["a"] == {"b": [["***", "to ***"]], "***": 1}


def test_they_are_found_in_objects_that_only_speak_when_written():
    class Message:
        def __repr__(self):
            return "<Message to ada@example.org>"

    assert redacted(event="x", message=Message(), error=ValueError("ada@example.org")) == {
        "event": "x",
        "message": "<Message to ***>",
        "error": "***",
    }


def test_a_value_that_is_named_like_a_secret_is_hidden_whole():
    line = redacted(event="x", secrets=["a"], api_key="abc", password="abc", token=None, tokens_left=3)
    assert line == {
        "event": "x",
        "secrets": "***",
        "api_key": "***",
        "password": "***",
        "token": None,
        "tokens_left": 3,
    }


def test_the_configured_secrets_are_found_without_any_pattern():
    configure("json", "info", stream := io.StringIO(), secrets=["3f9acd", "3f9acd-longer", ""])
    structlog.get_logger().info("odd", text="is 3f9acd-longer or 3f9acd")
    assert lines(stream)[0]["text"] == "is *** or ***"


def test_a_traceback_is_kept_without_the_address_in_it():
    for log_format in ("json", "console"):
        configure(log_format, "info", stream := io.StringIO())
        try:
            int("ada@example.org")
        except ValueError:
            structlog.get_logger().exception("pass_failed")
        text = stream.getvalue()
        assert "Traceback" in text
        assert "ValueError: invalid literal" in text
        assert "ada@" not in text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_lone_surrogate_loses_no_line(log_format):  # case 072
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    configure(log_format, "info", stream)
    structlog.get_logger().info("odd", subject="cut emoji \ud83d", **{"\ud83d": 1})
    logging.getLogger("aiohttp").warning("cut \ud83d")
    stream.flush()
    text = stream.buffer.getvalue().decode("utf-8")
    assert text.count("\n") == 2
    assert "cut emoji \\" in text
    assert "ud83d" in text


def test_a_terminal_that_knows_only_ascii_loses_no_line():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    configure("console", "info", stream)
    structlog.get_logger().info("odd", subject="Grüße")
    stream.flush()
    assert b"Gr\\xfc" in stream.buffer.getvalue()


def test_a_value_cannot_forge_a_second_line_or_steer_the_terminal():
    configure("console", "info", stream := io.StringIO())
    logging.getLogger("aiohttp").warning("bad request\n2026-01-01 [info] all_is_well \x1b[2J")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


def test_redaction_never_raises():
    class Hostile:
        def __str__(self):
            raise RuntimeError("no")

    endless = {}
    endless["self"] = endless
    assert redacted(event="x", hostile=Hostile()) == {"event": "log_line_unreadable", "reason": "RuntimeError"}
    assert json.dumps(redacted(event="x", endless=endless, nan=float("nan")))
    assert redacted(event="x", nan=float("nan"))["nan"] == "nan"


def test_a_huge_text_is_cut_and_costs_no_time():
    started = time.process_time()
    line = redacted(event="x", body="a" * 1_000_000, other="a.%+" * 1_000_000)
    assert len(line["body"]) == LONGEST + 3
    assert time.process_time() - started < 2
