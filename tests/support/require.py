"""What a test needs of the machine: missing at home it is skipped with the reason, missing in CI it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, saying why; with ``CI=true`` fail it, so that nothing is left untested unnoticed."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI must have it)", pytrace=False)
    pytest.skip(reason)
