"""The codes of verification and of ``capsule diff``."""

from capsule.experiment.errors import ExitCode
from capsule.host.catalogue.entry import ErrorEntry

ENTRIES: dict[str, ErrorEntry] = {
    "CAP-V001": ErrorEntry(
        ExitCode.USAGE,
        "`--mode` is not known",
        "integrity, environment, prefix:N, segments:N, fresh-seed or full",
    ),
    "CAP-V002": ErrorEntry(
        ExitCode.TAMPERED,
        "no key was given",
        "`--key`, or `--allow-untrusted`",
    ),
    "CAP-V003": ErrorEntry(
        ExitCode.USAGE,
        "a prefix does not end on a trace record",
        "name a multiple of the trace interval",
    ),
    "CAP-V004": ErrorEntry(
        ExitCode.TAMPERED,
        "a layer in the bundle cannot be unpacked, or unpacks to something else",
        "do not trust the bundle",
    ),
    "CAP-V005": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the lock does not give the claimed image",
        "compare `image/config.json`",
    ),
    "CAP-V006": ErrorEntry(
        ExitCode.USAGE,
        "`--key`, `--allowed-signers` or `--keyless` together with `--allow-untrusted`",
        "give one",
    ),
    "CAP-V007": ErrorEntry(
        ExitCode.INTERRUPTED,
        "the verification was interrupted",
        "start it again",
    ),
    "CAP-V008": ErrorEntry(
        ExitCode.USAGE,
        "`--mode prefix` for a bundle that runs a program of its own",
        "`--mode full`",
    ),
    "CAP-V009": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the bundle was made without a container and can only be executed without one, which the "
        "user did not ask for",
        "`--engine process`, if the code in the bundle may have all permissions of your account",
    ),
    "CAP-V010": ErrorEntry(
        ExitCode.TAMPERED,
        "the bundle contradicts itself",
        "do not trust the bundle",
    ),
    "CAP-V011": ErrorEntry(
        ExitCode.TAMPERED,
        "a checkpoint is not a safetensors file",
        "do not trust the bundle",
    ),
    "CAP-V013": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the base layer cannot be built from the locked packages, because no mirror has them",
        "a mirror; or `--base supplied`, which takes the signer's",
    ),
    "CAP-V014": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the training code in the bundle is neither that of this Capsule nor that of a release "
        "that it knows",
        "verify with the version that made the bundle, or with a later release; or read the code "
        "and pass `--code supplied`",
    ),
    "CAP-V040": ErrorEntry(
        ExitCode.TAMPERED,
        "an image document contradicts the lock or the claims",
        "do not trust the bundle",
    ),
    "CAP-V041": ErrorEntry(
        ExitCode.TAMPERED,
        "`--expect-spec`: the bundle is of another experiment",
        "ask for the right one",
    ),
    "CAP-V042": ErrorEntry(
        ExitCode.TAMPERED,
        "`--expect-claim`: the bundle has another claim id",
        "ask for the right one",
    ),
    "CAP-V043": ErrorEntry(
        ExitCode.USAGE,
        "`--expect-claim` is not a claim id",
        "give all 64 digits",
    ),
    "CAP-V044": ErrorEntry(
        ExitCode.TAMPERED,
        "an output has a name that leads out of the working folder, or one path is claimed as two "
        "things",
        "do not trust the bundle",
    ),
    "CAP-V045": ErrorEntry(
        ExitCode.TAMPERED,
        "a bundle lacks a member of its run, has another one, or lists one with another role or "
        "media type",
        "do not trust the bundle",
    ),
    "CAP-V046": ErrorEntry(
        ExitCode.TAMPERED,
        "a member that follows from the bundle's other documents is not what they give",
        "do not trust the bundle",
    ),
    "CAP-V047": ErrorEntry(
        ExitCode.TAMPERED,
        "a line of `run/events.jsonl` is not an event, or there are too many",
        "do not trust the bundle",
    ),
    "CAP-V048": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the program left no file and printed nothing, here as there: nothing is claimed, so "
        "nothing can be reproduced",
        "have it write its results into its working folder, or print them",
    ),
    "CAP-V049": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "a re-execution left a malformed file, or was itself a wrong use; the message has its code",
        "see that code",
    ),
    "CAP-V050": ErrorEntry(
        ExitCode.USAGE,
        "`--image embedded` with the plain-process engine",
        "use a container engine",
    ),
    "CAP-V051": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "`--image embedded`, and the bundle carries no image",
        "`--image rebuilt`, or a bundle made with `--embed-image`",
    ),
    "CAP-V053": ErrorEntry(
        ExitCode.TAMPERED,
        "the embedded image is not in the form that Capsule writes, or holds what no image of "
        "Capsule's holds",
        "do not trust the bundle, or `--image rebuilt`",
    ),
    "CAP-V054": ErrorEntry(
        ExitCode.TAMPERED,
        "the embedded image would unpack to too much",
        "do not trust the bundle, or `--image rebuilt`",
    ),
    "CAP-V055": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "the signer's own image would get a GPU through a runtime or toolkit with a known way out",
        "update it, or `--image rebuilt`",
    ),
    "CAP-V056": ErrorEntry(
        ExitCode.USAGE,
        "`--limit` is not `FIELD=NUMBER`",
        "a field of the spec's section `limits`, e.g. `minutes=10`",
    ),
    "CAP-V057": ErrorEntry(
        ExitCode.TAMPERED,
        "`--expect-lock`: the bundle has another lock",
        "ask for the right one",
    ),
    "CAP-V058": ErrorEntry(
        ExitCode.USAGE,
        "`--expect-lock` is neither a file nor the digest of a lock",
        "name a lock file, or give all 64 digits",
    ),
    "CAP-V060": ErrorEntry(
        ExitCode.USAGE,
        "`--challenge` has no number of segments",
        "a number from 1 on, or `all`",
    ),
    "CAP-V061": ErrorEntry(
        ExitCode.TAMPERED,
        "a state in the bundle is malformed, or not of the claimed checkpoint",
        "do not trust the bundle",
    ),
    "CAP-V062": ErrorEntry(
        ExitCode.USAGE,
        "the run cannot be challenged: it kept no states, recorded the system's randomness, or is "
        "a program's",
        "`--mode full`; ask for a run with `recording.segment_states: true`",
    ),
    "CAP-V063": ErrorEntry(
        ExitCode.USAGE,
        "`--challenge` asks for more segments than there are",
        "a smaller number, or `all`",
    ),
    "CAP-V064": ErrorEntry(
        ExitCode.USAGE,
        "`--challenge` or `--fresh-seed` together with `--mode`",
        "give one",
    ),
    "CAP-V070": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "`capsule diff --bisect`: a side cannot be executed here",
        "`--dense FILE` where it can be executed, and that file in its place",
    ),
    "CAP-V071": ErrorEntry(
        ExitCode.USAGE,
        "an argument of `capsule diff` is not a bundle, a dense record or a finished run",
        "name one",
    ),
    "CAP-V072": ErrorEntry(
        ExitCode.USAGE,
        "a checkpoint that is compared cannot be read",
        "take it from its bundle or run directory again",
    ),
    "CAP-V073": ErrorEntry(
        ExitCode.USAGE,
        "`capsule diff` of a trainer's run and a program's",
        "name two of one kind",
    ),
    "CAP-V075": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "a side that is executed for `--bisect` does not repeat its own trace here",
        "`--dense FILE` on the machine where it does",
    ),
    "CAP-V076": ErrorEntry(
        ExitCode.USAGE,
        "the traces do not part, or not in what a trainer did: nothing to bisect",
        "leave `--bisect` out",
    ),
    "CAP-V077": ErrorEntry(
        ExitCode.INCONCLUSIVE,
        "every update in the dense records is equal",
        "`capsule diagnose` finds what does not repeat",
    ),
    "CAP-V078": ErrorEntry(
        ExitCode.TAMPERED,
        "`--bisect` would execute a bundle that no trusted key signed",
        "`--key`, or `--allow-untrusted`",
    ),
    "CAP-V079": ErrorEntry(
        ExitCode.USAGE,
        "`capsule diff --bisect`: a side is a bare run directory without its lock",
        "name the folder that `capsule run` made, or its bundle",
    ),
    "CAP-V080": ErrorEntry(
        ExitCode.USAGE,
        "`--sign` with a mode that executes nothing of the run",
        "`--mode full`, `prefix:N` or `segments:N`",
    ),
    "CAP-V081": ErrorEntry(
        ExitCode.USAGE,
        "`--receipt` without `--sign`",
        "`--sign KEY`",
    ),
    "CAP-V082": ErrorEntry(
        ExitCode.USAGE,
        "`--report` names a file that cannot be written",
        "name one in a folder you may write to, or `/dev/null`",
    ),
}
