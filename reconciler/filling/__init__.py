# SPDX-License-Identifier: Apache-2.0
"""The ways by which events and past sends come in other than by the feed: back-fill, replay, import."""
