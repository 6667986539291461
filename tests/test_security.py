# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md says is shown by a test is shown by one that exists."""

from __future__ import annotations

import re

from serving import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_each_test_that_the_threat_model_names_exists() -> None:
    named = NAMED.findall((ROOT / "SECURITY.md").read_text())
    missing = [
        f"{file}::{test}" for file, test in named if not re.search(rf"\bdef {test}\(", (ROOT / file).read_text())
    ]
    assert missing == []
    assert len(named) > 30
