"""Determinism in every Python process of a run, whichever process started it.

A run's settings travel in the environment variable ``CAPSULE_DETERMINISM``, made by
:func:`capsule.experiment.variables.environment_variables`: JSON with the spec's ``determinism``
section, its ``numerics`` profile and the ``environment`` that goes with them. Beside this package,
in the same site-packages, lies ``capsule-determinism.pth``. The interpreter reads it at every
start, under ``-I``, ``-E`` and ``-P``, too, and so calls :func:`install`, which leaves a hook
behind: when torch is imported, the start of the interpreter is checked, torch's flags are set, and
read back. Another hook translates a variable for numpy versions that know it under other names.

A child started with a cleaned environment has lost the variable, and others with it. It finds them
in its nearest ancestor that has them, and restarts itself once with what was missing: hash seed,
thread counts, instruction-set pins and preloaded libraries take effect at a start only, and so do
the choice of a GPU and the folder of its driver. What a program sets otherwise for a child is not
overruled, but refused once that child imports torch.

Not reached: ``python -S`` and virtual environments of the program's own, which do not see these
site-packages, and so not the image's torch.

All of this runs at every start of an interpreter, and imports nothing that is not there already.
"""

# ruff: noqa: PTH115, PTH119, PTH120, PTH123, PTH208

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
RUN_VARIABLE = "CAPSULE_RUN"  # as in capsule.experiment.contract
# What an engine sets besides: preloaded libraries, the run's GPUs, and where their driver is.
ENGINE_VARIABLES = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
INTERPRETERS = "interpreters.jsonl"  # likewise
_NUMPY_VARIABLE = "NPY_DISABLE_CPU_FEATURES"
_SETS_OF_LEVEL = {
    "X86_V3": "AVX F16C FMA3 AVX2",
    "X86_V4": "AVX512F AVX512CD AVX512_KNL AVX512_KNM AVX512_SKX AVX512_CLX AVX512_CNL",
}


def install() -> None:
    """Take over the settings of the run that this interpreter belongs to, if there is one.

    Once is enough: a virtual environment's interpreter reads each ``.pth`` file twice.
    """
    global _installed  # noqa: PLW0603
    if _installed:
        return
    _installed = True
    if _NUMPY_VARIABLE in os.environ:
        sys.meta_path.insert(0, _NumpyFinder())
    if VARIABLE in os.environ:
        # A copy: what counts is the environment that the interpreter was started with.
        sys.meta_path.insert(0, _TorchFinder(os.environ[VARIABLE], dict(os.environ)))
    elif (inherited := _environment_of_ancestors()) is not None:
        program = os.readlink("/proc/self/exe")
        if os.path.basename(program).startswith("python"):
            _restart(program, inherited)
        # Embedded in another program, which has begun and must not begin again.
        sys.meta_path.insert(0, _TorchFinder(inherited[VARIABLE], dict(os.environ)))
    note_start()


_installed = False


def note_start() -> None:
    """Write down the hash seed of this process, and whether torch's flags will be set in it."""
    seed = (_heeds_hash_seed() and os.environ.get("PYTHONHASHSEED")) or "random"
    if not sys.flags.hash_randomization:
        seed = "0"
    watched = any(isinstance(finder, _TorchFinder) for finder in sys.meta_path)
    # Formatted by hand, so that the start of an interpreter does not import json.
    _note(f'{{"hash_seed":"{seed}","watched":{str(watched).lower()}}}', os.environ)


def _heeds_hash_seed() -> bool:
    """Tell whether this interpreter was started without -E, -I and -R."""
    # sys.flags.hash_randomization is 1 both under -R and with a seed other than 0.
    return not (sys.flags.ignore_environment or _randomizes(sys.orig_argv))


