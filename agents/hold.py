"""What one attempt has in hand: its claim, its job, and how far it has come. Shared by the steps of the attempt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpukeeper.agents.endings import SoFar
from gpukeeper.agents.room import HostRoom, Slot
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.agents.writer import HeldJob
from gpukeeper.capacity.need import Need
from gpukeeper.events import job as facts
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import ClaimBeat
from gpukeeper.projections.hostview import PendingRoute

_PARTIAL_CHARS_MAX = 8_192


class Hold:
    """One claim and its job. Its fields change only in the attempt that it belongs to."""

    def __init__(
        self, room: HostRoom, route: PendingRoute, slot: Slot, provider: Provider, more: Sequence[Slot] = ()
    ) -> None:
        self.room = room
        self.route = route
        self.slot = slot
        #: Slots of further devices, where the job takes several, and the claim of each that is taken.
        self.more = tuple(more)
        self.more_epochs: dict[str, int] = {}
        self.provider = provider
        self.job = HeldJob(room.recorder, route.job, route.job_seq)
        self.epoch = 0
        self.phase = "claiming"
        self.tokens = 0
        self.last_progress_at: str | None = None
        self.model = ""
        #: What the model takes, as it was admitted; None where nobody knows.
        self.need: Need | None = None
        self.load_s: float | None = None
        self.first_byte_s: float | None = None
        #: By the monotonic clock; None before the run.
        self.run_began_s: float | None = None

    @property
    def on_cpu(self) -> bool:
        return self.slot.device.kind == "cpu"

    async def append(self, fact: Fact) -> None:
        """Append to the job. Raises as :meth:`gpukeeper.agents.writer.HeldJob.append` does."""
        await self.job.append(fact, epoch=self.epoch)

    @property
    def claims(self) -> tuple[tuple[Slot, int], ...]:
        """Every slot that is taken, with its claim, in the order in which they were taken."""
        if not self.epoch:
            return ()
        others = ((slot, self.more_epochs[slot.device.id]) for slot in self.more if slot.device.id in self.more_epochs)
        return ((self.slot, self.epoch), *others)

    def beats(self) -> list[ClaimBeat]:
        """What heartbeats say about its claims; nothing before it has one."""
        return [
            ClaimBeat(
                job=self.route.job,
                device=slot.device.id,
                slot=slot.index,
                epoch=epoch,
                attempt=self.route.attempt,
                phase=self.phase,
                tokens=self.tokens,
                last_progress_at=self.last_progress_at,
            )
            for slot, epoch in self.claims
        ]

    def so_far(self) -> SoFar:
        """What the attempt has come to, for the fact that ends it."""
        run_s = None if self.run_began_s is None else round(time.monotonic() - self.run_began_s, 4)
        return SoFar(
            job=self.route.job,
            epoch=self.epoch,
            attempt=self.route.attempt,
            timings=facts.Timings(load_s=self.load_s, first_byte_s=self.first_byte_s, run_s=run_s),
            partial=self.room.outputs.text(self.route.job, self.route.attempt)[-_PARTIAL_CHARS_MAX:] or None,
        )

    def context(self) -> dict[str, object]:
        """For log lines."""
        return {
            "job": self.route.job,
            "device": self.slot.device.id,
            "epoch": self.epoch,
            "attempt": self.route.attempt,
        }
