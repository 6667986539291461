# SPDX-License-Identifier: Apache-2.0
"""Measures the receiver and the pass against limits taken in the same run. `python -m benchmarks --help`."""
