"""How much memory a job's model takes, and who says so. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

NeedSource = Literal["", "declared", "learned", "reported"]

#: On top of the measured peak, whichever is more: another load of the same model takes a little more or less.
MARGIN_PERCENT = 10
MARGIN_MIN_MB = 256


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Memory a job takes, in MB. A figure that nobody knows is None, never 0."""

    #: On each of its devices.
    vram_mb: int | None
    #: Who says so: the submission, the loads of before, or the runtime; empty where nobody does.
    source: NeedSource = ""
    #: Of the host's own memory, and on its disk: only ever as declared.
    ram_mb: int | None = None
    disk_mb: int | None = None

    @property
    def asks_host(self) -> bool:
        """Whether it needs anything of the host beside its devices."""
        return bool(self.ram_mb or self.disk_mb)


def with_margin(measured_mb: int) -> int:
    """What to count on for a model whose largest load took ``measured_mb``."""
    return measured_mb + max(MARGIN_MIN_MB, -(-measured_mb * MARGIN_PERCENT // 100))


def which_need(
    *,
    declared_mb: int | None,
    learned_mb: int | None = None,
    reported_mb: int | None = None,
    ram_mb: int | None = None,
    disk_mb: int | None = None,
) -> Need | None:
    """The need that counts: declared, else learned with its margin, else reported; None where nobody says anything.

    Args:
        declared_mb: ``need.vram_mb`` of the submission.
        learned_mb: :meth:`gpukeeper.projections.learned.Learned.peak_mb`, as measured.
        reported_mb: what the runtime says about the model.
        ram_mb: ``need.ram_mb`` of the submission.
        disk_mb: ``need.disk_mb`` of the submission.
    """
    vram_mb: int | None = None
    source: NeedSource = ""
    if declared_mb is not None:
        vram_mb, source = declared_mb, "declared"
    elif learned_mb is not None:
        vram_mb, source = with_margin(learned_mb), "learned"
    elif reported_mb is not None:
        vram_mb, source = reported_mb, "reported"
    if vram_mb is None and ram_mb is None and disk_mb is None:
        return None
    return Need(vram_mb=vram_mb, source=source, ram_mb=ram_mb, disk_mb=disk_mb)
