"""A user's own program, run as the image runs it: outputs, flags, failures, orders to stop."""

import hashlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from capsule.experiment import contract
from capsule.experiment.arrival_log import ArrivalLog, Messages
from capsule.experiment.contract import Event, Failure, Outputs, ProgramResult, Runtime
from tests.training.conftest import (
    finish_run,
    make_spec,
    new_run,
    read,
    start_run,
    tree_facts,
)

SPEC = {
    "schema": "capsule/spec/v1",
    "name": "own",
    "seeds": {"root": 7},
    "image": {"packages": ["numpy"]},
    "code": {},
    "trainer": {"command": [sys.executable, "train.py"]},
}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def program(tmp_path):
    """Make a run directory for a script; return it and the variables to add."""

    def make(script, files=None, **trainer):
        project = tmp_path / "project"
        project.mkdir()
        (project / "train.py").write_text(script)
        for name, text in (files or {}).items():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text(text)
        spec = make_spec(SPEC, trainer=trainer)
        directory = new_run(tmp_path / "run", spec, tree=tree_facts(project))
        project.chmod(0o555)  # as in an image
        return directory, {contract.PROJECT_VARIABLE: str(project)}

    return make


def outputs_of(directory):
    return Outputs.model_validate_json((directory / contract.OUTPUTS).read_bytes())


def failure_of(directory):
    return Failure.model_validate_json((directory / contract.FAILURE).read_bytes())


@pytest.mark.slow
def test_what_a_plain_script_writes_and_prints_is_hashed(program):
    directory, variables = program(
        "import pathlib, sys\n"
        "print(open('data/in.txt').read(), sys.argv[1:])\n"
        "pathlib.Path('results').mkdir()\n"
        "pathlib.Path('results/model.bin').write_bytes(bytes(10))\n"
        "pathlib.Path('latest').symlink_to('results/model.bin')\n"
        "pathlib.Path('data/table.csv').open('a').write('2\\n')\n"
        "print('to standard error', file=sys.stderr)\n",
        files={"data/in.txt": "input", "data/table.csv": "1\n"},
        command=[sys.executable, "train.py", "--seed", "{seed}"],
    )
    status, errors = finish_run(directory, added=variables, warm=False)
    assert status == 0, errors
    assert "to standard error" in errors
    outputs = outputs_of(directory)
    printed = b"input ['--seed', '7']\n"
    assert (directory / contract.STANDARD_OUTPUT).read_bytes() == printed
    assert outputs.standard_output.sha256 == sha256(printed)
    assert {path: output.sha256 for path, output in outputs.files.items()} == {
        "data/table.csv": sha256(b"1\n2\n"),
        "latest": sha256(b"results/model.bin"),
        "results/model.bin": sha256(bytes(10)),
    }
    assert outputs.files["latest"].target == "results/model.bin"
    document = (directory / contract.OUTPUTS).read_bytes()
    result = ProgramResult.model_validate_json((directory / contract.RESULT).read_bytes())
    assert result.outputs == sha256(document)
    runtime = Runtime.model_validate_json((directory / contract.RUNTIME).read_bytes())
    assert runtime.flags["torch.deterministic_debug_mode"] == "2"
    assert set(runtime.libraries) == {"python", "numpy"}
    lines = (directory / contract.EVENTS).read_bytes().splitlines()
    assert [Event.model_validate_json(line).kind for line in lines] == ["start", "finish"]


@pytest.mark.slow
def test_two_processes_and_two_places_give_the_same_outputs(program, tmp_path):
    script = (
        "from capsule.training import run\n"
        "import random, numpy as np\n"
        "with run() as r:\n"
        "    random.seed(r.seed)\n"
        "    for step in range(5):\n"
        "        r.log(step, loss=random.random())\n"
        "    r.checkpoint(5, {'w': np.arange(3.0)})\n"
    )
    directory, variables = program(script)
    again = tmp_path / "elsewhere" / "again"
    again.parent.mkdir()
    shutil.copytree(directory, again)
    for folder, warm in ((directory, False), (again, True)):
        status, errors = finish_run(folder, added=variables, warm=warm)
        assert status == 0, errors
    assert read(directory, contract.OUTPUTS) == read(again, contract.OUTPUTS)
    assert set(outputs_of(directory).files) == {
        "outputs/metrics.jsonl",
        "outputs/checkpoints/step-000000000005.safetensors",
    }


