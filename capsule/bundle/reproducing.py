"""REPRODUCING.md: how to check and repeat a run, with Capsule and without it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from capsule.bundle.claims import Claims, ProgramClaims, TrainingClaims
from capsule.entropy.launch import REPLAYED, launch_arguments
from capsule.experiment import contract
from capsule.experiment.lock import Lock, LockedData
from capsule.experiment.spec import Spec, task_name
from capsule.experiment.trainers import CommandTrainer
from capsule.image.assembly.assemble import reference_of
from capsule.image.data.listing import size_text
from capsule.image.distribution import PREFIX, distribution_of

# These texts are parts of a signed member, which verify makes again and compares byte for byte.
# Bundles of a Capsule with other words are recognised by its digest (capsule.host.code).
_HEAD = """\
# Reproducing {name}

Claim id: `{claim_id}`

This bundle is an uncompressed tar of plain files. It records one run of *{name}*: {what}, locked,
executed and signed by Capsule {version}.

## With Capsule

Install Capsule from a package index, or from a wheel or a clone of its repository:

    pip install capsule-rl
    capsule verify BUNDLE.capsule.tar --key SIGNER.pub{places}

The second command checks the signature, compares this machine with the recorded one, rebuilds the
image from the packages that `spec/lock.json` names, runs it again and compares every claim.

## Without Capsule

Unpack the bundle, and check that its files are the ones that were signed:

    mkdir bundle && tar -xf BUNDLE.capsule.tar -C bundle && cd bundle
    sha256sum --strict -c SHA256SUMS

`signatures/run.sigstore.json` is a Sigstore bundle (v0.3) with a DSSE envelope around an
in-toto statement about `manifest.json` and `SHA256SUMS`; any verifier of that format can check it
with the signer's public key.
"""

_WITH_ARCHIVE = """
Run it again with Docker alone:

    zstd -dc image/image.tar.zst | docker load
    mkdir -p again/entropy
{copied}    chmod -R a+rwX again
    docker run --rm --network none --read-only --cap-drop ALL \\
        --security-opt no-new-privileges --security-opt seccomp=image/seccomp.json \\
        --hostname capsule --tmpfs /tmp:mode=1777 --volume "$PWD/again:/out" \\
{gpu}{volumes}        --entrypoint {launcher} {reference} \\
        {arguments}

`capsule-launch` starts first and provides the program's randomness.

The image's config digest must be `{config}`
(`docker image inspect --format '{{{{.Id}}}}' {reference}`; engines that use the containerd image
store print the manifest digest instead).
"""

_DATA = """
## Data sets

In addition to its image, the run read these data sets. `data/NAME.json` lists every path of a data
set, with the size and the SHA-256 of every file; the digest of that file identifies the data set.

{sets}
{where}"""

_CARRIED = """\
This bundle contains them. To unpack one into a folder with its name:

    mkdir NAME && zstd -dc data/NAME.tar.zst | tar -x -C NAME
"""

_ELSEWHERE = """\
This bundle does not contain them. `observations.json` lists the addresses of those that were
downloaded.
"""

_COMPARE = """
Compare the results. The two files of each pair must be equal, byte for byte:

    cmp run/trace.jsonl again/trace.jsonl
    cmp run/checkpoints.json again/checkpoints.json
    cmp run/evaluation.json again/evaluation.json
    cmp profiles/streams.json again/streams.json

The first line in which the two `trace.jsonl` differ is the first step at which the runs differ.
"""

_COMPARE_PROGRAM = """
Compare what the program wrote and printed. The two files must be equal, byte for byte:

    cmp run/outputs.json again/outputs.json

They list every output with its SHA-256. The outputs themselves are in the folder `workspace/` of
each run. An output whose name an archive cannot contain is in this bundle as `outputs/SHA256`.
"""

# A run sees one GPU, and finds the driver's libraries where NVIDIA's toolkit mounts them.
_GPU = "        --gpus device=0 --env LD_LIBRARY_PATH=/usr/lib64 \\\n"

_NOTHING = """
**Nothing is claimed.** The program left no file and printed nothing, so equal lists show no result.
"""

_WITHOUT_ARCHIVE = """
This bundle does not contain the whole image. `capsule build spec/lock.json --archive image.tar`
builds it from the packages that `spec/lock.json` names with SHA-256 digests, and writes an archive
for `docker load`; it contains the image whose config digest is `{config}`.

