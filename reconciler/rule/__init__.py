# SPDX-License-Identifier: Apache-2.0
"""The rule of release, what it rests on (what silence is worth, how much may be released), and its words. Pure."""
