"""Memory that the server shares with a worker process: a file in memory, which both map."""

import fcntl
import mmap
import os

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""


def create_shared_memory() -> "SharedMemory":
    """Return memory that can grow, and not shrink: then what is mapped stays there."""
    descriptor = os.memfd_create("mmjax-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # The last seal: a process that shares it cannot add others.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return SharedMemory(descriptor)


class SharedMemory:
    """Used by one thread at a time."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapping: mmap.mmap | None = None
        """Kept: to map two megapixels anew takes longer than to copy them."""

    @property
    def num_used_bytes(self) -> int:
        """Return how much memory it takes."""
        return os.fstat(self.descriptor).st_blocks * _BLOCK_BYTES

    def grow(self, num_bytes: int) -> None:
        """Make it at least so large."""
        if os.fstat(self.descriptor).st_size < num_bytes:
            os.truncate(self.descriptor, num_bytes)

    def write(self, data: bytes | memoryview, place: int = 0) -> None:
        """Write bytes from `place` on; it grows where it must."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self.descriptor, view, place)
            view, place = view[count:], place + count

    def read_into(self, view: memoryview) -> None:
        """Fill `view` from the beginning; ValueError where there are fewer bytes."""
        num_read = 0
        while num_read < len(view):
            count = os.preadv(self.descriptor, [view[num_read:]], num_read)
            if count == 0:
                raise ValueError("a worker process gave too few bytes")
            num_read += count

    def read(self, num_bytes: int) -> bytes:
        """Return a copy of the beginning; ValueError where there are fewer bytes."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def view(self, num_bytes: int) -> memoryview:
        """Return its beginning, which the other process may write to as well.

        To be released before the next call. ValueError where it is not as large.
        """
        if self._mapping is None or len(self._mapping) < num_bytes:
            self._unmap()
            self._mapping = mmap.mmap(self.descriptor, num_bytes)
        return memoryview(self._mapping)[:num_bytes]

    def free(self) -> None:
        """Give its pages back; it stays as large as it was.

        OSError or ValueError where the other process has made it too large to be mapped.
        """
        self._unmap()
        with mmap.mmap(self.descriptor, 0) as whole:
            whole.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Free it here; the other process may have it still. Idempotent."""
        self._unmap()
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _unmap(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()
