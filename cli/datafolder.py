"""The data folder: where it is, who may read it, and who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import platformdirs

from gpukeeper.events.errors import GpukeeperError

LOCK_NAME = "up.lock"
_HOLDER_BYTES_MAX = 65_536


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a data folder."""

    pid: int
    host: str
    #: RFC 3339, UTC.
    started_at: str
    command: str


class FolderHeld(GpukeeperError):
    """Another process holds the data folder.

    Fields: ``folder``, ``holder`` (a :class:`Holder`, or None where it did not say).
    """

    code = "folder_held"


class FolderUnusable(GpukeeperError):
    """The data folder cannot be used."""

    code = "folder_unusable"


def data_folder(given: Path | None, environ: Mapping[str, str]) -> Path:
    """The absolute path of the data folder: ``given``, else ``$GPUQ_DATA``, else the user's."""
    if given is None:
        given = Path(environ["GPUQ_DATA"]) if environ.get("GPUQ_DATA") else None
    return (given or platformdirs.user_data_path("gpukeeper")).expanduser().absolute()


def make_private(folder: Path) -> None:
    """Make ``folder`` where it is missing, and let only its owner in (mode 0700).

    Raises:
        FolderUnusable: it belongs to somebody else, or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid != os.geteuid():
            raise FolderUnusable(f"{folder} belongs to user {state.st_uid}, not to you", folder=str(folder))
        if stat.S_IMODE(state.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise FolderUnusable(f"{folder}: {error.strerror}", folder=str(folder)) from error


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads (mode 0600), whole or not at all, and durably.

    Raises:
        FolderUnusable: it cannot be written, as where the disk is full.
    """
    draft = path.with_name(path.name + ".new")
    with _in_words(path):
        draft.unlink(missing_ok=True)  # left behind by a crash, perhaps with another mode
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)


@contextmanager
def _in_words(path: Path) -> Generator[None]:
    """Let what the system refuses be said as :class:`FolderUnusable`."""
    try:
        yield
    except OSError as error:
        raise FolderUnusable(f"{path} cannot be written: {error.strerror}", folder=str(path.parent)) from error


@contextmanager
def hold(folder: Path, *, command: str) -> Generator[None]:
    """Hold ``folder`` (made private) alone while the context lasts; the kernel frees it on any death.

    Raises:
        FolderHeld: names the process that has it.
        FolderUnusable: it belongs to somebody else, or cannot be made or written, or its file system has no locks.
    """
    make_private(folder)
    with _in_words(folder / LOCK_NAME):
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, folder)
        holder = Holder(
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
        )
        with _in_words(folder / LOCK_NAME):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(holder), 0)
        yield
        # The file stays: removing it would let two processes lock two files of the same name.
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise FolderUnusable(f"{folder} cannot be locked: {error.strerror}", folder=str(folder)) from error
        holder = read_holder(folder)
        who = "another process"
        if holder is not None:
            who = f"process {holder.pid} on {holder.host} since {holder.started_at} ({holder.command})"
        raise FolderHeld(f"{folder} is held by {who}", folder=str(folder), holder=holder) from error


def read_holder(folder: Path) -> Holder | None:
    """Who said last that it holds ``folder``; None where nobody did, or it has not finished saying so.

    For display only: a holder that was killed has let go without taking its name back.
    """
    try:
        with (folder / LOCK_NAME).open("rb") as file:
            return msgspec.json.decode(file.read(_HOLDER_BYTES_MAX), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
