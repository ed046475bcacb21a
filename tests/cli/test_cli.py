"""Command lines of several commands: what is refused, and shipped specs. No engine needed."""

from capsule.host.spec_file import load_spec
from tests.cli.conftest import SMALL, capsule


def test_the_specs_of_the_papers_are_their_defaults():
    """What these specs write out is what the papers' tables say; one has choices of its own."""
    for name, chosen in (
        ("dqn-breakout", ()),
        ("r2d2-atari", ()),
        (
            "impala-atari",
            (
                *("actors", "annealing", "hidden_units", "initialization", "network"),
                *("schedule", "truncation"),
            ),
        ),
    ):
        trainer = load_spec(SMALL.with_name(f"{name}.yaml")).trainer
        choice = {field: getattr(trainer, field) for field in chosen}
        assert trainer == type(trainer)(algorithm=trainer.algorithm, **choice)


def test_a_missing_bundle_or_mode_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = capsule("verify", tmp_path / "none.tar", "--mode", "prefix:x")
    assert done.exit_code == 2
    assert "CAP-V001" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_a_command_line_is_found_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, code in (
        (("run",), "CAP-S001"),
        (("run", "--resume", "nowhere"), "CAP-S012"),
        (("run", SMALL, "--cluster", "docker:2"), "CAP-E018"),
        (("verify", SMALL, "--allow-untrusted"), "CAP-B114"),
    ):
        done = capsule(*words)
        assert (done.exit_code, code in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())
