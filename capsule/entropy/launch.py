"""How a run is started: the launcher's command line for a spec (``docs/launcher.md``)."""

from __future__ import annotations

import hashlib

from capsule.experiment.canonical import canonical_json
from capsule.experiment.spec import CpuAccelerator, Spec

_KEY_DOMAIN = "capsule/entropy/v1"


def root_key(seed: int) -> bytes:
    """Return the 32-byte key of all derived entropy.

    It is the SHA-256 of the canonical JSON (RFC 8785) of ``["capsule/entropy/v1", seed]``.
    """
    return hashlib.sha256(canonical_json([_KEY_DOMAIN, seed])).digest()


def launch_arguments(
    spec: Spec, *, native: str, directory: str, replay: str | None, seconds: int | None = None
) -> list[str]:
    """Return the words that go before a program's own to start it as its spec says.

    Args:
        spec: What is run.
        native: Folder of the native parts, as the program will see it.
        directory: Folder for the journal and the reports, as the program will see it. It must
            exist, and belong to this start alone.
        replay: Path of the profile to replay, as the program will see it; None to record one. Only
            for ``entropy.mode: recorded``.
        seconds: When the launcher is to end the run, should nobody else have done so; None to
            leave it running.

    Raises:
        ValueError: A profile was given for another mode.
    """
    entropy = spec.entropy
    if replay is not None and entropy.mode != "recorded":
        raise ValueError(f"entropy.mode {entropy.mode!r} replays no profile")
    mode = {"recorded": "record" if replay is None else "replay"}.get(entropy.mode, entropy.mode)
    words = [f"{native}/capsule-launch", "--entropy", mode, "--directory", directory]
    if mode != "system":
        seed = spec.seeds.root if entropy.seed is None else entropy.seed
        words += ["--key", root_key(seed).hex()]
    if replay is not None:
        words += ["--profile", replay, "--on-exhaustion", entropy.on_exhaustion]
    words += ["--clock", entropy.clock]
    if seconds is not None:
        words += ["--time-limit", str(seconds)]
    if not entropy.supervised:
        words.append("--no-supervisor")
    if entropy.address_randomization:
        words.append("--keep-address-randomization")
    for library in _preloads(spec):
        words += ["--preload", f"{native}/{library}"]
    return [*words, "--"]


def _preloads(spec: Spec) -> list[str]:
    accelerator = spec.accelerator
    libraries = []
    if isinstance(accelerator, CpuAccelerator) and accelerator.numerics.startswith("portable"):
        libraries.append("libcapsule-math.so")
    if (spec.entropy.mode, spec.entropy.clock) != ("system", "system"):
        libraries.append("libcapsule-entropy.so")
    return libraries
