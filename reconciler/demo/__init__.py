# SPDX-License-Identifier: Apache-2.0
"""`reconciler demo`: the same messages sent three ways over the same faults, and what their recipients really got.

Everything but the provider is the product itself: the guard, the receiver, the passes, an embedded PostgreSQL. The
provider is the one of `reconciler.breakable`, on loopback, and what the demo says of duplicates and losses is what that
one counted.
"""
