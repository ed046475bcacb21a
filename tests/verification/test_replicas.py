"""Real trainings on two kinds of processor: verified whole, graded, and vouched for."""

import json
import re
import subprocess
import sys
import textwrap
from datetime import UTC, datetime

import pytest

from capsule import execution
from capsule.bundle.bundle import Content, open_bundle, pack
from capsule.bundle.keys import generate, load_private
from capsule.bundle.packing import FinishedRun, pack_run
from capsule.bundle.receipts import receipts_beside
from capsule.bundle.tally import read_original, read_receipts
from capsule.bundle.trust import load_policy
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import Spec
from capsule.image.cache import Cache
from capsule.image.code import training_code_digest
from capsule.machine.fingerprint import take_fingerprint
from capsule.report.progress import SilentReporter
from capsule.report.terminal import show_report
from capsule.verification import verify as verification
from capsule.verification.execution import admission
from capsule.verification.receipt import require_execution, sign_report
from capsule.verification.request import Mode, VerifyRequest
from tests.docs.pages import DOCS, matches
from tests.hostile.genuine import edit_json, rederive
from tests.locked_images import locked_image
from tests.report.terminals import printed
from tests.verification.stand_ins import OLD, StandIn

SPEC = {
    "name": "replica",
    "accelerator": {"kind": "cpu", "numerics": "native"},
    "environment": {"suite": "gymnasium", "id": "CartPole-v1", "max_episode_steps": 200},
    "trainer": {
        "algorithm": "dqn",
        "network": "mlp",
        "hidden_units": 32,
        "total_steps": 2_600,
        "replay_capacity": 2_600,
        "replay_start": 200,
        "update_interval": 2,
        "target_interval": 100,
        "learning_rate": 0.005,
        "min_squared_gradient": 0.001,
        "exploration_initial": 0.81,
        "exploration_final": 0.05,
        "exploration_steps": 800,
    },
    "evaluation": {
        "interval": 2_600,
        "starts": 60,
        "noop_max": 10,
        "tolerance": {"relative": 0.1},
    },
    "recording": {"trace_interval": 200, "tensor_interval": 2_600, "checkpoint_interval": 2_600},
    "image": {"packages": []},
    "limits": {"memory_mb": 512},
}
LOCK = Lock(
    spec=Spec.model_validate_json(json.dumps(SPEC)),
    image=locked_image(training_code_digest()),
)
QUIET = SilentReporter()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def here(folder):
    return StandIn(folder / "here", take_fingerprint({"name": "process"}))


@pytest.fixture(scope="module")
def old(folder, here):
    """A machine whose processor has neither AVX2 nor FMA."""
    cpu = here.fingerprint.cpu.model_copy(update={"family": 6, "model": 26, "flags": ("sse4_2",)})
    fingerprint = here.fingerprint.model_copy(update={"cpu": cpu})
    return StandIn(folder / "old", fingerprint, code=OLD)


@pytest.fixture(scope="module")
def bundle(folder, old):
    """What the old machine trained, packed and signed."""
    generate(folder / "alice")
    directory = folder / "run"
    execution.execute(LOCK, old, directory, reporter=QUIET)
    run = FinishedRun(LOCK, None, old.describe(), old.fingerprint, datetime.now(UTC), directory)
    path, _ = pack_run(
        run, load_private(folder / "alice"), folder, Cache(folder / "cache"), embed_image=False
    )
    return path


@pytest.fixture
def verified(bundle, folder, monkeypatch):
    """Return a function that verifies the bundle on a machine."""

    def work(machine, path=bundle, **choices):
        monkeypatch.setattr(admission, "open_engine", lambda *_, **__: machine)
        monkeypatch.setattr(verification, "take_fingerprint", lambda _: machine.fingerprint)
        trust = load_policy(keys=[folder / "alice.pub"])
        request = VerifyRequest(path, trust, Mode("full"), engine="process", **choices)
        return verification.verify(request, Cache(folder / "cache"), QUIET)

    return work


