"""docs/grades.md states the effect of a false statement in every field of the observations."""

import re

from capsule.bundle.claims import Observations
from capsule.machine.fingerprint import Fingerprint
from tests.docs.pages import DOCS


def test_every_observation_has_a_row():
    section = (DOCS / "grades.md").read_text().split("## What an author can gain", 1)[1]
    listed = set()
    for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        root = first.partition(".")[0]
        listed |= {first, *(f"{root}{name}" if name[0] == "." else name for name in others)}
    fields = Observations.model_fields.keys() - {"schema_id", "fingerprint", "engine"}
    facts = Fingerprint.model_fields.keys() - {"schema_id"}
    assert listed == {*fields, "engine.name", *(f"fingerprint.{name}" for name in facts)}
