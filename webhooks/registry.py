# SPDX-License-Identifier: Apache-2.0
"""The providers that there are, by name. Adding a provider is one line here, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from webhooks.provider import Provider
from webhooks.providers import (
    azure_acs,
    brevo,
    customerio,
    elastic_email,
    loops,
    mailersend,
    mailgun,
    mailjet,
    mailtrap,
    mandrill,
    postal,
    postmark,
    resend,
    scaleway,
    sendgrid,
    ses,
    smtp2go,
    sparkpost,
)

PROVIDERS: Final[Mapping[str, Provider]] = MappingProxyType(
    {
        "ses": ses.PROVIDER,
        "sendgrid": sendgrid.PROVIDER,
        "mailgun": mailgun.PROVIDER,
        "postmark": postmark.PROVIDER,
        "resend": resend.PROVIDER,
        "brevo": brevo.PROVIDER,
        "mailjet": mailjet.PROVIDER,
        "sparkpost": sparkpost.PROVIDER,
        "mandrill": mandrill.PROVIDER,
        "mailersend": mailersend.PROVIDER,
        "mailtrap": mailtrap.PROVIDER,
        "scaleway": scaleway.PROVIDER,
        "postal": postal.PROVIDER,
        "smtp2go": smtp2go.PROVIDER,
        "azure_acs": azure_acs.PROVIDER,
        "elastic_email": elastic_email.PROVIDER,
        "customerio": customerio.PROVIDER,
        "loops": loops.PROVIDER,
    }
)
"""Provider by its name in settings (`[feeds.<name>] provider = "..."`)."""
