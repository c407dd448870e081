"""One segment as two sealed memory files mapped into this process, and the word that says the daemon lives.

A segment is a control file (version, and a lock and a sequence word for each chunk) and a payload file.
Every process that uses it maps both; the operations are native calls on the mapping. Nothing read from a
mapping is used as address, length, index or bound.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from collections.abc import Callable
from typing import Any

from smb import _native
from smb.errors import OutOfMemory, ProtocolError, RangeError, TypeMismatch

CHUNK_BYTES = 256 * 1024
"""Bytes of a segment under one lock."""

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x0010  # F_SEAL_FUTURE_WRITE, not in the fcntl module
_HEAD_BYTES = 4096  # of the control file, before the chunks' words
_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL, Linux 6.3; older kernels refuse the flag


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises TypeMismatch for a type that segments don't hold."""
    if dtype not in _native.DTYPES:
        raise TypeMismatch(f"a segment holds no {dtype!r} (known: {', '.join(_native.DTYPES)})")
    return 1 if dtype == "bool" else int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


class Life:
    """Whether a daemon's process lives: one word, marked by the kernel when the process ends.

    The daemon creates it and passes ``fd``; clients attach and ask ``alive``, which is a load.
    Close it in the daemon on a clean end. Closing twice is fine.
    """

    def __init__(self, native: _native.Life, fd: int) -> None:
        self._native = native
        self._fd = fd

    @classmethod
    def create(cls) -> Life:
        """The daemon's side; starts a sleeping thread whose death, with the process, marks the word."""
        fd = _memory_file("smb-life", mmap.PAGESIZE)
        try:
            native = _native.Life(fd, keep=True)
            # Sealed only now: our own mapping stays writable, no client can make one.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        return cls(native, fd)

    @classmethod
    def attach(cls, fd: int) -> Life:
        """The client's side of a daemon's word; ``fd`` stays the caller's. Raises ProtocolError."""
        _check_file(fd, mmap.PAGESIZE, "life word")
        own = os.dup(fd)
        try:
            return cls(_native.Life(own, keep=False), own)
        except BaseException:
            os.close(own)
            raise

    @property
    def fd(self) -> int:
        """The memory file to pass to clients; -1 once closed."""
        return self._fd

    @property
    def alive(self) -> bool:
        return self._native.alive

    @property
    def native(self) -> _native.Life:
        return self._native

    def close(self) -> None:
        self._native.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Mapping(_native.Mapping):
    """One segment mapped in this process. Any thread may call any method; operations release the GIL.

    read(out, offset=0, threads=1) -> None        never torn inside a chunk; chunks may differ in age
    write(array, offset=0, threads=1) -> int      these three return the version after them
    accumulate(source, scale=1.0, offset=0, threads=1) -> int     source: an array or another Mapping
    exchange(local, alpha, offset=0, threads=1) -> int            local changes in place
    combine(how, scalar, source, offset, count, counts=True, threads=1) -> int    scale, fill, copy, axpy
    reduce(how, other=None, threads=1) -> float                   dot, sum, in float64

    The first four take stripe=0, stripes=1 too: with more, this is one stripe of a larger segment, and they
    do what lies here (smb/pieces.py); count_update() counts once all stripes are done.

    Arrays are C-contiguous buffers (numpy) or CPU torch tensors of the segment's dtype; offsets and lengths
    count elements. accumulate and exchange need float32 and refuse NaN and Inf: they stop before the first
    chunk that has one; earlier chunks stand, it and later ones are untouched.

    Raises RangeError, TypeMismatch, NonFinite, NotPermitted, Closed, RequestError (same memory on both sides,
    alpha outside (0, 1]); TransportError when the daemon is dead or dies meanwhile, or when ``patience``
    ended with part of the chunks done; WaitTimeout when it ended with none done.

    on_stuck(chunk, tid, seconds)   called about each second while a living thread keeps a lock that an
                                    operation here waits for; what it raises ends the operation
    on_torn(chunk)                  called every 10 ms while a read-only reader finds a chunk which a writer
                                    left half-done as it died; should have the daemon repair() it
    on_dead()                       called when an operation finds the daemon dead, before it does anything;
                                    should have follow() or replace() called, or raise. An operation that has
                                    begun then ends in its own memory whatever becomes of the daemon
    patience                        seconds without progress after which an operation gives up
    """

    on_stuck: Callable[[int, int, float], None] | None = None
    on_torn: Callable[[int], None] | None = None
    on_dead: Callable[[], None] | None = None
    patience: float = 60.0

    def __init__(
        self, control_fd: int, payload_fd: int, count: int, dtype: str, *, readonly: bool, life: Life | None
    ) -> None:
        super().__init__(control_fd, payload_fd, count, dtype, readonly, life.native if life else None)
        self._control_fd = control_fd
        self._payload_fd = payload_fd
        self.readonly = readonly
        self.nbytes = count * item_bytes(dtype)
        self.chunks = -(-self.nbytes // CHUNK_BYTES)
        self._before_close: list[Callable[[], None]] = []

    @classmethod
    def create(
        cls,
        count: int,
        dtype: str,
        *,
        prefault_threads: int = 1,
        initial: Any | None = None,
        huge_pages: bool = False,
    ) -> Mapping:
        """A new segment of ``count`` zeros, or of the values of ``initial``, its pages present.

        huge_pages  take pages of 2 MiB for what fills them, as far as the kernel has them at hand; of use
                    only where it may (memory.need_huge_pages())

        Raises OutOfMemory when the kernel has no pages for it; whoever creates checks the limits before.
        """
        nbytes = count * item_bytes(dtype)
        if nbytes <= 0:
            raise RangeError(f"a segment of {count} elements: must have at least one")
        fds: list[int] = []
        try:
            fds.append(_memory_file("smb-control", _native.control_bytes(nbytes), _SIZE_SEALS))
            fds.append(_memory_file("smb-payload", nbytes, _SIZE_SEALS))
            mapping = cls(fds[0], fds[1], count, dtype, readonly=False, life=None)
            mapping._make_present(prefault_threads, huge_pages)
            if initial is not None:
                mapping.initialise(initial, prefault_threads)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return mapping

    @classmethod
    def attach(
        cls,
        control_fd: int,
        payload_fd: int,
        count: int,
        dtype: str,
        *,
        readonly: bool = False,
        life: Life | None = None,
        prefault_threads: int = 1,
    ) -> Mapping:
        """Map a segment that another process created; both descriptors stay the caller's.

        Raises ProtocolError when the files are not sealed memory of just the right size: a file that its
        sender can shrink would kill this process by SIGBUS.
        """
        nbytes = count * item_bytes(dtype)
        _check_file(control_fd, _native.control_bytes(nbytes), "control file")
        _check_file(payload_fd, nbytes, "payload file")
        fds: list[int] = []
        try:
            fds.append(os.dup(control_fd))
            fds.append(os.dup(payload_fd))
            mapping = cls(fds[0], fds[1], count, dtype, readonly=readonly, life=life)
            mapping._make_present(prefault_threads)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return mapping

    @property
    def control_fd(self) -> int:
        """The control file, for passing on; -1 once closed."""
        return self._control_fd

    @property
    def payload_fd(self) -> int:
        """The payload file, for passing on; -1 once closed."""
        return self._payload_fd

    def start_version(self, version: int) -> None:
        """Begin to count at ``version``; for whoever made the segment, before anyone else knows it."""
        os.pwrite(self._control_fd, version.to_bytes(8, "little"), 0)

    def work_done(self) -> int:
        """A number that changes with every write to any chunk, counted in the version or not."""
        words = os.pread(self._control_fd, _native.control_bytes(self.nbytes), 0)[_HEAD_BYTES:]
        return zlib.crc32(words)

    def take_over(self, control_fd: int, payload_fd: int, life: Life) -> None:
        """Become another daemon's segment of this size; the descriptors stay the caller's."""
        _check_file(control_fd, _native.control_bytes(self.nbytes), "control file")
        _check_file(payload_fd, self.nbytes, "payload file")
        fds: list[int] = []
        try:
            fds += [os.dup(control_fd), os.dup(payload_fd)]
            self.replace(fds[0], fds[1], life.native)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        for fd in (self._control_fd, self._payload_fd):
            os.close(fd)
        self._control_fd, self._payload_fd = fds

    def readonly_fds(self) -> tuple[int, int]:
        """New descriptors of both files that cannot be mapped writable; the caller closes them."""
        control = os.open(f"/proc/self/fd/{self._control_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return control, os.open(f"/proc/self/fd/{self._payload_fd}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(control)
            raise

    def before_close(self, call: Callable[[], None]) -> None:
        """``call`` before the memory goes."""
        self._before_close.append(call)

    def close(self) -> None:
        """Unmap, once operations under way in other threads have ended. Twice is fine."""
        while self._before_close:
            self._before_close.pop()()
        super().close()
        for fd in {self._control_fd, self._payload_fd} - {-1}:
            os.close(fd)
        self._control_fd = self._payload_fd = -1

    def _make_present(self, threads: int, huge: bool = False) -> None:
        try:
            self.prefault(threads, huge)
        except OSError as error:
            raise OutOfMemory(f"no memory for the {self.nbytes} bytes of a segment: {error}") from error


def _memory_file(name: str, nbytes: int, seals: int = 0) -> int:
    """A new memory file of whole pages, zeroed, sealed as asked; the caller closes it."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _whole_pages(nbytes))
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(fd)
        raise OutOfMemory(f"no memory file of {nbytes} bytes: {error}") from error
    return fd


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _check_file(fd: int, nbytes: int, what: str) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"{what}: descriptor {fd} is no sealable memory file") from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise ProtocolError(f"{what}: not sealed against shrinking and growing (seals {seals:#x})")
    size = os.fstat(fd).st_size
    if size != _whole_pages(nbytes):
        raise ProtocolError(f"{what}: has {size} bytes, {_whole_pages(nbytes)} expected")
