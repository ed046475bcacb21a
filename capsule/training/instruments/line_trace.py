"""What the lines of a program compute, and which sources of nondeterminism they ask.

Two hooks of the interpreter. The trace hook notes, after each line of the user's code, every
local variable that the line names and that has another value now: as a digest, so that two runs can
be compared assignment by assignment. The profile hook notes the calls that ask a clock, the
operating system's entropy, an address, a process number or a folder, with the user's line that they
came from. Library code is not traced, and nothing of the program is called to look at a value.
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
MAX_ITEMS = 1_000  # of a container; longer ones are judged by their first items and their length
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
# Libraries often use these for what never reaches a result; only calls in the user's code count.
_OWN_CALLS_ONLY = frozenset({"address", "process", "directory", "clock"})
_SEED = random.Random.seed.__code__
_GLOBAL_GENERATOR: random.Random = vars(random)["_inst"]


class LineTrace:
    """Traces the threads of this process, as long as there is room."""

    def __init__(self) -> None:
        self.truncated = False
        self._room = MAX_ASSIGNMENTS
        self._variables: dict[tuple[Location, str], _Values] = {}
        self._known: dict[FrameType, tuple[int, dict[str, str]]] = {}
        self._sources: dict[tuple[Source, str, Location], int] = {}

    def start(self) -> None:
        """Set the hooks in this thread and in those that it will start."""
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
        """Return what each line assigned, in the order of the first assignments."""
        return tuple(
            values.summary(where, name) for (where, name), values in self._variables.items()
        )

    def sources(self) -> tuple[SourceUse, ...]:
        """Return the sources that were asked, in the order of their first use."""
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
        # The interpreter calls before it executes a line. What it has executed since is therefore
        # the line of the call before.
        line, digests = self._known[frame]
        if event in {"line", "return"}:
            self._note(frame, line, digests)
            self._known[frame] = (frame.f_lineno, digests)
        if event == "return":
            del self._known[frame]
        return self._line

    def _note(self, frame: FrameType, line: int, digests: dict[str, str]) -> None:
        """Note the variables that a line, which has just been executed, gave new values."""
        file, variables = frame.f_code.co_filename, frame.f_locals
        for name in _names(file, line):
            if name not in variables or name.startswith("__"):
                continue
            value = variables[name]
            # An exception of a hook would be raised in the program. Values that cannot be looked at
            # are skipped, such as tensors inside of vmap() and sets that another thread changes.
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
        # Without a seed, Random.seed() takes one from the operating system.
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
    """Summary of the values that one variable took on one line."""

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
        # A sum does not depend on the order, and unlike an exclusive or it counts equal values.
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

    Equal content gives equal digests in every process: addresses, the order of sets, and whatever
    is inside objects of libraries stay out.
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
        return hex(value).encode()  # repr() has a limit for integers, and takes quadratic time
    return repr(value).encode("utf-8", "surrogatepass")


def _items(value: Any) -> list[Any] | None:
    """Return what a container or an object of the user's classes holds; None for the rest."""
    kind = type(value)
    if kind in {list, tuple}:
        return list(value)
    if kind in {set, frozenset}:
        # Of a larger set, the first items would be others in each run.
        return sorted(map(digest_of, value)) if len(value) <= MAX_ITEMS else [len(value)]
    if kind is dict:
        return list(value.items())
    if _is_own_class(kind):
        try:
            # getattr() would call the class's own __getattribute__().
            return list(object.__getattribute__(value, "__dict__").items())
        except AttributeError:  # it has slots only
            return []
    if kind.__module__ == "numpy" and _has_objects(value):
        return [f"{value.dtype}{value.shape}", *value.flat[:MAX_ITEMS].tolist()]
    return None


def _has_objects(value: Any) -> bool:
    """Tell whether an array holds Python objects, of which its memory has the addresses."""
    return hasattr(value, "tobytes") and bool(value.dtype.hasobject)


def _array_bytes(value: Any) -> bytes:
    """Return shape, type and elements of an array or tensor; nothing for anything else."""
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

    # These operators are not those of the program, and must not be counted.
    with _disable_current_modes(), torch.no_grad():
        data: bytes = element_bytes(value.cpu()).numpy().tobytes()
    return facts + data


def _is_own_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_own(file))


def _unordered(value: Any) -> str | None:
    """Return a digest of a sequence's or mapping's items without their order."""
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
    """Show simple values; never call code of the program's."""
    if type(value) in {list, tuple} and all(type(item) in _PLAIN for item in value[:MAX_ITEMS]):
        value = value[:8]
    elif type(value) in {str, bytes}:
        value = value[:MAX_SHOWN]
    elif type(value) not in _PLAIN:
        return ""
    try:
        return repr(value)[:MAX_SHOWN]
    except ValueError:  # an int has more digits than Python converts
        return ""


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _method(function: Any) -> tuple[Source, str] | None:
    """Recognise bound methods of builtin types, which are made anew at each access."""
    owner: Any = getattr(function, "__self__", None)
    if owner is _GLOBAL_GENERATOR:
        return "entropy", f"random.{function.__name__}"
    # The name comes first, and isinstance() is not called: a class of the program could answer.
    if function.__name__ == "seed" and type(owner).__module__ == "torch._C":
        return "entropy", "torch.Generator.seed"
    if function.__name__ in {"now", "utcnow", "today"} and issubclass(type(owner), type):
        return "clock", f"{owner.__name__}.{function.__name__}"
    return None


@cache
def _names(file: str, line: int) -> frozenset[str]:
    return frozenset(re.findall(r"[^\W\d]\w*", linecache.getline(file, line)))
