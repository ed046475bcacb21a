"""The corpus of stored bundles: what a release made, every later version reads.

``scripts/corpus.py`` makes it. A failure here means that bundles which people have published can no
longer be read, or say something else than they did: the code is at fault, not the corpus.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.image.code import training_code_digest
from capsule.image.releases import release_of, releases
from scripts import corpus
from tests.conftest import one_processor
from tests.format import reader
from tests.verification.runs import Machine

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = sorted(corpus.SPECS)
KEY = HERE / f"{corpus.AUTHOR}.pub"
LINES = {"run/events.jsonl": "event", "run/trace.jsonl": "trace"}  # files with one per line
BITWISE = ["dqn", "r2d2", "impala", "impala-recorded", "program", "program-recorded"]


def bundle(name):
    return HERE / f"{name}.capsule.tar"


def files_of(name):
    return reader.read(bundle(name), KEY.read_text())[1]


def command(*arguments, status=0):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    accepted = status if isinstance(status, tuple) else (status,)
    assert done.exit_code in accepted, (done.output, done.exception)
    return done


def verify(name, folder, *options, status=0):
    report = folder / "report.json"
    fixed = ("--key", KEY, "--quiet", "--report", report)
    with one_processor():
        command("verify", bundle(name), *fixed, *options, status=status)
    return json.loads(report.read_text())


def lock_codes():
    """Return the digest of the training code of each lock of the corpus, by the file it is in."""
    bundles = [*HERE.glob("*.capsule.tar"), *HERE.glob("*.members/*.capsule.tar")]
    locks = {path: json.loads(packed_in(path)["spec/lock.json"]) for path in bundles}
    codes = {path.name: lock["image"]["code"]["sha256"] for path, lock in locks.items()}
    for path in HERE.glob("*.capsule-study.tar"):
        for number, pins in enumerate(json.loads(packed_in(path)["study/lock.json"])["pins"]):
            codes[f"{path.name}, pins {number}"] = pins["image"]["code"]["sha256"]
    return codes


def packed_in(path):
    return dict(reader.members(path.read_bytes()))


def is_own(code):
    """Whether training code is this commit's own; the corpus has no other but that of releases."""
    if code == training_code_digest():
        return True
    assert release_of(code) is not None, STALE
    return False


STALE = "made with the training code of another commit: run scripts/corpus.py"


def test_the_corpus_has_the_training_code_of_this_commit_until_a_release():
    """Otherwise nothing below would execute any of it again."""
    if releases().code:
        assert not {name for name, code in lock_codes().items() if release_of(code) is None}
    else:
        stale = {name for name, code in lock_codes().items() if code != training_code_digest()}
        assert not stale, STALE


def test_the_corpus_is_complete_and_small():
    bundles = {path.name.removesuffix(".capsule.tar") for path in HERE.glob("*.capsule.tar")}
    assert bundles == set(NAMES)
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file()) < corpus.LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_it_is_intact(name, tmp_path):
    report = verify(name, tmp_path, "--mode", "integrity")
    claim_id, _ = reader.read(bundle(name), KEY.read_text())
    assert (report["verdict"], report["authentic"]) == ("intact", True)
    assert report["claim_id"] == claim_id


@pytest.mark.parametrize("name", NAMES)
def test_each_document_fits_its_published_schema(name):
    for path, data in files_of(name).items():
        if path.endswith(".json") and b'"schema":"capsule/' in data:
            document = json.loads(data)
            kind = document["schema"].split("/")[1]
            schema = json.loads((ROOT / "schemas" / f"{kind}-v1.json").read_text())
            Draft202012Validator(schema).validate(document)
        elif kind := LINES.get(path):
            schema = json.loads((ROOT / "schemas" / f"{kind}-v1.json").read_text())
            for line in data.splitlines():
                Draft202012Validator(schema).validate(json.loads(line))


