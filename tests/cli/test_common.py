"""What commands share: exit statuses and messages of errors, GPUs by name, locks of specs."""

import contextlib
import errno
import inspect
import io
import json
import os

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.cli.common import engine_option, guarded, locked, print_json, use_gpu
from capsule.experiment.spec import SourcesSpec
from capsule.host.errors import CapsuleError, ExitCode
from capsule.image.cache import Cache
from capsule.machine.devices import Device
from tests.cli.conftest import SMALL, capsule
from tests.study.small_studies import BASE

VALUES = st.none() | st.integers() | st.floats(allow_nan=False) | st.lists(st.text(), max_size=2)
DOCUMENTS = st.dictionaries(st.text(max_size=9), VALUES, max_size=3)
ERROR = CapsuleError("CAP-S003", "a.b 7 is not a known key", fix="Remove it.")


# Errors of commands


def ended(error, **options):
    @guarded
    def command(*, as_json=False):
        raise error

    with pytest.raises(typer.Exit) as caught:
        command(**options)
    return caught.value.exit_code


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_what_the_system_refuses_is_no_bug(number):
    assert ended(OSError(number, "refused")) == ExitCode.INCONCLUSIVE


def test_used_up_memory_is_no_bug():
    assert ended(MemoryError()) == ExitCode.INCONCLUSIVE


def test_other_errors_are_still_bugs():
    assert ended(FileNotFoundError(errno.ENOENT, "gone")) == ExitCode.INTERNAL
    assert ended(ValueError()) == ExitCode.INTERNAL


def test_a_bad_spec_ends_with_status_2_and_no_traceback(tmp_path):
    spec = tmp_path / "s.yaml"
    spec.write_text(SMALL.read_text().replace("discount", "discont").replace("game:", "gamme:"))
    done = capsule("build", spec, "--json")
    assert done.exit_code == 2
    assert "Traceback" not in done.stderr
    assert "environment.gamme is not a known key" in done.stderr
    assert "fix:" in done.stderr
    assert json.loads(done.stdout)["code"] == "CAP-S003"
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_each_remedy_of_a_spec_is_shown_whole(capsys):
    fixes = [f"Remove section_{number}, or change trainer.command." for number in range(20)]
    ended(CapsuleError("CAP-S003", "wrong", fix="\n".join(fixes)))
    assert capsys.readouterr().err == "CAP-S003: wrong\nfix: " + "\n  ".join(fixes) + "\n"


def test_a_coded_error_is_shown_with_its_fix_and_ends_with_the_status_of_its_code(capsys):
    assert ended(ERROR) == ExitCode.USAGE
    assert capsys.readouterr() == ("", "CAP-S003: a.b 7 is not a known key\nfix: Remove it.\n")


def test_with_json_the_error_is_a_document_on_standard_output_too(capsys):
    assert ended(ERROR, as_json=True) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "schema": "capsule/error/v1",
        "code": "CAP-S003",
        "message": "a.b 7 is not a known key",
        "fix": "Remove it.",
        "exit_code": 2,
    }
    assert shown.err == "CAP-S003: a.b 7 is not a known key\nfix: Remove it.\n"


def test_further_lines_of_a_message_are_indented(capsys):
    ended(CapsuleError("CAP-S003", "first\nsecond", fix="Remove both."))
    assert capsys.readouterr().err == "CAP-S003: first\n  second\nfix: Remove both.\n"


def test_the_text_of_an_error_does_not_control_the_terminal(capsys):
    ended(CapsuleError("CAP-S003", "a\x1b[2Jb", fix="c\rd"))
    assert capsys.readouterr().err == "CAP-S003: a\ufffd[2Jb\nfix: c\ufffdd\n"


def test_a_bug_is_reported_as_one_with_the_type_of_the_exception(capsys):
    assert ended(ZeroDivisionError("by zero"), as_json=True) == 70
    shown = capsys.readouterr()
    assert shown.err.startswith("CAP-X001: ZeroDivisionError: by zero\nfix: This is a bug")
    assert "capsule --debug" in json.loads(shown.out)["fix"]
    assert "Traceback" not in shown.err


def test_a_full_disk_is_a_document_with_the_path(capsys):
    ended(OSError(errno.ENOSPC, "No space left on device", "/scratch/x"), as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["code"], document["exit_code"]) == ("CAP-X003", 4)
    assert "'/scratch/x': No space left on device" in document["message"]
    assert "TMPDIR" in document["fix"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_has_its_own_status_and_no_document(error, capsys):
    assert ended(error, as_json=True) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_the_status_that_a_command_chose_stays(capsys):
    assert ended(typer.Exit(ExitCode.DIFFERS)) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ERROR, ValueError("bug")])