`image/layer-*.tar.zst` are copies of layers whose packages may disappear from the mirrors one day.
Unless Capsule itself ships the digest of the base layer, only the signer attests to it.
"""

_PROCESS = """
This run used no container: it was executed by the plain-process engine, in an environment made
from the wheels that `spec/lock.json` names. The operating system's own libraries were not pinned.
"""


def reproducing_guide(lock: Lock, claims: Claims, *, embedded: bool, with_data: bool) -> str:
    """Return the text of REPRODUCING.md for a run.

    Args:
        lock: What was run.
        claims: What the run claims.
        embedded: Whether the bundle carries the whole image.
        with_data: Whether it carries the data sets.
    """
    spec = lock.spec
    program = isinstance(spec.trainer, CommandTrainer)
    text = _HEAD.format(
        name=spec.name,
        claim_id=claims.claim_id(),
        what=what_ran(spec),
        version=lock.image.code.version,
        places="" if with_data else "".join(f" --data {name}=PATH" for name in lock.data or ()),
    )
    if lock.data is not None:
        text += _data_sets(lock.data, carried=with_data)
    if claims.image is None:
        return text + _PROCESS
    if not embedded:
        return text + _WITHOUT_ARCHIVE.format(config=claims.image.config)
    return (
        text
        + _WITH_ARCHIVE.format(
            reference=reference_of(lock.image.recipe, claims.image.config),
            config=claims.image.config,
            gpu=_GPU if spec.accelerator.kind == "cuda" else "",
            **_launch(spec),
            copied=_copied(claims),
            volumes=_volumes(lock),
        )
        + (_COMPARE_PROGRAM if program else _COMPARE)
        + (_NOTHING if isinstance(claims, ProgramClaims) and claims.nothing else "")
    )


def _data_sets(data: Mapping[str, LockedData], *, carried: bool) -> str:
    """List data sets, and say where they are."""
    lines = [
        f"    {name}: {size_text(pin)}, SHA-256 of its listing {pin.sha256}\n"
        for name, pin in data.items()
    ]
    return _DATA.format(sets="".join(lines), where=_CARRIED if carried else _ELSEWHERE)


def _volumes(lock: Lock) -> str:
    """Return the options that show a container the data sets, from folders of their names."""
    if lock.data is None:
        return ""
    folders = [f'--volume "$PWD/{name}:{contract.DATA_FOLDER}/{name}:ro"' for name in lock.data]
    variable = f"--env {contract.DATA_VARIABLE}={contract.DATA_FOLDER}"
    return "".join(f"        {option} \\\n" for option in (variable, *folders))


def _launch(spec: Spec) -> dict[str, str]:
    """Return how the run is started in its image, in words for a shell."""
    recorded = spec.entropy.mode == "recorded"
    distribution = distribution_of(spec.image)
    launcher, *options = launch_arguments(
        spec,
        native=f"{PREFIX}/{distribution.native}",
        directory="/out/entropy",
        replay=recorded,
    )
    words = [*options, distribution.interpreter, "-P", "-m", "capsule.training", "/out"]
    return {
        "launcher": launcher,
        "arguments": " \\\n        ".join(_lines(words)),
    }


def _copied(claims: Claims) -> str:
    """Return the commands that give the run its job, and what it is to repeat."""
    given = {"spec/job.json": contract.JOB}
    if claims.entropy_profile is not None:
        given["profiles/entropy.profile"] = f"entropy/{REPLAYED}"
    if isinstance(claims, TrainingClaims) and claims.schedule is not None:
        given["profiles/schedule.log"] = contract.SCHEDULE_REPLAY
    if isinstance(claims, ProgramClaims) and claims.arrivals is not None:
        given["profiles/arrivals.json"] = contract.ARRIVALS_REPLAY
    return "".join(f"    cp {member} again/{name}\n" for member, name in given.items())


def _lines(words: list[str]) -> list[str]:
    """Put each option on a line of its own, with its value."""
    lines: list[str] = []
    for word in map(shlex.quote, words):
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def what_ran(spec: Spec) -> str:
    """Describe a run of ``spec`` in a few words."""
    if isinstance(spec.trainer, CommandTrainer):
        return f"the program `{_plain(shlex.join(spec.trainer.command))}`"
    spec = spec.training()
    environment = spec.environment
    steps, algorithm = spec.trainer.total_steps, spec.trainer.algorithm.upper()
    task = f"{environment.suite}/{task_name(environment)}"
    own = "" if spec.code is None else ", an environment of its source tree"
    return f"{steps:,} agent steps of {algorithm} on {_plain(task)}{own}"


def _plain(text: str) -> str:
    """Replace what would end a line or a code span, and so let the author write further lines."""
    return "".join(c if c.isprintable() and c != "`" else "?" for c in text)
