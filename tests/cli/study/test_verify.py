"""capsule study verify: what it shows."""

import json
import shutil
from pathlib import Path

from capsule.cli.study.verify import _show, _show_members
from tests.cli.conftest import capsule

CORPUS = Path(__file__).parents[2] / "corpus"
NOTHING = {"relaxations": [], "records": [], "source_trees": []}


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
    signers = [each["signers"] for each in documents]
    assert [[each["kind"] for each in found] for found in signers] == [["dsse"], ["dsse"]]
    assert [[each["rejection_reason"] for each in found] for found in signers] == [
        ["is not a trusted key"],
        [None],
    ]


def test_what_every_member_relies_on_is_shown():
    command = ("study", "verify", CORPUS / "study-program.capsule-study.tar")
    done = capsule(*command, "--key", CORPUS / "author.pub")
    (tree,) = json.loads(capsule(*command, "--allow-untrusted", "--json").stdout)["source_trees"]
    assert f"code      the SIGNER'S, of 1 source tree: {tree}\n" in done.stdout
    assert "records" not in done.stdout


def test_a_co_signature_counts_for_the_study_and_not_for_its_members(tmp_path):
    study = shutil.copyfile(CORPUS / "study.capsule-study.tar", tmp_path / "a.capsule-study.tar")
    assert capsule("keygen", tmp_path / "carol").exit_code == 0
    signed = capsule("sign", study, "--key", tmp_path / "carol")
    signature = f"{study}.carol.sshsig"
    assert signed.stderr == (
        f"next: capsule study verify {study} --key … --signature {signature}\n"
    )
    keys = ("--key", CORPUS / "author.pub", "--key", tmp_path / "carol.pub", "--threshold", 2)
    alone = capsule("study", "verify", study, *keys)
    assert (alone.exit_code, "CAP-B155" in alone.stderr) == (3, True)
    words = (*keys, "--signature", signature, "--members", CORPUS / "study.members", "--json")
    both = capsule("study", "verify", study, *words)
    assert both.exit_code == 0, both.output
    document = json.loads(both.stdout)
    assert [each["kind"] for each in document["signers"]] == ["dsse", "detached"]
    assert {each["agreement"] for each in document["bundles"]} == {"intact"}


def test_without_a_trusted_key_both_options_that_name_one_are_shown():
    done = capsule("study", "verify", CORPUS / "study.capsule-study.tar")
    assert (done.exit_code, done.stderr.partition(":")[0]) == (3, "CAP-V002")
    assert "--key or --allowed-signers" in done.stderr


def test_an_engine_without_anything_to_execute_is_rejected():
    words = ("--key", CORPUS / "author.pub", "--engine", "process")
    done = capsule("study", "verify", CORPUS / "study.capsule-study.tar", *words)
    assert done.exit_code == 2
    assert "CAP-X005: --engine has no effect with a check that executes nothing" in done.stderr


def test_reasons_from_bundles_do_not_control_the_terminal(capsys):
    member = {"name": "a.1", "agreement": "not-reproduced", "reason": "output \x1b[2J\nintact"}
    _show_members([member | {"fix": None}])
    line = "a.1: not-reproduced: output \ufffd[2J\ufffdintact\n"
    assert capsys.readouterr().out == line
    _show_members([member | {"fix": f"{'long ' * 60}\x1b[2J"}])
    assert capsys.readouterr().out == f"{line}fix: {'long ' * 60}\ufffd[2J\n"


def test_one_member_is_written_in_the_singular(capsys):
    bundle = {"name": "a.1", "agreement": "intact", "reason": "", "fix": None}
    document = {
        **NOTHING,
        "claim_id": "c",
        "members": 1,
        "bundles": [bundle],
        "sample": [],
        "chance_to_notice": [{"forged": 1, "probability": 1.0}],
        "undecidable": 0,
        "challenge": None,
    }
    _show(document, [])
    assert capsys.readouterr().out == (
        "claim id  c\n"
        "intact    every table follows from the claims of 1 member\n"
        "bundles   the bundles of 1 of 1 member are in the folder\n"
        "If 1 member was forged, a sample of this size would have drawn one with probability "
        "1.00.\n"
    )


def test_members_that_a_sample_cannot_decide_are_counted(capsys):
    member = {
        "name": "a.1",
        "agreement": "inconclusive",
        "reason": "it needs its data sets",
        "fix": None,
    }
    document = {
        **NOTHING,
        "claim_id": "c",
        "members": 4,
        "bundles": None,
        "sample": [member],
        "chance_to_notice": [],
        "undecidable": 3,
        "challenge": None,
    }
    _show(document, [])
    assert capsys.readouterr().out.endswith(
        "3 members cannot be decided without their own bundles.\n"
    )
    _show(document | {"sample": []}, [])
    assert "cannot be decided" not in capsys.readouterr().out
