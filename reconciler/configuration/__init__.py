# SPDX-License-Identifier: Apache-2.0
"""What may be configured: the tables of the settings file, where they are read from, and what is refused."""
