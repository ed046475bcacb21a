"""SBOMs: sound by tools that are not ours, equal for equal images, and refused when they lie."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hypothesis import given, settings
from hypothesis import strategies as st
from packageurl import PackageURL

from capsule.bundle.licences import debian_choice, expression_choice
from capsule.bundle.package_urls import debian_purl, wheel_purl
from capsule.bundle.sbom import image_sbom, machine_sbom
from capsule.bundle.sbom_checks import sbom_matches_lock, validate_sbom
from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import LockedGit, LockedProject
from capsule.experiment.spec import CudaAccelerator
from capsule.machine.fingerprint import Fingerprint, take_fingerprint
from capsule.machine.gpu import Driver, Gpu, MigPart, RemappedRows
from tests.bundle.locks import debian, digest_of, make_lock, wheel

VALIDATOR = JsonStrictValidator(SchemaVersion.V1_6)
DIGEST = "sha256:" + sha256_hex(b"image")


PACKAGES = (debian("libstdc++6", "12.2.0-14+deb12u1"), debian("tzdata", "1:2026a~1-0", "all"))
CPU = make_lock(
    wheels=(wheel("torch", "2.13.0+cpu", "cp311-cp311-linux_x86_64"), wheel("ale-py", "0.12.1")),
    packages=PACKAGES,
)
CUDA = make_lock(
    "cuda",
    wheels=(
        wheel("torch", "2.13.0"),
        wheel("nvidia-cuda-runtime", "13.0.96"),
        wheel("nvidia-cudnn-cu13", "9.15.1.9"),
        wheel("nvidia-cublas", "13.1.0.3"),
        wheel("triton", "3.6.0"),
    ),
    packages=PACKAGES,
    accelerator=CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9.10", driver=">=580.65"),
)
PROGRAM = CPU.model_copy(
    update={
        "project": LockedProject(
            sha256=digest_of("tree"),
            size=10_240,
            files={"train.py": f"file 0644 {digest_of('train')}", "link": "symlink train.py"},
            git=LockedGit(commit="1" * 40, dirty=True, diff=None, untracked=("train.py",)),
        )
    }
)
TORCH_PURL = wheel_purl(CPU.image.wheels[0])
LICENCES = {
    TORCH_PURL: expression_choice("BSD-3-Clause"),
    wheel_purl(CPU.image.wheels[1]): expression_choice("GPL-2.0-only OR LicenseRef-Other"),
    debian_purl(PACKAGES[1], "debian-12"): debian_choice(("Expat", "public-domain")),
}
NO_LICENCE = {"capsule:licence": "no assertion"}
GOOD = image_sbom(CPU, DIGEST, LICENCES)
BARE = image_sbom(CPU, DIGEST)  # licences are their author's word: no lock contradicts them

GPU = Gpu(
    index=0,
    name="NVIDIA H200",
    architecture="hopper",
    compute_capability="9.0",
    cuda_cores=16896,
    mig_enabled=False,
    memory_bytes=150_754_820_096,
    vbios="96.00.BC.00.01",
    gsp_firmware="580.95.05",
    remapped_rows=RemappedRows(correctable=1, uncorrectable=0, pending=False, failed=False),
    uuid_sha256="a" * 64,
    unavailable={"sm_count": "NVML_ERROR_NOT_SUPPORTED"},
)
HERE = take_fingerprint({"name": "docker", "version": "20.10.24", "storage-driver": "overlay2"})
GPU_MACHINE = Fingerprint(
    **{name: getattr(HERE, name) for name in ("cpu", "memory_bytes", "kernel", "os", "engine")},
    driver=Driver(nvml="loaded", version="580.95.05", cuda="13.0"),
    gpus=(GPU, GPU.model_copy(update={"index": 1})),
)

DOCUMENTS = {
    "cpu image": GOOD,
    "cuda image": image_sbom(CUDA, DIGEST),
    "image of a program": image_sbom(PROGRAM, DIGEST),
    "empty image": image_sbom(make_lock(), DIGEST),
    "this machine": machine_sbom(HERE),
    "gpu machine": machine_sbom(GPU_MACHINE),
}


def components(data):
    document = json.loads(data)
    parts = [document["metadata"]["component"], *document["components"]]
    return {part["bom-ref"]: part for part in parts}


def named(data, name):
    (part,) = (part for part in components(data).values() if part["name"] == name)
    return part


def properties(part):
    return {each["name"]: each["value"] for each in part.get("properties", [])}


def refusal(data):
    with pytest.raises(CapsuleError) as caught:
        validate_sbom(data)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B062", ExitCode.TAMPERED)
    return caught.value.message


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("data", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_document_is_sound_by_the_library_of_cyclonedx(data):
    assert VALIDATOR.validate_str(data.decode()) is None
    document = parse_canonical_json(data)
    parts = components(data)
    assert len(parts) == 1 + len(document["components"])
    for dependency in document["dependencies"]:
        assert {dependency["ref"], *dependency["dependsOn"]} <= parts.keys()
    validate_sbom(data)


@pytest.mark.parametrize("lock", [CPU, CUDA])
def test_every_package_of_the_lock_is_in_the_document(lock):
    parts = components(image_sbom(lock, DIGEST))
    purls = {part["purl"]: part for part in parts.values() if "purl" in part}
    assert all(ref == part["purl"] for ref, part in parts.items() if "purl" in part)
    for each in lock.image.wheels:
        purl = PackageURL("pypi", None, each.name, each.version, {"file_name": each.filename})
        part = purls.pop(purl.to_string())
        assert part["hashes"] == [{"alg": "SHA-256", "content": each.sha256}]
        assert (part["name"], part["version"]) == (each.name, each.version)
    for each in lock.image.debian:
        qualifiers = {"arch": each.architecture, "distro": "debian-12"}
        purl = PackageURL("deb", "debian", each.name, each.version, qualifiers)
        part = purls.pop(purl.to_string())
        assert part["hashes"] == [{"alg": "SHA-256", "content": each.sha256}]
        assert properties(part) == {"capsule:debian:pool": each.pool} | NO_LICENCE
    (image,) = purls
    assert PackageURL.from_string(image).version == DIGEST
    assert named(image_sbom(lock, DIGEST), "capsule-rl")["version"] == "0.1.0"
    assert named(image_sbom(lock, DIGEST), "debian") == {
        "type": "operating-system",
        "bom-ref": "os:debian-12",
        "name": "debian",
        "version": "12",
    }


def test_the_image_depends_on_everything_in_it():
    (dependency,) = json.loads(GOOD)["dependencies"]
    root = json.loads(GOOD)["metadata"]["component"]
    assert dependency["ref"] == root["bom-ref"]
    assert root["type"] == "container"
    assert root["hashes"] == [{"alg": "SHA-256", "content": DIGEST.removeprefix("sha256:")}]
    assert set(dependency["dependsOn"]) == components(GOOD).keys() - {root["bom-ref"]}


def test_cuda_libraries_are_visible():
    data = image_sbom(CUDA, DIGEST)
    libraries = {
        (properties(part)["capsule:cuda:library"], part["type"], part["version"], part["group"])
        for part in components(data).values()
        if part.get("group") == "NVIDIA"
    }
    assert libraries == {
        ("CUDA", "platform", "13.0.96", "NVIDIA"),
        ("cuDNN", "library", "9.15.1.9", "NVIDIA"),
        ("cuBLAS", "library", "13.1.0.3", "NVIDIA"),
    }
    assert properties(named(data, "torch")) == NO_LICENCE


def test_licences_are_written_where_they_are_known():
    licences = {
        part["name"]: part["licenses"] for part in components(GOOD).values() if "licenses" in part
    }
    assert licences == {
        "torch": [{"license": {"id": "BSD-3-Clause", "acknowledgement": "declared"}}],
        "ale-py": [
            {"expression": "GPL-2.0-only OR LicenseRef-Other", "acknowledgement": "declared"}
        ],
        "capsule-rl": [{"license": {"id": "Apache-2.0", "acknowledgement": "declared"}}],
        "tzdata": [
            {"license": {"id": "MIT", "acknowledgement": "declared"}},
            {"license": {"name": "public-domain", "acknowledgement": "declared"}},
        ],
    }


def test_what_has_no_licence_says_so():
    asserted = {part["name"] for part in components(GOOD).values() if "licenses" in part}
    silent = {
        part["name"]
        for part in components(GOOD).values()
        if NO_LICENCE.items() <= properties(part).items()
    }
    assert (asserted, silent) == ({"torch", "ale-py", "capsule-rl", "tzdata"}, {"libstdc++6"})


def test_a_source_tree_is_named_by_its_digest_alone():
    part = named(image_sbom(PROGRAM, DIGEST), "source-tree")
    assert part["type"] == "application"
    assert part["hashes"] == [{"alg": "SHA-256", "content": PROGRAM.project.sha256}]
    facts = {"capsule:source-tree:bytes": "10240", "capsule:source-tree:files": "2"}
    assert properties(part) == facts | NO_LICENCE
    assert part.keys() == {"type", "bom-ref", "name", "hashes", "properties"}
    assert "source-tree" not in components(GOOD)
    moved = PROGRAM.project.model_copy(update={"git": None})
    assert image_sbom(PROGRAM.model_copy(update={"project": moved}), DIGEST) == image_sbom(
        PROGRAM, DIGEST
    )


@pytest.mark.slow
def test_equal_images_give_equal_bytes_in_any_process():
    code = (
        "import sys, pathlib; from capsule.bundle.sbom import image_sbom;"
        "from capsule.experiment.lock import Lock;"
        "lock = Lock.model_validate_json(sys.stdin.buffer.read());"
        f"sys.stdout.buffer.write(image_sbom(lock, {DIGEST!r}))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=CUDA.document(),
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC-{seed}"},
        )
        assert done.stdout == image_sbom(CUDA, DIGEST)


def test_the_document_is_a_function_of_the_image_alone():
    other_spec = CPU.spec.model_copy(update={"name": "other"})
    renamed = CPU.model_copy(update={"spec": other_spec})
    reordered = CPU.model_copy(
        update={"image": CPU.image.model_copy(update={"wheels": CPU.image.wheels[::-1]})}
    )
    assert image_sbom(renamed, DIGEST, LICENCES) == GOOD
    assert image_sbom(reordered, DIGEST, LICENCES) == GOOD
    another = json.loads(image_sbom(CPU, "sha256:" + "0" * 64, LICENCES))
    assert another["serialNumber"] != json.loads(GOOD)["serialNumber"]


def test_the_form_is_pinned():
    # A verifier derives these bytes again, with a Capsule and libraries of another year.
    assert sha256_hex(GOOD) == "3679615972981549fe13e14334b3b32682a3797668d278c6dc7adcb54c8fce55"
    assert json.loads(GOOD)["serialNumber"] == "urn:uuid:300d5341-c811-5b02-9e4e-12b9fc72fef4"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    name=st.from_regex(r"[a-z0-9][a-z0-9+.-]{1,20}", fullmatch=True),
    version=st.from_regex(r"([0-9]:)?[0-9][A-Za-z0-9.+~-]{0,20}", fullmatch=True),
    local=st.from_regex(r"([0-9]!)?[0-9]+(\.[0-9]+)*(rc1)?(\+[a-z0-9.]{1,8})?", fullmatch=True),
)
def test_package_urls_are_those_of_the_reference_library(name, version, local):
    package = debian(name, version)
    lock = make_lock(packages=(package,), wheels=(wheel("some-name", local),))
    for part in components(image_sbom(lock, DIGEST)).values():
        if "purl" in part:
            parsed = PackageURL.from_string(part["purl"])
            assert parsed.to_string() == part["purl"]
            assert (parsed.name, parsed.version) == (part["name"], part["version"])


def test_a_machine_with_gpus():
    data = machine_sbom(GPU_MACHINE)
    parts = components(data)
    assert parts["gpu:0"]["type"] == "device"
    assert parts["gpu:0"]["name"] == "NVIDIA H200"
    facts = properties(parts["gpu:0"])
    assert facts["cdx:device:function"] == "graphics processor"
    assert facts["capsule:gpu:compute-capability"] == "9.0"
    assert facts["capsule:gpu:mig-enabled"] == "false"
    assert facts["capsule:gpu:remapped-rows-correctable"] == "1"
    assert "capsule:gpu:sm-count" not in facts
    assert parts["driver"] == {
        "type": "device-driver",
        "bom-ref": "driver",
        "name": "nvidia",
        "version": "580.95.05",
        "properties": [{"name": "capsule:driver:cuda", "value": "13.0"}],
    }
    assert parts["gpu:1:vbios"]["type"] == "firmware"
    assert parts["kernel"]["version"] == HERE.kernel
    depends = {each["ref"]: each["dependsOn"] for each in json.loads(data)["dependencies"]}
    assert depends["gpu:0"] == ["driver", "gpu:0:gsp-firmware", "gpu:0:vbios"]
    assert set(depends["machine"]) == parts.keys() - {"machine"}
    assert machine_sbom(GPU_MACHINE) == data
    one_gpu = GPU_MACHINE.model_copy(update={"gpus": (GPU,)})
    assert json.loads(machine_sbom(one_gpu))["serialNumber"] != json.loads(data)["serialNumber"]


def test_each_part_of_a_gpu_is_a_component():
    parts = [
        GPU.model_copy(update={"part": MigPart(slot=slot, name=f"MIG {slot}", sm_count=14)})
        for slot in (1, 2)
    ]
    data = machine_sbom(GPU_MACHINE.model_copy(update={"gpus": tuple(parts)}))
    validate_sbom(data)
    found = components(data)
    assert {"gpu:0:1", "gpu:0:2", "gpu:0:2:vbios"} < found.keys()
    facts = properties(found["gpu:0:2"])
    assert (facts["capsule:gpu:part-name"], facts["capsule:gpu:part-sm-count"]) == ("MIG 2", "14")


def test_a_machine_that_tells_little():
    silent = Fingerprint.model_validate_json(
        canonical_json(
            {
                "cpu": {},
                "memory_bytes": 1,
                "kernel": "6.1",
                "os": {},
                "driver": {"nvml": "not found"},
                "gpus": [{"index": 0}],
            }
        )
    )
    data = machine_sbom(silent)
    validate_sbom(data)
    assert components(data).keys() == {"machine", "cpu", "kernel", "gpu:0"}


# --- what is refused ----------------------------------------------------------------------------


def changed(data, change):
    document = copy.deepcopy(json.loads(data))
    change(document)
    return canonical_json(document)


def duplicate_reference(document):
    document["components"][1]["bom-ref"] = document["components"][0]["bom-ref"]


def reference_of_the_root(document):
    document["components"][0]["bom-ref"] = document["metadata"]["component"]["bom-ref"]


def dangling_reference(document):
    document["dependencies"][0]["dependsOn"].append("nothing")


def dangling_subject(document):
    document["dependencies"].append({"ref": "nothing"})


def dependencies_given_twice(document):
    document["dependencies"].append({"ref": document["dependencies"][0]["ref"]})


def nested_purl(document):
    document["components"][0]["components"] = [{"type": "file", "name": "x", "purl": "pkg:/broken"}]


def set_to(field, value):
    def change(document):
        document["components"][0][field] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (duplicate_reference, "occurs more than once"),
        (reference_of_the_root, "occurs more than once"),
        (dangling_reference, "'nothing' refers to nothing"),
        (dangling_subject, "'nothing' refers to nothing"),
        (dependencies_given_twice, "given more than once"),
        (nested_purl, "'pkg:/broken'"),
        (set_to("purl", "torch 2.13"), "package URL 'torch 2.13'"),
        (set_to("hashes", [{"alg": "SHA-256", "content": "123"}]), "components/0/hashes"),
        (set_to("type", "spaceship"), "components/0/type"),
        (set_to("licenses", [{"license": {"id": "BSD"}}]), "components/0/licenses"),
        (set_to("surprise", 1), "'surprise'"),
        (set_to("externalReferences", []), "'externalReferences'"),
        (lambda document: document.pop("bomFormat"), "bomFormat"),
        (lambda document: document.update(specVersion="1.5"), "specVersion"),
        (lambda document: document.update(serialNumber="urn:uuid:1"), "serialNumber"),
        (
            lambda document: document.update(
                components=[{"type": "file", "name": str(number)} for number in range(2_001)]
            ),
            "2000 entries",
        ),
    ],
)
def test_a_document_with_a_flaw_is_refused(change, reason):
    validate_sbom(GOOD)
    assert reason in refusal(changed(GOOD, change))


def nested(depth):
    component = {"type": "file", "name": "x"}
    for _ in range(depth):
        component = {"type": "file", "name": "x", "components": [component]}
    return b'{"bomFormat":"CycloneDX","components":[%b],"specVersion":"1.6","version":1}' % (
        canonical_json(component)
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        GOOD + b"\n",
        GOOD.replace(b'"version":1}', b'"version":1,"version":1}'),
        b"[" * 100_000,
        nested(400),
        b" " * ((4 << 20) + 1),
    ],
    ids=["empty", "list", "null", "bytes", "newline", "twice", "brackets", "deep", "large"],
)
def test_what_is_no_document_is_refused(data):
    validate_sbom(nested(3))
    refusal(data)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_is_refused_or_named(data):
    position = data.draw(st.integers(0, len(BARE) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != BARE[position]))
    lie = BARE[:position] + bytes([byte]) + BARE[position + 1 :]
    try:
        differences = sbom_matches_lock(lie, CPU, DIGEST)
    except CapsuleError as error:
        assert error.code == "CAP-B062"
    else:
        assert differences


# --- a lock to compare with ---------------------------------------------------------------------


@pytest.mark.parametrize(("lock", "licences"), [(CPU, LICENCES), (CPU, {}), (CUDA, {})])
def test_an_honest_document_matches_its_lock(lock, licences):
    data = image_sbom(lock, DIGEST, licences)
    assert sbom_matches_lock(data, lock) == []
    assert sbom_matches_lock(data, lock, DIGEST) == []


def other_version(document):
    (torch,) = (part for part in document["components"] if part["name"] == "torch")
    torch["version"] = "2.12.0"


def other_hash(document):
    (torch,) = (part for part in document["components"] if part["name"] == "torch")
    torch["hashes"][0]["content"] = "0" * 64


def missing_package(document):
    (torch,) = (part for part in document["components"] if part["name"] == "torch")
    document["components"].remove(torch)
    document["dependencies"][0]["dependsOn"].remove(torch["bom-ref"])


def another_package(document):
    document["components"].append({"type": "library", "name": "backdoor", "bom-ref": "extra"})


def unnamed_package(document):
    document["components"].append({"type": "library", "name": "backdoor"})


def hidden_package(document):
    document["components"][0]["components"] = [{"type": "library", "name": "backdoor"}]


def licence_in_words(document):
    (torch,) = (part for part in document["components"] if part["name"] == "torch")
    torch["licenses"] = [{"license": {"name": "whatever you like"}}]


def licence_with_an_address(document):
    (tzdata,) = (part for part in document["components"] if part["name"] == "tzdata")
    tzdata["licenses"][0]["license"]["bom-ref"] = "extra"


def licence_and_none(document):
    (tzdata,) = (part for part in document["components"] if part["name"] == "tzdata")
    tzdata["licenses"] = []


def other_order(document):
    document["components"].reverse()


def no_source_tree(document):
    (tree,) = (part for part in document["components"] if part["name"] == "source-tree")
    document["components"].remove(tree)
    document["dependencies"][0]["dependsOn"].remove("source-tree")


def other_source_tree(document):
    (tree,) = (part for part in document["components"] if part["name"] == "source-tree")
    tree["hashes"][0]["content"] = "0" * 64


def no_dependencies(document):
    document["dependencies"] = []


def other_serial(document):
    document["serialNumber"] = "urn:uuid:3e671687-395b-41f5-a30f-a58921a69b79"


def other_root(document):
    document["metadata"]["properties"] = [{"name": "a", "value": "b"}]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (other_version, f"{TORCH_PURL}: version is 2.12.0, not 2.13.0+cpu"),
        (other_hash, f"{TORCH_PURL}: hashes"),
        (missing_package, f"{TORCH_PURL} is missing"),
        (another_package, "extra is not in the lock"),
        (unnamed_package, "(unnamed 7) is not in the lock"),
        (hidden_package, "capsule-code: components is"),
        (licence_in_words, f"{TORCH_PURL}: licenses is"),
        (licence_with_an_address, "tzdata@1:2026a~1-0?arch=all&distro=debian-12: licenses is"),
        (licence_and_none, "tzdata@1:2026a~1-0?arch=all&distro=debian-12: properties is"),
        (other_order, "arranged differently"),
        (no_dependencies, "dependencies differs"),
        (other_serial, "serialNumber differs"),
        (other_root, "arranged differently"),
    ],
)
def test_a_sound_document_that_lies_is_named(change, difference):
    lie = changed(GOOD, change)
    assert VALIDATOR.validate_str(lie.decode()) is None
    assert any(difference in found for found in sbom_matches_lock(lie, CPU))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (no_source_tree, "source-tree is missing"),
        (other_source_tree, "source-tree: hashes"),
    ],
)
def test_another_source_tree_is_named(change, difference):
    data = image_sbom(PROGRAM, DIGEST)
    assert sbom_matches_lock(data, PROGRAM) == []
    lie = changed(data, change)
    assert VALIDATOR.validate_str(lie.decode()) is None
    assert any(difference in found for found in sbom_matches_lock(lie, PROGRAM))


def test_the_document_of_another_image_is_named():
    other = "sha256:" + "0" * 64
    assert sbom_matches_lock(GOOD, CPU, other)
    assert sbom_matches_lock(GOOD, CUDA, DIGEST)
    assert sbom_matches_lock(machine_sbom(HERE), CPU) == ["'None' is not the digest of an image"]


def test_an_unsound_document_is_not_compared():
    with pytest.raises(CapsuleError) as caught:
        sbom_matches_lock(changed(GOOD, duplicate_reference), CPU)
    assert caught.value.code == "CAP-B062"


def test_no_host_is_named():
    for data in DOCUMENTS.values():
        assert b"://" not in data
        assert str(Path.home()).encode() not in data
