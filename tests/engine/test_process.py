"""The plain-process engine: the locked environment and nothing of the caller's."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from capsule.bundle.claims import image_relaxations
from capsule.engine import memory_events, process, supervise
from capsule.engine.environment import environment_key
from capsule.engine.interface import NATIVE, RUN_DIRECTORY, Task
from capsule.engine.process import ProcessEngine, RunningProcess, Start, descendants, started
from capsule.entropy.launch import launch_arguments
from capsule.entropy.report import collect
from capsule.experiment.contract import FIRST_PROCESS
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.files import write_atomic
from capsule.experiment.spec import CodeSpec
from capsule.experiment.variables import environment_variables
from capsule.image.cache import Cache
from capsule.image.distribution import DEBIAN_12
from capsule.image.resolution.project import capture_project
from tests.conftest import wait_until
from tests.engine.conftest import installations
from tests.entropy.evidence import make_mechanisms
from tests.refusals import refusal

pytestmark = pytest.mark.network  # for the packages of the interpreter, unless they are cached

LEAKY = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD_X",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTHONHOME_X",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "SECRET_TOKEN",
    "VIRTUAL_ENV",
    "http_proxy",
)


@pytest.fixture(scope="module")
def common_cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def cache(request, tmp_path, common_cache):
    """The cache of the tests that execute a task, which share an environment; else one's own."""
    return common_cache if "run" in request.fixturenames else Cache(tmp_path / "cache")


@pytest.fixture(params=["enclosed", "plain"])
def enclosed(request, monkeypatch):
    """Whether tasks have namespaces of their own; the kernel of a test machine allows it."""
    if request.param == "plain":
        monkeypatch.setattr("capsule.engine.process.namespaces_refused", lambda: "not allowed")
    return request.param == "enclosed"


@pytest.fixture
def run(lock, cache, run_directory, make_task, enclosed):
    """Return a function that runs Python code: its end, and its output."""
    engine = ProcessEngine()
    notes = []
    engine.prepare(lock, None, cache, progress=notes.append)
    assert any("not allowed" in note for note in notes) is not enclosed

    def run_code(
        code,
        *,
        on_poll=lambda: None,
        environment=None,
        launcher=(),
        hostname=None,
        processors=None,
        data=None,
        **limits,
    ):
        task = Task(
            run_directory=run_directory,
            environment=environment or {},
            limits=make_task("").limits.model_copy(update=limits),
            native=DEBIAN_12.native,
            arguments=(*launcher, "python3.11", "-P", "-c", code, RUN_DIRECTORY),
            hostname=hostname,
            processors=processors,
            data=data or {},
        )
        ended = engine.run(task, on_poll)
        return ended, (run_directory / "output.log").read_text()

    return run_code


def test_a_task_sees_the_locked_wheels_the_locked_code_and_its_directory(
    run, run_directory, cache, enclosed
):
    code = (
        "import made, capsule.training, sys, os, importlib.util\n"
        "print(made.VALUE, sys.argv[1])\n"
        "print(os.path.dirname(capsule.__file__))\n"
        "print(importlib.util.find_spec('capsule.engine'), importlib.util.find_spec('docker'))\n"
        "print(os.path.exists(made.__cached__))\n"  # though no run may write bytecode
        "open(sys.argv[1] + '/file', 'w').write('kept')\n"
        "sys.exit(7)"
    )
    ended, output = run(code)
    assert (ended.status, ended.reason) == (7, "exited")
    lines = output.splitlines()
    assert lines[0] == ("42 /out" if enclosed else f"42 {run_directory}")
    environments = "/capsule/local/lib" if enclosed else str(cache.root / "environments")
    assert lines[1].startswith(environments)
    assert lines[2] == "None None"
    assert lines[3] == "True"
    assert (run_directory / "file").read_text() == "kept"


