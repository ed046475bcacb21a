"""The options and arguments that commands share or have many of, with their groups in the help.

Each is an annotated type, so that a command's signature shows only names and defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

CHECKS = "What to check"
EXPECTED = "Which bundle to accept"
TRUST = "Whom to trust"
EXECUTION = "Where and what to execute"
PROCESSES = "How many processes"
RECEIPT = "Receipt"
OUTPUT = "Output"

# Shared by several commands.

DEFAULT_SPEC = Path("capsule.yaml")
SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Spec (YAML) or lock file (*.lock.json).")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Override a field of the spec. May be repeated."
    ),
]
EngineOption = Annotated[
    Literal["auto", "docker", "podman", "process"],
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Engine that executes the run: auto, docker, podman or process (no container).",
        rich_help_panel=EXECUTION,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print the result as one JSON object.", rich_help_panel=OUTPUT),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Show no progress on standard error.", rich_help_panel=OUTPUT
    ),
]
PassphraseOption = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="FILE",
        help="File whose first line is the passphrase of the private key. Without this option, "
        "the passphrase is asked for on the terminal.",
    ),
]

KeysOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="Public key that you trust (OpenSSH or PEM). May be repeated.",
        rich_help_panel=TRUST,
    ),
]
AllowedSignersOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--allowed-signers",
        metavar="FILE",
        help="Trust file in OpenSSH's ALLOWED SIGNERS format. May be repeated.",
        rich_help_panel=TRUST,
    ),
]
RevokedOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--revoked",
        metavar="FILE",
        help="List of revoked keys or fingerprints, one per line. May be repeated.",
        rich_help_panel=TRUST,
    ),
]
UntrustedOption = Annotated[
    bool,
    typer.Option(
        "--allow-untrusted",
        help="Continue even though no trusted key signed the bundle.",
        rich_help_panel=TRUST,
    ),
]

# capsule verify

IdentityOption = Annotated[
    list[str] | None,
    typer.Option(
        "--identity",
        metavar="NAME",
        help="Accept only signatures of this name in the trust file or, with --keyless, of this "
        "Sigstore identity. May be repeated.",
        rich_help_panel=TRUST,
    ),
]
ThresholdOption = Annotated[
    int,
    typer.Option(
        "--threshold",
        metavar="N",
        min=1,
        help="Number of different trusted keys that must have signed.",
        rich_help_panel=TRUST,
    ),
]
SignatureOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--signature",
        metavar="FILE",
        help="Further signature, as written by 'capsule sign'. May be repeated.",
        rich_help_panel=TRUST,
    ),
]
KeylessOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--keyless",
        metavar="FILE",
        help="Sigstore bundle over manifest.json. Needs --identity and --issuer.",
        rich_help_panel=TRUST,
    ),
]
IssuerOption = Annotated[
    str | None,
    typer.Option(
        "--issuer",
        metavar="URL",
        help="Identity provider that authenticated the --keyless identity.",
        rich_help_panel=TRUST,
    ),
]
ModeOption = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="integrity, environment, prefix:N (the first N agent steps), segments:N, fresh-seed "
        "or full.",
        rich_help_panel=CHECKS,
    ),
]
ChallengeOption = Annotated[
    str | None,
    typer.Option(
        "--challenge",
        metavar="N|all",
        help="Execute N randomly chosen segments between checkpoints again, and a short training "
        "with a fresh seed. Same as --mode segments:N.",
        rich_help_panel=CHECKS,
    ),
]
FreshSeedOption = Annotated[
    bool,
    typer.Option(
        "--fresh-seed",
        help="Train briefly with a seed drawn now, to show that the image computes its results "
        "instead of replaying stored ones. Same as --mode fresh-seed.",
        rich_help_panel=CHECKS,
    ),
]
GradeOption = Annotated[
    Literal["bitwise", "content", "statistical"],
    typer.Option(
        "--grade",
        metavar="GRADE",
        help="Weakest agreement that ends with exit status 0: bitwise, content or statistical.",
        rich_help_panel=CHECKS,
    ),
]
ExpectSpecOption = Annotated[
    Path | None,
    typer.Option(
        "--expect-spec",
        metavar="FILE",
        help="Reject the bundle unless it was made from this spec.",
        rich_help_panel=EXPECTED,
    ),
]
ExpectLockOption = Annotated[
    str | None,
    typer.Option(
        "--expect-lock",
        metavar="FILE|DIGEST",
        help="Reject the bundle unless it has this lock, which pins every package.",
        rich_help_panel=EXPECTED,
    ),
]
ExpectClaimOption = Annotated[
    str | None,
    typer.Option(
        "--expect-claim",
        metavar="ID",
        help="Reject the bundle unless it has this claim id.",
        rich_help_panel=EXPECTED,
    ),
]
ImageOption = Annotated[
    Literal["rebuilt", "embedded"],
    typer.Option(
        "--image",
        metavar="WHICH",
        help="rebuilt: build the image from the lock. embedded: load the signer's image from the "
        "bundle.",
        rich_help_panel=EXECUTION,
    ),
]
BaseOption = Annotated[
    Literal["packages", "supplied"],
    typer.Option(
        "--base",
        metavar="WHICH",
        help="packages: build the base layer from Debian packages. supplied: take the signer's "
        "base layer from the bundle.",
        rich_help_panel=EXECUTION,
    ),
]
CodeOption = Annotated[
    Literal["own", "supplied"],
    typer.Option(
        "--code",
        metavar="WHICH",
        help="own: execute only this Capsule's training code. supplied: also accept the signer's "
        "version of it.",
        rich_help_panel=EXECUTION,
    ),
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="FIELD=NUMBER",
        help="Lower one of the bundle's resource limits, e.g. minutes=10. May be repeated.",
        rich_help_panel=EXECUTION,
    ),
]
ReportOption = Annotated[
    Path,
    typer.Option(
        "--report",
        metavar="FILE",
        help="File for the report, as JSON.",
        rich_help_panel=OUTPUT,
    ),
]
SignReceiptOption = Annotated[
    Path | None,
    typer.Option(
        "--sign",
        metavar="KEY",
        help="Sign a receipt of the result with this private key.",
        rich_help_panel=RECEIPT,
    ),
]
ReceiptOption = Annotated[
    Path | None,
    typer.Option(
        "--receipt",
        metavar="FILE",
        help="File for the receipt. By default it is written beside the bundle.",
        rich_help_panel=RECEIPT,
    ),
]

# capsule run

SigningKeyOption = Annotated[
    Path,
    typer.Option(
        "--key", metavar="KEY", help="Private key that signs the bundle ('capsule keygen')."
    ),
]
SshKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--ssh-key",
        metavar="KEY",
        help="Key for an additional signature by ssh-keygen: a file, or one held by an agent.",
    ),
]
RunsOption = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="Folder in which the run directory is created.",
        rich_help_panel=OUTPUT,
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FOLDER",
        help="Run directory of an interrupted run to resume. SPEC is ignored.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Run IMPALA's actors on a Ray cluster: docker:N starts one in N containers on this "
        "machine, [ray://]HOST:PORT is the address of an existing one.",
        rich_help_panel=PROCESSES,
    ),
]
LearnersOption = Annotated[
    int,
    typer.Option(
        "--learners",
        metavar="N",
        min=1,
        help="Processes that share the gradient of a batch (IMPALA).",
        rich_help_panel=PROCESSES,
    ),
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        "--replicas",
        metavar="N",
        min=1,
        help="Inference processes (IMPALA with trainer.inference.mode: server).",
        rich_help_panel=PROCESSES,
    ),
]
EmbedImageOption = Annotated[
    bool,
    typer.Option(
        "--embed-image", help="Store the whole image in the bundle.", rich_help_panel=OUTPUT
    ),
]