GRADES = (DOCS / "grades.md").read_text()
EXAMPLE = GRADES.split("## An example\n", 1)[1].split("\n## ", 1)[0]
SHOWN = textwrap.dedent("\n".join(re.findall("^    .*$", EXAMPLE, re.MULTILINE)))
INTERVAL = re.compile(r"\[(-?[\d.]+), (-?[\d.]+)\]")


def intervals(text):
    return [float(bound) for pair in INTERVAL.findall(text) for bound in pair]


@pytest.mark.slow
def test_another_processor_reproduces_within_the_tolerance(verified, here):
    report = verified(here, required="statistical")
    assert report.verdict == "reproduced-statistical", report
    assert (report.expected_grade, report.exit_code) == ("statistical", ExitCode.OK)
    assert report.first_difference is not None
    (task,) = report.statistics.tasks
    assert task.paired
    assert len(task.recorded) == len(task.found) == 60
    assert "lies within the declared" in report.summary
    text = printed(show_report, report, width=200)
    assert matches(INTERVAL.sub("[…]", SHOWN), text), text
    # Their draws follow from the claim id, and so from this machine and this version.
    assert intervals(text) == pytest.approx(intervals(SHOWN), rel=0.2, abs=0.05)
    assert verified(here).exit_code == ExitCode.DIFFERS


@pytest.mark.slow
def test_the_same_processor_reproduces_bit_for_bit(verified, old):
    report = verified(old)
    assert (report.verdict, report.expected_grade) == ("reproduced-bitwise", "bitwise")
    assert report.statistics is None


@pytest.mark.slow
def test_other_bits_from_an_equal_machine_are_not_excused(verified, here, old, folder):
    pretender = StandIn(here.folder, old.fingerprint)
    report = verified(pretender)
    assert (report.verdict, report.expected_grade) == ("not-reproduced", "bitwise")
    assert report.statistics.tasks[0].criteria[0].outcome == "within"


@pytest.mark.slow
def test_a_run_that_is_worse_does_not_pass(verified, here, folder):
    """It looks no further than the next reward; its lock says otherwise."""
    faulty = StandIn(folder / "faulty", here.fingerprint, fault={"discount": 0.3})
    report = verified(faulty)
    assert (report.verdict, report.expected_grade) == ("not-reproduced", "statistical")
    (task,) = report.statistics.tasks
    assert task.criteria[0].outcome == "outside"
    assert task.difference.high < 0
    assert task.signed_rank.p_value < 0.01
    assert f"its network scores {task.found_metric.estimate:.6g}," in " ".join(EXAMPLE.split())


def forge(bundle, folder, observed, factor):
    """Sign the bundle again with another evaluation and another account of the machine."""
    with open_bundle(bundle, ()) as opened:
        files = {path: opened.content(path) for path in opened.files}
        facts = {file.path: (file.role, file.media_type) for file in opened.manifest.files}
    before = dict(files)

    def raised(evaluation):
        point = evaluation["points"][-1]
        point["returns"] = [(factor * float.fromhex(each)).hex() for each in point["returns"]]

    edit_json(files, "run/evaluation.json", raised)
    edit_json(files, "claims.json", lambda claims: raised(claims["evaluation"]))
    edit_json(files, "observations.json", lambda facts: facts["fingerprint"].update(observed))
    rederive(files, before)
    contents = {path: Content(data, *facts[path]) for path, data in files.items()}
    claim_id = sha256_hex(files["claims.json"])
    return pack(contents, claim_id, load_private(folder / "alice"), folder / "forged")


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.05, 50])  # within the tolerance, and beyond it
def test_a_forged_score_is_not_excused_by_a_forged_machine(
    verified, here, old, folder, bundle, factor
):
    """What the old machine trained is verified on one like it, but named as another's."""
    cpu = here.fingerprint.model_dump(mode="json", by_alias=True)["cpu"]
    forged = forge(bundle, folder, {"cpu": cpu}, factor)
    report = verified(old, path=forged, required="statistical")
    assert (report.verdict, report.expected_grade) == ("not-reproduced", "statistical")
    assert report.exit_code == ExitCode.DIFFERS
    assert "a tolerance applies only where the traces differ" in report.summary