def test_data_sets_can_be_read_and_only_mounts_protect_them(run, data, enclosed):
    code = (
        "import os; from pathlib import Path\n"
        "folder = Path(os.environ['CAPSULE_DATA']); print(folder)\n"
        "for name in ('digits/deep/text', 'labels/a=b.csv'): print((folder / name).read_text())\n"
        "try:\n"
        "    (folder / 'digits/probe').write_text('x')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    ended, output = run(code, data=data)
    assert ended.status == 0
    folder, *lines = output.splitlines()
    assert (folder == "/data") is enclosed
    assert lines == ["deep", "", "1,2", "", *["Read-only file system"] * enclosed]
    assert run("import os; print('CAPSULE_DATA' in os.environ)")[1] == "False\n"


def test_a_task_may_have_fewer_processors_but_no_host_name_of_its_own(run):
    first = min(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0))"
    _, output = run(code, processors=str(first))
    assert output == f"{{{first}}}\n"
    with pytest.raises(ValueError, match="host name"):
        run(code, hostname="varied-host")


def test_nothing_of_the_callers_environment_is_inherited(run, monkeypatch, lock, cache, enclosed):
    for name in LEAKY:
        monkeypatch.setenv(name, "leak")
    given = environment_variables(lock.spec)
    _, output = run("import os, json; print(json.dumps(dict(os.environ)))", environment=given)
    found = json.loads(output)
    home = found.pop("HOME")
    environment = cache.root / "environments" / environment_key(lock)
    if enclosed:
        assert home == "/tmp"  # noqa: S108 - a private one
        environment = "/capsule"
    else:
        assert found.pop("TMPDIR") == home
        assert not Path(home).exists()
    assert found.pop("PATH") == f"{environment}/bin:/usr/local/bin:/usr/bin:/bin"
    assert (found.pop("USER"), found.pop("LOGNAME")) == ("capsule", "capsule")
    assert found.pop("CUDA_VISIBLE_DEVICES") == ""  # CUDA shows no GPU to a task without one
    assert found == given


def test_no_privilege_can_be_gained_and_no_core_is_dumped(run):
    _, output = run(
        "import resource\n"
        "print(resource.getrlimit(resource.RLIMIT_CORE))\n"
        "print([l for l in open('/proc/self/status') if l.startswith('NoNewPrivs')])"
    )
    assert "(0, 0)" in output
    assert r"NoNewPrivs:\t1" in output


def test_the_claims_say_whether_the_launcher_was_alone(run, lock, run_directory, enclosed):
    (run_directory / "start").mkdir()
    words = launch_arguments(
        lock.spec, native=NATIVE, directory=f"{RUN_DIRECTORY}/start", replay=None
    )
    ended, output = run("import os; print(os.getpid())", launcher=words)
    assert (ended.status, output == f"{FIRST_PROCESS}\n") == (0, enclosed)
    report = collect(run_directory / "start")
    found = image_relaxations(lock, "process", report, make_mechanisms())
    assert ("engine.namespaces=none" in found) is not enclosed
    assert "engine=process" in found


def test_a_signal_is_told_as_by_a_shell(run):
    # A fault, because nothing else ends the first process of a namespace from inside.
    ended, _ = run("import ctypes; ctypes.string_at(0)")
    assert (ended.status, ended.reason) == (128 + signal.SIGSEGV, "exited")


def test_too_much_time_ends_a_task(run, time_is_up):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(3)))\n"
        "open(sys.argv[1] + '/ready', 'w').close(); time.sleep(600)"
    )
    ended, output = run(code, on_poll=time_is_up)
    assert (ended.status, ended.reason, output) == (3, "timed-out", "saved\n")


def test_too_much_memory_ends_a_task(run):
    code = "import time; held = b'x' * (200 << 20); time.sleep(600)"
    ended, _ = run(code, memory_mb=100)
    assert (ended.status, ended.reason) == (137, "out-of-memory")


def test_too_much_memory_in_a_child_ends_a_task(run):
    child = "import time; held = b'x' * (200 << 20); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ended, _ = run(code, memory_mb=100)
    assert (ended.status, ended.reason) == (137, "out-of-memory")