@pytest.mark.slow
def test_a_failing_program_is_named_with_its_status(program):
    directory, variables = program("raise SystemExit(3)")
    assert finish_run(directory, added=variables)[0] == 6
    failure = failure_of(directory)
    assert failure.code == "CAP-T302"
    assert "with status 3" in failure.message
    assert not (directory / contract.RESULT).exists()


@pytest.mark.slow
def test_a_command_that_is_not_there_is_named_and_the_shell_that_is_there(program):
    directory, variables = program("", command=["no-such-program"])
    assert finish_run(directory, added=variables)[0] == 6
    failure = failure_of(directory)
    assert failure.code == "CAP-T301"
    assert "no-such-program" in failure.message
    assert "[sh, FILE]" in failure.fix


@pytest.mark.slow
def test_what_a_program_leaves_running_is_ended_before_anything_is_hashed(program):
    directory, variables = program(
        "import os, subprocess, sys, time\n"
        'code = \'import time\\nwhile True: open("noise", "a").write("x"); time.sleep(0.01)\'\n'
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "while not os.path.exists('noise'): time.sleep(0.01)\n"
    )
    status, errors = finish_run(directory, added=variables)
    assert status == 0, errors
    noise = directory / contract.WORKSPACE / "noise"
    assert outputs_of(directory).files["noise"].size == noise.stat().st_size
    time.sleep(0.1)
    assert outputs_of(directory).files["noise"].size == noise.stat().st_size


