"""The options and arguments that commands share or have many of, with their groups in the help.

Each is an annotated type, so that a command's signature shows only names and defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

CHECKS = "What to check"
EXPECTED = "Which bundle to accept"
TRUST = "Trusted keys and identities"
EXECUTION = "Where and what to execute"
PROCESSES = "How many processes"
RECEIPT = "Receipt"
OUTPUT = "Output"


def option(
    words: str,
    help: str,  # noqa: A002
    panel: str | None = None,
    *,
    min: int | None = None,  # noqa: A002
    complete: Callable[[str], list[str]] | None = None,
) -> Any:
    """Return an option for :data:`typing.Annotated`.

    Args:
        words: Its names, and what stands for its value in the help, as in ``--output -o FILE``.
        help: What it does.
        panel: Its group in the help.
        min: The smallest number that it takes.
        complete: What a shell offers in the place of an incomplete value.
    """
    names = [word for word in words.split() if word.startswith("-")]
    metavar = words.removeprefix(" ".join(names)).strip() or None
    return typer.Option(
        *names,
        metavar=metavar,
        help=help,
        rich_help_panel=panel,
        min=min,
        autocompletion=complete,
    )


def _complete_setting(incomplete: str) -> list[str]:
    from capsule.host.completion import complete_setting

    return complete_setting(incomplete)


# Shared by several commands.

DEFAULT_SPEC = Path("capsule.yaml")
SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Spec (YAML) or lock file (*.lock.json).")
]
SetOption = Annotated[
    list[str] | None,
    option(
        "--set FIELD=VALUE",
        "Override a field of the spec. May be repeated.",
        complete=_complete_setting,
    ),
]
EngineOption = Annotated[
    Literal["auto", "docker", "podman", "bwrap", "apptainer", "process"],
    option(
        "--engine NAME",
        "Engine that executes the run: auto, docker, podman, bwrap or apptainer (no daemon), or "
        "process (no container).",
        EXECUTION,
    ),
]
DataOption = Annotated[
    list[str] | None,
    option(
        "--data NAME=PATH",
        "File or folder with the content of a data set on this machine. May be repeated.",
        EXECUTION,
    ),
]
GpuOption = Annotated[
    str | None,
    option(
        "--gpu GPU",
        "NVIDIA GPU for a CUDA spec: its index, or the beginning of its UUID. By default, it is "
        "the first GPU that is visible (CUDA_VISIBLE_DEVICES) and meets the spec. If a run uses "
        "--learners, name several, as in 0,1.",
        EXECUTION,
    ),
]
JsonOption = Annotated[
    bool,
    option("--json", "Print the result as one JSON object.", OUTPUT),
]
QuietOption = Annotated[
    bool,
    option("--quiet -q", "Show no progress on standard error.", OUTPUT),
]
PassphraseOption = Annotated[
    Path | None,
    option(
        "--passphrase-file FILE",
        "File whose first line is the passphrase of the private key. Without this option, "
        "the command asks for the passphrase on the terminal.",
    ),
]
PassphraseFileOption = Annotated[  # of commands that never ask
    Path | None,
    option(
        "--passphrase-file FILE",
        "File whose first line is the passphrase of the private key.",
    ),
]

KeysOption = Annotated[
    list[Path] | None,
    option("--key FILE", "Public key that you trust (OpenSSH or PEM). May be repeated.", TRUST),
]
AllowedSignersOption = Annotated[
    list[Path] | None,
    option(
        "--allowed-signers FILE",
        "Trust file in OpenSSH's ALLOWED SIGNERS format. May be repeated.",
        TRUST,
    ),
]
RevokedOption = Annotated[
    list[Path] | None,
    option(
        "--revoked FILE",
        "List of revoked keys or fingerprints, one per line. May be repeated.",
        TRUST,
    ),
]
UntrustedOption = Annotated[
    bool,
    option("--allow-untrusted", "Continue even though no trusted key signed the bundle.", TRUST),
]

# capsule verify

IdentityOption = Annotated[
    list[str] | None,
    option(
        "--identity NAME",
        "Accept only signatures of this name in the trust file or, with --keyless, of this "
        "Sigstore identity. May be repeated.",
        TRUST,
    ),
]
ThresholdOption = Annotated[
    int,
    option(
        "--threshold N", "Number of different trusted keys that must have signed.", TRUST, min=1
    ),
]
SignatureOption = Annotated[
    list[Path] | None,
    option(
        "--signature FILE",
        "Further signature, as written by 'capsule sign'. May be repeated.",
        TRUST,
    ),
]
KeylessOption = Annotated[
    list[Path] | None,
    option(
        "--keyless FILE",
        "Sigstore bundle over manifest.json. Requires --identity and --issuer.",
        TRUST,
    ),
]
IssuerOption = Annotated[
    str | None,
    option("--issuer URL", "Identity provider that authenticated the --keyless identity.", TRUST),
]
ModeOption = Annotated[
    str,
    option(
        "--mode MODE",
        "integrity (nothing is executed), environment, prefix:N (the first N agent steps), "
        "segments:N, fresh-seed or full.",
        CHECKS,
    ),
]
ChallengeOption = Annotated[
    str | None,
    option(
        "--challenge N|all",
        "Execute N randomly chosen segments between checkpoints again, and a short training "
        "with a fresh seed. Same as --mode segments:N.",
        CHECKS,
    ),
]
FreshSeedOption = Annotated[
    bool,
    option(
        "--fresh-seed",
        "Train briefly with a seed drawn now, to show that the image computes its results "
        "instead of replaying stored ones. Same as --mode fresh-seed.",
        CHECKS,
    ),
]
VaryOption = Annotated[
    str | None,
    option(
        "--vary CONDITIONS",
        "Also execute the run again with one condition changed at a time, and report on which of "
        "them the result depends: threads, processes, locale, timezone, hostname, cpu-count, "
        "separated by commas, or all.",
        CHECKS,
    ),
]
GradeOption = Annotated[
    Literal["bitwise", "content", "statistical"],
    option(
        "--grade GRADE",
        "Weakest grade that gives the exit status 0: bitwise, content or statistical.",
        CHECKS,
    ),
]
ExpectSpecOption = Annotated[
    Path | None,
    option("--expect-spec FILE", "Reject the bundle unless it was made from this spec.", EXPECTED),
]
ExpectLockOption = Annotated[
    str | None,
    option(
        "--expect-lock FILE|DIGEST",
        "Reject the bundle unless it has this lock, which pins every package.",
        EXPECTED,
    ),
]
ExpectClaimOption = Annotated[
    str | None,
    option("--expect-claim ID", "Reject the bundle unless it has this claim id.", EXPECTED),
]
ImageOption = Annotated[
    Literal["rebuilt", "embedded"],
    option(
        "--image WHICH",
        "rebuilt: build the image from the lock. embedded: load the signer's image from the "
        "bundle.",
        EXECUTION,
    ),
]
PullOption = Annotated[
    str | None,
    option(
        "--pull REFERENCE",
        "Take the image from a registry instead of building it, if it is the claimed one: "
        "REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST.",
        EXECUTION,
    ),
]
BaseOption = Annotated[
    Literal["packages", "supplied"],
    option(
        "--base WHICH",
        "packages: build the base layer from Debian packages. supplied: take the signer's "
        "base layer from the bundle.",
        EXECUTION,
    ),
]
CodeOption = Annotated[
    Literal["own", "supplied"],
    option(
        "--code WHICH",
        "own: execute only this Capsule's training code. supplied: also accept the signer's "
        "version of it.",
        EXECUTION,
    ),
]
LimitOption = Annotated[
    list[str] | None,
    option(
        "--limit FIELD=NUMBER",
        "Lower one of the bundle's resource limits, e.g. minutes=10. May be repeated.",
        EXECUTION,
    ),
]
ReportOption = Annotated[
    Path,
    option("--report FILE", "File for the report, as JSON.", OUTPUT),
]
SignReceiptOption = Annotated[
    Path | None,
    option("--sign KEY", "Sign a receipt of the result with this private key.", RECEIPT),
]
ReceiptOption = Annotated[
    Path | None,
    option(
        "--receipt FILE",
        "File for the receipt. By default, it is written beside the bundle.",
        RECEIPT,
    ),
]

# capsule run

SigningKeyOption = Annotated[
    Path | None,
    option(
        "--key KEY",
        "Private key that signs. By default, it is your own key, which is made if it is missing.",
    ),
]
SshKeyOption = Annotated[
    Path | None,
    option(
        "--ssh-key KEY",
        "Key for an additional signature by ssh-keygen: a private key, or the public half of a key "
        "in an SSH agent.",
    ),
]
RunsOption = Annotated[
    Path,
    option("--output -o FOLDER", "Folder in which the run directory is created.", OUTPUT),
]
ResumeOption = Annotated[
    Path | None,
    option(
        "--resume FOLDER",
        "Run directory of an interrupted run to resume, with the engine with which it began. SPEC "
        "and --output are ignored.",
    ),
]
ClusterOption = Annotated[
    str | None,
    option(
        "--cluster CLUSTER",
        "Run IMPALA's actors on a Ray cluster: docker:N starts a cluster in N containers on this "
        "machine, and [ray://]HOST:PORT is the address of an existing one.",
        PROCESSES,
    ),
]
LearnersOption = Annotated[
    int,
    option(
        "--learners N", "Processes that share the gradient of a batch (IMPALA).", PROCESSES, min=1
    ),
]
ReplicasOption = Annotated[
    int,
    option(
        "--replicas N",
        "Inference processes (IMPALA with trainer.inference.mode: server).",
        PROCESSES,
        min=1,
    ),
]
EmbedImageOption = Annotated[
    bool,
    option("--embed-image", "Store the whole image in the bundle.", OUTPUT),
]
EmbedDataOption = Annotated[
    bool,
    option("--embed-data", "Store the data sets of the spec in the bundle.", OUTPUT),
]
MetricsOption = Annotated[
    str | None,
    option(
        "--metrics FORM:PLACE",
        "Also write the metrics during the run: tensorboard:FOLDER, csv:FILE, mlflow:FOLDER "
        "or wandb:FOLDER (offline).",
        OUTPUT,
    ),
]