@pytest.fixture
def memory_group(tmp_path, monkeypatch):
    """A control group with little memory, whose kills are counted; only root can make one.

    This process stays outside, because the kernel could choose to kill it as well.
    """
    name, mounts = f"capsule-test-{os.getpid()}", Path("/sys/fs/cgroup")
    if (mounts / "memory").is_dir():  # version 1
        mounts, line = mounts / "memory", f"4:memory:/{name}"
        settings = {"memory.limit_in_bytes": "64M", "memory.swappiness": "0"}
    else:
        line, settings = f"0::/{name}", {"memory.max": "64M", "memory.swap.max": "0"}
    group = mounts / name
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group can be made")
    try:
        if not all((group / setting).exists() for setting in settings):
            pytest.skip("control groups have no memory controller")
        for setting, value in settings.items():
            (group / setting).write_text(value)
        (tmp_path / "groups").write_text(f"{line}\n")
        monkeypatch.setattr(memory_events, "_GROUPS", tmp_path / "groups")
        yield group
    finally:
        group.rmdir()


@pytest.mark.engine
def test_a_task_that_the_kernel_kills_in_a_control_group_was_out_of_memory(run, memory_group):
    code = (
        "import time\n"
        "while '/capsule-test' not in open('/proc/self/cgroup').read(): time.sleep(0.01)\n"
        "held = b'x' * (200 << 20); time.sleep(600)"
    )

    others = {*descendants(os.getpid())}

    def move():
        for number in {*descendants(os.getpid())} - others:
            with suppress(ProcessLookupError):
                (memory_group / "cgroup.procs").write_text(str(number))

    ended, _ = run(code, on_poll=move)
    assert (ended.status, ended.reason) == (137, "out-of-memory")
    assert "(oom_kill)" in ended.evidence


def test_a_task_that_ends_when_a_child_is_killed_does_not_end_well(run):
    code = (
        "import os, subprocess\n"
        "sleeping = [subprocess.Popen(['sleep', '600']) for _ in range(100)]\n"
        "held = b'x' * (200 << 20); os.wait(); os._exit(0)"
    )
    ended, _ = run(code, memory_mb=100)
    assert (ended.status, ended.reason) == (137, "out-of-memory")


def test_too_much_disk_ends_a_task(run):
    code = (
        "import sys, time\n"
        "open(sys.argv[1] + '/big', 'wb').write(b'x' * (40 << 20)); time.sleep(600)"
    )
    ended, _ = run(code, disk_mb=8)
    assert (ended.status, ended.reason) == (137, "disk-full")
    assert ended.evidence == "its run directory was larger than limits.disk_mb"


def test_a_disk_with_little_space_ends_a_task(run, monkeypatch):
    monkeypatch.setattr(supervise, "RESERVE_BYTES", 1 << 60)
    ended, _ = run("import time; time.sleep(600)")
    assert (ended.status, ended.reason) == (137, "disk-full")
    assert ended.evidence.endswith(" MiB of its disk were free")