WAITING = (
    "import os, pathlib, signal, sys, time\n"
    "state = pathlib.Path(os.environ['CAPSULE_STATE'], 'step')\n"
    "resumed = os.environ['CAPSULE_RESUMED']\n"
    "pathlib.Path('log').open('a').write(resumed)\n"
    "if state.exists(): sys.exit()\n"
    "signal.signal(signal.SIGTERM, lambda *_: (state.write_text('1'), sys.exit()))\n"
    "pathlib.Path('ready').touch()\n"
    "time.sleep(0 if pathlib.Path(os.environ['CAPSULE_RUN'], 'go').exists() else 6000)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(("resumable", "expected"), [(True, b"01"), (False, b"0")])
def test_an_interrupted_program_resumes_only_if_it_says_that_it_can(program, resumable, expected):
    directory, variables = program(WAITING, resumable=resumable, standard_output=False)
    process = start_run(directory, added=variables)
    while not (directory / contract.WORKSPACE / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert process.returncode == 130
    assert not (directory / contract.RESULT).exists()
    (directory / "go").touch()
    before = (directory / contract.RUNTIME).read_bytes()
    elsewhere = before.replace(b'"python":"', b'"python":"0')  # as on another machine
    assert elsewhere != before
    (directory / contract.RUNTIME).write_bytes(elsewhere)
    status, _ = finish_run(directory, added=variables)
    if resumable:
        assert (status, failure_of(directory).code) == (4, "CAP-T113")
        (directory / contract.RUNTIME).write_bytes(before)
        status, _ = finish_run(directory, added=variables)
    assert status == 0
    assert (directory / contract.RUNTIME).read_bytes() == before
    assert outputs_of(directory).files["log"].sha256 == sha256(expected)
    assert outputs_of(directory).standard_output is None


@pytest.mark.slow
def test_a_program_whose_output_cannot_be_shown_is_run_to_its_end(program):
    script = "import time\nfor number in range(3): print(number, flush=True); time.sleep(0.2)\n"
    directory, variables = program(script)
    process = start_run(directory, added=variables, warm=False, stdout=subprocess.PIPE)
    process.stdout.close()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert outputs_of(directory).standard_output.sha256 == sha256(b"0\n1\n2\n")


@pytest.mark.slow
def test_a_source_tree_that_is_not_the_locked_one_is_not_run(program, tmp_path):
    directory, variables = program("open('ran', 'w')", files={"data": "locked"})
    (tmp_path / "project/data").write_text("other")
    assert finish_run(directory, added=variables)[0] == 6
    assert failure_of(directory).code == "CAP-T305"
    assert "data" in failure_of(directory).message
    assert not (directory / contract.WORKSPACE / "ran").exists()


FLOOD = (
    "import time\n"
    "for number in range(5001): open(f'{number}.txt', 'w')\n"
    "while True: time.sleep(1)\n"
)


@pytest.mark.slow
def test_a_program_that_writes_too_many_files_is_stopped_while_it_runs(program):
    directory, variables = program(FLOOD)
    assert finish_run(directory, added=variables)[0] == 6
    assert failure_of(directory).code == "CAP-T303"
    assert "5,001 files" in failure_of(directory).message
    assert not (directory / contract.ENDED).exists()


@pytest.mark.slow
def test_what_cannot_be_claimed_can_be_left_out_without_running_again(program):
    directory, variables = program(
        "import os, pathlib\nopen('runs', 'a').write('1')\nopen(b'caf\\xe9', 'w')\nprint('once')\n"
    )
    assert finish_run(directory, added=variables)[0] == 6
    assert "not UTF-8" in failure_of(directory).message
    job = contract.Job.model_validate_json((directory / contract.JOB).read_bytes())
    spec = make_spec(
        job.spec.model_dump(mode="json", by_alias=True), trainer={"outputs": ["*", "!caf*"]}
    )
    (directory / contract.FAILURE).unlink()
    job = job.model_copy(update={"spec": spec})
    (directory / contract.JOB).write_bytes(job.document())
    status, errors = finish_run(directory, added=variables)
    assert status == 0, errors
    assert outputs_of(directory).files["runs"].sha256 == sha256(b"1")
    assert outputs_of(directory).standard_output.sha256 == sha256(b"once\n")


@pytest.mark.slow
def test_a_program_is_ended_when_one_of_its_threads_cannot_wait_in_order(program):
    directory, variables = program(
        "import threading\n"
        "from capsule.training import arrivals\n"
        "threading.Thread(target=arrivals.as_completed, args=([],), kwargs={'name': '1'}).start()\n"
        "threading.Event().wait()\n"
    )
    status, errors = finish_run(directory, added=variables)
    assert status == 6, errors
    assert read(directory, contract.FAILURE)["code"] == "CAP-T382"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "rest", "order", "reason"),
    [
        (
            "other",
            "threading.Thread(target=queue.Queue().get).start()\nmail.get()\n",
            (0, 0),
            "'mail~1' waits for a message of 'me' after 0 of 2 arrivals",
        ),
        ("me", "mail.get()\nmail.get(timeout=0)\n", (0,), "it waits for more than was recorded"),
    ],
    ids=["what never comes", "more than was recorded"],
)
def test_a_repeated_program_is_ended_when_all_of_it_waits(program, source, rest, order, reason):
    directory, variables = program(
        "import queue, threading\n"
        "from capsule.training import arrivals\n"
        "mail = arrivals.Inbox(queue.Queue(), name='mail')\n"
        f"mail.put(1, source='{source}')\n"
        f"{rest}"
    )
    log = ArrivalLog(waits={"mail~1": Messages(sources=("me",), order=order)})
    (directory / contract.ARRIVALS_REPLAY).write_bytes(log.document())
    status, errors = finish_run(directory, added=variables)
    assert status == 1, errors
    failure = read(directory, contract.FAILURE)
    assert failure["code"] == "CAP-T381"
    assert reason in failure["message"]
