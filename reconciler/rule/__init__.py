# SPDX-License-Identifier: Apache-2.0
"""The rule of release, and what it rests on: what silence is worth, and how much may be released. Pure."""
