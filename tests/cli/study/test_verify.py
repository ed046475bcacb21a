"""capsule study verify: what it shows."""

import json
from pathlib import Path

from capsule.cli.study.verify import _show, _show_members
from tests.cli.conftest import capsule

CORPUS = Path(__file__).parents[2] / "corpus"


def test_a_signature_that_does_not_count_is_shown_as_such():
    command = ("study", "verify", CORPUS / "study.capsule-study.tar")
    untrusted = capsule(*command, "--allow-untrusted")
    assert untrusted.exit_code == 0, untrusted.output
    assert "is not a trusted key; the signature does not count\n" in untrusted.stdout
    trusted = capsule(*command, "--key", CORPUS / "author.pub")
    assert "does not count" not in trusted.stdout
    documents = [
        json.loads(capsule(*command, *words, "--json").stdout)
        for words in (["--allow-untrusted"], ["--key", CORPUS / "author.pub"])
    ]
    assert [each["authentic"] for each in documents] == [False, True]
    assert [each["rejection_reasons"] for each in documents] == [["is not a trusted key"], [None]]


def test_reasons_from_bundles_do_not_control_the_terminal(capsys):
    member = {"name": "a.1", "agreement": "not-reproduced", "reason": "output \x1b[2J\nintact"}
    _show_members([member])
    assert capsys.readouterr().out == "a.1: not-reproduced: output \ufffd[2J\ufffdintact\n"


def test_one_member_is_written_in_the_singular(capsys):
    bundle = {"name": "a.1", "agreement": "intact", "reason": ""}
    document = {
        "claim_id": "c",
        "signers": [],
        "rejection_reasons": [],
        "members": 1,
        "bundles": [bundle],
        "sample": [],
        "chance_to_notice": [{"forged": 1, "probability": 1.0}],
        "undecidable": 0,
        "challenge": None,
    }
    _show(document)
    assert capsys.readouterr().out == (
        "claim id  c\n"
        "intact    every table follows from the claims of the 1 member\n"
        "bundles   the bundles of 1 of 1 member are in the folder\n"
        "If 1 member was forged, a sample of this size would have drawn one with probability "
        "1.00.\n"
    )


def test_members_that_a_sample_cannot_decide_are_counted(capsys):
    member = {"name": "a.1", "agreement": "inconclusive", "reason": "it needs its data sets"}
    document = {
        "claim_id": "c",
        "signers": [],
        "rejection_reasons": [],
        "members": 4,
        "bundles": None,
        "sample": [member],
        "chance_to_notice": [],
        "undecidable": 3,
        "challenge": None,
    }
    _show(document)
    assert capsys.readouterr().out.endswith(
        "3 members cannot be decided without their own bundles.\n"
    )
    _show(document | {"sample": []})
    assert "cannot be decided" not in capsys.readouterr().out
