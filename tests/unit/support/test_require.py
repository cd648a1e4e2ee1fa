"""What the machine lacks is skipped at home and fails in CI."""

from __future__ import annotations

import pytest

from support.require import skip_or_fail


def test_at_home_the_test_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="no compiler"):
        skip_or_fail("no compiler")


def test_in_ci_the_test_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="no compiler"):
        skip_or_fail("no compiler")
