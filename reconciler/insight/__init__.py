# SPDX-License-Identifier: Apache-2.0
"""What people are shown of how it stands: status and findings, one send's story, reports, other rules over history.

And the daemon's watch, which looks for what went wrong and stops the releases of a feed.
"""
