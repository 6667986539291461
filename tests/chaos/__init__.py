# SPDX-License-Identifier: Apache-2.0
"""Crash and network faults under load: what is acknowledged stays, nothing is sent twice, all comes back."""

import sys
from pathlib import Path

# As pytest has it, for `python -m tests.chaos`: what the tests share is found by its bare name.
sys.path.insert(0, str(Path(__file__).parent.parent))