def test_a_disk_that_is_too_full_for_the_output_does_not_hide_the_end(
    run, run_directory, monkeypatch
):
    monkeypatch.setattr(supervise, "write_atomic", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    (run_directory / "output.log").touch()
    fill = "open(sys.argv[1] + '/big', 'wb').write(b'x' * (40 << 20))"
    ended, _ = run(f"import sys, time; {fill}; time.sleep(600)", disk_mb=8)
    assert (ended.status, ended.reason) == (137, "disk-full")
    with pytest.raises(CapsuleError, match="CAP-X003"):
        run("import os, sys; os.remove(sys.argv[1] + '/big')", disk_mb=8)


def test_an_interrupt_lets_the_task_save_and_leaves_no_process(run, run_directory):
    code = (
        "import signal, subprocess, sys, time\n"
        "def save(*_):\n"
        "    open(sys.argv[1] + '/state', 'w').write('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "subprocess.Popen(['sleep', '601.357'])\n"
        "open(sys.argv[1] + '/ready', 'w').close()\n"
        "time.sleep(600)"
    )

    def interrupt_once_ready():
        if (run_directory / "ready").exists():
            (run_directory / "ready").unlink()
            os.kill(os.getpid(), signal.SIGINT)

    ended, _ = run(code, on_poll=interrupt_once_ready)
    assert (ended.status, ended.reason) == (0, "interrupted")
    assert (run_directory / "state").read_text() == "saved"
    assert _no_process_mentions("601.357")


def test_an_error_of_the_caller_leaves_no_process(run, run_directory):
    def fail():
        if (run_directory / "ready").exists():
            raise KeyboardInterrupt

    code = "import os, sys, time; open(sys.argv[1] + '/ready', 'w').close(); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run(code, on_poll=fail)
    assert _no_process_mentions(str(run_directory))


def test_a_task_that_does_not_end_is_reported_and_not_waited_for(make_task, monkeypatch):
    for place in (process, supervise):
        monkeypatch.setattr(place, "KILL_SECONDS", 0.1)
    monkeypatch.setattr(process, "_LOG_SECONDS", 0.1)
    monkeypatch.setattr(RunningProcess, "kill", lambda _: None)
    start = Start(("sleep", "600"), os.environ, "/", enclosed=False)
    with pytest.raises(CapsuleError, match="CAP-E009"), started(start, make_task("")) as running:
        supervise._kill(running)
    assert running.wait(0) is None
    os.kill(running.number, signal.SIGKILL)
    assert running.wait(600) == 137


def test_the_task_ends_with_a_capsule_that_is_killed(lock, cache, run_directory):
    script = (
        "import pathlib, sys\n"
        "from capsule.engine.interface import Task\n"
        "from capsule.engine.process import ProcessEngine\n"
        "from capsule.experiment.lock import Lock\n"
        "from capsule.image.cache import Cache\n"
        "from capsule.experiment.spec import LimitsSpec\n"
        "lock = Lock.model_validate_json(sys.stdin.read())\n"
        "engine = ProcessEngine()\n"
        "engine.prepare(lock, None, Cache(pathlib.Path(sys.argv[1])), progress=print)\n"
        'code = \'import sys, time; open(sys.argv[1] + "/ready", "w"); time.sleep(600)\'\n'
        "task = Task(run_directory=pathlib.Path(sys.argv[2]), environment={},\n"
        "    limits=LimitsSpec(),\n"
        "    arguments=('python3.11', '-c', code, '{run_directory}'))\n"
        "engine.run(task)\n"
    )
    command = [sys.executable, "-c", script, str(cache.root), str(run_directory)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with host:
        host.stdin.write(lock.document())
        host.stdin.close()
        wait_until((run_directory / "ready").exists, seconds=600)
        host.kill()
    wait_until(lambda: _no_process_mentions(str(run_directory)), seconds=600)


def test_output_is_bounded(run, monkeypatch):
    monkeypatch.setattr("capsule.engine.supervise.LOG_BYTES", 1 << 20)
    ended, output = run("print('x' * (4 << 20))")
    assert ended.status == 0
    assert len(output) == 1 << 20


def test_output_is_there_at_the_end_of_a_task_however_slow_the_disk_is(run, monkeypatch):
    def write_slowly(path, data):
        time.sleep(0.5)
        write_atomic(path, data)

    monkeypatch.setattr(process, "_LOG_SECONDS", 0.2)
    monkeypatch.setattr(supervise, "write_atomic", write_slowly)
    assert run("print('all of it')")[1] == "all of it\n"


def test_a_process_that_keeps_the_output_open_is_not_waited_for(
    make_task, run_directory, monkeypatch
):
    monkeypatch.setattr(process, "_LOG_SECONDS", 0.2)
    ready = run_directory / "ready"
    away = (
        f"setsid sh -c 'echo $$ >{ready}; exec sleep 600' &"
        f" until test -s {ready}; do sleep 0.1; done"
    )
    start = Start(("sh", "-c", away), os.environ, "/", enclosed=False)
    with started(start, make_task("")) as running:
        assert running.wait(600) == 0
    assert not (run_directory / "output.log").exists()
    os.kill(int(ready.read_text()), signal.SIGKILL)


def test_a_task_that_leaves_no_place_for_its_log(run):
    with pytest.raises(CapsuleError) as refused:
        run("import os, sys; os.makedirs(sys.argv[1] + '/output.log/folder')")
    assert refused.value.code == "CAP-E041"


def test_no_environment_is_made_where_no_program_can_be_executed(lock, cache, monkeypatch):
    noexec = CapsuleError("CAP-E020", "the cache is mounted with noexec", fix="Set CAPSULE_CACHE.")
    monkeypatch.setattr(cache, "require_programs", Mock(side_effect=noexec))
    refusal("CAP-E020", ProcessEngine().prepare, lock, None, cache, progress=print)
    assert not (cache.root / "environments").exists()


@pytest.mark.parametrize("enclosed", ["plain"], indirect=True)  # it is made before there are any
def test_an_environment_whose_interpreter_went_is_made_again(lock, cache, run):
    environment = cache.root / "environments" / environment_key(lock)
    (environment / "bin" / "python3.11").unlink()
    notes = []
    ProcessEngine().prepare(lock, None, cache, progress=notes.append)
    assert installations(notes) == 1
    assert run("print(1)")[1] == "1\n"


@pytest.mark.parametrize("enclosed", ["plain"], indirect=True)
@pytest.mark.parametrize("deed", ["plant", "change", "replace", "remove"])
def test_an_environment_that_was_changed_is_made_again(lock, cache, run, deed):
    """A file that was planted would be executed with all that the caller may do."""
    notes = []
    ProcessEngine().prepare(lock, None, cache, progress=lambda _: None)
    environment = cache.root / "environments" / environment_key(lock)
    site = environment / DEBIAN_12.packages
    victim = next(path for path in sorted(site.rglob("*.py")) if path.stat().st_size > 0)
    honest, times = victim.read_bytes(), victim.stat()
    if deed == "plant":
        (site / "evil.pth").write_text("import os; os._exit(9)\n")
    elif deed == "change":  # with its size and its date
        victim.write_bytes(b"#" * len(honest))
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif deed == "replace":
        (site / "other").write_bytes(b"#" * len(honest))
        (site / "other").replace(victim)
    else:
        victim.unlink()
    ProcessEngine().prepare(lock, None, cache, progress=notes.append)
    assert installations(notes) == 1
    assert victim.read_bytes() == honest
    assert not (site / "evil.pth").exists()
    as_always = {"PYTHONDONTWRITEBYTECODE": "1"}  # every spec sets it
    assert run("print(1)", environment=as_always)[1] == "1\n"
    ProcessEngine().prepare(lock, None, cache, progress=notes.append)
    assert installations(notes) == 1


@pytest.mark.parametrize("enclosed", ["plain"], indirect=True)
def test_a_source_tree_that_was_changed_in_the_cache_is_unpacked_again(
    lock, cache, tmp_path, run_directory, make_task, enclosed
):
    """A trainer imports environments and networks from it, and claims the locked tree."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "own.py").write_text("VALUE = 1\n")
    project = capture_project(CodeSpec(path="tree"), tmp_path, cache)
    lock = lock.model_copy(update={"project": project})
    code = "import runpy, os; print(runpy.run_path(os.environ['CAPSULE_PROJECT'] + '/own.py'))"
    task = replace(make_task(""), arguments=("python3.11", "-P", "-c", code))
    engine = ProcessEngine()
    engine.prepare(lock, None, cache, progress=lambda _: None)
    (cache.root / "projects" / project.sha256 / "own.py").write_text("VALUE = 2\n")
    engine.prepare(lock, None, cache, progress=lambda _: None)
    engine.run(task)
    assert "'VALUE': 1" in (run_directory / "output.log").read_text()


def test_a_gpu_that_is_not_there_is_inconclusive(make_lock, monkeypatch):
    monkeypatch.setattr("capsule.engine.gpu._LOADED", ())
    cuda = {"kind": "cuda", "cuda": "13.0", "cudnn": ">=9", "driver": ">=580"}
    with pytest.raises(CapsuleError) as refusal:
        ProcessEngine().check(make_lock(accelerator=cuda))
    assert (refusal.value.code, refusal.value.exit_code) == ("CAP-E003", ExitCode.INCONCLUSIVE)


def _no_process_mentions(text):
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes() and folder.name != str(
                os.getpid()
            ):
                return False
    return True
