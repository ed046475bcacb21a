"""The codes of random profiles."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-R101": ErrorEntry(
        ExitCode.INTERNAL,
        "the launcher got an unknown or incomplete option",
        "report it",
    ),
    "CAP-R102": ErrorEntry(
        ExitCode.INTERNAL,
        "a library to be preloaded is missing, unreadable or not for x86-64",
        "build the image again",
    ),
    "CAP-R103": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the launcher's folder is missing, cannot be written, or holds another run's files",
        "an empty folder on a disk with room",
    ),
    "CAP-R104": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the kernel or the container does not let system calls be supervised",
        "Linux 5.14 or newer, or `entropy.supervised: false`",
    ),
    "CAP-R105": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "address randomisation cannot be switched off",
        "Capsule's seccomp profile, or `entropy.address_randomization: true`",
    ),
    "CAP-R106": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the program cannot be executed",
        "correct `trainer.command`, or add the program",
    ),
    "CAP-R107": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the program did not load what is preloaded",
        "an image with glibc 2.28 or newer",
    ),
    "CAP-R108": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the memory of a supervised program cannot be reached",
        "keep it dumpable and under its user, or `entropy.supervised: false`",
    ),
    "CAP-R109": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a supervised program makes 32-bit or x32 system calls",
        "x86-64 programs only, or `entropy.supervised: false`",
    ),
    "CAP-R110": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the supervisor cannot continue",
        "see the message; report it",
    ),
    "CAP-R111": ErrorEntry(
        ExitCode.TAMPERED,
        "the profile to be replayed is not intact, or of another version or architecture",
        "give the recorded run's profile",
    ),
    "CAP-R112": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the journal has no more room",
        "raise the limit on file size, or `entropy.mode: virtual`",
    ),
    "CAP-R113": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the launcher's report is missing or malformed",
        "start the run again",
    ),
    "CAP-R114": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the run went on after its time limit, and no Capsule was there to end it",
        "raise `limits.minutes`, then resume",
    ),
    "CAP-R201": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "a run wrote nothing down about its randomness, or another version of Capsule did",
        "start the run again",
    ),
    "CAP-R202": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the journal of a run contradicts itself",
        "start the run again",
    ),
    "CAP-R203": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "the journal has no room for the randomness of the whole run",
        "raise the limit on file size, or `entropy.mode: virtual`",
    ),
    "CAP-R204": ErrorEntry(
        ExitCode.TRAINING_FAILED,
        "two threads that asked for randomness have one path",
        "a folder for each run, or `entropy.mode: virtual`",
    ),
    "CAP-R211": ErrorEntry(
        ExitCode.TAMPERED,
        "not a random profile",
        "name a profile that Capsule wrote",
    ),
    "CAP-R212": ErrorEntry(
        ExitCode.TAMPERED,
        "a profile of another version",
        "the Capsule that made it, or record again",
    ),
    "CAP-R213": ErrorEntry(
        ExitCode.TAMPERED,
        "a profile from another architecture",
        "replay it there",
    ),
    "CAP-R214": ErrorEntry(
        ExitCode.TAMPERED,
        "a profile is cut off or was edited",
        "get it again",
    ),
    "CAP-R215": ErrorEntry(
        ExitCode.TAMPERED,
        "a profile has a correct checksum, but Capsule did not write it",
        "do not trust it; record again",
    ),
    "CAP-R221": ErrorEntry(
        ExitCode.DIFFERS,
        "a replay asked for more than was recorded, or for something else",
        "the same code and inputs, or `entropy.mode: virtual`",
    ),
    "CAP-R222": ErrorEntry(
        ExitCode.DIFFERS,
        "a replay asked for less than was recorded",
        "the same code and inputs, and let it finish",
    ),
    "CAP-R301": ErrorEntry(
        ExitCode.USAGE,
        "a run that records its randomness was interrupted, and is to be resumed",
        "start it anew, or use `entropy.mode: virtual`",
    ),
}
