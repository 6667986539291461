# SPDX-License-Identifier: Apache-2.0
"""What we believe: the send log, the decision about each ambiguous send, and the programs around them."""
