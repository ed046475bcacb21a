"""The bundle of a finished run: its members, what is observed, and what is not packed."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import zstandard

from capsule.bundle import run_bundle
from capsule.bundle.packing import FinishedRun, pack_run
from capsule.bundle.run_bundle import members_of
from capsule.experiment import contract
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import Lock, LockedGit
from capsule.experiment.spec import CodeSpec, DataSpec
from capsule.image.assembly.assemble import Image
from capsule.image.assembly.making import Layer
from capsule.image.cache import Cache
from capsule.image.data.listing import list_data, pin_of
from capsule.image.data.places import FoundData
from capsule.image.resolution.project import capture_project
from capsule.machine.fingerprint import Cpu
from tests.bundle.locks import debian
from tests.report.runs import MACHINE, PROGRAM, finished


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def training(tmp_path) -> FinishedRun:
    return finished(tmp_path)


@pytest.fixture
def program(tmp_path) -> FinishedRun:
    return finished(tmp_path, PROGRAM)


@pytest.fixture
def packed(tmp_path, cache, alice):
    """Return a function that packs a run: the members of its bundle, and its claims."""

    def pack(run, *, embed_image=False, embed_data=False):
        folder = tmp_path / "bundles"
        folder.mkdir(exist_ok=True)
        path, claims = pack_run(
            run, alice, folder, cache, embed_image=embed_image, embed_data=embed_data
        )
        with tarfile.open(path) as archive:
            return {each.name: archive.extractfile(each).read() for each in archive}, claims

    return pack


def unpacked(data):
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def observed(members):
    return json.loads(members["observations.json"])


@pytest.mark.parametrize("kind", ["training", "program"])
def test_a_bundle_has_the_members_of_its_lock_and_claims(kind, packed, request):
    run = request.getfixturevalue(kind)
    members, claims = packed(run)
    assert members["claims.json"] == claims.document()
    assert members["spec/lock.json"] == run.lock.document()
    named = set(members_of(run.lock, claims, embedded=False, with_data=False))
    signed = {"manifest.json", "SHA256SUMS", "signatures/run.sigstore.json"}
    assert members.keys() == named | signed
    for name in (contract.RUNTIME, contract.MECHANISMS, contract.RESULT, contract.LOG):
        assert members[f"run/{name}"] == (run.directory / name).read_bytes()


def test_the_name_of_a_bundle_has_the_beginning_of_its_claim_id(training, tmp_path, cache, alice):
    path, claims = pack_run(training, alice, tmp_path, cache, embed_image=False)
    claim_id = hashlib.sha256(claims.document()).hexdigest()
    assert path == tmp_path / f"small-dqn-{claim_id[:8]}.capsule.tar"


def test_a_training_observes_its_speed_and_a_program_its_time(training, packed, tmp_path):
    found = observed(packed(training)[0])
    assert (found["training_seconds"], found["steps_per_second"]) == (80, 5)  # 400 steps
    assert found["started"] == "2026-11-21T12:00:00+00:00"
    assert found["engine"] == {"name": "process", "version": "1"}
    assert found["device"] == {"kind": "cpu"}
    other = observed(packed(finished(tmp_path / "other", PROGRAM))[0])
    assert (other["training_seconds"], other["steps_per_second"]) == (3, None)


def test_a_training_that_took_no_time_has_no_speed(training, packed):
    path = training.directory / contract.RESULT
    path.write_bytes(canonical_json(json.loads(path.read_bytes()) | {"seconds": 0}))
    found = observed(packed(training)[0])
    assert (found["training_seconds"], found["steps_per_second"]) == (0, None)


def test_claims_depend_neither_on_the_machine_nor_on_the_time(training, packed):
    elsewhere = replace(
        training,
        fingerprint=MACHINE.model_copy(update={"cpu": Cpu(vendor="AuthenticAMD")}),
        started=datetime(2027, 1, 1, tzinfo=UTC),
    )
    members, claims = packed(training)
    others, again = packed(elsewhere)
    assert claims == again
    assert members["observations.json"] != others["observations.json"]
    assert members["machine/sbom.cdx.json"] != others["machine/sbom.cdx.json"]


def test_only_events_are_packed_of_what_a_program_writes_there(tmp_path, packed):
    event = {"time": 1.5, "kind": "progress", "step": 8}
    lines = ["no event\n", json.dumps(event, indent=None) + "\n", '{"kind": "finish"}\n']
    members, _ = packed(finished(tmp_path, PROGRAM, events=lines))
    assert members["run/events.jsonl"] == canonical_json(event) + b"\n"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("training", contract.RUNTIME),
        ("training", contract.ENTROPY_REPORT),
        ("training", contract.EVENTS),
        ("training", contract.RESULT),
        ("training", contract.CHECKPOINT_INDEX),
        ("training", contract.EVALUATION),
        ("program", contract.OUTPUTS),
        ("program", contract.RESULT),
    ],
)
def test_a_run_directory_that_lacks_a_document_leaves_no_bundle(
    kind, name, request, tmp_path, cache, alice
):
    run = request.getfixturevalue(kind)
    (run.directory / name).unlink()
    folder = tmp_path / "bundles"
    folder.mkdir()
    with pytest.raises(CapsuleError) as caught:
        pack_run(run, alice, folder, cache, embed_image=False)
    assert caught.value.code == "CAP-B090"
    assert caught.value.message.startswith(f"{name} of the run is not a valid ")
    assert "No such file" in caught.value.message
    assert "output.log" in caught.value.fix
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", ["link", "folder/secret", "../secret", "/etc/passwd", "gone"])
def test_a_file_of_the_machine_is_not_packed_as_an_output(program, tmp_path, cache, alice, path):
    (tmp_path / "secret").write_text("secret")
    workspace = program.directory / contract.WORKSPACE
    (workspace / "link").symlink_to(tmp_path / "secret")
    (workspace / "folder").symlink_to(tmp_path)
    listed = contract.Output(size=6, sha256=hashlib.sha256(b"secret").hexdigest())
    outputs = contract.Outputs(files={path: listed}, standard_output=None)
    (program.directory / contract.OUTPUTS).write_bytes(outputs.document())
    folder = tmp_path / "bundles"
    folder.mkdir()
    with pytest.raises(CapsuleError) as caught:
        pack_run(program, alice, folder, cache, embed_image=False)
    assert caught.value.code == "CAP-B142"
    assert repr(path) in caught.value.message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "path", "shown"),
    [
        ("program", f"{contract.WORKSPACE}/model.bin", "workspace/model.bin"),
        ("program", contract.STANDARD_OUTPUT, f"run/{contract.STANDARD_OUTPUT}"),
        ("training", contract.TRACE, f"run/{contract.TRACE}"),
    ],
)
@pytest.mark.parametrize("left", [0, 1, -1])
def test_what_changed_since_the_run_ended_is_not_signed(
    kind, path, shown, left, tmp_path, cache, alice, request
):
    """A machine that lost power leaves such files, and no verifier would accept the bundle."""
    run = request.getfixturevalue(kind)
    file = run.directory / path
    file.write_bytes(file.read_bytes()[:left] if left >= 0 else file.read_bytes() + b"\n")
    bundles = tmp_path / "bundles"
    with pytest.raises(CapsuleError, match=f"CAP-B142 '{shown}' is not what it was"):
        pack_run(run, alice, bundles, cache, embed_image=False)
    assert not bundles.exists()


def test_outputs_are_packed_under_their_names_and_links_are_only_listed(program, packed):
    workspace = program.directory / contract.WORKSPACE
    (workspace / "latest").symlink_to("model.bin")
    path = program.directory / contract.OUTPUTS
    listed = json.loads(path.read_bytes())
    target = {"size": 9, "sha256": hashlib.sha256(b"model.bin").hexdigest()}
    listed["files"]["latest"] = {**target, "target": "model.bin", "executable": False}
    path.write_bytes(canonical_json(listed))
    members, claims = packed(program)
    assert members["workspace/model.bin"] == b"weights"
    assert members["run/stdout.txt"] == b"done\n"
    assert claims.outputs["latest"].target == "model.bin"
    assert not [name for name in members if "latest" in name]


# --- images ---------------------------------------------------------------------------------------


@pytest.fixture
def contained(training, base_layer):
    """The run in an image, whose base has one Debian package."""
    digest = hashlib.sha256(base_layer.read_bytes()).hexdigest()
    layers = [
        Layer(name, f"sha256:{digest}", base_layer, base_layer.stat().st_size)
        for name in ("base", "wheels", "code")
    ]
    image = Image(b"{}", tuple(layers), "capsule:test")
    return replace(with_package(training), image=image, engine={"name": "docker"})


def with_package(run):
    image = run.lock.image.model_copy(update={"debian": (debian("gcc-12-base", "1"),)})
    return replace(run, lock=run.lock.model_copy(update={"image": image}))


@pytest.mark.parametrize("inside", [True, False])
def test_a_bundle_names_the_debian_licences_of_its_image(contained, training, packed, inside):
    members, _ = packed(contained if inside else with_package(training))
    parts = json.loads(members["image/sbom.cdx.json"])["components"]
    (package,) = (part for part in parts if part["name"] == "gcc-12-base")
    names = [each["license"] for each in package.get("licenses", ())]
    named = [each.get("id") or each["name"] for each in names]
    assert named == (["GPL-2+ or Artistic", "MIT"] if inside else [])


def test_the_layers_that_a_verifier_could_not_rebuild_are_packed(contained, packed, base_layer):
    members, claims = packed(contained)
    assert claims.image.layers == tuple(layer.diff_id for layer in contained.image.layers)
    layers = [name for name in members if name.startswith("image/layer-")]
    assert sorted(layers) == ["image/layer-base.tar.zst", "image/layer-code.tar.zst"]
    assert unpacked(members["image/layer-base.tar.zst"]) == base_layer.read_bytes()
    assert "image/image.tar.zst" not in members


def test_the_whole_image_is_packed_if_it_is_asked_for(contained, packed, base_layer):
    members, _ = packed(contained, embed_image=True)
    with tarfile.open(fileobj=io.BytesIO(unpacked(members["image/image.tar.zst"]))) as archive:
        digest = contained.image.layers[0].diff_id.removeprefix("sha256:")
        assert archive.extractfile(f"blobs/sha256/{digest}").read() == base_layer.read_bytes()


def test_a_layer_is_compressed_once_for_all_bundles(contained, packed, cache):
    first, _ = packed(contained)
    kept = {path: path.stat().st_ino for path in cache.folder("derived").iterdir()}
    assert len(kept) == 1
    again, _ = packed(contained)
    assert {path: path.stat().st_ino for path in cache.folder("derived").iterdir()} == kept
    assert again["image/layer-base.tar.zst"] == first["image/layer-base.tar.zst"]


# --- source trees and data sets -------------------------------------------------------------------


@pytest.fixture
def from_source(program, tmp_path, cache):
    """Return a function that gives the program a source tree of one file."""

    def made(content):
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "train.py").write_bytes(content)
        project = capture_project(CodeSpec(path="tree"), tmp_path, cache)
        spec = program.lock.spec.model_copy(update={"code": CodeSpec()})
        return replace(program, lock=Lock(spec=spec, image=program.lock.image, project=project))

    return made


def test_a_source_tree_is_packed_with_its_difference_from_its_commit(
    from_source, packed, cache, tmp_path
):
    run = from_source(b"print(1)\n")
    (tmp_path / "diff").write_bytes(b"--- a\n+++ b\n")
    digest = hashlib.sha256(b"--- a\n+++ b\n").hexdigest()
    cache.trees.add(tmp_path / "diff", digest)
    git = LockedGit(commit="1" * 40, dirty=True, diff=digest, untracked=())
    project = run.lock.project.model_copy(update={"git": git})
    members, _ = packed(replace(run, lock=run.lock.model_copy(update={"project": project})))
    tree = unpacked(members["image/layer-project.tar.zst"])
    assert hashlib.sha256(tree).hexdigest() == project.sha256
    assert members["spec/project.diff"] == b"--- a\n+++ b\n"


@pytest.fixture
def small_bounds(monkeypatch):
    """Have verifiers unpack little, so that a bomb may be small."""
    monkeypatch.setattr(run_bundle, "ALWAYS_UNPACKED_BYTES", 1 << 14)


def test_a_source_tree_that_no_verifier_would_unpack_is_refused(from_source, packed, small_bounds):
    run = from_source(bytes(1 << 20))
    with pytest.raises(CapsuleError) as caught:
        packed(run)
    assert caught.value.code == "CAP-B161"
    assert f"{run.lock.project.size} bytes" in caught.value.message
    assert "code.files" in caught.value.fix


@pytest.fixture
def with_data(training, tmp_path, cache):
    """Return a function that gives the training a data set of one file."""

    def made(content):
        file = tmp_path / "digits.csv"
        file.write_bytes(content)
        listing = list_data("digits", file, lambda _: hashlib.sha256(content).hexdigest())
        pins = {"digits": pin_of(listing)}
        read = contract.DataRead(sets=pins)
        (training.directory / contract.DATA).write_bytes(read.document())
        spec = training.lock.spec.model_copy(update={"data": {"digits": DataSpec()}})
        lock = Lock(spec=spec, image=training.lock.image, data=pins)
        found = FoundData(file, "https://example.org/digits.csv", listing, cache)
        return replace(training, lock=lock, data={"digits": found})

    return made


@pytest.mark.parametrize("embedded", [True, False])
def test_a_data_set_is_listed_and_packed_only_if_it_is_asked_for(with_data, packed, embedded):
    run = with_data(b"1,2\n")
    members, claims = packed(run, embed_data=embedded)
    listing = members["data/digits.json"]
    assert claims.data == {"digits": hashlib.sha256(listing).hexdigest()}
    assert hashlib.sha256(b"1,2\n").hexdigest() in listing.decode()
    assert observed(members)["data"] == {"digits": "https://example.org/digits.csv"}
    assert ("data/digits.tar.zst" in members) is embedded
    if embedded:
        with tarfile.open(fileobj=io.BytesIO(unpacked(members["data/digits.tar.zst"]))) as archive:
            assert [archive.extractfile(each).read() for each in archive] == [b"1,2\n"]


def test_a_data_set_that_no_verifier_would_unpack_is_refused(with_data, packed, small_bounds):
    run = with_data(bytes(1 << 20))
    packed(run)
    with pytest.raises(CapsuleError) as caught:
        packed(run, embed_data=True)
    assert caught.value.code == "CAP-B162"
    assert "'digits' has 1048576 bytes" in caught.value.message
    assert "--embed-data" in caught.value.fix
