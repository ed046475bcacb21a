"""The codes of specs and locks."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-L001": ErrorEntry(
        ExitCode.USAGE,
        "the lock file cannot be read",
        "restore it, or delete it and lock again",
    ),
    "CAP-L002": ErrorEntry(
        ExitCode.USAGE,
        "not a lock, or edited by hand",
        "restore it, or delete it and lock again",
    ),
    "CAP-L003": ErrorEntry(
        ExitCode.USAGE,
        "`--set` or `--refresh` given with a lock instead of a spec",
        "give the spec",
    ),
    "CAP-L101": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "`pip config list` fails",
        "make it work with Capsule's own Python",
    ),
    "CAP-L102": ErrorEntry(
        ExitCode.USAGE,
        "`image.packages` holds what is not PEP 508, a location, or a package twice",
        "write names and versions; places go into `image.sources`",
    ),
    "CAP-L103": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "the resolver finds no solution",
        "correct or loosen `image.packages`",
    ),
    "CAP-L104": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a package has source distributions only",
        "pin a version with a wheel, or build one",
    ),
    "CAP-L105": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a package index is unreachable and nothing is cached",
        "check the network, pip's configuration, `image.sources`",
    ),
    "CAP-L106": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "no wheel fits the image's platform, or the source gives no SHA-256",
        "pin another version, or use an index with digests",
    ),
    "CAP-L107": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "torch resolves to a CUDA build for a CPU spec",
        "make PyTorch's CPU index reachable, or add a CPU wheel to find-links",
    ),
    "CAP-L108": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "the wheels bring no or another CUDA or cuDNN",
        "set the field to what was found, or pin another torch",
    ),
    "CAP-L109": ErrorEntry(
        ExitCode.USAGE,
        "not a version constraint",
        "write e.g. `13.0`, `>=9.10`",
    ),
    "CAP-L121": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "extra Debian packages on a machine without apt",
        "lock on Debian, or drop them",
    ),
    "CAP-L122": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "no Debian 12 package index",
        "connect, or set `image.sources.debian`",
    ),
    "CAP-L123": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "unknown Debian package",
        "correct the name",
    ),
    "CAP-L124": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "apt finds no solution",
        "change `image.debian`, or `--refresh-base`",
    ),
    "CAP-L125": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a package of the recipe is not in the shipped base lock",
        "`--refresh-base`",
    ),
    "CAP-L201": ErrorEntry(
        ExitCode.USAGE,
        "the folder of `code.path` is missing or unreadable",
        "name the program's folder",
    ),
    "CAP-L202": ErrorEntry(
        ExitCode.USAGE,
        "the source tree is in a git work tree, and git cannot be asked",
        "install git, make `git status` work there",
    ),
    "CAP-L203": ErrorEntry(
        ExitCode.USAGE,
        "the source tree holds no file",
        "correct `code.path`, `code.files` or `.gitignore`",
    ),
    "CAP-L204": ErrorEntry(
        ExitCode.USAGE,
        "the source tree is larger than 256 MiB or 10,000 files",
        "leave data out with `code.files`, or have git ignore it",
    ),
    "CAP-L205": ErrorEntry(
        ExitCode.USAGE,
        "a file of the source tree is unreadable, special, or a link that leads outside",
        "leave it out with `code.files`",
    ),
    "CAP-L206": ErrorEntry(
        ExitCode.USAGE,
        "a file of the source tree, or its difference from the last commit, seems to hold a "
        "credential",
        "leave it out with `code.files`, or name it there if it holds no secret",
    ),
    "CAP-S001": ErrorEntry(
        ExitCode.USAGE,
        "the spec file cannot be read, or is larger than 1 MiB",
        "name an existing spec",
    ),
    "CAP-S002": ErrorEntry(
        ExitCode.USAGE,
        "not strict YAML: syntax, duplicate key, anchor, tag, non-finite number",
        "correct the place that is named",
    ),
    "CAP-S003": ErrorEntry(
        ExitCode.USAGE,
        "a field is unknown, missing, of the wrong type or out of range",
        "change the field that is named",
    ),
    "CAP-S004": ErrorEntry(
        ExitCode.USAGE,
        "`--set` is not `section.field=value`",
        "write `--set seeds.root=1`",
    ),
    "CAP-S005": ErrorEntry(
        ExitCode.USAGE,
        "`capsule init` would overwrite a file, or cannot write it",
        "choose another name or folder",
    ),
    "CAP-S006": ErrorEntry(
        ExitCode.USAGE,
        "`--set` of another field than `trainer.outputs` together with `--resume`",
        "start a new run",
    ),
    "CAP-S008": ErrorEntry(
        ExitCode.USAGE,
        "`capsule scores` was given the bundle of a run without an evaluation, or with a return "
        "that is not a finite number",
        "give bundles of runs that were evaluated",
    ),
    "CAP-S009": ErrorEntry(
        ExitCode.USAGE,
        "`--learners` with another trainer than IMPALA, or `--replicas` without "
        "`trainer.inference.mode: server`",
        "leave the option out, or change the spec",
    ),
    "CAP-S010": ErrorEntry(
        ExitCode.USAGE,
        "the file that `evaluation.start_set` names cannot be read, or is not a start set",
        "name a file that `capsule starts` wrote",
    ),
    "CAP-S011": ErrorEntry(
        ExitCode.USAGE,
        "`capsule starts` was given the bundle of a run whose starts no network ranked",
        "give the bundle of a run whose evaluation ranks random starts",
    ),
}
