# SPDX-License-Identifier: Apache-2.0
"""The providers that there are, by name. Adding a provider is one line here, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from webhooks.provider import Provider
from webhooks.providers import mailgun, postmark, resend, sendgrid, ses

PROVIDERS: Final[Mapping[str, Provider]] = MappingProxyType(
    {
        "ses": ses.PROVIDER,
        "sendgrid": sendgrid.PROVIDER,
        "mailgun": mailgun.PROVIDER,
        "postmark": postmark.PROVIDER,
        "resend": resend.PROVIDER,
    }
)
"""Provider by its name in settings (`[feeds.<name>] provider = "..."`)."""
