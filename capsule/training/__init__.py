"""The code inside the image: trainers, environments, streams, traces, checkpoints, user programs.

User programs import ``arrivals``, ``run`` and ``Recorder`` from here; all other names are internal.
"""

from __future__ import annotations

TYPE_CHECKING = False  # known to type checkers by its name; this runs at every start of Python
if TYPE_CHECKING:
    from capsule.training.own_program.recorder import Recorder, run

__all__ = ["Recorder", "run"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from capsule.training.own_program import recorder

    return getattr(recorder, name)
