"""How a run is started: the launcher's command line for a spec (``docs/launcher.md``)."""

from __future__ import annotations

import hashlib

from capsule.experiment.canonical import canonical_json
from capsule.experiment.spec import Spec, calendar_clock

REPLAYED = "replayed.profile"
"""Name of a profile that is replayed, in the folder of the start."""

_KEY_DOMAIN = "capsule/entropy/v1"


def root_key(seed: int) -> bytes:
    """Return the 32-byte key of all derived entropy.

    It is the SHA-256 of the canonical JSON (RFC 8785) of ``["capsule/entropy/v1", seed]``.
    """
    # The domain keeps the key apart from everything else that is derived from the seed.
    return hashlib.sha256(canonical_json([_KEY_DOMAIN, seed])).digest()


def launch_arguments(
    spec: Spec, *, native: str, directory: str, replay: bool, seconds: int | None = None
) -> list[str]:
    """Return the words that go before a program's own to start it as its spec says.

    Args:
        spec: What is run.
        native: Folder of the native parts, as the program will see it.
        directory: Folder for the journal and the reports, as the program will see it. It must
            exist, and belong to this start alone.
        replay: Whether to replay the profile that lies in ``directory`` as :data:`REPLAYED`. Only
            for ``entropy.mode: recorded``, which otherwise records one.
        seconds: When the launcher ends the run if nothing else has done so; None to
            leave it running.

    Raises:
        ValueError: Another mode is to replay a profile.
    """
    entropy = spec.entropy
    if replay and entropy.mode != "recorded":
        raise ValueError(f"entropy.mode {entropy.mode!r} replays no profile")
    mode = {"recorded": "replay" if replay else "record"}.get(entropy.mode, entropy.mode)
    words = [f"{native}/capsule-launch", "--entropy", mode, "--directory", directory]
    if mode != "system":
        seed = spec.seeds.root if entropy.seed is None else entropy.seed
        words += ["--key", root_key(seed).hex()]
    if replay:
        words += ["--on-exhaustion", entropy.on_exhaustion]
    words += ["--clock", calendar_clock(spec)]
    if spec.determinism.sorted_listings:
        words.append("--sort-listings")
    if spec.determinism.cores is not None:
        words += ["--cores", str(spec.determinism.cores)]
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
    libraries = []
    if spec.cpu_numerics.startswith("portable"):
        libraries.append("libcapsule-math.so")
    entropy, layers = spec.entropy.mode, spec.determinism
    # The interposer also answers for the clock, listings and processors, so entropy.mode: system
    # alone does not make it unnecessary.
    left_alone = (entropy, calendar_clock(spec), layers.cores) == ("system", "system", None)
    if not left_alone or layers.sorted_listings:
        libraries.append("libcapsule-entropy.so")
    return libraries
