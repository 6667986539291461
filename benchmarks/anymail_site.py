# SPDX-License-Identifier: Apache-2.0
"""A site as (j) compares with: django-anymail reads and verifies posts, a handler of its signal stores each event.

Everything is as quick as Django lets it be: no middleware, connections that stay, statements that are planned once, and
a table with nothing but its key. gunicorn runs `benchmarks.anymail_site:application`; ANYMAIL_SITE_DSN is the database.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import django  # type: ignore[import-untyped]
from django.conf import settings  # type: ignore[import-untyped]

from benchmarks.payloads import SECRET, feeds

View = Callable[[object], Any]

INSERT: Final = """
INSERT INTO tracking_event (esp, message_id, event_id, send_key, kind, occurred_at, recipient, reason, raw)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""


def _database(dsn: str) -> dict[str, Any]:
    parts = urlsplit(dsn)
    place = parse_qs(parts.query)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.removeprefix("/"),
        "USER": parts.username,
        "HOST": place["host"][0],
        "PORT": place["port"][0],
        "CONN_MAX_AGE": None,
        "OPTIONS": {"server_side_binding": True, "prepare_threshold": 0},
    }


settings.configure(
    ALLOWED_HOSTS=["127.0.0.1"],
    ANYMAIL={
        "MAILGUN_WEBHOOK_SIGNING_KEY": SECRET,
        "SENDGRID_TRACKING_WEBHOOK_VERIFICATION_KEY": feeds(Path())["sendgrid"].secrets[0],
    },
    DATABASES={"default": _database(os.environ["ANYMAIL_SITE_DSN"])},
    DEBUG=False,
    LOGGING_CONFIG=None,
    MIDDLEWARE=[],
    ROOT_URLCONF=__name__,
    SECRET_KEY="signs nothing",  # noqa: S106 - it does
    USE_I18N=False,
    USE_TZ=True,
)
django.setup(set_prefix=False)

from anymail.signals import tracking  # noqa: E402 - these want settings
from anymail.webhooks.mailgun import MailgunTrackingWebhookView  # noqa: E402 - same
from anymail.webhooks.sendgrid import SendGridTrackingWebhookView  # noqa: E402 - same
from django.core.wsgi import get_wsgi_application  # type: ignore[import-untyped]  # noqa: E402 - same
from django.db import connection, transaction  # type: ignore[import-untyped]  # noqa: E402 - same
from django.urls import path  # type: ignore[import-untyped]  # noqa: E402 - same

warnings.simplefilter("ignore")  # at each post it would warn that it supports SendGrid no longer


def store(sender: type, event: Any, esp_name: str, **_: object) -> None:  # noqa: ARG001 - the shape of a receiver
    """Store one event."""
    row = (
        *(esp_name, event.message_id or "", event.event_id, event.metadata.get("send_key"), event.event_type),
        *(event.timestamp, event.recipient, event.description, json.dumps(event.esp_event)),
    )
    with connection.cursor() as cursor:
        cursor.execute(INSERT, row)


def measured(view: View) -> View:
    """Say how long the answer is, as Django's CommonMiddleware would: else gunicorn sends it in chunks."""

    def answer(request: object) -> Any:
        response = view(request)
        response.headers["Content-Length"] = "0"
        return response

    return answer


tracking.connect(store)
urlpatterns = [
    path("mailgun", measured(MailgunTrackingWebhookView.as_view())),
    # One commit for a batch: many times as quick as one for each event. A single event commits by itself.
    path("sendgrid", measured(transaction.atomic(SendGridTrackingWebhookView.as_view()))),
]
application = get_wsgi_application()