def test_a_traceback_is_shown_in_debug_mode_only(error, capsys, monkeypatch):
    ended(error)
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("CAPSULE_DEBUG", "1")
    ended(error)
    assert "Traceback" in capsys.readouterr().err


def test_a_guarded_command_keeps_the_name_help_and_options_of_its_function():
    def command(path: str, *, quiet: bool = False) -> None:
        """Do something."""

    found = guarded(command)
    assert (found.__name__, found.__doc__) == ("command", "Do something.")
    assert inspect.signature(found) == inspect.signature(command)
    assert found("path", quiet=True) is None


# JSON


def test_json_for_a_terminal_is_ascii(capsys):
    print_json({"name": "\x9b31m\u202e\x1b]0;x\a \u2066é"})
    assert capsys.readouterr().out.isascii()


@settings(max_examples=40)
@given(DOCUMENTS)
def test_what_is_printed_is_the_document_without_control_characters(document):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_json(document)
    text = shown.getvalue()
    assert json.loads(text) == document
    assert text.isascii()
    assert not {chr(code) for code in range(32)} - {"\n"} & set(text)
    assert text.endswith("}\n")


# GPUs

GPUS = (
    Device(0, "0", "GPU-aaaa0000", "NVIDIA H200", "9.0", 2),
    Device(1, "1", "GPU-bbbb1111", "NVIDIA H200", "9.0", 2),
)
OTHER = Device(1, "1", "GPU-cccc2222", "NVIDIA L4", "8.9", 2)


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that has this machine have some GPUs and the variable a value."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def have(*devices, visible=None):
        monkeypatch.setattr("capsule.machine.devices.read_devices", lambda _nvml: devices)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    have(*GPUS)
    return have


def test_without_a_name_the_gpus_stay_as_they_are(gpus):
    use_gpu(None)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    gpus(*GPUS, visible="1")
    use_gpu(None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("wanted", "uuids"),
    [
        ("1", "GPU-bbbb1111"),
        ("GPU-b", "GPU-bbbb1111"),
        ("1,0", "GPU-bbbb1111,GPU-aaaa0000"),
        (" 0 , GPU-bbbb1111 ", "GPU-aaaa0000,GPU-bbbb1111"),
    ],
)
def test_named_gpus_are_visible_by_their_uuids_in_the_named_order(gpus, wanted, uuids):
    use_gpu(wanted)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == uuids


@pytest.mark.parametrize(
    ("wanted", "named"),
    [("2", "2"), ("", ""), ("GPU-", "GPU-"), ("0,7", "7"), ("0,", ""), ("NVIDIA H200",) * 2],
)
def test_a_name_of_no_gpu_or_several_is_refused_and_changes_nothing(gpus, wanted, named):
    with pytest.raises(CapsuleError) as caught:
        use_gpu(wanted)
    assert caught.value.code == "CAP-M009"
    assert f"--gpu {named!r} is not one of the GPUs" in caught.value.message
    assert all(f"{each.place} (NVIDIA H200, {each.uuid})" in caught.value.message for each in GPUS)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("wanted", ["0,0", "0,GPU-aaaa"])
def test_a_gpu_is_not_named_twice(gpus, wanted):
    with pytest.raises(CapsuleError, match=r"CAP-M009 .* names a GPU twice"):
        use_gpu(wanted)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_gpu_that_a_scheduler_hides_cannot_be_named(gpus):
    gpus(*GPUS, visible="GPU-aaaa0000")
    with pytest.raises(CapsuleError) as caught:
        use_gpu("GPU-bbbb1111")
    assert (caught.value.code, "GPU-bbbb1111)" in caught.value.message) == ("CAP-M009", False)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa0000"


def test_an_index_among_gpus_of_several_models_is_ambiguous(gpus):
    gpus(GPUS[0], OTHER, visible="0")
    with pytest.raises(CapsuleError) as caught:
        use_gpu("GPU-aaaa0000")
    assert caught.value.code == "CAP-M008"
    assert "CUDA_VISIBLE_DEVICES has the index 0" in caught.value.message
    assert "UUID" in caught.value.fix
    gpus(GPUS[0], OTHER)
    use_gpu("1")  # of the PCI bus, as 'nvidia-smi -L' numbers them
    assert os.environ["CUDA_VISIBLE_DEVICES"] == OTHER.uuid


# Locks


