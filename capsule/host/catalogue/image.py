"""The codes of images."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-I101": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a recipe is unknown or unreadable",
        "reinstall Capsule",
    ),
    "CAP-I102": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "the lock needs another assembler version, recipe or training code",
        "use the Capsule version it names, or lock again",
    ),
    "CAP-I103": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a package is not in the cache, or not what was locked",
        "build again; delete the file that is named",
    ),
    "CAP-I104": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a malformed Debian package, or one that contradicts the lock",
        "lock another version",
    ),
    "CAP-I105": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "not a wheel, or a malformed one",
        "lock another version",
    ),
    "CAP-I106": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a wheel disagrees with its RECORD",
        "lock another version",
    ),
    "CAP-I107": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "an unsafe path in a package",
        "lock another version",
    ),
    "CAP-I108": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a setuid file, device, or link where none may be",
        "lock another version",
    ),
    "CAP-I109": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "two packages bring one path with different content, or one module in different files",
        "leave one out, or pin other versions",
    ),
    "CAP-I110": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a layer carried by a bundle is not canonical, or not the locked base layer, code or "
        "source tree",
        "ask for an unmodified bundle",
    ),
    "CAP-I111": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a layer cannot be written",
        "free space, or set `CAPSULE_CACHE`",
    ),
    "CAP-I112": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "the source tree that a lock names is not in the cache",
        "build from the spec, or verify a bundle, which carries it",
    ),
    "CAP-I113": ErrorEntry(
        ExitCode.TAMPERED,
        "the Debian packages of a lock make another base layer than the lock says",
        "distrust the bundle; lock your own spec again",
    ),
    "CAP-I301": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a file does not have its SHA-256",
        "remove the source that gave it, or lock again",
    ),
    "CAP-I302": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a locked wheel is not available",
        "check the sources; lock again",
    ),
    "CAP-I303": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "a locked Debian package is on no mirror",
        "`capsule lock --refresh-base`; to verify a bundle, `--base supplied`",
    ),
    "CAP-I304": ErrorEntry(
        ExitCode.BUILD_FAILED,
        "no Debian mirror is known",
        "set `image.sources.debian`",
    ),
    "CAP-I305": ErrorEntry(
        ExitCode.TAMPERED,
        "a lock contradicts a wheel's file name",
        "lock again; distrust the bundle it came from",
    ),
    "CAP-I306": ErrorEntry(
        ExitCode.TAMPERED,
        "a lock does not pin what its spec and recipe ask for, or holds a package that nothing "
        "asks for",
        "distrust the bundle; lock your own spec again",
    ),
    "CAP-I307": ErrorEntry(
        ExitCode.TAMPERED,
        "a wheel that the spec does not name holds `sitecustomize`, `usercustomize`, "
        "`apport_python_hook` (which the `sitecustomize` of Debian imports) or an interpreter",
        "name the package in `image.packages`, or distrust what brought it",
    ),
    "CAP-I308": ErrorEntry(
        ExitCode.USAGE,
        "a folder of the cache belongs to another user or can be written by others",
        "delete it, or set `CAPSULE_CACHE` to a folder of your own",
    ),
}
