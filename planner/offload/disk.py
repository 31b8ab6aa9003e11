"""Room on a disk: one file without a name, threads that copy, direct I/O where the file system has it.

The file has no name from the moment it is made (or loses it at once), so that nothing is left of it when the process
ends, however that is. Direct I/O goes past the page cache, which would take the memory that is to be saved.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import tempfile
import weakref
from collections import defaultdict, deque
from pathlib import Path

import torch

from planner.errors import OffloadError, gb, warn
from planner.offload.layout import rounded
from planner.offload.store import Frame, Wait
from planner.offload.threads import STAGING, Copy, Return, Transfer, Worker

_DIRECT, _NAMELESS = getattr(os, "O_DIRECT", 0), getattr(os, "O_TMPFILE", 0)
_IN_MEMORY = ("tmpfs", "ramfs")  # file systems
_NO_SUCH_FLAG = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)  # what file systems say of these
_warned: set[str] = set()


class Disk:
    """A store in a folder.

    Args:
        folder: where the file is made, when the first frame is opened.
        most: bytes that all frames together may take; None for what the file system has.
    """

    def __init__(self, folder: str, most: int | None = None) -> None:
        self.folder, self.most = folder, most
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._file: _File | None = None
        self._unused: dict[int, deque[int]] = defaultdict(deque)  # offsets, by size; closed extents return here
        self._writer, self._reader = Worker("offload: write"), Worker("offload: read")

    def open(self, nbytes: int) -> Frame:
        """A frame of so many bytes. Raises OffloadError where there is no room for it."""
        nbytes = rounded(nbytes)
        if self._process != os.getpid():  # forked: the file is that of the other process, and threads stay there
            self._begin()
        if self._file is None:
            self._file = _File(self.folder)
        unused = self._unused[nbytes]
        at = unused.popleft() if unused else self._file.grow(nbytes, self.most)
        return Frame(_DiskExtent(self._file, at, self._writer, self._reader, unused))


class _DiskExtent:
    def __init__(self, file: _File, start: int, writer: Worker, reader: Worker, unused: deque[int]) -> None:
        self._file, self._start, self._writer, self._reader = file, start, writer, reader
        self._unused = unused
        self._process = os.getpid()
        self._copies: list[tuple[Worker, Copy]] = []

    def out(self, x: torch.Tensor, at: int) -> Wait:
        return self._begin(self._writer, x, self._file.write, at)

    def back(self, x: torch.Tensor, at: int) -> Wait:
        return self._begin(self._reader, x, self._file.read, at)

    def _begin(self, worker: Worker, x: torch.Tensor, run: Transfer, at: int) -> Wait:
        self._refuse_fork()
        copy = Copy(x, run, self._start + at)
        worker.add(copy)
        self._copies.append((worker, copy))

        def wait() -> None:
            self._refuse_fork()
            copy.wait()

        return wait

    def _refuse_fork(self) -> None:
        if self._process != os.getpid():
            raise OffloadError(
                f"offload to {self._file.folder}: this process was forked (os.fork, a worker) between a forward pass "
                "and its backward pass, and what was offloaded is with the process before: run both in one process"
            )

    def close(self) -> None:
        """Called by the garbage collector, in any thread: waits for nothing, and takes no lock."""
        if self._process != os.getpid():
            return
        busy = {worker for worker, copy in self._copies if copy.cancel()}
        if not busy:
            self._unused.append(self._start)
        last = Return(self._unused, self._start, len(busy))
        for worker in busy:
            worker.add(last)


class _File:
    """The file: grows, and is read and written at offsets."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.size = 0
        self._fd, self._direct = _opened(folder)
        weakref.finalize(self, os.close, self._fd)

    def grow(self, nbytes: int, most: int | None) -> int:
        """Take room at the end. Returns its offset."""
        start = self.size
        if most is not None and start + nbytes > most:
            raise OffloadError(
                f"offload to {self.folder}: {gb(start + nbytes)} are needed there at once, and host_gb= allows "
                f"{gb(most)}: several forward passes wait for their backward pass, or calls of several shapes "
                "take room each. Give more host_gb, or run each backward pass before the next forward pass"
            )
        try:
            _allocate(self._fd, start, nbytes)
        except OSError as e:
            raise _refused(self.folder, f"taking {gb(nbytes)}", e) from e
        self.size += nbytes
        return start

    def write(self, address: int, nbytes: int, at: int, staging: memoryview) -> None:
        try:
            self._write(address, nbytes, at, staging)
        except OSError as e:
            raise _refused(self.folder, f"writing {gb(nbytes)}", e) from e

    def _write(self, address: int, nbytes: int, at: int, staging: memoryview) -> None:
        buffer = _address(staging)
        for start in range(0, nbytes, STAGING):
            size = min(STAGING, nbytes - start)
            ctypes.memmove(buffer, address + start, size)
            whole, done = rounded(size), 0
            while done < whole:
                try:
                    done += os.pwrite(self._fd, staging[done:whole], at + start + done)
                except OSError as e:
                    if not (self._direct and e.errno == errno.EINVAL):
                        raise
                    self._buffered()

    def read(self, address: int, nbytes: int, at: int, staging: memoryview) -> None:
        try:
            self._read(address, nbytes, at, staging)
        except OSError as e:
            raise _refused(self.folder, f"reading {gb(nbytes)}", e) from e

    def _read(self, address: int, nbytes: int, at: int, staging: memoryview) -> None:
        buffer = _address(staging)
        for start in range(0, nbytes, STAGING):
            size = min(STAGING, nbytes - start)
            whole, done = rounded(size), 0
            while done < whole:
                got = os.preadv(self._fd, [staging[done:whole]], at + start + done)
                if not got:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                done += got
            ctypes.memmove(address + start, buffer, size)

    def _buffered(self) -> None:
        """Go on without direct I/O."""
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_DIRECT)
        _say_buffered(self.folder)


