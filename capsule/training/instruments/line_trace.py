"""Recording the values that the lines of a program assign, and their sources of nondeterminism.

Two hooks of the interpreter do this. After each line of the user's code, the trace hook records a
digest of every local variable that the line names and that has a new value, so that two runs can be
compared assignment by assignment. The profile hook records calls that read a clock, the operating
system's entropy, an address, a process number or a folder, with the line of the user's code from
which they came. Library code is not traced, and no code of the program is called to examine a
value.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import random
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from types import FrameType
from typing import Any

from capsule.training.instruments.report import Location, Source, SourceUse, Variable, is_own

MAX_ASSIGNMENTS = 500_000
MAX_ITEMS = 1_000  # of a container; of a longer one, the length and the first items are digested
MAX_SORTED = 20_000
MAX_DEPTH = 4
MAX_ARRAY_BYTES = 1 << 20
MAX_SHOWN = 60  # characters of a value
VALUES_SHOWN = 4

_WATCHED: Mapping[Any, tuple[Source, str]] = {
    **{
        getattr(time, name): ("clock", f"time.{name}")
        for name in (
            *("time", "time_ns", "monotonic", "monotonic_ns"),
            *("perf_counter", "perf_counter_ns", "localtime", "gmtime", "ctime"),
        )
    },
    os.urandom: ("entropy", "os.urandom"),
    os.getrandom: ("entropy", "os.getrandom"),
    os.getpid: ("process", "os.getpid"),
    threading.get_ident: ("process", "threading.get_ident"),
    os.listdir: ("directory", "os.listdir"),
    os.scandir: ("directory", "os.scandir"),
    id: ("address", "id"),
}
# Libraries often use these without any effect on results, so only calls in the user's code count.
_OWN_CALLS_ONLY = frozenset({"address", "process", "directory", "clock"})
_SEED = random.Random.seed.__code__
_GLOBAL_GENERATOR: random.Random = vars(random)["_inst"]


class LineTrace:
    """Traces the threads of this process, up to :data:`MAX_ASSIGNMENTS` assignments.

    Attributes:
        truncated: Whether this limit was reached.
    """

    def __init__(self) -> None:
        self.truncated = False
        self._room = MAX_ASSIGNMENTS
        self._variables: dict[tuple[Location, str], _Values] = {}
        self._known: dict[FrameType, tuple[int, dict[str, str]]] = {}
        self._sources: dict[tuple[Source, str, Location], int] = {}

    def start(self) -> None:
        """Set the hooks in this thread and in all threads that are started later."""
        threading.settrace(self._call)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        sys.settrace(self._call)

    def stop(self) -> None:
        """Remove the hooks."""
        sys.settrace(None)
        sys.setprofile(None)
        threading.settrace(None)
        threading.setprofile(None)

    def variables(self) -> tuple[Variable, ...]:
        """Return the values that each line assigned, in the order of the first assignments."""
        return tuple(
            values.summary(where, name) for (where, name), values in self._variables.items()
        )

    def sources(self) -> tuple[SourceUse, ...]:
        """Return the uses of sources of nondeterminism, in the order of the first uses."""
        return tuple(
            SourceUse(source=source, function=function, where=where, calls=calls)
            for (source, function, where), calls in self._sources.items()
        )

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        if self.truncated or not is_own(frame.f_code.co_filename):
            return None
        self._known[frame] = (frame.f_lineno, {})
        return self._line

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any] | None:
        if self.truncated or frame not in self._known:
            return None
        # The interpreter calls this before it executes a line, so the line of the previous call has
        # just been executed.
        line, digests = self._known[frame]
        if event in {"line", "return"}:
            self._note(frame, line, digests)
            self._known[frame] = (frame.f_lineno, digests)
        if event == "return":
            del self._known[frame]
        return self._line

    def _note(self, frame: FrameType, line: int, digests: dict[str, str]) -> None:
        """Record the variables to which a line, which has just been executed, gave new values."""
        file, variables = frame.f_code.co_filename, frame.f_locals
        for name in _names(file, line):
            if name not in variables or name.startswith("__"):
                continue
            value = variables[name]
            # An exception here would be raised in the program. Values that cannot be examined are
            # skipped, such as tensors inside of vmap() and sets that another thread changes.
            try:
                digest = digest_of(value)
                if digests.get(name) == digest:
                    continue
                digests[name] = digest
                self._room -= 1
                if self._room < 0:
                    self.truncated = True
                    return
                where = Location(file=file, line=line, function=frame.f_code.co_name)
                self._variables.setdefault((where, name), _Values(value)).add(value, digest)
            except Exception:  # noqa: BLE001, S112
                continue

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            found = _WATCHED.get(argument) or _method(argument)
        # Without an argument, Random.seed() reads entropy from the operating system.
        elif event == "call" and frame.f_code is _SEED and frame.f_locals.get("a") is None:
            found = ("entropy", "Random.seed")
        else:
            return
        if found is not None:
            self._count(frame, *found)

    def _count(self, frame: FrameType | None, source: Source, function: str) -> None:
        if source in _OWN_CALLS_ONLY and frame and not is_own(frame.f_code.co_filename):
            return
        while frame and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame:
            code = frame.f_code
            where = Location(file=code.co_filename, line=frame.f_lineno, function=code.co_name)
            key = (source, function, where)
            self._sources[key] = self._sources.get(key, 0) + 1


class _Values:
    """A summary of the values that one line gave to one variable."""

    def __init__(self, first: Any) -> None:
        self._kind = _kind(first)
        self._count = 0
        self._ordered = hashlib.blake2b(digest_size=16)
        self._elements = hashlib.blake2b(digest_size=16)
        self._sum = 0
        self._shown: list[str] = []

    def add(self, value: Any, digest: str) -> None:
        self._count += 1
        self._ordered.update(digest.encode())
        self._elements.update((_unordered(value) or digest).encode())
        # A sum does not depend on the order; unlike an exclusive or, it counts equal values.
        self._sum = (self._sum + int(digest, 16)) % 2**128
        if len(self._shown) < VALUES_SHOWN:
            self._shown.append(_shown(value))

    def summary(self, where: Location, name: str) -> Variable:
        return Variable(
            where=where,
            name=name,
            values=self._count,
            digest=self._ordered.hexdigest(),
            unordered=f"{self._sum:032x}",
            elements=self._elements.hexdigest(),
            kind=self._kind,
            shown=tuple(self._shown),
        )


def digest_of(value: Any) -> str:
    """Return a digest of a value's content, 32 hexadecimal digits.

    Equal content has equal digests in every process: the digest covers neither addresses, nor the
    order of sets, nor the contents of library objects other than arrays and tensors.
    """
    state = hashlib.blake2b(digest_size=16)
    _feed(state.update, value, MAX_DEPTH)
    return state.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any, depth: int) -> None:
    kind = type(value)
    update(kind.__qualname__.encode())
    if kind in _PLAIN:
        update(_plain_bytes(value))
    elif depth and (items := _items(value)) is not None:
        update(str(len(items)).encode())
        for item in items[:MAX_ITEMS]:
            _feed(update, item, depth - 1)
    elif kind.__module__ in {"numpy", "torch", "torch.nn.parameter"}:
        update(_array_bytes(value))


def _plain_bytes(value: Any) -> bytes:
    if isinstance(value, (float, complex)):
        number = complex(value)
        return struct.pack("<dd", number.real, number.imag)
    if isinstance(value, int):
        return hex(value).encode()  # repr() has a limit for large integers, and is quadratic
    return repr(value).encode("utf-8", "surrogatepass")


def _items(value: Any) -> list[Any] | None:
    """Return the contents of a container or of an object of the user's classes; None for others."""
    kind = type(value)
    if kind in {list, tuple}:
        return list(value)
    if kind in {set, frozenset}:
        # The first items of a larger set would differ from run to run.
        return sorted(map(digest_of, value)) if len(value) <= MAX_ITEMS else [len(value)]
    if kind is dict:
        return list(value.items())
    if _is_own_class(kind):
        try:
            # getattr() could call a method of the program's class.
            return list(object.__getattribute__(value, "__dict__").items())
        except AttributeError:  # the object only has slots
            return []
    if kind.__module__ == "numpy" and _has_objects(value):
        return [f"{value.dtype}{value.shape}", *value.flat[:MAX_ITEMS].tolist()]
    return None