def _randomizes(arguments: Sequence[str]) -> bool:
    """Tell whether an interpreter's arguments contain its option -R."""
    words = iter(arguments[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
            continue
        if not word.startswith("-") or word in {"-", "--"}:
            return False
        letters = flags = word[1:]
        for letter in "cmWX":  # the options with an argument, which may follow in the same word
            flags = flags.partition(letter)[0]
        if "R" in flags:
            return True
        option, argument = letters[len(flags) :][:1], letters[len(flags) + 1 :]
        if option and option in "cm":  # what follows is for the program
            return False
        if option and not argument:
            next(words, None)
    return False


def note_torch(flags: Mapping[str, str]) -> None:
    """Write down the flags of torch that were read back in this process."""
    import json

    _note(json.dumps({"torch": dict(flags)}), os.environ)


def _note(line: str, environment: Mapping[str, str]) -> None:
    """Append a line to the account of the run's Python processes.

    A process that cannot do so is missing there, and counts as one that told nothing.
    """
    if RUN_VARIABLE not in environment:
        return
    # The program can write to this folder. A link that it puts there must not lead elsewhere, and
    # a pipe must not block the start of an interpreter.
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
    """Check how this interpreter was started.

    Args:
        environment: The variables that it was started with.
        expected: Variables and the values they must have.

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
    if not _heeds_hash_seed() or sys.flags.hash_randomization != (seed != "0"):
        raise CapsuleError(
            "CAP-T102",
            f"the interpreter ignores PYTHONHASHSEED={seed}",
            fix="Start it without -E, -I or -R.",
        )


def environment_of(process: int | str) -> dict[str, str]:
    """Return the environment that a process ("self", too) was started with.

    Raises:
        OSError: It has ended, or belongs to another user.
    """
    with open(f"/proc/{process}/environ", "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    # A zero byte ends each entry, so nothing follows the last one.
    return {name: value for name, _, value in (entry.partition("=") for entry in entries if entry)}


class ImportFinder:
    """A finder that finds a module as the others do, and takes part in its execution."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module; None for all others (:class:`importlib.abc.MetaPathFinder`)."""
        if name != self._module or self._searching:  # another finder of this kind asks in its turn
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
        """Execute the module."""
        execute()

    def _attend(self, loader: Any) -> None:
        """Be there when ``loader`` executes its module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Uncovers the method of its class again, unless another finder of this kind has.
            vars(loader).pop("exec_module", None)
            self.around(lambda: execute(module))

        loader.exec_module = exec_module


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
        sets = (_SETS_OF_LEVEL.get(word, word) for word in given.split())
        os.environ[_NUMPY_VARIABLE] = " ".join(sets)
        try:
            execute()
        finally:
            os.environ[_NUMPY_VARIABLE] = given


def _precedes_levels(package: str) -> bool:
    """Tell whether the numpy in a folder is older than 2.4; False if its version is not known."""
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
        # Only here: a child that does not import torch may be started as its program likes.
        check_start(self._environment, settings["environment"])
        execute()
        _set_flags(settings)


def _set_flags(settings: Mapping[str, Any]) -> None:
    """Set what torch itself has switches for, and read it back."""
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
            # It belongs to another user, outside the run; or it has just ended, and left its
            # children to its own ancestor or a subreaper. Then the search, which begins again, does
            # not meet it a second time.
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
    """Become the same program, with the same arguments and all that the environment lacks."""
    import json

    # The first argument stays as well: Python finds its virtual environment by it.
    with open("/proc/self/cmdline", "rb") as file:
        arguments = file.read().split(b"\0")[:-1]
    settled = json.loads(inherited[VARIABLE])["environment"]
    names = (VARIABLE, RUN_VARIABLE, *ENGINE_VARIABLES, *settled)
    lost = {name: inherited[name] for name in names if name in inherited}
    # This process is executed twice and notes one start. Without this line the ledger would count a
    # program that told nothing (capsule.entropy.evidence).
    _note('{"restarted":true}', {**lost, **os.environ})
    # What the program has set for the child wins. If it contradicts the spec, check_start() says
    # so.
    os.execve(program, arguments, {**lost, **os.environ})  # noqa: S606
