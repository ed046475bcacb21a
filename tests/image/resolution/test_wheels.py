"""Which of the wheels that uv found is taken, and what of it is kept."""

import itertools

import pytest

from capsule.experiment.errors import CapsuleError
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_12
from capsule.image.resolution import wheels
from capsule.image.resolution.sources import MachineSources
from capsule.image.resolution.wheels import (
    ResolvedWheel,
    WheelSearch,
    choose_wheel,
    compile_wheels,
    read_pylock,
)
from tests.image.package_index import make_wheel

WHEELS = [
    "a-1.0-py3-none-any.whl",
    "a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "a-1.0-1-cp311-cp311-manylinux_2_28_x86_64.whl",
    "a-1.0-2-cp311-cp311-manylinux_2_28_x86_64.whl",
    "a-1.0-cp311-cp311-manylinux_2_39_x86_64.whl",
    "a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",
    "a-1.0-cp311-cp311-win_amd64.whl",
]


def test_the_best_wheel_is_chosen_in_any_order():
    chosen = {
        choose_wheel(DEBIAN_12, {name: {"name": name} for name in order}, "a")["name"]
        for order in itertools.islice(itertools.permutations(WHEELS), 0, None, 97)
    }
    assert chosen == {"a-1.0-2-cp311-cp311-manylinux_2_28_x86_64.whl"}
    abi3 = ["a-1.0-py3-none-any.whl", "a-1.0-cp310-abi3-manylinux2014_x86_64.whl"]
    assert choose_wheel(DEBIAN_12, {name: {"name": name} for name in abi3}, "a")["name"] == abi3[1]


def test_no_fitting_wheel_is_a_coded_error():
    with pytest.raises(CapsuleError, match="win_amd64") as caught:
        choose_wheel(DEBIAN_12, {"a-1.0-cp311-cp311-win_amd64.whl": {}}, "a")
    assert caught.value.code == "CAP-L106"


def test_pylock_without_digest_or_wheel(tmp_path):
    sha256 = make_wheel(tmp_path, "beta", "2.1")
    url = (tmp_path / "beta-2.1-py3-none-any.whl").as_uri()
    text = '[[packages]]\nname = "beta"\nversion = "2.1"\n'
    (wheel,) = read_pylock(DEBIAN_12, f'{text}wheels = [{{ url = "{url}" }}]\n')
    assert wheel == ResolvedWheel("beta", "2.1", "beta-2.1-py3-none-any.whl", sha256, url)
    with pytest.raises(CapsuleError, match="SHA-256"):
        read_pylock(
            DEBIAN_12,
            f'{text}wheels = [{{ url = "https://x.example/beta-2.1-py3-none-any.whl" }}]\n',
        )
    with pytest.raises(CapsuleError) as caught:
        read_pylock(DEBIAN_12, f'{text}sdist = {{ url = "https://x.example/beta-2.1.tar.gz" }}\n')
    assert caught.value.code == "CAP-L104"


@pytest.mark.parametrize(
    ("explanation", "required_by", "built"),
    [
        ("and brax==0.12.3 depends on gym, we can conclude", "brax==0.12.3", "gym"),
        ("all versions of brax depend on gym>=0.21 and", "brax", '"gym>=0.21"'),
        ("brax depends on gym>=0.21,<0.26, we can conclude", "brax", '"gym>=0.21,<0.26"'),
        ("brax depends on gym==0.21.* and you require brax", "brax", '"gym==0.21.*"'),
        ("a==1 depends on gym<1, and a==2 depends on gym>1, we", "a==1, a==2", "gym"),
        ("brax depends on gym-notices and you require gym", None, "gym"),
        ("no usable wheels and you require gym==0.26.2, we can", None, '"gym==0.26.2"'),
    ],
)
def test_a_package_without_a_wheel_is_named_with_what_requires_it(
    tmp_path, monkeypatch, explanation, required_by, built
):
    hint = "hint: Wheels are required for `gym` because building from source is disabled"
    monkeypatch.setattr(wheels, "_run_uv", lambda *_: f"{explanation}\n{hint}")
    search = WheelSearch(DEBIAN_12, MachineSources(), Cache(tmp_path), print)
    with pytest.raises(CapsuleError) as caught:
        compile_wheels(search, ["brax"], [])
    named = f"gym (required by {required_by})" if required_by else "gym"
    assert caught.value.message.startswith(f"image.packages: no wheel of {named} fits ")
    assert f"--wheel-dir ../wheels {built}'" in caught.value.fix


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("failed to write to the cache: No space left on device (os error 28)", "CAP-X003"),
        ("because b was not found, a cannot be used", "CAP-L103"),
        ("tcp connect error: Connection refused (os error 111)", "CAP-L103"),
    ],
)
def test_a_full_disk_is_no_fault_of_the_requirements(tmp_path, monkeypatch, message, code):
    monkeypatch.setattr(wheels, "_run_uv", lambda *_: message)
    with pytest.raises(CapsuleError) as caught:
        search = WheelSearch(DEBIAN_12, MachineSources(), Cache(tmp_path), print)
        compile_wheels(search, ["a"], [])
    assert caught.value.code == code
    assert message in caught.value.message
