"""What a reader may expect of a bundle, and how it is said."""

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DataSpec
from capsule.image.cache import Cache
from capsule.image.lockfile import write_lock
from capsule.image.pinning import capture
from capsule.verification.request import Expectation, parse_lock
from tests.bundle.locks import make_lock


def test_a_lock_is_named_by_its_file_or_its_digest(tmp_path):
    lock = make_lock()
    write_lock(tmp_path / "x.lock.json", lock)
    assert parse_lock(str(tmp_path / "x.lock.json")) == parse_lock(lock.digest()) == lock.digest()


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "A" * 64, "nowhere.lock.json"])
def test_anything_else_is_no_lock(text):
    with pytest.raises(CapsuleError, match="CAP-V058") as refusal:
        parse_lock(text)
    assert refusal.value.exit_code == ExitCode.USAGE


def test_a_setting_that_the_bundle_does_not_have_is_called_absent():
    lock = make_lock()
    entropy = lock.spec.entropy.model_copy(update={"seed": 1})
    wanted = lock.spec.model_copy(update={"entropy": entropy})
    with pytest.raises(CapsuleError, match=r"entropy\.seed is absent, not 1"):
        Expectation(spec=wanted).check(lock, None)


@pytest.mark.parametrize(
    ("sha256", "expected"),
    [(None, True), ("1" * 64, True), ("2" * 64, True), ("3" * 64, False)],
    ids=["any", "of the file", "of the listing", "of other data"],
)
def test_the_published_digest_of_a_data_set_is_expected(sha256, expected):
    """A lock does not contain it: its own digest is of the data that were used."""
    lock = make_lock()
    wanted = lock.spec.model_copy(update={"data": {"digits": DataSpec(sha256=sha256)}})
    expectation = Expectation(spec=wanted)
    if expected:
        expectation.check_data({"digits": ("1" * 64, "2" * 64)}.get)
        return
    with pytest.raises(CapsuleError, match=r"its data set 'digits' has the SHA-256 1{64}, not 3"):
        expectation.check_data({"digits": ("1" * 64, "2" * 64)}.get)


def test_a_lock_of_the_same_spec_with_another_package_is_another(tmp_path):
    lock, other = make_lock(), make_lock().model_copy(deep=True)
    image = other.image.model_copy(update={"base": "0" * 64})
    other = other.model_copy(update={"image": image})
    assert other.spec == lock.spec
    Expectation(spec=lock.spec, lock=lock.digest()).check(lock, None)
    with pytest.raises(CapsuleError, match="CAP-V057") as refusal:
        Expectation(spec=lock.spec, lock=lock.digest()).check(other, None)
    assert refusal.value.exit_code == ExitCode.TAMPERED


@pytest.fixture
def published(tmp_path):
    """A spec with a source tree, and the lock that was made from it."""
    spec = tmp_path / "published" / "spec.yaml"
    (spec.parent / "tree").mkdir(parents=True)
    (spec.parent / "tree" / "network.py").write_text("depth = 2\n")
    spec.write_text(
        "schema: capsule/spec/v1\nname: x\ncode: {path: tree}\n"
        "trainer: {command: [python, network.py], outputs: [x]}\n"
    )
    return spec


@pytest.mark.parametrize(
    ("name", "content", "difference"),
    [
        ("network.py", "depth = 3\n", r"network\.py is file 0644 \w{64}, not file 0644 \w{64}"),
        ("sitecustomize.py", "import forged\n", r"sitecustomize\.py is missing, not file"),
    ],
    ids=["another file", "one more file"],
)
def test_the_source_tree_of_the_published_spec_is_expected(
    published, name, content, difference, tmp_path
):
    """A spec contains its path only; the reviewer's copy of it contains the tree."""
    cache = Cache(tmp_path / "cache")
    expectation = Expectation.parse(published, None, None)
    project = capture(expectation.spec, published, cache, print)
    expectation.check_tree(project, cache)
    (published.parent / "tree" / name).write_text(content)
    with pytest.raises(CapsuleError, match=f"CAP-V041 .*in its source tree, {difference}") as error:
        expectation.check_tree(project, cache)
    assert error.value.exit_code == ExitCode.TAMPERED


def test_without_the_tree_of_the_published_spec_another_option_is_proposed(published, tmp_path):
    cache = Cache(tmp_path / "cache")
    expectation = Expectation.parse(published, None, None)
    project = capture(expectation.spec, published, cache, print)
    (published.parent / "tree").rename(published.parent / "elsewhere")
    with pytest.raises(CapsuleError, match=r"'tree'.* is not a folder") as error:
        expectation.check_tree(project, cache)
    assert error.value.fix.endswith("use --expect-lock instead of --expect-spec.")