@pytest.mark.parametrize("name", NAMES)
def test_it_has_a_report(name, tmp_path):
    page = tmp_path / "page.html"
    command("report", bundle(name), "--key", KEY, "-o", page)
    assert reader.read(bundle(name), KEY.read_text())[0] in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_compared(name, tmp_path):
    done = command("diff", bundle(name), bundle(name), "--key", KEY, "--json", "--quiet")
    assert json.loads(done.stdout)["equal"]
    other = {"dqn": "r2d2", "program": "program-recorded", "program-recorded": "program"}
    done = command(
        "diff",
        bundle(name),
        bundle(other.get(name, "dqn")),
        "--json",
        "--allow-untrusted",
        status=1,
    )
    assert not json.loads(done.stdout)["equal"]


@pytest.mark.parametrize("name", corpus.VERIFIED)
def test_its_receipt_counts(name):
    keys = ("--key", KEY, "--key", HERE / f"{corpus.VERIFIER}.pub")
    done = command("receipts", bundle(name), *keys, "--json")
    tallies = json.loads(done.stdout)["tallies"]
    assert tallies == {"reproduced-bitwise": {"signers": 1, "machines": 1}}


@pytest.mark.network
@pytest.mark.parametrize("name", BITWISE)
def test_it_is_executed_again_bit_for_bit(name, tmp_path):
    """A bundle without an image carries no training code; only an installed one repeats it."""
    code = json.loads(files_of(name)["spec/lock.json"])["image"]["code"]["sha256"]
    if is_own(code):
        report = verify(name, tmp_path, "--engine", "process", status=(0, 1))
        assert is_repeated(report), report
        return
    # Environments are kept by digest: that of the code which made the bundle may be there still.
    options = ("--engine", "process", "--code", "supplied")
    report = verify(name, tmp_path, *options, status=(0, 1, 4))
    refusal = (report["error"] or {}).get("code")
    assert is_repeated(report) or (report["verdict"], refusal) == ("inconclusive", "CAP-E014"), (
        report
    )


def is_repeated(report):
    """Whether everything is equal, except a patch release of Python where there is another here."""
    pins = [each["component"] for each in report["differences"]]
    if pins == ["libraries.python"]:
        return "are equal, but libraries.python differs" in report["summary"]
    return report["verdict"] == "reproduced-bitwise"


@pytest.mark.engine
@pytest.mark.network
def test_a_bundle_with_its_image_embedded_is_executed_again(tmp_path):
    """It is made here: its base layer alone takes 15 MB, twice."""
    corpus.make_keys(tmp_path)
    made = corpus.make("embedded", corpus.PROGRAM, tmp_path, "--embed-image")
    report = tmp_path / "report.json"
    options = ("--image", "embedded", "--quiet", "--report", report)
    command("verify", made, "--key", tmp_path / "author.pub", *options)
    found = json.loads(report.read_text())
    assert (found["verdict"], found["image_source"]) == ("reproduced-bitwise", "embedded")
    assert reader.read(made, (tmp_path / "author.pub").read_text())[0] == found["claim_id"]


# --- studies --------------------------------------------------------------------------------------


def study(name):
    return HERE / f"{name}.capsule-study.tar"


@pytest.mark.parametrize("name", corpus.STUDIES)
def test_every_table_of_a_study_follows_from_its_claims(name):
    done = command("study", "verify", study(name), "--key", KEY, "--json")
    assert json.loads(done.stdout)["members"] in (2, 4)
    rows = command("study", "report", study(name), "--format", "csv").stdout.splitlines()[1:]
    claim_ids = {row.split(",")[-2] for row in rows}
    assert len(claim_ids) == {"study": 3, "study-program": 2}[name]


@pytest.mark.parametrize("name", corpus.STUDIES)
def test_each_document_of_a_study_fits_its_published_schema(name):
    kinds = set()
    for path, data in packed_in(study(name)).items():
        if path.endswith(".json") and b'"schema":"capsule/' in data:
            document = json.loads(data)
            kinds.add(kind := document["schema"].split("/")[1])
            schema = json.loads((ROOT / "schemas" / f"{kind}-v1.json").read_text())
            Draft202012Validator(schema).validate(document)
    assert {"bundle", "study-claims", "study-lock"} < kinds


