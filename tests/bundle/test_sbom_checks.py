"""SBOMs that are not sound are refused, and those that contradict their lock are named."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packageurl import PackageURL

from capsule.bundle.sbom import image_sbom, machine_sbom
from capsule.bundle.sbom_checks import MAX_BYTES, MAX_ENTRIES, sbom_matches_lock, validate_sbom
from capsule.experiment.canonical import canonical_json
from capsule.experiment.errors import CapsuleError, ExitCode
from tests.bundle.sboms import (
    BARE,
    CPU,
    CUDA,
    DIGEST,
    GOOD,
    HERE,
    LICENCES,
    PROGRAM,
    TORCH_PURL,
    VALIDATOR,
)


def refusal(data):
    with pytest.raises(CapsuleError) as caught:
        validate_sbom(data)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-B062", ExitCode.TAMPERED)
    return caught.value.message


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


def purl_of_the_root(document):
    document["metadata"]["component"]["purl"] = "pkg:/broken"


def component_in_the_root(document):
    document["metadata"]["component"]["components"] = [{"type": "file", "name": "x"}]


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
        (purl_of_the_root, "'pkg:/broken'"),
        (component_in_the_root, "a component is inside another"),
        (set_to("components", [{"type": "library", "name": "backdoor"}]), "inside another"),
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


def named(name):
    component = {"type": "file", "name": name}
    return b'{"bomFormat":"CycloneDX","components":[%b],"specVersion":"1.6","version":1}' % (
        canonical_json(component)
    )


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


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
        named(nested(400)),
        b" " * ((4 << 20) + 1),
    ],
    ids=["empty", "list", "null", "bytes", "newline", "twice", "brackets", "deep", "large"],
)
def test_what_is_no_document_is_refused(data):
    validate_sbom(named("x"))
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
    assert any(difference in found for found in sbom_matches_lock(lie, CPU, DIGEST))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (no_source_tree, "source-tree is missing"),
        (other_source_tree, "source-tree: hashes"),
    ],
)
def test_another_source_tree_is_named(change, difference):
    data = image_sbom(PROGRAM, DIGEST)
    assert sbom_matches_lock(data, PROGRAM, DIGEST) == []
    lie = changed(data, change)
    assert VALIDATOR.validate_str(lie.decode()) is None
    assert any(difference in found for found in sbom_matches_lock(lie, PROGRAM, DIGEST))


def test_the_document_of_another_image_is_named():
    other = "sha256:" + "0" * 64
    assert sbom_matches_lock(GOOD, CPU, other)
    assert sbom_matches_lock(GOOD, CUDA, DIGEST)
    assert sbom_matches_lock(machine_sbom(HERE), CPU, DIGEST)


def test_an_unsound_document_is_not_compared():
    with pytest.raises(CapsuleError) as caught:
        sbom_matches_lock(changed(GOOD, duplicate_reference), CPU, DIGEST)
    assert caught.value.code == "CAP-B062"


@settings(max_examples=8)
@given(st.sets(st.sampled_from(CPU.image.wheels + CPU.image.debian)))
def test_exactly_the_packages_that_are_not_in_both_are_named(removed):
    image = CPU.image.model_copy(
        update={
            kind: tuple(each for each in getattr(CPU.image, kind) if each not in removed)
            for kind in ("wheels", "debian")
        }
    )
    less = CPU.model_copy(update={"image": image})
    names = {each.name for each in removed}
    for lock, document, reason in (
        (CPU, image_sbom(less, DIGEST), " is missing"),
        (less, image_sbom(CPU, DIGEST), " is not in the lock"),
    ):
        found = sbom_matches_lock(document, lock, DIGEST)
        named = [each.removesuffix(reason) for each in found if each.endswith(reason)]
        assert {PackageURL.from_string(purl).name for purl in named} == names
        assert len(named) == len(names)
        # The list of what the image depends on differs as well.
        assert set(found) - {purl + reason for purl in named} <= {"dependencies differs"}
        assert bool(found) == bool(removed)


def test_the_refusal_says_what_to_do():
    with pytest.raises(CapsuleError) as caught:
        validate_sbom(b"{}")
    assert caught.value.message.startswith("the SBOM is not a valid CycloneDX 1.6 document: ")
    assert "ask its signer" in caught.value.fix


@pytest.mark.parametrize("extra", [0, 1])
def test_the_largest_document_is_parsed_and_a_larger_one_is_not(extra):
    # Spaces are not canonical, which only a parser can tell.
    reason = refusal(b"{}" + b" " * (MAX_BYTES - 2 + extra))
    assert (f"it is larger than {MAX_BYTES} bytes" in reason) is bool(extra)


def test_a_sound_document_is_bounded_in_every_list():
    def many(document):
        document["dependencies"][0]["dependsOn"] = ["capsule-code"] * (MAX_ENTRIES + 1)

    assert f"dependsOn has more than {MAX_ENTRIES} entries" in refusal(changed(GOOD, many))
