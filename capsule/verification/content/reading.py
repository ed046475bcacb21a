"""Reading a file in memory as a stream, no large piece at a time."""

from __future__ import annotations

import io

from capsule.verification.content.parts import Data, NotComparableError

MAX_PIECE_BYTES = 64 << 20


class Window(io.RawIOBase):
    """A stream over a file in memory.

    An untrusted file states the sizes of its parts, and where its lines end: one piece that is read
    is at most :data:`MAX_PIECE_BYTES` long.
    """

    def __init__(self, data: Data) -> None:
        """Read ``data`` from its beginning."""
        super().__init__()
        self._data = data
        self._place = 0

    def readable(self) -> bool:
        """Return True: the window can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: any place can be read."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place.

        Raises:
            ValueError: It is before the beginning.
        """
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """Return the place."""
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, all that are left if ``size`` is negative.

        Raises:
            NotComparableError: They are more than :data:`MAX_PIECE_BYTES`.
        """
        left = max(0, len(self._data) - self._place)
        count = left if size is None or size < 0 else min(size, left)
        if count > MAX_PIECE_BYTES:
            raise NotComparableError(f"a piece of {count:,} bytes")
        data = self._data[self._place : self._place + count]
        self._place += count
        return data

    def readline(self, size: int | None = -1) -> bytes:
        """Return the rest of the line with its line feed, or its first ``size`` bytes.

        Raises:
            NotComparableError: They are more than :data:`MAX_PIECE_BYTES`.
        """
        end = self._data.find(b"\n", self._place) + 1 or len(self._data)
        count = max(0, end - self._place)
        return self.read(count if size is None or size < 0 else min(size, count))
