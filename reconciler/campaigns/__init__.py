# SPDX-License-Identifier: Apache-2.0
"""Lists of recipients: read and loaded, with whom nobody writes to and how often one may be written to."""
