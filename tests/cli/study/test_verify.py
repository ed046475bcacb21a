"""capsule study verify: what it shows."""

from capsule.cli.study.verify import _show_members


def test_reasons_from_bundles_do_not_control_the_terminal(capsys):
    member = {"name": "a.1", "agreement": "not-reproduced", "reason": "output \x1b[2J\nintact"}
    _show_members([member])
    assert capsys.readouterr().out == "a.1: not-reproduced: output \ufffd[2J\ufffdintact\n"
