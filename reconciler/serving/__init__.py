# SPDX-License-Identifier: Apache-2.0
"""The process that `reconciler serve` is: what runs in it, when, and how it is stopped, reloaded and watched."""
