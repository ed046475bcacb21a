"""Determinism in every Python process of a run, whichever process started it.

A run's settings are passed on in the environment variable ``CAPSULE_DETERMINISM``, which
:func:`capsule.experiment.variables.environment_variables` makes: JSON with the spec's
``determinism`` section, its ``numerics`` profile and the ``environment`` that these require. The
file ``capsule-determinism.pth`` is in the same site-packages as this package. The interpreter reads
it at every start, also with ``-I``, ``-E`` and ``-P``, and so calls :func:`install`. This installs
a hook: when torch is imported, the start of the interpreter is checked, and torch's flags are set
and read back. Another hook translates a variable for versions of numpy that know other names, and
others record that a package was imported that compiles for the processor on which it runs. Before
all this, modules get their bytecode from the folder in which an engine mounts it, if it does.

A child that is started with a cleaned environment lacks the variable and others. It reads them from
its nearest ancestor that has them, and restarts itself once with the missing ones, because hash
seed, thread counts, instruction-set pins and preloaded libraries take effect only at a start, as do
the choice of a GPU and the folder of its driver. A variable that a program sets for a child to
another value is not changed; the error comes when that child imports torch.

Two kinds of processes are not reached: ``python -S``, and virtual environments that the program
makes, which see neither these site-packages nor the image's torch.

This module runs at every start of an interpreter, and imports nothing that is not imported already.
"""

# ruff: noqa: PTH112, PTH115, PTH119, PTH120, PTH123, PTH208

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # known to type checkers by its name; importing typing would take too long
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

VARIABLE = "CAPSULE_DETERMINISM"
_BYTECODE = "/bytecode"  # as in capsule.engine.bytecode, which puts bytecode there
RUN_VARIABLE = "CAPSULE_RUN"  # as in capsule.experiment.contract
# Further variables of an engine: preloaded libraries, the run's GPUs, and the folder of the driver.
ENGINE_VARIABLES = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
INTERPRETERS = "interpreters.jsonl"  # as in capsule.experiment.contract
# Packages that compile functions for the processor on which they run, or choose them by its
# instructions, which no profile pins.
COMPILERS = ("cv2", "faiss", "jaxlib", "numba", "onnxruntime", "tensorflow")
_NUMPY_VARIABLE = "NPY_DISABLE_CPU_FEATURES"
_SETS_OF_LEVEL = {
    "X86_V3": "AVX F16C FMA3 AVX2",
    "X86_V4": "AVX512F AVX512CD AVX512_KNL AVX512_KNM AVX512_SKX AVX512_CLX AVX512_CNL",
}


def install() -> None:
    """Apply the settings of the run to which this interpreter belongs, if there is one.

    Only the first call has an effect, because the interpreter of a virtual environment reads each
    ``.pth`` file twice.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    if sys.pycache_prefix is None and os.path.isdir(f"{_BYTECODE}/usr"):
        sys.pycache_prefix = _BYTECODE
    if _NUMPY_VARIABLE in os.environ:
        sys.meta_path.insert(0, _NumpyFinder())
    if RUN_VARIABLE in os.environ:
        watch_compilers()
    if VARIABLE in os.environ:
        # A copy, because the program may change os.environ after the interpreter has started.
        sys.meta_path.insert(0, _TorchFinder(os.environ[VARIABLE], dict(os.environ)))
    elif (inherited := _environment_of_ancestors()) is not None:
        program = os.readlink("/proc/self/exe")
        if os.path.basename(program).startswith("python"):
            _restart(program, inherited)
        # Otherwise Python is embedded in another program, which must not be restarted.
        sys.meta_path.insert(0, _TorchFinder(inherited[VARIABLE], dict(os.environ)))
    note_start()


_installed = False


def note_start() -> None:
    """Record the hash seed of this process, and whether torch's flags will be set in it."""
    seed = (_uses_hash_seed() and os.environ.get("PYTHONHASHSEED")) or "random"
    if not sys.flags.hash_randomization:
        seed = "0"
    watched = any(isinstance(finder, _TorchFinder) for finder in sys.meta_path)
    # Formatted by hand, so that the start of an interpreter does not import json.
    _note(f'{{"hash_seed":"{seed}","watched":{str(watched).lower()}}}', os.environ)


def _uses_hash_seed() -> bool:
    """Return whether this interpreter was started without -E, -I and -R."""
    # sys.flags.hash_randomization is 1 both under -R and with a seed other than 0.
    return not (sys.flags.ignore_environment or _randomizes(sys.orig_argv))


