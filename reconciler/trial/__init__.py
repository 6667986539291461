# SPDX-License-Identifier: Apache-2.0
"""The user's own crash matrix: puts the promises to the test in a schema of its own, with processes that are killed."""
