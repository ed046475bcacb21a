"""The GitHub Action: its form, and its shell steps as a runner executes them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ACTION = YAML(typ="safe").load(ROOT / "action.yml")
INSTALL, VERIFY = ACTION["runs"]["steps"]
CORPUS = ROOT / "tests" / "corpus"


class Runner:
    """Executes a step of the action as GitHub's runner does, with files for its outputs."""

    def __init__(self, folder):
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.output, self.summary = folder / "output", folder / "summary"

    def link(self):
        """Put this environment's Capsule where the first step installs one."""
        programs = self.temporary / "capsule" / "bin"
        programs.mkdir(parents=True)
        for name in ("capsule", "python"):
            (programs / name).symlink_to(Path(sys.executable).with_name(name))

    def execute(self, step, inputs=None):
        variables = {
            name: str((inputs or {}).get(value.split("inputs.")[1].split()[0], ""))
            for name, value in step.get("env", {}).items()
        }
        environment = {
            **os.environ,
            **variables,
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "RUNNER_TEMP": str(self.temporary),
        }
        assert step["shell"] == "bash"
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=self.temporary
        )

    @property
    def outputs(self):
        return dict(line.split("=", 1) for line in self.output.read_text().splitlines())


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


def verify(runner, bundle, key, arguments="--mode=integrity"):
    runner.link()
    return runner.execute(VERIFY, {"bundle": bundle, "key": key, "arguments": arguments})


def test_the_form_is_githubs():
    program = Path(sys.executable).with_name("check-jsonschema")
    schema = ("--builtin-schema", "vendor.github-actions")
    subprocess.run([program, *schema, ROOT / "action.yml"], check=True)


def test_no_input_is_pasted_into_a_program():
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
    pasted = "".join(VERIFY["env"].values())
    assert all(f"inputs.{name} " in pasted for name in ACTION["inputs"])


@pytest.mark.parametrize("step", [INSTALL, VERIFY], ids=["install", "verify"])
def test_the_shell_accepts_the_steps(step):
    subprocess.run(["bash", "-n", "-c", step["run"]], check=True)


@pytest.mark.slow
def test_a_sound_bundle_gives_its_verdict(runner):
    done = verify(runner, CORPUS / "dqn.capsule.tar", CORPUS / "author.pub")
    assert done.returncode == 0, done.stderr
    report = json.loads(Path(runner.outputs["report"]).read_text())
    assert runner.outputs["verdict"] == report["verdict"] == "intact"
    assert runner.outputs["claim-id"] == report["claim_id"]
    assert "**intact**" in runner.summary.read_text()


@pytest.mark.slow
def test_each_use_in_a_job_has_a_report_of_its_own(runner):
    reports = []
    runner.link()
    for bundle in ("dqn.capsule.tar", "program.capsule.tar"):
        inputs = {"bundle": CORPUS / bundle, "key": CORPUS / "author.pub"}
        runner.execute(VERIFY, {**inputs, "arguments": "--mode=integrity"})
        reports.append(Path(runner.outputs["report"]))
    verified = [json.loads(report.read_text())["bundle"] for report in reports]
    assert verified == ["dqn.capsule.tar", "program.capsule.tar"]


@pytest.mark.slow
def test_each_of_several_keys_is_trusted(runner):
    keys = f"{CORPUS / 'verifier.pub'}\n\n{CORPUS / 'author.pub'}\n"
    assert verify(runner, CORPUS / "dqn.capsule.tar", keys).returncode == 0


@pytest.mark.slow
def test_a_bundle_by_another_key_fails_the_job(runner):
    done = verify(runner, CORPUS / "dqn.capsule.tar", CORPUS / "verifier.pub")
    assert (done.returncode, runner.outputs["verdict"]) == (3, "untrusted")


@pytest.mark.slow
def test_a_tampered_bundle_fails_the_job(runner, tmp_path):
    data = bytearray((CORPUS / "dqn.capsule.tar").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "it's $(touch tampered).tar").write_bytes(data)
    done = verify(runner, tmp_path / "it's $(touch tampered).tar", CORPUS / "author.pub")
    assert (done.returncode, runner.outputs["verdict"]) == (3, "tampered")
    assert not (runner.temporary / "tampered").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bundle", "arguments"),
    [("missing.tar", ""), ("--help", ""), (CORPUS / "dqn.capsule.tar", "--mode=nonsense")],
)
def test_wrong_inputs_fail_the_job_without_a_verdict(bundle, arguments, runner):
    done = verify(runner, bundle, CORPUS / "author.pub", arguments)
    assert done.returncode in (2, 4)
    assert runner.outputs["verdict"] in ("", "inconclusive")
    assert not runner.outputs["claim-id"]


@pytest.mark.soak
@pytest.mark.network
@pytest.mark.slow
def test_the_first_step_installs_what_the_second_needs(runner):
    done = runner.execute(INSTALL)
    assert done.returncode == 0, done.stderr
    inputs = {
        "bundle": CORPUS / "dqn.capsule.tar",
        "key": CORPUS / "author.pub",
        "arguments": "--mode=integrity",
    }
    done = runner.execute(VERIFY, inputs)
    assert (done.returncode, runner.outputs["verdict"]) == (0, "intact"), done.stderr
