"""Every command that a page shows without its output is run, as far as this machine can do it.

Other tests of this folder run the commands of blocks of the kind ``console``, and compare their
output. Those of indented lines are run here as they stand, in the order of the page, with the names
of a reader's files replaced by those of a small experiment.
"""

import shutil

import pytest

from tests.docs.pages import DOCS, FENCED, run
from tests.docs.test_commands import SHOWN
from tests.end_to_end.conftest import MICRO

pytestmark = [
    pytest.mark.engine,
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.xdist_group("programs"),
]

ROOT = DOCS.parent
# With the package, the images are such that no other test uses or removes them.
TRAINER = MICRO.replace("checkpoint_interval: 200", "checkpoint_interval: 100")
TRAINER = TRAINER.replace("starts: 2", "starts: 4")
TRAINER += "image: {debian: [ed]}\n"
# Pages whose commands are about a trainer: starts, segments, games, seeds, scores, operators.
OF_TRAINERS = {
    "diagnose.md", "diff.md", "dqn.md", "grades.md", "replay.md", "study.md", "verify.md",
}  # fmt: skip
# On the other pages, the experiment is a program, whose image has no torch to import.
PROGRAM = """\
schema: capsule/spec/v1
name: micro
code: {path: code}
image: {packages: [], debian: [ed]}
trainer: {command: [python, train.py]}
seeds: {root: 1}
limits: {memory_mb: 1024, minutes: 5}
"""
TRAIN = """\
import random
from capsule.training import run

with run() as r:
    random.seed(r.seed)
    r.log(1, loss=random.random())
    r.evaluation(1, [random.random()])
"""
STUDY = """\
schema: capsule/study/v1
name: small
base: spec.yaml
runs: 3
groups: {all: {vary: [root]}}
"""
# What stands for the names of a reader's files, in this order.
NAMES = {
    "SIGNER.pub": "alice.pub",
    "KEY": "alice",
    "BUNDLE": "run.capsule.tar",
    "dqn-breakout-….capsule.tar": "run.capsule.tar",
    "results/run.capsule.tar": "run.capsule.tar",
    "keys/alice.pub": "alice.pub",
    "keygen alice": "keygen author",  # there is one called alice already
    "studies/NAME": "studies/small",
    "NAME.capsule-study.tar": "studies/small/*.capsule-study.tar",
    "specs/dqn-breakout.yaml": "spec.yaml",
    "specs/dqn-cartpole.yaml": "spec.yaml",
    "specs/starts.json": "starts.json",
    "experiment.yaml": "spec.yaml",
    "--begin 20 --seconds 10": "--begin 1 --seconds 1",  # the episodes last three seconds
    " A B ": " run.capsule.tar other.capsule.tar ",
}
# Commands that need other machines, a person or much time: the tests that run their like, and what
# these name.
ELSEWHERE = {
    "--on slurm": ("tests/study/test_slurm.py", "slurm"),
    "--on kubernetes": ("tests/study/test_kubernetes.py", "kubernetes"),
    "--on ray": ("tests/study/test_ray.py", "ray://"),
    "--cluster": ("tests/end_to_end/test_cluster.py", "--cluster"),
    "--gpu": ("tests/cli/test_common.py", "use_gpu("),
    "-cuda.yaml": ("tests/end_to_end/test_cuda_image.py", "cuda"),
    "ghcr.io/": ("tests/end_to_end/test_registry.py", '"--pull"'),
    "--keyless": ("tests/bundle/test_keyless.py", "keyless"),
    "--passphrase": ("tests/cli/test_passphrase.py", "passphrase"),
    "--vary": ("tests/end_to_end/test_vary.py", "--vary"),
    "--apply": ("tests/docs/test_diagnose.py", "diagnose.md"),
    "capsule init": ("tests/end_to_end/test_first_commands.py", "init"),
    "capsule list": ("tests/cli/test_list.py", '"list"'),
    "capsule prune": ("tests/cli/test_prune.py", '"prune"'),  # it would empty the tests' cache
    "--resume runs/DIRECTORY": ("tests/end_to_end/test_own_outputs.py", '"--resume"'),
    "capsule run sb3_ppo.yaml": ("tests/examples/test_other_programs.py", "sb3_ppo"),
    "/sb3-ppo-": ("tests/examples/test_other_programs.py", "sb3_ppo"),
    # The commands of study.md show the progress of a study that is here.
    "# the progress of the members": ("tests/docs/test_shown_commands.py", "capsule/study/v1"),
}
# Commands about the machine alone, which several pages show: they are run once.
OF_THE_MACHINE = {"capsule doctor"}
DIFFERENT = 1  # the status of 'capsule diff' for runs that differ


