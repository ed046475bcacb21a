"""SBOMs: sound by tools that are not ours, and equal for equal images."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packageurl import PackageURL

from capsule.bundle.sbom import image_sbom, machine_sbom
from capsule.bundle.sbom_checks import validate_sbom
from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.machine.fingerprint import Fingerprint
from capsule.machine.gpu import Driver, Gpu, MigPart, RemappedRows
from tests.bundle.locks import make_lock
from tests.bundle.sboms import CPU, CUDA, DIGEST, GOOD, HERE, LICENCES, PROGRAM, VALIDATOR

NO_LICENCE = {"capsule:licence": "no assertion"}
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


def test_no_host_is_named():
    for data in DOCUMENTS.values():
        assert b"://" not in data
        assert str(Path.home()).encode() not in data
