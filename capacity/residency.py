"""What becomes of a model after a job: it stays for a while, goes at once, or stays for good. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpukeeper.events.spec import Residency

#: For ever, and at once, in the words of Ollama's ``keep_alive``.
FOR_EVER_S = -1
AT_ONCE_S = 0


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """The policy for the model of one job."""

    policy: Residency
    #: Who decided: an operator's pin, the job, or the runtime's registry entry.
    source: Literal["pin", "job", "runtime"]
    #: What a run must send to a runtime that unloads by itself, in seconds: 0 unloads after it, -1 never.
    keep_alive_s: int

    @property
    def unloads(self) -> bool:
        """Whether a runtime that does not unload by itself must be asked to, once the job has ended."""
        return self.policy == "unload"


def stay_of(*, job: Residency | None, runtime: Residency, keep_alive_s: int, pinned: bool) -> Stay:
    """The policy for one job's model.

    Args:
        job: what the job asks for; None where it does not say.
        runtime: what holds on this runtime for jobs that do not say.
        keep_alive_s: how long a model stays there with ``keep``, in seconds; -1 for ever.
        pinned: an operator pinned the model, or all that the runtime holds. That wins over everything.
    """
    if pinned:
        return Stay(policy="pin", source="pin", keep_alive_s=FOR_EVER_S)
    policy = runtime if job is None else job
    source: Literal["job", "runtime"] = "runtime" if job is None else "job"
    match policy:
        case "pin":
            return Stay(policy=policy, source=source, keep_alive_s=FOR_EVER_S)
        case "unload":
            return Stay(policy=policy, source=source, keep_alive_s=AT_ONCE_S)
        case "keep":
            return Stay(policy=policy, source=source, keep_alive_s=keep_alive_s)
