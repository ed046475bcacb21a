"""What commands tell their user while they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from capsule.experiment import contract

Progress = Callable[[str], None]  # is told, in one line, what is being done


class Reporter(Protocol):
    """Receives progress messages (``capsule.report.progress`` has the implementations)."""

    def note(self, message: str) -> None:
        """Say one line about what is being done."""

    def event(self, event: contract.Event) -> None:
        """Show one event of the training side."""
