"""The codes of engines."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-E001": ErrorEntry(
        ExitCode.NO_ENGINE,
        "no such engine answers; `verify` and `diff` need a container engine",
        "start it, or use another `--engine`",
    ),
    "CAP-E002": ErrorEntry(
        ExitCode.NO_ENGINE,
        "another engine answers than the one asked for",
        "use that one, or correct `DOCKER_HOST`",
    ),
    "CAP-E003": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the run needs a GPU and the engine has none to give",
        "a machine with GPU, driver and NVIDIA container toolkit",
    ),
    "CAP-E004": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "the engine shows another image than was loaded",
        "remove its image and build again",
    ),
    "CAP-E005": ErrorEntry(
        ExitCode.NO_ENGINE,
        "the container or process does not start",
        "see the engine's log",
    ),
    "CAP-E006": ErrorEntry(
        ExitCode.NO_ENGINE,
        "the engine failed or went away",
        "see the engine's log; resume the run",
    ),
    "CAP-E007": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a task made a folder of the run directory unreadable",
        "do not trust the run",
    ),
    "CAP-E008": ErrorEntry(
        ExitCode.USAGE,
        "another process runs in this run directory",
        "wait for it, or interrupt it",
    ),
    "CAP-E009": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a task does not end after SIGKILL",
        "look for a stuck disk or GPU",
    ),
    "CAP-E010": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "training ended without result or report: memory, time or disk used up, or a crash",
        "raise the limit that is named; see `output.log`",
    ),
    "CAP-E011": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the training side broke the run contract",
        "see `output.log`",
    ),
    "CAP-E012": ErrorEntry(
        ExitCode.INTERRUPTED,
        "the run was interrupted; its state is kept",
        "`capsule run --resume`",
    ),
    "CAP-E013": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a wheel is missing from the cache or damaged",
        "delete it and build again",
    ),
    "CAP-E014": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "this Capsule's training code is not the locked one (process engine)",
        "use the version that is named, or lock again",
    ),
    "CAP-E015": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "uv cannot make the environment of the process engine",
        "install the Python version, or use a container engine",
    ),
    "CAP-E016": ErrorEntry(
        ExitCode.NO_ENGINE,
        "`--cluster docker:N` with another engine",
        "`--engine docker`, or the address of a cluster",
    ),
    "CAP-E017": ErrorEntry(
        ExitCode.USAGE,
        "`--cluster` is neither `docker:N` nor an address",
        "e.g. `--cluster docker:2`",
    ),
    "CAP-E018": ErrorEntry(
        ExitCode.USAGE,
        "`--cluster` with a trainer that has no actors to play there",
        "leave it out",
    ),
    "CAP-E040": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a task made more files than can be watched, or folders too deep",
        "write fewer files, packed into larger ones",
    ),
    "CAP-E041": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a task left a link, a folder or a special file where a document belongs",
        "do not trust the run",
    ),
    "CAP-E042": ErrorEntry(
        ExitCode.USAGE,
        "Capsule runs as root, and others can enter the folder around the run directory",
        "make that folder root's alone: `chmod 700`",
    ),
}
