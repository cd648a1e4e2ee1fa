"""Settings that a submission leaves beside its body in the object store still hold."""

from __future__ import annotations

from gpukeeper.agents.body import with_settings
from gpukeeper.events.spec import JobSpec
from gpukeeper.events.work import ObjectRef, Work

REF = ObjectRef(object="o", size=1, digest="d")


def test_what_only_the_submission_says_is_added_and_what_the_body_says_stays() -> None:
    spec = JobSpec(model="m", body=REF, task="generate", max_tokens=5, temperature=0.5, stop=["."])

    assert with_settings(Work(prompt="p", max_tokens=9), spec) == Work(
        prompt="p", max_tokens=9, temperature=0.5, stop=["."]
    )


def test_a_body_that_says_everything_is_left_as_it_is() -> None:
    work = Work(prompt="p", seed=1)

    assert with_settings(work, JobSpec(model="m", body=REF, task="generate")) == work
