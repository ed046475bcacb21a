from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.cli.common import locked
from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import CpuAccelerator
from capsule.host.cuda import cuda_versions
from capsule.image.pinning import resolve
from capsule.image.resolution.resolve import (
    check_accelerator,
    parse_requirements,
    resolve_wheels,
    torch_backends,
)
from capsule.image.resolution.sources import MachineSources
from capsule.image.resolution.wheels import ResolvedWheel
from tests.image.package_index import CUDA, NVIDIA, Machine, make_spec, make_wheel


def test_locks_dependencies_and_own_needs_from_index_and_folder(machine):
    sha256 = machine.publish("alpha", "1.5", "beta>=2")
    machine.publish("alpha", "2.0")
    machine.publish("gamma", "0.3")
    beta = make_wheel(machine.folder, "beta", "2.1")
    spec = make_spec("Alpha<2")
    wheels = resolve_wheels(spec, ["gamma>=0.1"], machine.cache, lambda _: None)
    assert [(w.name, w.version, w.requested) for w in wheels] == [
        ("alpha", "1.5", "Alpha<2"),
        ("beta", "2.1", None),
        ("gamma", "0.3", None),
    ]
    assert [w.sha256 for w in wheels[:2]] == [sha256, beta]
    assert wheels[1].filename == "beta-2.1-py3-none-any.whl"


@pytest.mark.slow
def test_no_wheel_is_unpacked_to_be_hashed(machine):
    make_wheel(machine.folder, "beta", "2.1")
    machine.wheels(make_spec("beta"))
    assert list((machine.cache.root / "uv").rglob("beta*.dist-info")) == []


