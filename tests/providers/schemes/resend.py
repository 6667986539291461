# SPDX-License-Identifier: Apache-2.0
"""How Resend signs."""

from __future__ import annotations

from scheme import SVIX_HEADERS, SVIX_KEYS, Scheme, standard_webhook

SCHEME = Scheme(SVIX_KEYS, standard_webhook, headers=SVIX_HEADERS)