def shown_commands(page):
    """Return the commands of the indented lines of a page, continued lines joined.

    A command that a page shows again, with another comment or none, is there once.
    """
    text = FENCED.sub("", page.read_text()).replace("\\\n", " ")
    shown = {}
    for line in text.splitlines():
        if line.startswith("    ") and (match := SHOWN.fullmatch(line.strip())):
            shown.setdefault(match[1].partition("  #")[0].strip(), match[1])
    return list(shown.values())


PAGES = [page for page in sorted(DOCS.glob("*.md")) if shown_commands(page)]


def experiment_of(spec, folder):
    """Fill a folder with keys, a spec, a study, and two runs."""
    for name in ("spec.yaml", "capsule.yaml"):
        (folder / name).write_text(spec)
    (folder / "code").mkdir()
    (folder / "code" / "train.py").write_text(TRAIN)
    (folder / "study.yaml").write_text(STUDY)
    for name in (".ssh", ".zfunc", ".local/share/bash-completion/completions", ".config/fish"):
        (folder / name).mkdir(parents=True)
    (folder / ".config" / "fish" / "completions").mkdir()
    for command in (
        "capsule keygen alice",
        "capsule keygen bob",
        "capsule keygen capsule.key",
        "ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519",
        "capsule run spec.yaml --key alice --output one",
        "mv one/*/*.capsule.tar run.capsule.tar",
        "capsule run spec.yaml --key alice --output other --set seeds.root=2",
        "mv other/*/*.capsule.tar other.capsule.tar",
    ):
        done = run(command, folder)
        assert done.returncode == 0, done.stdout
    key = " ".join((folder / "alice.pub").read_text().split()[:2])
    trusted = folder / "configuration" / "allowed_signers"
    trusted.parent.mkdir(exist_ok=True)
    trusted.write_text(f'alice namespaces="capsule-manifest@*" {key}\n')
    return folder


@pytest.fixture(scope="module")
def of_a_trainer(tmp_path_factory):
    return experiment_of(TRAINER, tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def of_a_program(tmp_path_factory):
    return experiment_of(PROGRAM, tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def run_before():
    """Commands of :data:`OF_THE_MACHINE` that another page has shown."""
    return set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_succeed(page, request, tmp_path, run_before):
    experiment = "of_a_trainer" if page.name in OF_TRAINERS else "of_a_program"
    folder = tmp_path / "reader"
    shutil.copytree(request.getfixturevalue(experiment), folder)
    done_here = set(run_before)
    for shown in shown_commands(page):
        if any(part in shown for part in ELSEWHERE):
            continue
        command = shown.replace("~/", f"{folder}/")
        for name, ours in NAMES.items():
            command = command.replace(name, ours)
        if command in done_here:  # with our names, commands of a page may be the same
            continue
        done_here.add(command)
        run_before |= OF_THE_MACHINE & {command}
        done = run(command, folder)
        expected = (0, DIFFERENT) if command.startswith("capsule diff ") else (0,)
        assert done.returncode in expected, f"{shown}\n{command}\n{done.stdout}"


@pytest.mark.parametrize("part", ELSEWHERE)
def test_what_runs_elsewhere_is_shown_and_has_tests(part):
    file, what = ELSEWHERE[part]
    assert what in (ROOT / file).read_text()
    assert any(part in shown for page in PAGES for shown in shown_commands(page))
