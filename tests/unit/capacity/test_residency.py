from __future__ import annotations

import pytest

from gpukeeper.capacity.residency import Stay, stay_of
from gpukeeper.events.spec import Residency


@pytest.mark.parametrize(
    ("job", "runtime", "policy", "source", "keep_alive_s"),
    [
        (None, "keep", "keep", "runtime", 300),
        (None, "unload", "unload", "runtime", 0),
        (None, "pin", "pin", "runtime", -1),
        ("keep", "unload", "keep", "job", 300),
        ("keep", "pin", "keep", "job", 300),
        ("unload", "keep", "unload", "job", 0),
        ("unload", "pin", "unload", "job", 0),
        ("pin", "unload", "pin", "job", -1),
    ],
)
def test_a_jobs_policy_goes_before_its_runtimes(
    job: Residency | None, runtime: Residency, policy: Residency, source: str, keep_alive_s: int
) -> None:
    stay = stay_of(job=job, runtime=runtime, keep_alive_s=300, pinned=False)

    assert (stay.policy, stay.source, stay.keep_alive_s) == (policy, source, keep_alive_s)
    assert stay.unloads == (policy == "unload")


@pytest.mark.parametrize("job", [None, "keep", "unload", "pin"])
@pytest.mark.parametrize("runtime", ["keep", "unload", "pin"])
def test_c58_a_pin_wins_over_every_policy_and_is_never_unloaded(job: Residency | None, runtime: Residency) -> None:
    stay = stay_of(job=job, runtime=runtime, keep_alive_s=0, pinned=True)

    assert stay == Stay(policy="pin", source="pin", keep_alive_s=-1)
    assert not stay.unloads


@pytest.mark.parametrize("keep_alive_s", [-1, 0, 1, 3600])
def test_what_stays_stays_as_long_as_the_registry_says(keep_alive_s: int) -> None:
    assert stay_of(job="keep", runtime="unload", keep_alive_s=keep_alive_s, pinned=False).keep_alive_s == keep_alive_s
