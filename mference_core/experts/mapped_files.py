"""Files mapped read-only, and what the operating system can say and do about their pages.

The system calls are made through ctypes: it lets go of the interpreter lock, and gives addresses that kernels can use.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mference_core.errors import StreamError

READ_ONLY, SHARED, FAILED = 1, 1, ctypes.c_void_p(-1).value
WILLNEED = 3
POPULATE_READ = 22  # Linux 5.14
WORKERS = min(4, os.cpu_count() or 1)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FIRST_BIT = bytes(value & 1 for value in range(256))


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    library.mmap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    library.madvise.argtypes = (pointer, size, number)
    library.mincore.argtypes = (pointer, size, pointer)
    return library


class MappedFile:
    """One file at `address`; offsets and sizes in bytes, rounded out to whole pages where pages are meant."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = _library()
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            remedy = "verify or reinstall the model"
            raise StreamError(what=f"expert file {path}", got="missing", remedy=remedy) from error
        except OSError as error:
            raise StreamError(what=f"reading {path} failed: {error.strerror}") from error
        try:
            facts = os.fstat(handle)
            self.size = facts.st_size
            address = self._library.mmap(None, max(1, self.size), READ_ONLY, SHARED, handle, 0)
            if address == FAILED:
                raise StreamError(what=f"mapping {path} failed: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(handle)
        self.address = int(address)
        # Elsewhere Linux says of every page that it is in memory, so as not to tell one user of another's reads.
        self.tells = facts.st_uid == os.geteuid() or os.access(path, os.W_OK)

    def missing_bytes(self, offset: int, size: int) -> int:
        """Return how many bytes of the pages of a span are not in memory; all of them where that cannot be known."""
        start, length = self._pages(offset, size)
        pages = (ctypes.c_ubyte * (length // PAGE_BYTES))()
        if not self.tells or self._library.mincore(self.address + start, length, pages):
            return size
        absent = len(pages) - bytes(pages).translate(_FIRST_BIT).count(1)
        return min(size, absent * PAGE_BYTES)

    def will_need(self, offset: int, size: int) -> None:
        """Begin reading the pages of a span; a hint, so no failure of it matters."""
        start, length = self._pages(offset, size)
        self._library.madvise(self.address + start, length, WILLNEED)

    def populate(self, offset: int, size: int) -> None:
        """Block until the pages of a span are in memory, where the system can; elsewhere they come when touched.

        Raises: StreamError when they cannot be read.
        """
        start, length = self._pages(offset, size)
        if sys.platform != "linux" or not self._library.madvise(self.address + start, length, POPULATE_READ):
            return
        reason = ctypes.get_errno()
        if reason not in (errno.EINVAL, errno.ENOSYS):
            raise StreamError(
                what=f"reading {self.path} at byte {offset} failed: {os.strerror(reason)}",
                remedy="verify or reinstall the model",
            )

    def view(self, offset: int, size: int) -> memoryview:
        """Return bytes of the file, read-only; populate them first, and do not use them after `close`."""
        data = (ctypes.c_ubyte * size).from_address(self.address + offset)
        return memoryview(data).cast("B").toreadonly()

    def close(self) -> None:
        """Unmap the file; closing again does nothing."""
        if self.address:
            self._library.munmap(self.address, max(1, self.size))
            self.address = 0

    def _pages(self, offset: int, size: int) -> tuple[int, int]:
        """Return start and length of the whole pages around a span."""
        if not self.address:
            raise StreamError(what=f"the mapping of {self.path}", got="closed", expected="an open model")
        start = offset - offset % PAGE_BYTES
        return start, -(-(offset + size - start) // PAGE_BYTES) * PAGE_BYTES


class MappedFiles:
    """Every file mapped once, however many layers lie in it; and threads for what is done with them meanwhile."""

    def __init__(self) -> None:
        self._open: dict[Path, MappedFile] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def get(self, path: Path) -> MappedFile:
        """Return the mapping of a file. Raises: StreamError."""
        self.check_open()
        if path not in self._open:
            self._open[path] = MappedFile(path)
        return self._open[path]

    def begin(self, work: Callable[[], None]) -> "Future[None]":
        """Do something on another thread; `close` waits for it."""
        self.check_open()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="mference-mapped")
        return self._threads.submit(work)

    def close(self) -> None:
        """Unmap all of them; no address of theirs may be used any more."""
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for mapped in self._open.values():
            mapped.close()

    def check_open(self) -> None:
        """Raise StreamError after `close`."""
        if self._closed:
            raise StreamError(what="the mapping of expert files", got="closed", expected="an open model")
