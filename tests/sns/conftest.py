# SPDX-License-Identifier: Apache-2.0
"""A fake SNS, and no certificates that other tests fetched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sns_signer import FakeSNS

from webhooks import sns


@pytest.fixture(autouse=True)
def _no_certificates_from_other_tests() -> Iterator[None]:
    sns._fetched.clear()
    yield
    sns._fetched.clear()


@pytest.fixture(scope="module")
def aws() -> FakeSNS:
    return FakeSNS()
