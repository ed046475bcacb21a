"""The codes of the machine, diagnosis and reports, and those of no room."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-D001": ErrorEntry(
        ExitCode.USAGE,
        "`--steps` does not fit the trainer's intervals",
        "name the number that the message suggests",
    ),
    "CAP-D002": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a run left no report of its instruments",
        "see `output.log`; let the program end by itself",
    ),
    "CAP-D003": ErrorEntry(
        ExitCode.USAGE,
        "`--apply` with a lock or with `--set`",
        "name the spec, and write what `--set` says into it",
    ),
    "CAP-D004": ErrorEntry(
        ExitCode.USAGE,
        "the spec cannot be written, or has a comment between a key and a value on the next line, "
        "which cannot be kept",
        "make it writable, write the value on the line of its key, or set the fields by hand",
    ),
    "CAP-M001": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the spec requires a GPU and this machine has none",
        "a machine with an NVIDIA GPU and driver",
    ),
    "CAP-M002": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "no GPU has the name and compute capability asked for",
        "a machine with that GPU",
    ),
    "CAP-M003": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the driver does not meet `accelerator.driver`",
        "install one that does",
    ),
    "CAP-M004": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the CPU lacks AVX2 or FMA",
        "a CPU with both",
    ),
    "CAP-M005": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "less memory than `limits.memory_mb`",
        "more memory",
    ),
    "CAP-M006": ErrorEntry(
        ExitCode.USAGE,
        "`accelerator.driver` is not a version constraint",
        "write `>=580.65`",
    ),
    "CAP-M007": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "`capsule doctor` on a Python without torch",
        "install `capsule-rl[train]`, or test inside an image",
    ),
    "CAP-P101": ErrorEntry(
        ExitCode.USAGE,
        "a file is neither a report nor a receipt",
        "give what `capsule verify` wrote (`--report`, `--sign`)",
    ),
    "CAP-P102": ErrorEntry(
        ExitCode.USAGE,
        "a report is about other claims than the bundle's",
        "give reports on this bundle only",
    ),
    "CAP-P103": ErrorEntry(
        ExitCode.TAMPERED,
        "a claimed return is not a number",
        "do not trust the bundle",
    ),
    "CAP-P104": ErrorEntry(
        ExitCode.USAGE,
        "the report cannot be written",
        "choose a folder you may write to",
    ),
    "CAP-X001": ErrorEntry(
        ExitCode.INTERNAL,
        "an unforeseen exception",
        "`capsule --debug …`, and report it",
    ),
    "CAP-X002": ErrorEntry(
        ExitCode.USAGE,
        "standard output cannot be written, for another reason than a closed pipe",
        "free disk space, or send the output elsewhere",
    ),
    "CAP-X003": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the operating system refused a file: full disk, missing permission, read-only file system",
        "free disk space, or set `TMPDIR` and `CAPSULE_CACHE`",
    ),
}
