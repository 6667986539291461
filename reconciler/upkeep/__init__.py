# SPDX-License-Identifier: Apache-2.0
"""What goes on beside the sends: what is over is pruned, who asks is forgotten, endpoints are looked after."""
