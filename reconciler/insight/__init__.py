# SPDX-License-Identifier: Apache-2.0
"""What people are shown of how it stands: status and findings, one send's story, reports, other rules over history."""
