# SPDX-License-Identifier: Apache-2.0
"""Tools that try out a provider, a sender or a running receiver from outside."""
