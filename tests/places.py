# SPDX-License-Identifier: Apache-2.0
"""Where tests keep their clusters."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

PREFIX = "esp-reconciler-tests-"


def parent_folder() -> Path:
    """A folder in memory where there is one: a database there is about eight times as quick to copy."""
    memory = Path("/dev/shm")  # noqa: S108 - shared memory is meant
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
