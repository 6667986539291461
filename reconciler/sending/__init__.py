# SPDX-License-Identifier: Apache-2.0
"""What lies below `guard` and its siblings, which applications import: claims, answers, traces, idempotency."""