def _address(staging: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(staging))


def _opened(folder: str) -> tuple[int, bool]:
    """A new file without a name in a folder, and whether its I/O is direct."""
    for flags in (_NAMELESS | _DIRECT, _NAMELESS, 0):
        try:
            if flags & _NAMELESS:
                fd = os.open(folder, os.O_RDWR | flags | os.O_CLOEXEC, 0o600)
            else:
                fd, path = tempfile.mkstemp(prefix="checkpoint-planner-", dir=folder)
                os.unlink(path)
        except OSError as e:
            if flags and e.errno in _NO_SUCH_FLAG and os.path.isdir(folder):
                continue
            raise _refused(folder, "making a file", e) from e
        direct = bool(flags & _DIRECT)
        if (kind := _file_system(fd)) in _IN_MEMORY:
            _say_once(folder, f"{folder} is in memory ({kind}): what is offloaded there takes what it saves")
        elif not direct:
            _say_buffered(folder)
        return fd, direct
    raise AssertionError("mkstemp returns or raises")


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, start + nbytes)


def _file_system(fd: int) -> str:
    """The type of the file system that a file is in, where Linux tells it; else nothing."""
    device = os.fstat(fd).st_dev
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    here = f"{os.major(device)}:{os.minor(device)}"
    return next((fields[fields.index("-") + 1] for fields in mounts if fields[2] == here), "")


def _say_buffered(folder: str) -> None:
    why = f"the file system of {folder} has no direct I/O: what is offloaded there goes through the page cache, "
    _say_once(folder, f"{why}which is not counted")


def _say_once(folder: str, why: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warn(f"{why}. Name a folder of another file system by offload_dir=")


def _refused(folder: str, what: str, e: OSError) -> OffloadError:
    advice = {
        errno.ENOSPC: "free room there, name another folder by offload_dir=, or plan with a larger budget_gb",
        errno.EFBIG: "the limit of file sizes is lower (ulimit -f): raise it, or plan with a larger budget_gb",
        errno.EDQUOT: "the quota is used up: name another folder by offload_dir=",
        errno.EACCES: "name a folder that can be written to by offload_dir=",
        errno.EPERM: "name a folder that can be written to by offload_dir=",
        errno.ENOENT: "make the folder, or name another by offload_dir=",
    }.get(e.errno or 0, "name another folder by offload_dir=")
    return OffloadError(f"offload to {folder}: {what} failed ({os.strerror(e.errno or 0)}): {advice}")
