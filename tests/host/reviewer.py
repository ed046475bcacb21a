"""What a reviewer does on a system that executes no runs, in the order in which it is done.

As a program, this module executes the commands in one interpreter, since a start takes seconds
under Wine, and writes their exit statuses and outputs to a file. They find the corpus of bundles
below the current folder.

usage: python reviewer.py RESULTS
"""

import json
import sys
from pathlib import Path

BUNDLE, PROGRAM = "corpus/dqn.capsule.tar", "corpus/program.capsule.tar"
STUDY = "corpus/study.capsule-study.tar"
KEY, VERIFIER = ("--key", "corpus/author.pub"), ("--key", "corpus/verifier.pub")
NOT_HERE = "CAP-E019: nothing was executed"

# Arguments, exit status, and something that is printed.
COMMANDS = (
    (("show", BUNDLE), 0, "400 agent steps of DQN"),
    (("show", STUDY), 0, "4 runs in 2 groups"),
    (("verify", BUNDLE, *KEY, "--mode", "integrity"), 0, "signed by a trusted key"),
    (("verify", PROGRAM, *KEY, "--mode", "integrity"), 0, "intact"),
    (("verify", BUNDLE, *KEY), 4, NOT_HERE),
    (("diff", BUNDLE, BUNDLE), 0, "equal, bit for bit"),
    (("diff", PROGRAM, "corpus/program-recorded.capsule.tar"), 1, "files.scores.json.sha256"),
    (("report", BUNDLE, "-o", "page.html"), 0, ""),
    (("receipts", BUNDLE, f"{BUNDLE}.verifier.receipt.json", *KEY, *VERIFIER), 0, "by 1 signer"),
    (("study", "verify", STUDY, *KEY), 0, "intact"),
    (("study", "report", STUDY), 0, "deterministic"),
    (("keygen", "mine"), 0, "fingerprint"),
    (("keygen", "mine"), 2, "CAP-B135"),
    (("sign", BUNDLE, "--key", "mine", "-o", "mine.sshsig"), 0, "signature"),
    (
        (
            "verify",
            BUNDLE,
            "--key",
            "mine.pub",
            "--signature",
            "mine.sshsig",
            "--mode",
            "integrity",
        ),
        0,
        "signed by a trusted key",
    ),
    (("sign", PROGRAM, "-o", "own.sshsig"), 0, "made a signing key"),
    (("export", BUNDLE, "--to", "csv", "-o", "csv"), 0, "wrote 1 run"),
    (
        (
            "export",
            BUNDLE,
            "--to",
            "zenodo",
            "-o",
            "zenodo",
            "--creator",
            "A, B",
            "--licence",
            "MIT",
        ),
        0,
        "wrote",
    ),
    (("list", "."), 0, "has no runs"),
    (("init", "mine.yaml"), 0, "wrote mine.yaml"),
    (("lock", "mine.yaml"), 125, NOT_HERE),
    (("plan", "mine.yaml"), 125, NOT_HERE),
    (("build", "mine.yaml"), 125, NOT_HERE),
    (("run", "mine.yaml"), 125, NOT_HERE),
    (("replay", BUNDLE, *KEY), 125, NOT_HERE),
    (("doctor", "--profile", "none"), 4, "on Linux on x86_64 only"),
    (("prune", "--dry-run"), 0, ""),
)
# What the commands write is read elsewhere, so no line ends as lines do on Windows.
WRITTEN = (
    *("mine", "mine.pub", "mine.sshsig", "mine.yaml", "page.html", "verify-report.json"),
    *("zenodo/files/SHA256SUMS", "zenodo/MD5SUMS"),
)


def main(results: str) -> None:
    """Execute the commands."""
    from typer.testing import CliRunner

    from capsule.cli.main import app

    done = [CliRunner().invoke(app, arguments) for arguments, _, _ in COMMANDS]
    found = [(each.exit_code, each.output) for each in done]
    Path(results).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
