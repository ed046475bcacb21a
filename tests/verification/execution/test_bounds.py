"""What a verifier's machine bounds: a bundle's limits, and images where they break out."""

import stat
from types import SimpleNamespace

import pytest

from capsule.engine.containers import ContainerEngine
from capsule.engine.process import ProcessEngine
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.lock import Lock
from capsule.experiment.spec import CudaAccelerator, LimitsSpec
from capsule.experiment.trace import read_trace
from capsule.verification.execution.bounds import (
    check_embedded,
    check_gpu_host,
    lowered,
    parse_limits,
    reexecution_folder,
)
from capsule.verification.integrity.layers import embedded_image


class Reported(ContainerEngine):
    """An engine that reports these versions."""

    def __init__(self, **versions):
        self._versions = {name.replace("_", "-"): number for name, number in versions.items()}

    def components(self):
        return self._versions


@pytest.fixture
def on_gpu():
    accelerator = CudaAccelerator.model_construct(kind="cuda")
    spec = type("Spec", (), {"accelerator": accelerator})
    return Lock.model_construct(spec=spec)


def test_limits_are_only_lowered():
    limits = LimitsSpec(memory_mb=100, minutes=10)
    found = lowered(limits, parse_limits(["minutes=3", "memory_mb=500"]))
    assert (found.minutes, found.memory_mb) == (3, 100)
    assert found.model_copy(update={"minutes": 10}) == limits


@pytest.mark.parametrize("text", ["minutes", "minutes=", "minutes=0", "minutes=-1", "minutes=1.5",
                                  "hours=1", "minutes=1e3", "=5", "minutes=inf"])  # fmt: skip
def test_other_limits_are_refused(text):
    with pytest.raises(CapsuleError) as caught:
        parse_limits([text])
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V056", ExitCode.USAGE)
    assert "memory_mb" in caught.value.fix


def test_an_embedded_image_needs_a_container():
    with pytest.raises(CapsuleError) as caught:
        check_embedded("embedded", ProcessEngine())
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V050", ExitCode.USAGE)
    check_embedded("rebuilt", ProcessEngine())


def test_a_strangers_image_is_refused_where_images_break_out(on_gpu):
    notes = []
    outdated = Reported(runc="1.1.5+ds1", nvidia_container_toolkit="1.17.7")
    with pytest.raises(CapsuleError) as caught:
        check_gpu_host(on_gpu, outdated, strange=True, note=notes.append)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V055", ExitCode.INCONCLUSIVE)
    assert "1.17.7" in caught.value.message
    assert notes == []
    check_gpu_host(on_gpu, outdated, strange=False, note=notes.append)
    assert len(notes) == 2
    repaired = Reported(runc="1.3.3", nvidia_container_toolkit="1.17.8")
    check_gpu_host(on_gpu, repaired, strange=True, note=notes.append)
    assert len(notes) == 2


def test_a_bundle_without_an_image_cannot_lend_one(on_gpu):
    bundle = SimpleNamespace(files={})
    with pytest.raises(CapsuleError) as caught, embedded_image(bundle, on_gpu, {}):
        pass
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V051", ExitCode.INCONCLUSIVE)


def test_a_reexecution_has_a_folder_that_only_the_verifier_may_enter(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notes = []
    with reexecution_folder(notes.append) as folder:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "file").touch()
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as refusing, reexecution_folder(notes.append) as folder:
        folder.mkdir()
        refusing.setattr("os.rmdir", refuse)
        refusing.setattr("pathlib.Path.rmdir", refuse)
    assert ["cannot be removed" in note for note in notes] == [True]


def refuse(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_what_a_reexecution_left_convicts_no_bundle(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    with pytest.raises(CapsuleError) as direct:
        list(read_trace(trace))
    assert direct.value.exit_code == ExitCode.TAMPERED
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        list(read_trace(trace))
    assert (caught.value.code, caught.value.exit_code) == ("CAP-T141", ExitCode.INCONCLUSIVE)
    with pytest.raises(CapsuleError) as caught, reexecution_folder(print):
        raise CapsuleError("CAP-B108", "of the bundle", fix="", exit_code=ExitCode.TAMPERED)
    assert caught.value.exit_code == ExitCode.TAMPERED