@pytest.mark.slow
def test_a_later_version_computes_the_tables_of_studies():
    words = []
    for name in corpus.STUDIES:
        words += ["study", "verify", study(name), "--key", KEY, ";"]
    done = later(COMMANDS, *words)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(";\n")[:-1]
    assert len(printed) == len(corpus.STUDIES)
    assert all("intact" in each for each in printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", corpus.STUDIES)
def test_the_bundles_of_its_members_are_those_that_the_study_names(name):
    options = ("--key", KEY, "--members", HERE / f"{name}.members", "--json", "--quiet")
    found = json.loads(command("study", "verify", study(name), *options).stdout)
    assert [member["agreement"] for member in found["bundles"]] == ["intact"] * found["members"]


@pytest.mark.network
@pytest.mark.slow
def test_segments_of_its_members_are_executed_again():
    code = json.loads(files_of("dqn")["spec/lock.json"])["image"]["code"]["sha256"]
    options = ("--key", KEY, "--members", HERE / "study.members", "--challenge", "1")
    options += ("--engine", "process", "--json", "--quiet")
    done = command("study", "verify", study("study"), *options, status=(0, 1, 4))
    challenge = json.loads(done.stdout)["challenge"]
    assert challenge["of"] == 8
    assert sum(member["segments"] for member in challenge["members"]) == 1
    if is_own(code):
        verdicts = {member["agreement"] for member in challenge["members"]}
        assert verdicts == {"reproduced-segments"}, challenge
        chances = {each["forged"]: each["probability"] for each in challenge["chance_to_notice"]}
        assert chances[4] == pytest.approx(4 / 8)


@pytest.mark.network
@pytest.mark.slow
def test_a_member_of_a_study_is_executed_again():
    lock = json.loads(packed_in(study("study"))["study/lock.json"])
    options = ("--key", KEY, "--sample", "1", "--engine", "process", "--json", "--quiet")
    if is_own(lock["pins"][0]["image"]["code"]["sha256"]):
        done = command("study", "verify", study("study"), *options, status=(0, 1))
        (member,) = json.loads(done.stdout)["sample"]
        assert member["agreement"] == "reproduced-bitwise" or "libraries" in member["reason"], (
            member
        )
    else:
        command("study", "verify", study("study"), *options, status=4)


# --- a later version, with a field more and another default ---------------------------------------

LATER = """
import importlib.abc, importlib.util, sys
from pathlib import Path

CHANGES = {
    # A field more, which new specs set; and other defaults.
    "capsule.experiment.trainers.dqn": [
        ("    discount: Probability = Field(0.99, ",
         "    novelty: int = added(absent=0, default=7)\\n    discount: Probability = Field(0.5, "),
        ("import (\\n    Model,", "import (\\n    Model,\\n    added,"),
    ],
    "capsule.bundle.claims": [
        ("    flags: Facts = ",
         "    energy: int | None = added(absent=None)\\n    flags: Facts = "),
        ("    deleted: tuple[str, ...] = Field((), ",
         "    deleted: tuple[str, ...] = Field(('gone',), "),
        ("import MAX_FACTS, Facts, Model", "import MAX_FACTS, Facts, Model, added"),
    ],
    "capsule.experiment.lock": [
        ("    code: LockedCode\\n",
         "    code: LockedCode\\n    mirror: str = added(absent='none', default='some')\\n"),
    ],
}

class Later(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name in CHANGES else None
    def get_filename(self, name):
        return str(Path(sys.argv[1], *name.split(".")).with_suffix(".py"))
    def get_data(self, path):
        text = Path(path).read_text()
        name = ".".join(Path(path).relative_to(sys.argv[1]).with_suffix("").parts)
        for old, new in CHANGES[name]:
            assert old in text, (name, old)
            text = text.replace(old, new, 1)
        return text.encode()

sys.meta_path.insert(0, Later())
from capsule.bundle.claims import claims_model
from capsule.cli.main import app
from capsule.experiment.lock import Lock
"""
IDENTITIES = """
for folder in map(Path, sys.argv[2:]):
    stored = (folder / "lock").read_bytes(), (folder / "claims").read_bytes()
    lock = Lock.parse(stored[0])
    claims = claims_model(lock).parse(stored[1])
    assert (lock.document(), claims.document()) == stored
    assert (lock.image.mirror, claims.energy) == ("none", None)
    print(lock.digest(), claims.claim_id())
"""
# Runs several commands, each up to the word ";", which it prints after each, while they succeed.
COMMANDS = """
words = sys.argv[2:]
while words:
    end = words.index(";")
    if status := app(words[:end], standalone_mode=False):
        sys.exit(status)
    print(";", flush=True)
    words = words[end + 1:]
"""


def later(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", LATER + script, str(ROOT), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_a_later_version_gives_the_same_identities(tmp_path):
    expected = []
    for name in NAMES:
        claim_id, files = reader.read(bundle(name), KEY.read_text())
        folder = tmp_path / name
        folder.mkdir()
        (folder / "lock").write_bytes(files["spec/lock.json"])
        (folder / "claims").write_bytes(files["claims.json"])
        expected.append([json.loads(files["claims.json"])["lock"], claim_id])
    done = later(IDENTITIES, *(tmp_path / name for name in NAMES))
    assert [line.split() for line in done.stdout.splitlines()] == expected


@pytest.mark.slow
def test_a_later_version_finds_them_intact(tmp_path):
    reports = {name: tmp_path / f"{name}.json" for name in NAMES}
    words = []
    for name, report in reports.items():
        words += ["verify", bundle(name), "--key", KEY, "--quiet", "--mode", "integrity"]
        words += ["--report", report, ";"]
    done = later(COMMANDS, *words)
    assert done.returncode == 0, done.stderr
    for name, report in reports.items():
        assert json.loads(report.read_text())["verdict"] == "intact", name


@pytest.mark.slow
def test_training_code_of_a_later_version_repeats_it_bit_for_bit(tmp_path):
    """The later version's own training code reads the older lock as it was meant."""
    from capsule.experiment.lock import Lock
    from tests.verification.runs import CARTPOLE, make_lock, train

    package = tmp_path / "later" / "capsule"
    shutil.copytree(ROOT / "capsule", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / "experiment" / "trainers" / "dqn.py"
    text = path.read_text()
    old = "    discount: Probability = Field(0.99, "
    assert old in text
    new = old.replace("0.99", "0.5")
    changed = text.replace(old, f"    novelty: int = added(absent=0, default=7)\n{new}", 1)
    path.write_text(changed.replace("    Model,\n", "    Model,\n    added,\n", 1))
    lock = make_lock(CARTPOLE)
    assert Lock.parse(lock.document()) == lock
    honest = train(tmp_path / "honest", lock)
    again = train(tmp_path / "again", lock, Machine(path=str(package.parent)))
    for name in ("trace.jsonl", "checkpoints.json", "evaluation.json"):
        assert (again.directory / name).read_bytes() == (honest.directory / name).read_bytes()


@pytest.mark.network
def test_a_later_version_executes_it_with_the_code_that_made_it(tmp_path):
    """The older training code understands the job that the later version writes."""
    code = json.loads(files_of("dqn")["spec/lock.json"])["image"]["code"]["sha256"]
    arguments = ("verify", bundle("dqn"), "--key", KEY, "--quiet", "--engine", "process")
    report = tmp_path / "report.json"
    done = later("app(sys.argv[2:])", *arguments, "--report", report)
    found = json.loads(report.read_text())
    if is_own(code):
        assert is_repeated(found), found
    else:
        assert (done.returncode, found["error"]["code"]) == (4, "CAP-E014"), found
