"""What stands on the PCI bus, driver or not."""

from __future__ import annotations

from pathlib import Path

SYS_PCI = Path("/sys/bus/pci/devices")


def has_nvidia_hardware(pci: Path = SYS_PCI) -> bool:
    """Whether the machine has an NVIDIA display or 3D controller, driver or not. False where that is not told."""
    for folder in pci.glob("*"):
        try:
            vendor, device_class = ((folder / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:  # unplugged since it was listed
            continue
        if vendor == "0x10de" and device_class.startswith(("0x0300", "0x0302")):
            return True
    return False
