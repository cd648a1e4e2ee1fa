"""What one AMD GPU is and what it measures, read from sysfs in the thread of that GPU's lane.

Which memory counts, first match wins:

1. The part is *integrated* and the host lends it more (GTT) than was carved out for it (VRAM): the kernel puts what
   programs ask for into the larger pool, so GTT is the capacity, and what is free is also bounded by what the host has
   available. The smaller pool is left out of the count: too careful, never too generous.
2. Otherwise VRAM.

*Integrated* needs positive evidence, as GTT is also there for cards with memory of their own: the driver offers
``gpu_busy_percent`` but neither ``mem_busy_percent`` nor ``pcie_bw``, which it leaves out for integrated parts only.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpukeeper.agents.devices.hostmemory import MeminfoUnreadable, read_meminfo
from gpukeeper.capacity.device import Device
from gpukeeper.events.errors import GpukeeperError
from gpukeeper.events.readings import DeviceReading, DeviceState

SYS_DRM = Path("/sys/class/drm")
NO_FIGURES = "its driver gives no memory figures: its capacity is unknown, and unknown is never free"

_AMD = "0x1002"
_CARD = re.compile(r"card(\d+)")
_UNIQUE_ID = re.compile(r"(?:0x)?([0-9a-fA-F]{1,32})")
_PCI_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_BYTES_PER_MB = 1 << 20
#: No part has this much; a figure beyond it is nonsense, not capacity.
_BYTES_MAX = 1 << 50
#: A file of sysfs is one page at most.
_FILE_BYTES_MAX = 4096
#: Of the largest number that the kernel writes.
_DIGITS_MAX = 20
#: The file or its folder is not there.
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
#: The file is still there, and the device behind it is not.
_UNPLUGGED = frozenset({errno.ENODEV, errno.ENXIO})


class CardUnreadable(GpukeeperError):
    """A GPU cannot be identified or measured. ``number`` is the system's error, where it was one."""

    code = "card_unreadable"

    def __init__(self, message: str, *, number: int | None = None) -> None:
        super().__init__(message, number=number)
        self.number = number


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that the kernel listed, and where to find it again."""

    device: Device
    #: Such as ``card0``: the kernel's name for it at the time it was found.
    folder: str
    integrated: bool = False
    #: The id by its place on the bus, for when another card claims the same ``unique_id``.
    place_id: str | None = None


class _Pool(NamedTuple):
    """Bytes."""

    total: int
    used: int
    #: It is the host's memory.
    unified: bool = False


def card_folders(drm: Path) -> list[str]:
    """The folders that stand for whole GPUs, of any vendor, in the kernel's order. None where there are no GPUs.

    Raises:
        CardUnreadable: the list exists and cannot be read.
    """
    try:
        names = [entry.name for entry in drm.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CardUnreadable(f"{drm}: {error.strerror or error}") from error
    # Connectors (card0-DP-1) and render nodes stand beside them.
    numbered = [(int(match[1]), name) for name in names if (match := _CARD.fullmatch(name)) is not None]
    return [name for _, name in sorted(numbered)]


def probe(drm: Path, folder: str) -> Card | None:
    """The AMD GPU in ``folder``; None where it is somebody else's.

    Raises:
        CardUnreadable: it cannot be identified.
    """
    base = drm / folder / "device"
    try:
        vendor = _text(base / "vendor")
    except CardUnreadable as error:
        if error.number in _MISSING:
            return None  # a virtual display, which has no vendor
        raise
    if vendor.lower() != _AMD:
        return None
    by_chip = _chip_in(_text_or_none(base / "unique_id") or "")
    by_place = _place_in(_text_or_none(base / "uevent") or "")
    device_id = by_chip or by_place
    if device_id is None:
        raise CardUnreadable(f"{folder}: an AMD GPU without a unique_id or a PCI address has no identity")
    integrated = _is_integrated(base)
    device = Device(
        id=device_id,
        kind="gpu",
        name=_name(base),
        index=int(folder.removeprefix("card")),
        unschedulable=None if (base / "mem_info_vram_total").exists() else NO_FIGURES,
    )
    return Card(device=device, folder=folder, integrated=integrated, place_id=by_place)


def measure(drm: Path, card: Card, *, read_at: str, meminfo: Path) -> DeviceReading:
    """Read one GPU. Whatever fails is said in the reading."""

    def failed(state: DeviceState, error: str) -> DeviceReading:
        return DeviceReading(device=card.device.id, source="amdgpu", read_at=read_at, state=state, error=error)

    base = drm / card.folder / "device"
    try:
        if not _is_still(base, card):
            return failed("lost", f"{card.folder} of the kernel no longer is {card.device.id}")
        memory = _memory(base, card, meminfo)
    except CardUnreadable as error:
        # A single file that is not there is a gap in the driver; where all are missing, so is the GPU.
        gone = error.number in _UNPLUGGED or (error.number in _MISSING and not (base / "vendor").exists())
        return failed("lost" if gone else "unknown", error.message)
    except MeminfoUnreadable as error:
        return failed("unknown", error.message)
    # Rounded so that no figure promises more than there is.
    total_mb, used_mb = memory.total // _BYTES_PER_MB, -(-memory.used // _BYTES_PER_MB)
    return DeviceReading(
        device=card.device.id,
        source="amdgpu",
        read_at=read_at,
        total_mb=total_mb,
        used_mb=min(used_mb, total_mb),
        free_mb=max(total_mb - used_mb, 0),
        unified=memory.unified,
        utilization_percent=_busy_percent(base),
    )


def _memory(base: Path, card: Card, meminfo: Path) -> _Pool:
    """The pool that models go to."""
    vram = _pool(base, "vram")
    if card.integrated:
        gtt = _pool(base, "gtt")
        if gtt.total > vram.total:
            available = read_meminfo(meminfo).available_mb * _BYTES_PER_MB
            return _Pool(gtt.total, max(gtt.used, gtt.total - available), unified=True)
    if vram.total == 0:
        raise CardUnreadable("0 bytes of VRAM cannot be")
    return vram


def _pool(base: Path, name: str) -> _Pool:
    total, used = (_number(base / f"mem_info_{name}_{what}") for what in ("total", "used"))
    if not 0 <= used <= total <= _BYTES_MAX:
        raise CardUnreadable(f"{used} bytes of {name.upper()} used of {total} cannot be")
    return _Pool(total, used)


def _busy_percent(base: Path) -> int | None:
    """None where the driver does not tell: a part that sleeps, or resets, refuses the question."""
    try:
        percent = _number(base / "gpu_busy_percent")
    except CardUnreadable:
        return None
    return percent if 0 <= percent <= 100 else None


def _is_still(base: Path, card: Card) -> bool:
    """Whether the folder still stands for this GPU: after a change, a number may mean another one."""
    if card.device.id == card.place_id:
        return _place_in(_text(base / "uevent")) == card.place_id
    return _chip_in(_text(base / "unique_id")) == card.device.id


def _is_integrated(base: Path) -> bool:
    return (base / "gpu_busy_percent").exists() and not any(
        (base / name).exists() for name in ("mem_busy_percent", "pcie_bw")
    )


def _chip_in(unique_id: str) -> str | None:
    """By what the chip says of itself; kept when the card moves to another slot."""
    match = _UNIQUE_ID.fullmatch(unique_id)
    if match is None or int(match[1], 16) == 0:
        return None
    return f"AMD-{match[1].lower()}"


def _place_in(uevent: str) -> str | None:
    """By its place on the PCI bus."""
    for line in uevent.splitlines():
        name, _, address = line.partition("=")
        if name == "PCI_SLOT_NAME" and _PCI_ADDRESS.fullmatch(address):
            return "AMD-" + address.lower().replace(":", "-").replace(".", "-")
    return None


def _name(base: Path) -> str:
    product = _text_or_none(base / "product_name")
    if product:
        return product
    model = _text_or_none(base / "device")
    return f"AMD GPU {model}" if model else "AMD GPU"


def _number(path: Path) -> int:
    text = _text(path)
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise CardUnreadable(f"{path}: {text[:40]!r} is not a number")
    return int(text)


def _text_or_none(path: Path) -> str | None:
    try:
        return _text(path)
    except CardUnreadable:
        return None


def _text(path: Path) -> str:
    """What the file says, without the line's end. Blocks as long as the driver does: for a lane."""
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES_MAX).decode("utf-8", errors="replace").strip()
    except OSError as error:
        raise CardUnreadable(f"{path}: {error.strerror or error}", number=error.errno) from error
