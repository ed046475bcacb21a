"""What a reader may expect of a bundle, and how it is said."""

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.spec import DataSpec
from capsule.image.lockfile import write_lock
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
