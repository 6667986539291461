# SPDX-License-Identifier: Apache-2.0
"""What django-anymail reads in a delivery: an independent reading to compare ours with. It checks no signature here."""

from __future__ import annotations

import importlib
import json
import warnings
from typing import Any

from django.conf import settings  # type: ignore[import-untyped]
from django.test import RequestFactory  # type: ignore[import-untyped]

from webhooks.provider import Delivery

VIEWS = {
    "ses": ("amazon_ses", "AmazonSESTrackingWebhookView"),
    "sendgrid": ("sendgrid", "SendGridTrackingWebhookView"),
    "mailgun": ("mailgun", "MailgunTrackingWebhookView"),
    "postmark": ("postmark", "PostmarkTrackingWebhookView"),
    "resend": ("resend", "ResendTrackingWebhookView"),
    "brevo": ("brevo", "BrevoTrackingWebhookView"),
    "mailjet": ("mailjet", "MailjetTrackingWebhookView"),
    "sparkpost": ("sparkpost", "SparkPostTrackingWebhookView"),
    "mandrill": ("mandrill", "MandrillCombinedWebhookView"),
    "mailersend": ("mailersend", "MailerSendTrackingWebhookView"),
    "mailtrap": ("mailtrap", "MailtrapTrackingWebhookView"),
    "postal": ("postal", "PostalTrackingWebhookView"),
}


def anymail_events(esp: str, delivery: Delivery) -> list[Any]:
    """Return anymail's tracking events of one delivery, in its order; `esp` is our name of the provider.

    Each has `event_type`, `message_id`, `recipient`, `timestamp`, `event_id`, `metadata`. What anymail raises for a
    delivery that it can't read is passed on. A bare SES record is wrapped into an SNS notification first.
    """
    view = _view(esp)
    request = RequestFactory().generic(
        delivery.method,
        "/",
        _enveloped(delivery.body) if esp == "ses" else delivery.body,
        content_type=delivery.headers.get("content-type", "application/json"),
        headers={name: value for name, value in delivery.headers.items() if not name.startswith("content-")},
        query_string=delivery.query,
    )
    return list(view.parse_events(request))


def _view(esp: str) -> Any:
    if not settings.configured:
        settings.configure(
            DEFAULT_CHARSET="utf-8",
            SECRET_KEY="for tests",
            USE_TZ=True,
            ANYMAIL={
                "WEBHOOK_SECRET": "user:password",
                "MAILGUN_WEBHOOK_SIGNING_KEY": "key",
                "MANDRILL_WEBHOOK_KEY": "key",
                "MAILERSEND_SIGNING_SECRET": "key",
                "POSTAL_WEBHOOK_KEY": "key",
            },
        )
    module, name = VIEWS[esp]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it supports SendGrid no longer
        view_class = getattr(importlib.import_module(f"anymail.webhooks.{module}"), name)
        view_class.as_view()  # declares the attributes that the constructor reads
        return view_class()


def _enveloped(body: bytes) -> bytes:
    value = json.loads(body)
    if "Type" in value:
        return body
    return json.dumps({"Type": "Notification", "MessageId": "m", "Message": body.decode()}).encode()