@pytest.mark.parametrize("data", [b"", b"not a lock", b"{}", b'{"schema":"capsule/lock/v1"}'])
def test_a_damaged_lock_is_refused(tmp_path, data):
    lock = tmp_path / "x.lock.json"
    lock.write_bytes(data)
    done = capsule("build", lock)
    assert done.exit_code == 2
    assert "CAP-L002" in done.stderr
    assert lock.read_bytes() == data


@pytest.mark.parametrize(
    "command", [["build"], ["run", "--key", "alice"]], ids=lambda each: each[0]
)
def test_run_and_build_write_no_lock_file_for_a_setting(place, monkeypatch, command):
    def unprepared(lock, *_, **__):
        assert lock.spec.seeds.root == 7
        raise CapsuleError("CAP-E013", "not in this test", fix="None.")

    capsule("lock", "cart.yaml")
    written = (place / "cart.lock.json").read_bytes()
    monkeypatch.setattr("capsule.execution.prepare", unprepared)
    name, *rest = command
    done = capsule(name, "cart.yaml", "--set", "seeds.root=7", "--engine", "process", *rest)
    assert "not in this test" in done.stderr
    assert (place / "cart.lock.json").read_bytes() == written


@pytest.fixture
def lock_of(place):
    """Return a function that locks a file, and notes what is reported of it."""

    def lock_of(name, overrides=None, **options):
        notes = []
        found = locked(place / name, overrides, Cache(), progress=notes.append, **options)
        return *found, notes

    return lock_of


def test_the_lock_file_beside_a_spec_is_written_once_and_follows_the_spec(lock_of, place):
    lock, _, notes = lock_of("cart.yaml")
    assert notes == [f"wrote {place / 'cart.lock.json'}"]
    assert (place / "cart.lock.json").read_bytes() == lock.document() + b"\n"
    assert lock_of("cart.yaml") == (lock, SourcesSpec(), [])
    (place / "cart.yaml").write_text(f"{BASE}seeds: {{root: 7}}\n")
    changed, _, notes = lock_of("cart.yaml")
    assert (changed.spec.seeds.root, changed.image, len(notes)) == (7, lock.image, 1)
    assert (place / "cart.lock.json").read_bytes() == changed.document() + b"\n"


def test_a_setting_is_in_the_lock_and_not_in_its_file(lock_of, place):
    lock, _, notes = lock_of("cart.yaml", ["seeds.root=7"])
    assert (lock.spec.seeds.root, notes) == (7, [])
    assert not (place / "cart.lock.json").exists()


def test_pins_are_kept_unless_they_are_to_be_refreshed(lock_of, resolutions):
    lock_of("cart.yaml")
    lock_of("cart.yaml")
    assert len(resolutions.made) == 1
    lock_of("cart.yaml", refresh=True)
    lock_of("cart.yaml", refresh_base=True)
    assert len(resolutions.made) == 3


def test_sources_of_packages_come_with_the_lock_and_are_not_in_it(lock_of, place):
    (place / "cart.yaml").write_text(f"{BASE}image: {{sources: {{find_links: [wheels]}}}}\n")
    lock, sources, _ = lock_of("cart.yaml")
    assert sources.find_links == (str(place / "wheels"),)
    assert lock.spec.image.sources == SourcesSpec()
    assert lock_of("cart.lock.json") == (lock, SourcesSpec(), [])


@pytest.mark.parametrize("name", ["cart.lock.json", "lock.json"])
@pytest.mark.parametrize(
    "change",
    [
        {"overrides": ["seeds.root=7"]},
        {"refresh": True},
        {"refresh_base": True},
        {"refresh_data": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_pins_of_a_named_lock_cannot_be_changed(lock_of, place, name, change):
    lock, *_ = lock_of("cart.yaml")
    (place / name).write_bytes(written := lock.document() + b"\n")
    with pytest.raises(CapsuleError) as caught:
        lock_of(name, **change)
    assert caught.value.code == "CAP-L003"
    assert caught.value.message.startswith(f"{place / name} is a lock file")
    assert caught.value.fix == "Name the spec instead of the lock file."
    assert (place / name).read_bytes() == written


@pytest.mark.parametrize(
    ("engines", "option"),
    [
        (["docker", "podman"], ""),
        (["docker", "docker"], ""),
        (["bwrap", "bwrap"], " --engine bwrap"),
        (["process"], " --engine process"),
        (["process", "bwrap"], ""),  # neither suits both
        ([None], ""),
    ],
)
def test_an_engine_that_verify_does_not_choose_itself_is_named(engines, option):
    assert engine_option(engines) == option