def _randomizes(arguments: Sequence[str]) -> bool:
    """Return whether an interpreter's arguments contain its option -R."""
    words = iter(arguments[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
            continue
        if not word.startswith("-") or word in {"-", "--"}:
            return False
        letters = flags = word[1:]
        for letter in "cmWX":  # options with an argument, which may follow in the same word
            flags = flags.partition(letter)[0]
        if "R" in flags:
            return True
        option, argument = letters[len(flags) :][:1], letters[len(flags) + 1 :]
        if option and option in "cm":  # further arguments are those of the program
            return False
        if option and not argument:
            next(words, None)
    return False


def note_torch(flags: Mapping[str, str]) -> None:
    """Record the flags of torch that were read back in this process."""
    import json

    _note(json.dumps({"torch": dict(flags)}), os.environ)


def watch_compilers() -> None:
    """Record which of :data:`COMPILERS` this process has imported, and will import."""
    for name in COMPILERS:
        if name in sys.modules:
            _note_compiler(name)
        else:
            sys.meta_path.insert(0, _CompilerFinder(name))


def _note_compiler(name: str) -> None:
    _note(f'{{"compiler":"{name}"}}', os.environ)


def _note(line: str, environment: Mapping[str, str]) -> None:
    """Append a line to the account of the run's Python processes, if that is possible.

    The ledger reports processes of which the account has no line.
    """
    if RUN_VARIABLE not in environment:
        return
    # The program can write to this folder. A symbolic link must not redirect the line, and a pipe
    # must not block the start of an interpreter.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(f"{environment[RUN_VARIABLE]}/{INTERPRETERS}", flags, 0o644)
    except OSError:
        return
    try:
        # A single write to a file opened with O_APPEND, so that lines of several processes do not
        # mix.
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def check_start(environment: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Check the environment and the options with which this interpreter was started.

    Args:
        environment: The environment variables of the interpreter.
        expected: Variables and the values that they must have.

    Raises:
        CapsuleError: CAP-T101, a variable is missing or differs; CAP-T102, the interpreter ignores
            its environment.
    """
    from capsule.experiment.errors import CapsuleError

    for name, wanted in expected.items():
        if environment.get(name) != wanted:
            raise CapsuleError(
                "CAP-T101",
                f"environment variable {name} is {environment.get(name)!r}; the spec needs "
                f"{wanted!r} before the interpreter starts",
                fix="Start the run with 'capsule run', which sets it, and do not change it in the "
                "environment of a child process.",
            )
    seed = expected["PYTHONHASHSEED"]
    if not _uses_hash_seed() or sys.flags.hash_randomization != (seed != "0"):
        raise CapsuleError(
            "CAP-T102",
            f"the interpreter ignores PYTHONHASHSEED={seed}",
            fix="Start it without -E, -I or -R.",
        )


def environment_of(process: int | str) -> dict[str, str]:
    """Return the environment with which a process, or ``"self"``, was started.

    Raises:
        OSError: The process has ended, or belongs to another user.
    """
    with open(f"/proc/{process}/environ", "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    # Each entry ends with a zero byte, so the last element is empty.
    return {name: value for name, _, value in (entry.partition("=") for entry in entries if entry)}


class ImportFinder:
    """A meta path finder that lets the other finders find a module, and wraps its execution."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module; None for all others (:class:`importlib.abc.MetaPathFinder`)."""
        # ``_searching`` prevents endless recursion if another finder of this kind asks this one.
        if name != self._module or self._searching:
            return None
        self._searching = True
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        self._searching = False
        if spec is not None and spec.loader is not None:
            self._attend(spec.loader)
        return spec

    def around(self, execute: Callable[[], None]) -> None:
        """Execute the module; derived classes do something before or after."""
        execute()

    def _attend(self, loader: Any) -> None:
        """Let ``loader`` execute its module through :meth:`around`."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # This restores the method of the class, unless another finder of this kind has done so.
            vars(loader).pop("exec_module", None)
            self.around(lambda: execute(module))

        loader.exec_module = exec_module


class _CompilerFinder(ImportFinder):
    """Records that one of :data:`COMPILERS` was imported."""

    def around(self, execute: Callable[[], None]) -> None:
        execute()
        _note_compiler(self._module)


class _NumpyFinder(ImportFinder):
    """Lets a numpy older than 2.4 find its own names in ``NPY_DISABLE_CPU_FEATURES``.

    The variable names levels of the architecture, as numpy 2.4 does. Older versions ignore them,
    and disabling a set of instructions there disables no set that includes it. The variable has its
    own value again after the import, because child processes inherit it.
    """

    def __init__(self) -> None:
        super().__init__("numpy")
        self._folder = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            self._folder = os.path.dirname(spec.origin)
        return spec

    def around(self, execute: Callable[[], None]) -> None:
        given = os.environ.get(_NUMPY_VARIABLE)
        if given is None or not _precedes_levels(self._folder):
            execute()
            return
        import warnings

        sets = (_SETS_OF_LEVEL.get(word, word) for word in given.split())
        os.environ[_NUMPY_VARIABLE] = " ".join(sets)
        # numpy warns of each set that it or this processor does not have. In a program that treats
        # warnings as errors, the import would fail.
        warnings.filterwarnings("ignore", "During parsing environment variable", RuntimeWarning)
        try:
            execute()
        finally:
            os.environ[_NUMPY_VARIABLE] = given


def _precedes_levels(package: str) -> bool:
    """Return whether the numpy in a folder is older than 2.4; False if its version is unknown."""
    # Not importlib.metadata: it imports random, which draws from the program's entropy.
    versions = [
        entry[len("numpy-") : -len(".dist-info")].split(".")
        for entry in os.listdir(os.path.dirname(package))
        if entry.startswith("numpy-") and entry.endswith(".dist-info")
    ]
    return any((int(major), int(minor)) < (2, 4) for major, minor, *_ in versions)


class _TorchFinder(ImportFinder):
    """Sets the flags of torch when it is imported."""

    def __init__(self, settings: str, environment: dict[str, str]) -> None:
        super().__init__("torch")
        self._settings = settings
        self._environment = environment

    def around(self, execute: Callable[[], None]) -> None:
        import json

        settings = json.loads(self._settings)
        # Checked only here, because a child that does not import torch may be started in any way.
        check_start(self._environment, settings["environment"])
        _without_collector(execute)
        _set_flags(settings)


def _without_collector(execute: Callable[[], None]) -> None:
    """Import torch without Python's garbage collector, which would take a tenth of the time.

    Most of the objects that it would visit again and again last until the process ends.
    """
    import gc

    enabled = gc.isenabled()
    gc.disable()
    try:
        execute()
    finally:
        if enabled:
            gc.enable()


def _set_flags(settings: Mapping[str, Any]) -> None:
    """Set torch's flags, read them back, and settle the CPU numerics."""
    from capsule.training.determinism import torch_flags

    note_torch(torch_flags.apply(torch_flags.TorchFlags.of(settings["determinism"])))
    if settings["numerics"] is not None:
        from capsule.training.determinism import cpu

        cpu.require(settings["numerics"])
        cpu.settle(settings["numerics"])


def _environment_of_ancestors() -> dict[str, str] | None:
    """Return the environment of the nearest ancestor that has the variable."""
    unreadable = None
    process = os.getppid()
    while process:
        try:
            environment = environment_of(process)
            if VARIABLE in environment:
                return environment
            process = _parent(process)
        except OSError:
            # The process belongs to another user, outside of the run; or it has just ended, and its
            # children now have another parent. In the second case, the search begins again and does
            # not find it a second time.
            if process == unreadable:
                return None
            unreadable, process = process, os.getppid()
    return None


def _parent(process: int) -> int:
    with open(f"/proc/{process}/stat") as file:
        # The second field is the program's name in parentheses, and may contain parentheses and
        # blanks.
        return int(file.read().rpartition(")")[2].split()[1])


def _restart(program: str, inherited: Mapping[str, str]) -> None:
    """Execute the same program again, with the same arguments and the missing variables."""
    import json

    # The first argument is kept as well, because Python finds its virtual environment by it.
    with open("/proc/self/cmdline", "rb") as file:
        arguments = file.read().split(b"\0")[:-1]
    settled = json.loads(inherited[VARIABLE])["environment"]
    names = (VARIABLE, RUN_VARIABLE, *ENGINE_VARIABLES, *settled)
    lost = {name: inherited[name] for name in names if name in inherited}
    # This process executes Python twice and records one start. Without this line, the ledger would
    # count a process that recorded nothing (capsule.entropy.evidence).
    _note('{"restarted":true}', {**lost, **os.environ})
    # Variables that the program has set for the child are kept. If one contradicts the spec,
    # check_start() raises an error.
    os.execve(program, arguments, {**lost, **os.environ})  # noqa: S606
