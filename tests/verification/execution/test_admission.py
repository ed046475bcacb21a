"""Images that a verifier refuses to execute."""

from functools import partial
from types import SimpleNamespace

import pytest

from capsule import execution
from capsule.engine.containers import ContainerEngine
from capsule.experiment.lock import Lock
from capsule.experiment.spec import CudaAccelerator, LimitsSpec
from capsule.host.errors import CapsuleError, ExitCode
from capsule.report.progress import SilentReporter
from capsule.verification.execution import admission, grading
from capsule.verification.execution.admission import check_embedded, check_gpu_host
from capsule.verification.integrity.layers import embedded_image


class Reported(ContainerEngine):
    """An engine that reports these versions."""

    def __init__(self, **versions):
        self._versions = {name.replace("_", "-"): number for name, number in versions.items()}

    def components(self):
        return self._versions


OUTDATED = Reported(runc="1.1.5+ds1", nvidia_container_toolkit="1.17.7")


@pytest.fixture
def on_gpu():
    accelerator = CudaAccelerator.model_construct(kind="cuda")
    spec = type("Spec", (), {"accelerator": accelerator})
    return Lock.model_construct(spec=spec)


def test_an_embedded_image_needs_a_container():
    with pytest.raises(CapsuleError) as caught:
        check_embedded("process", "embedded")
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V050", ExitCode.USAGE)
    check_embedded("process", "rebuilt")


def test_a_strangers_image_is_refused_where_images_break_out(on_gpu):
    with pytest.raises(CapsuleError) as caught:
        check_gpu_host(on_gpu, OUTDATED)
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V055", ExitCode.INCONCLUSIVE)
    assert "1.17.7" in caught.value.message
    check_gpu_host(on_gpu, Reported(runc="1.3.3", nvidia_container_toolkit="1.17.8"))


@pytest.mark.parametrize(
    ("image", "base", "genuine", "rejected"),
    [
        ("rebuilt", "packages", False, False),
        ("rebuilt", "supplied", True, False),  # the base layer is one that Capsule ships
        ("rebuilt", "supplied", False, True),
        ("embedded", "packages", True, True),
    ],
)
def test_the_signers_base_layer_is_rejected_as_a_whole_image_is(
    on_gpu, monkeypatch, image, base, genuine, rejected
):
    on_gpu.spec.limits = LimitsSpec()
    monkeypatch.setattr(admission, "is_genuine", lambda _: genuine)
    monkeypatch.setattr(admission, "supplied_data", lambda *_: {})
    monkeypatch.setattr(admission, "prepare_image", lambda *_: None)
    request = SimpleNamespace(image=image, base=base, limits={}, data={})
    run = SimpleNamespace(lock=on_gpu, claims=SimpleNamespace(image=None))
    prepare = partial(admission.prepare_executor, request, run, cache=None)
    if rejected:
        with pytest.raises(CapsuleError, match="CAP-V055"):
            prepare(engine=OUTDATED, reporter=SilentReporter())
    else:
        prepare(engine=OUTDATED, reporter=SilentReporter())


def test_a_bundle_without_an_image_cannot_lend_one(on_gpu):
    run = SimpleNamespace(bundle=SimpleNamespace(files={}), lock=on_gpu)
    with pytest.raises(CapsuleError) as caught, embedded_image(run):
        pass
    assert (caught.value.code, caught.value.exit_code) == ("CAP-V051", ExitCode.INCONCLUSIVE)


@pytest.mark.xdist_group("verification")  # they share runs
@pytest.mark.slow
def test_other_training_code_is_executed_only_if_the_user_accepts_it(
    verified, honest_bundle, monkeypatch
):
    monkeypatch.setattr(execution, "execute", lambda *_, **__: pytest.fail("it was executed"))
    report = verified(honest_bundle, code="own")
    assert (report.verdict, report.exit_code) == ("inconclusive", 4)
    assert report.error["code"] == "CAP-V014"
    # A bundle without an image has no code that could be read.
    assert "If the run had an image, you can also" in report.error["fix"]
    assert "--code supplied" in report.error["fix"]
    monkeypatch.undo()
    report = verified(honest_bundle)
    assert (report.verdict, report.own_code) == ("reproduced-bitwise", False)
    assert "the training code was the signer's own" in report.summary


@pytest.mark.xdist_group("verification")  # they share runs
@pytest.mark.slow
def test_the_code_of_a_release_is_executed_and_named(verified, honest_bundle, monkeypatch):
    for module in (admission, grading):
        monkeypatch.setattr(module, "release_of", lambda _: "0.0.9")
    report = verified(honest_bundle, code="own")
    assert (report.verdict, report.own_code) == ("reproduced-bitwise", True)
    assert report.summary.endswith("; the training code was that of Capsule 0.0.9")
