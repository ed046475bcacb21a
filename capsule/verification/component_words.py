"""The components of claims, traces and states in words, as the subject of a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping

from capsule.host.wording import agreeing

# The words for each component, and whether they are in the plural.
_COMPONENT_WORDS: Mapping[str, tuple[str, bool]] = {
    # Claims.
    "lock": ("the lock", False),
    "image": ("the image", False),
    "relaxations": ("the relaxations", True),
    "data": ("the data sets", True),
    "flags": ("the flags", True),
    "libraries": ("the versions of the libraries", True),
    "entropy_profile": ("the recorded randomness", False),
    "streams": ("the random streams", True),
    "schedule": ("the schedule", False),
    "arrivals": ("the order of arrivals", False),
    "trace": ("the trace", False),
    "checkpoints": ("the checkpoints", True),
    "parameters": ("the parameters", True),
    "evaluation": ("the evaluation", False),
    "steps": ("the number of steps", False),
    "episodes": ("the number of episodes", False),
    "outputs": ("the outputs", True),
    "files": ("the files", True),
    "deleted": ("the deleted files", True),
    "empty_folders": ("the empty folders", True),
    "standard_output": ("the standard output", False),
    # Trace records.
    "generations": ("the generations", True),
    "unrolls": ("the unrolls", True),
    "observations": ("the observations", True),
    "actions": ("the actions", True),
    "rewards": ("the rewards", True),
    "terminals": ("the ends of episodes", True),
    "indices": ("the indices of the minibatches", True),
    "minibatch": ("the minibatch", False),
    "loss": ("the loss", False),
    "gradient": ("the gradient", False),
    "target": ("the target network", False),
    "optimizer": ("the state of the optimizer", False),
    "step": ("the step at which the record ends", False),
    "end": ("the length of the trace", False),
    "format": ("the spelling of the record", False),
    # The state of a segment.
    "state": ("the state to resume from", False),
}


def component_words(path: str) -> str:
    """Return the words for the component that a path leads to or into; an unknown one as it is."""
    return _entry(path)[0]


def component_agreeing(path: str, one: str, many: str) -> str:
    """Return the form of a verb or a pronoun that agrees with the words for a component."""
    return agreeing(2 if _entry(path)[1] else 1, one, many)


def component_differs(path: str) -> str:
    """State that a component differs, and where in it: "the flags differ (flags.threads)"."""
    words = component_words(path)
    place = "" if path in (_name(path), words) else f" ({path})"
    return f"{words} {component_agreeing(path, 'differs', 'differ')}{place}"


def _entry(path: str) -> tuple[str, bool]:
    return _COMPONENT_WORDS.get(_name(path), (path, False))


def _name(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]
