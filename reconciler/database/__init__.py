# SPDX-License-Identifier: Apache-2.0
"""The database itself: connection, schema, rights, and the embedded server."""
