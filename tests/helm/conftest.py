# SPDX-License-Identifier: Apache-2.0
"""Helm itself, as a library of its own SDK; where there is no build of it these tests are skipped, and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helm_kit import Chart


@pytest.fixture(scope="session")
def chart() -> Iterator[Chart]:
    loaded = Chart(pytest.importorskip("helm_python", reason="helm-python-sdk is not installed"))
    yield loaded
    loaded.close()
