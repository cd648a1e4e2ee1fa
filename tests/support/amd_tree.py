"""A made-up ``/sys/class/drm`` with AMD GPUs in it."""

from __future__ import annotations

import shutil
from pathlib import Path

MB = 1 << 20
#: What the driver of a card with memory of its own offers beside its figures, and an integrated part lacks.
DISCRETE = {"mem_busy_percent": 3}


class AmdTree:
    """Cards under ``drm``. A file is given as its text or number; None leaves it out."""

    def __init__(self, folder: Path) -> None:
        self.drm = folder / "drm"
        self.drm.mkdir()
        #: Beside every real card there are its connectors and render nodes.
        for name in ("card0-DP-1", "renderD128", "version"):
            (self.drm / name).mkdir()

    def card(self, number: int, *, unique_id: str | None = None, **files: object) -> Path:
        """A Radeon with 24 GB at ``0000:0<number+3>:00.0``; ``files`` stand above what it has by itself."""
        device = self.drm / f"card{number}" / "device"
        device.mkdir(parents=True)
        told: dict[str, object] = {
            "vendor": "0x1002",
            "device": "0x744c",
            "uevent": f"DRIVER=amdgpu\nPCI_CLASS=30000\nPCI_SLOT_NAME=0000:{number + 3:02x}:00.0",
            "unique_id": unique_id,
            "mem_info_vram_total": 24560 * MB,
            "mem_info_vram_used": 1000 * MB,
            "mem_info_gtt_total": 32000 * MB,
            "mem_info_gtt_used": 20 * MB,
            "gpu_busy_percent": 37,
            **DISCRETE,
            **files,
        }
        for name, value in told.items():
            self.set(number, name, value)
        return device

    def integrated(self, number: int, *, unique_id: str | None = None, **files: object) -> Path:
        """A processor's part: 512 MB carved out, and up to 16000 MB of the host's."""
        own: dict[str, object] = {
            "mem_info_vram_total": 512 * MB,
            "mem_info_vram_used": 200 * MB,
            "mem_info_gtt_total": 16000 * MB,
            "mem_info_gtt_used": 1000 * MB,
            "mem_busy_percent": None,
        }
        return self.card(number, unique_id=unique_id, **{**own, **files})

    def set(self, number: int, name: str, value: object) -> None:
        """Write one file of a card, or take it away."""
        path = self.drm / f"card{number}" / "device" / name
        path.unlink(missing_ok=True)
        if value is not None:
            path.write_text(f"{value}\n")

    def unplug(self, number: int) -> None:
        shutil.rmtree(self.drm / f"card{number}")
