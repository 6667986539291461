# SPDX-License-Identifier: Apache-2.0
"""One file a provider: all that is known of it."""
