# SPDX-License-Identifier: Apache-2.0
"""What e-mail providers say: bytes in, rows of `provider_event` out. Knows nothing of what we believe."""
