# SPDX-License-Identifier: Apache-2.0
"""What the guards of senders have in common. Applications import `reconciler.guard` and its siblings instead."""
