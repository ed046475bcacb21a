# ruff: noqa: INP001
"""Write docs/errors.md from the codes in capsule/host/errors.txt.

Run this script after every change of the codes; a test compares the page with its output.

usage: python scripts/errors_page.py
"""

from __future__ import annotations

from pathlib import Path

from capsule.diagnosis import findings
from capsule.host.errors import ENTRIES

PLACE = Path(__file__).parents[1] / "docs" / "errors.md"
ROOMS = {  # by the letter of their codes
    "S": "Spec",
    "L": "Lock",
    "I": "Image",
    "E": "Engine",
    "T": "Training",
    "B": "Bundle",
    "M": "Machine",
    "N": "Native parts",
    "R": "Random profiles",
    "V": "Verification",
    "D": "Diagnosis",
    "P": "Reports",
    "Y": "Study",
    "X": "Bugs",
}
HEAD = """# Error catalogue

Every foreseen failure has a code. The message on standard error names the field, file or value,
and the remedy; this page lists the causes. The letter after `CAP-` names the part of Capsule:
S spec, L lock, I image, E engine, T training, B bundle, M machine, N native parts, R random
profiles, V verification, D diagnosis, P reports (pages), Y studies, X none of these (a bug). A
command that fails with a code ends with the exit status in the table, whose meaning
[exit-codes.md](exit-codes.md) describes; `capsule verify` reports most failures as verdicts.
`scripts/errors_page.py` writes this page.
"""
FINDINGS = """
The codes from CAP-D101 on are findings, not failures; [diagnose.md](diagnose.md) explains them.
"""
COLUMNS = """
| code | exit status | cause | fix |
|---|---|---|---|
"""


def page() -> str:
    """Return the page: a table for each part of Capsule."""
    rows = {code: (str(int(entry[0])), *entry[1:]) for code, entry in ENTRIES.items()}
    for code, finding in findings.CATALOGUE.items():
        cause = f"{finding.title[0].upper()}{finding.title[1:]}."
        rows[code] = ("", cause, "See [diagnose.md](diagnose.md).")
    parts = [HEAD]
    for letter, title in ROOMS.items():
        parts += [f"\n## {title}\n", FINDINGS if letter == "D" else "", COLUMNS]
        parts += [
            f"| {' | '.join((code, *rows[code]))} |\n"
            for code in sorted(rows)
            if code.startswith(f"CAP-{letter}")
        ]
    return "".join(parts)


if __name__ == "__main__":
    PLACE.write_text(page())