def _has_objects(value: Any) -> bool:
    """Return whether an array consists of Python objects, so that its memory has addresses."""
    return hasattr(value, "tobytes") and bool(value.dtype.hasobject)


def _array_bytes(value: Any) -> bytes:
    """Return type, shape and elements of an array or tensor, without those of large ones."""
    if type(value).__module__ == "numpy":
        if not hasattr(value, "tobytes"):
            return b""
        facts = f"{value.dtype}{value.shape}".encode()
        whole = value.nbytes <= MAX_ARRAY_BYTES and not _has_objects(value)
        return facts + (value.tobytes() if whole else b"")
    torch = sys.modules["torch"]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
        return b""
    facts = f"{value.dtype}{tuple(value.shape)}".encode()
    if value.numel() * value.element_size() > MAX_ARRAY_BYTES:
        return facts
    from torch.utils._python_dispatch import _disable_current_modes

    from capsule.training.instruments.operator_reexecution import element_bytes

    # The operators below are not those of the program, and must not be counted.
    with _disable_current_modes(), torch.no_grad():
        data: bytes = element_bytes(value.cpu()).numpy().tobytes()
    return facts + data


def _is_own_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_own(file))


def _unordered(value: Any) -> str | None:
    """Return a digest of the items of a sequence or mapping, in any order; None for others."""
    if type(value) not in {list, tuple, dict} or len(value) > MAX_SORTED:
        return None
    items = value.items() if type(value) is dict else value
    return digest_of(sorted(map(digest_of, items)))


def _kind(value: Any) -> str:
    kind = type(value).__qualname__
    if type(value) in {list, tuple, dict} and value:
        kind += f" of {type(next(iter(value))).__qualname__}"
    return kind


def _shown(value: Any) -> str:
    """Return the text of simple values, without calling any code of the program."""
    if type(value) in {list, tuple} and all(type(item) in _PLAIN for item in value[:MAX_ITEMS]):
        value = value[:8]
    elif type(value) in {str, bytes}:
        value = value[:MAX_SHOWN]
    elif type(value) not in _PLAIN:
        return ""
    try:
        return repr(value)[:MAX_SHOWN]
    except ValueError:  # an integer has more digits than Python converts
        return ""


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _method(function: Any) -> tuple[Source, str] | None:
    """Recognise bound methods of builtin types, which are made anew at each access."""
    owner: Any = getattr(function, "__self__", None)
    if owner is _GLOBAL_GENERATOR:
        return "entropy", f"random.{function.__name__}"
    # isinstance() is not used, because it could call code of the program's classes.
    if function.__name__ == "seed" and type(owner).__module__ == "torch._C":
        return "entropy", "torch.Generator.seed"
    if function.__name__ in {"now", "utcnow", "today"} and issubclass(type(owner), type):
        return "clock", f"{owner.__name__}.{function.__name__}"
    return None


@cache
def _names(file: str, line: int) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W\d]\w*", linecache.getline(file, line)))