# --- receipts -------------------------------------------------------------------------------------


def receipts(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "capsule", "receipts", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.slow
def test_receipts_of_real_verifications_are_counted(verified, bundle, here, old, folder):
    for name in ("bob", "carol"):
        generate(folder / name)
    bob, carol = (load_private(folder / name) for name in ("bob", "carol"))
    for key, machine in ((bob, old), (bob, here), (carol, old)):
        line = sign_report(verified(machine), key, bundle, None)
        assert line.startswith("receipt: ")
    paths = receipts_beside(bundle)
    assert len(paths) == 3
    policy = load_policy(keys=[folder / f"{name}.pub" for name in ("alice", "bob", "carol")])
    found = read_receipts(read_original(bundle, policy), paths, policy)
    assert found.summary == (
        "reproduced bitwise by 2 signers on 1 kind of machine; "
        "reproduced statistically by 1 signer on 1 kind of machine"
    )

    keys = "--key", folder / "alice.pub", "--key", folder / "bob.pub"
    trusting_bob = receipts(bundle, *keys, "--json")
    document = json.loads(trusting_bob.stdout)
    assert trusting_bob.returncode == 0
    assert document["tallies"]["reproduced-bitwise"] == {"signers": 1, "machines": 1}
    nobody = receipts(bundle)
    assert nobody.returncode == 3
    assert "no independent receipt by a trusted verifier" in nobody.stdout


@pytest.mark.slow
def test_an_authors_receipt_never_counts(verified, bundle, old, folder):
    """Not beside her own bundle, and not beside one that a key of the moment signed again."""
    alice = load_private(folder / "alice")
    generate(folder / "mallory")
    with open_bundle(bundle, ()) as opened:
        contents = {
            file.path: Content(opened.content(file.path), file.role, file.media_type)
            for file in opened.manifest.files
        }
        claim_id = opened.claim_id
    (folder / "laundered").mkdir()
    laundered = folder / "laundered" / bundle.name
    pack(contents, claim_id, load_private(folder / "mallory"), laundered)
    line = sign_report(verified(old), alice, bundle, folder / "own.receipt.json")
    assert "will not count as independent" in line
    own = folder / "own.receipt.json"

    named = receipts(bundle, own, "--key", folder / "alice.pub")
    assert (named.returncode, "the author's" in named.stdout) == (3, True)
    unnamed = receipts(laundered, own, "--key", folder / "alice.pub")
    assert (unnamed.returncode, "the author's" in unnamed.stdout) == (3, True)
    both = "--key", folder / "alice.pub", "--key", folder / "mallory.pub"
    fooled = receipts(laundered, own, *both)
    assert (fooled.returncode, "the author's" in fooled.stdout) == (3, True)


@pytest.mark.slow
def test_what_decides_nothing_has_no_receipt(verified, bundle, here, folder):
    report = verified(here).model_copy(update={"verdict": "inconclusive"})
    generate(folder / "dave")
    before = receipts_beside(bundle)
    line = sign_report(report, load_private(folder / "dave"), bundle, None)
    assert line == "no receipt: inconclusive decides nothing about the run"
    assert receipts_beside(bundle) == before
    for mode in ("integrity", "environment", "fresh-seed"):
        with pytest.raises(CapsuleError, match="nothing to attest") as caught:
            require_execution(Mode.parse(mode))
        assert caught.value.code == "CAP-V080"

    require_execution(Mode.parse("prefix:8"))


@pytest.mark.slow
def test_a_bundle_without_receipts_says_how_to_get_one(bundle, tmp_path):
    lonely = tmp_path / "lonely.capsule.tar"
    lonely.write_bytes(bundle.read_bytes())
    done = receipts(lonely)
    assert done.returncode == 2
    assert "CAP-B174" in done.stderr