def test_only_folders_work_too(machine, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    sha256 = make_wheel(machine.folder, "beta", "2.1")
    (wheel,) = resolve_wheels(make_spec("beta"), [], machine.cache, lambda _: None)
    assert wheel.sha256 == sha256


def test_the_specs_own_folder_is_added(machine, tmp_path):
    make_wheel(tmp_path / "more", "beta", "2.1")
    spec = make_spec("beta", find_links=[str(tmp_path / "more")])
    assert machine.wheels(spec) == {"beta": "2.1"}


@pytest.mark.parametrize("set_by", ["the file", "an override"])
def test_the_specs_own_folder_is_relative_to_the_spec(machine, tmp_path, monkeypatch, set_by):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("beta", "pydantic", "rfc8785", "xxhash"):
        make_wheel(home / "more", name, "9.0")
    sources = ", sources: {find_links: [more]}" if set_by == "the file" else ""
    (home / "tiny.yaml").write_text(
        "schema: capsule/spec/v1\n"
        "name: tiny\n"
        f"image: {{packages: [beta]{sources}}}\n"
        "environment: {suite: gymnasium, id: CartPole-v1}\n"
        "trainer: {algorithm: dqn, network: mlp}\n"
    )
    overrides = [] if sources else ["image.sources.find_links=[more]"]
    monkeypatch.chdir(elsewhere)
    lock, found = locked(
        Path("../home/tiny.yaml"), overrides, machine.cache, progress=lambda _: None
    )
    assert [wheel.name for wheel in lock.image.wheels] == ["beta", "pydantic", "rfc8785", "xxhash"]
    assert [Path(link).resolve() for link in found.find_links] == [home / "more"]
    assert all(Path(link).is_absolute() for link in found.find_links)
    written = lock.document().decode()
    assert "more" not in written
    assert str(tmp_path) not in written
    assert (home / "tiny.lock.json").exists() == (set_by == "the file")


def test_highest_version_of_all_indexes_wins_as_with_pip(machine, tmp_path, monkeypatch):
    machine.publish("alpha", "1.0")
    other = Machine.__new__(Machine)
    other.index = tmp_path / "other"
    other.publish("alpha", "1.1")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", other.index.as_uri())
    assert machine.wheels(make_spec("alpha")) == {"alpha": "1.1"}


@pytest.fixture
def uneven(machine):
    """A machine whose index has versions that no lock can have."""
    machine.publish("alpha", "1.0")
    machine.publish("alpha", "2.0", "source-only")
    machine.publish("beta", "1.0")
    machine.publish("gamma", "1.0")
    machine.publish("gamma", "3.0")
    machine.publish("delta", "1.0", "gamma<2")
    for name, version in (("source-only", "1.0"), ("beta", "1.1")):
        page = machine.index / name / "index.html"
        page.parent.mkdir(exist_ok=True)
        file = f"{name.replace('-', '_')}-{version}.tar.gz"
        page.with_name(file).write_bytes(b"source")
        links = page.read_text() if page.exists() else ""
        page.write_text(f'{links}\n<a href="{file}">{file}</a>')
    return machine


@pytest.mark.parametrize(
    ("packages", "newest"),
    [
        (["alpha"], "2.0"),  # it requires a package without a wheel
        (["beta"], "1.1"),  # it has no wheel itself
        (["gamma>=1", "delta"], "3.0"),  # delta requires gamma<2
    ],
)
def test_a_package_that_is_older_than_what_was_asked_for_is_named(uneven, packages, newest):
    uneven.wheels(make_spec(*packages))
    (notice,) = (text for text in uneven.messages if text.startswith("image.packages: "))
    assert notice.startswith(
        f"image.packages: {packages[0]} is locked at version 1.0, because version {newest} or "
    )


@pytest.mark.parametrize("package", ["alpha<2", "alpha==1.*", "gamma", "gamma==1.0"])
def test_a_package_that_is_what_was_asked_for_is_not_named(uneven, package):
    assert uneven.wheels(make_spec(package))
    assert uneven.messages == ["resolving Python packages"]


@pytest.mark.parametrize(
    ("package", "code", "text"),
    [
        ("no-such-thing", "CAP-L103", "no-such-thing"),
        ("alpha==9", "CAP-L103", "alpha==9"),
        ("windows-only", "CAP-L103", "windows-only"),
        ("source-only", "CAP-L104", "source-only"),
        ("alpha @ https://example.org/alpha.whl", "CAP-L102", "image.packages[0]"),
        ("alpha=>1", "CAP-L102", "'alpha=>1'"),
    ],
)
def test_impossible_packages_are_named(machine, package, code, text):
    machine.publish("alpha", "1.0")
    machine.publish("windows-only", "1.0", tag="py3-none-win32")
    project = machine.index / "source-only"
    project.mkdir()
    (project / "index.html").write_text(
        '<a href="source_only-1.0.tar.gz">source_only-1.0.tar.gz</a>'
    )
    with pytest.raises(CapsuleError) as caught:
        machine.wheels(make_spec(package))
    assert caught.value.code == code
    assert "image.packages" in caught.value.message
    assert text in caught.value.message
    assert str(machine.cache.root) not in caught.value.message


def test_cpu_takes_the_machines_own_cpu_build(torch_machine):
    assert torch_machine.wheels(make_spec("torch==2.13.0")) == {"torch": "2.13.0+cpu"}
    assert torch_machine.messages == ["resolving Python packages"]


def test_cpu_never_takes_a_cuda_build(torch_machine):
    (torch_machine.folder / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    with pytest.raises(CapsuleError) as caught:
        torch_machine.wheels(make_spec("torch==2.13.0"))
    assert caught.value.code == "CAP-L107"
    assert "accelerator.kind" in caught.value.message
    assert "cannot be reached" in caught.value.message  # PyTorch's own index was asked
    assert "resolving Python packages with PyTorch's cpu index" in torch_machine.messages


def test_cpu_takes_a_cuda_build_if_the_spec_accepts_one(torch_machine):
    (torch_machine.folder / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    accelerator = CpuAccelerator(cuda_build=True)
    found = torch_machine.wheels(make_spec("torch==2.13.0", accelerator=accelerator))
    assert found == {"torch": "2.13.0", **NVIDIA}
    assert torch_machine.messages == ["resolving Python packages"]


def test_cuda_takes_the_cuda_build_beside_a_cpu_build(torch_machine):
    found = torch_machine.wheels(make_spec("torch==2.13.0", accelerator=CUDA))
    assert found == {"torch": "2.13.0", **NVIDIA}


@pytest.mark.parametrize(
    ("field", "wanted", "found"), [("cuda", ">=14", "13.0.96"), ("cudnn", "9.10", "9.20.0.48")]
)
def test_cuda_of_another_version_names_the_field(torch_machine, field, wanted, found):
    accelerator = CUDA.model_copy(update={field: wanted})
    with pytest.raises(CapsuleError) as caught:
        torch_machine.wheels(make_spec("torch==2.13.0", accelerator=accelerator))
    assert caught.value.code == "CAP-L108"
    assert f"accelerator.{field} requires" in caught.value.message
    assert found in caught.value.message


def test_cuda_without_cuda_wheels_is_refused():
    torch = ResolvedWheel("torch", "2.13.0+cpu", "torch.whl", "0" * 64, "file:///torch.whl")
    with pytest.raises(CapsuleError, match="contain none"):
        check_accelerator(CUDA, [torch])


def test_which_index_is_asked_for_torch():
    some = MachineSources(find_links=("/wheels",))
    cpu = make_spec("torch").accelerator
    assert torch_backends(cpu, MachineSources()) == ("cpu",)
    assert torch_backends(cpu, some) == (None, "cpu")
    assert torch_backends(CUDA, some) == (None, "cu130")
    assert torch_backends(CUDA.model_copy(update={"cuda": "==12.8.*"}), some) == (None, "cu128")
    assert torch_backends(CUDA.model_copy(update={"cuda": ">=12.8"}), some) == (None,)


@pytest.mark.slow
def test_locks_again_without_a_network(machine, monkeypatch):
    """An index is online for the first resolution and gone for the second."""
    machine.publish("alpha", "1.5", "beta>=2")
    machine.publish("beta", "2.0")

    class Index(SimpleHTTPRequestHandler):
        def end_headers(self):
            self.send_header("Cache-Control", "max-age=0")
            super().end_headers()

        def log_message(self, *_args):
            pass

    handler = functools.partial(Index, directory=machine.index)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
        online = resolve_wheels(make_spec("alpha"), [], machine.cache, machine.messages.append)
        server.shutdown()
        thread.join()
    offline = resolve_wheels(make_spec("alpha"), [], machine.cache, machine.messages.append)
    assert offline == online
    assert any("cannot be reached" in message for message in machine.messages)
    with pytest.raises(CapsuleError) as caught:
        machine.wheels(make_spec("gamma"))
    assert caught.value.code == "CAP-L105"


def test_cuda_lock_reports_its_libraries(torch_machine):
    for name, version in {"pydantic": "2.12", "rfc8785": "0.1.4", "xxhash": "3.6"}.items():
        torch_machine.publish(name, version)
    spec = make_spec("torch==2.13.0", accelerator=CUDA)
    lock = resolve(spec, torch_machine.cache, progress=lambda _: None)
    assert lock.image.recipe == "cuda"
    wheels = [(wheel.name, wheel.version) for wheel in lock.image.wheels]
    assert cuda_versions(wheels) == {"CUDA": "13.0.96", "cuDNN": "9.20.0.48", "cuBLAS": "13.1.1.3"}


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.from_regex(r"^[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?.*$"), max_size=3)
)
def test_any_requirements_are_taken_or_refused_by_position(packages):
    try:
        assert list(parse_requirements(packages).values()) == packages
    except CapsuleError as error:
        assert error.code == "CAP-L102"
        assert "image.packages[" in error.message


def test_a_marker_in_many_parentheses_is_refused():
    text = f"foo; {'(' * 1_500}os_name == 'posix'{')' * 1_500}"
    with pytest.raises(CapsuleError, match=r"image\.packages\[1\] .*more than 100 parentheses"):
        parse_requirements(["bar", text])


def test_a_package_named_twice_is_refused():
    with pytest.raises(CapsuleError, match=r"image\.packages\[1\] 'Foo_Bar<2' .*second time"):
        parse_requirements(["foo-bar>1", "Foo_Bar<2"])
