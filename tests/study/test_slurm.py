"""Slurm: a real cluster for what it does, and stand-ins for what it cannot be made to do."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.study.directory import OUTCOME, Outcome, StudyDirectory
from capsule.study.running import MemberBatch, RunOptions, run_locally
from capsule.study.slurm import Slurm, SlurmArray
from tests.conftest import wait_until
from tests.refusals import refusal
from tests.study.slurm_cluster import one_node_cluster, processes_of
from tests.study.studies import BASE, make_lock

pytestmark = pytest.mark.xdist_group("slurm")

ROOT = Path(__file__).parents[2]
FIRST, SECOND, THIRD = (f"exploration.{run}" for run in (1, 2, 3))


@pytest.fixture(scope="module")
def cluster():
    with one_node_cluster() as configuration, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(configuration))
        yield configuration
    assert not processes_of(configuration)


@pytest.fixture
def study(tmp_path):
    lock = make_lock(resources={"memory_mb": 512, "minutes": 60})
    return StudyDirectory.create(tmp_path / "study", lock, resume=False)


def start(workplace, *arguments):
    command = [sys.executable, "-m", "capsule", "study", "run", "study.yaml", "--on", "slurm"]
    command += ["--key", "alice", "--engine", "process", "--output", "100% shared", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=workplace, text=True, **pipes)


def slurm(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def arrays_of(study):
    paths = sorted((study.path / "slurm").glob("*.members"), key=lambda path: int(path.stem))
    return [SlurmArray(path.stem, tuple(path.read_text().split())) for path in paths]


def claims_of(study):
    states = [study.state(member.name) for member in study.lock.members]
    assert {state.state for state in states} == {"done"}, states
    return {state.name: state.outcome.claim_id for state in states}


@pytest.mark.network
@pytest.mark.slow
def test_the_claims_are_those_of_a_local_run_whatever_happens_meanwhile(
    cluster, workplace, options
):
    folder = workplace / "100% shared"

    # The command that waits is interrupted; the jobs go on.
    command = start(workplace)
    wait_until((folder / "members" / FIRST / "work").exists)
    command.send_signal(signal.SIGINT)
    _, said = command.communicate()
    assert command.returncode == ExitCode.INTERRUPTED
    study = StudyDirectory.open(folder)
    (array,) = arrays_of(study)
    assert array.members == (FIRST, SECOND, THIRD)
    assert "CAP-Y024" in said
    assert f"'scancel {array.name}' cancels" in said
    assert array.elements()[FIRST].state == "RUNNING"

    # Another command waits for the same jobs. One is cancelled in the middle, and one is queued
    # again, as after the loss of its node or preemption; it would wait for two minutes.
    interfered, noted = {}, []

    def interfere():
        for name, command in ((SECOND, ("scancel",)), (THIRD, ("scontrol", "requeue"))):
            if name not in interfered and (step := study.state(name).step):
                slurm(*command, f"{array.name}_{array.members.index(name)}")
                interfered[name] = step
        if array.elements()[THIRD].reason == "BeginTime":
            slurm("scontrol", "update", f"job={array.name}_2", "starttime=now")

    backend = Slurm(noted.append, poll_seconds=0.2, settle_seconds=1.0)
    backend.run(MemberBatch(study, study.missing(), options), interfere)
    assert noted[0] == f"Slurm job {array.name} still has members that wait or run"
    assert sorted(interfered) == [SECOND, THIRD]
    assert arrays_of(study) == [array]
    states = [study.state(name) for name in array.members]
    assert [state.state for state in states] == ["done", "failed", "done"], states
    assert states[1].outcome.code == "CAP-Y025"
    assert states[1].outcome.message == f"Slurm job {array.name}_1 ended as CANCELLED"
    log = folder / "slurm" / f"{array.name}_1.log"
    assert str(log) in states[1].outcome.fix
    # It had the time to save its state; Slurm calls it cancelled before it has ended.
    wait_until(lambda: log.read_text().endswith("interrupted\n"))
    assert 0 < states[1].step < 4_096

    # What is missing runs again, from where it was stopped.
    command = start(workplace, "--resume", "--json")
    printed, said = command.communicate()
    assert command.returncode == 0, said
    assert json.loads(printed)["groups"]["exploration"]["done"] == 3
    assert [each.members for each in arrays_of(study)] == [array.members, (SECOND,)]

    local = StudyDirectory.create(workplace / "local", study.lock, resume=False)
    run_locally(MemberBatch(local, [SECOND], options), 1, lambda: None)  # the one that was killed
    assert claims_of(study)[SECOND] == local.outcome(SECOND).claim_id
    assert len(set(claims_of(study).values())) == 3


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.network
def test_the_commands_for_clusters_without_docker(cluster, workplace, monkeypatch):
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    page = (ROOT / "docs" / "hpc.md").read_text()
    (workplace / "seeds.sbatch").write_text(re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1])
    (workplace / "experiment.yaml").write_text((workplace / "cart.yaml").read_text())
    lines = re.findall(r"^    (.+)$", page, re.MULTILINE)
    # Those of the sections about bubblewrap; Apptainer is not installed here.
    *commands, verify = [each for each in lines if "sbatch" in each or "--engine bwrap" in each]
    assert [each.split()[:2] for each in (*commands, verify)] == [
        ["capsule", "build"],
        ["sbatch", "--wait"],
        ["capsule", "study"],
        ["capsule", "verify"],
    ]
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=workplace, capture_output=True, text=True
        )
        logs = [path.read_text() for path in workplace.glob("seed-*.log")]
        assert done.returncode == 0, (command, done.stderr, logs)
    seeds = sorted(workplace.glob("runs/seed-*/*/*.capsule.tar"))
    members = sorted(workplace.glob("studies/**/*.capsule.tar"))
    assert (len(seeds), len(members)) == (2, 3)
    verify = verify.replace("BUNDLE", shlex.quote(str(seeds[0])))
    subprocess.run(["bash", "-c", verify], cwd=workplace, check=True, capture_output=True)


def test_what_slurm_rejects_is_said_in_its_words(cluster, study, options, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "nonesuch")
    with pytest.raises(CapsuleError, match="invalid partition specified: nonesuch") as caught:
        Slurm(print).run(MemberBatch(study, study.missing(), options), print)
    assert caught.value.code == "CAP-Y022"
    assert not arrays_of(study)
    assert slurm("squeue", "--noheader", "--name=tiny") == ""


@pytest.mark.slow
def test_a_controller_that_is_not_reachable(cluster, study, options, monkeypatch, tmp_path):
    elsewhere = tmp_path / "slurm.conf"
    lines = cluster.read_text().splitlines()
    # The programs of Slurm try to reach it for so many seconds.
    changes = {"SlurmctldPort": "SlurmctldPort=1", "MessageTimeout": "MessageTimeout=1"}
    lines = [changes.get(line.partition("=")[0], line) for line in lines]
    elsewhere.write_text("\n".join(lines))
    monkeypatch.setenv("SLURM_CONF", str(elsewhere))
    with pytest.raises(CapsuleError, match="Unable to contact slurm controller") as caught:
        Slurm(print).run(MemberBatch(study, study.missing(), options), print)
    assert caught.value.code == "CAP-Y022"
    assert not arrays_of(study)


@pytest.fixture
def stopped():
    """Stop the partition: it takes jobs, and starts none."""
    slurm("scontrol", "update", "PartitionName=main", "State=DOWN")
    yield
    slurm("scontrol", "update", "PartitionName=main", "State=UP")


@pytest.mark.slow
def test_jobs_that_are_cancelled_before_they_wrote_anything(cluster, study, options, stopped):
    cancelled = []

    def cancel():
        if not cancelled:
            cancelled.extend(arrays_of(study))
            slurm("scancel", cancelled[0].name)

    names = study.missing()[:2]
    backend = Slurm(print, poll_seconds=0.2, settle_seconds=1.0)
    backend.run(MemberBatch(study, names, options), cancel)
    for name in names:
        assert study.outcome(name).code == "CAP-Y025"
        assert "ended as CANCELLED" in study.outcome(name).message


@pytest.mark.slow
def test_a_member_that_fails_by_itself_says_so_itself(cluster, study, options):
    name = study.missing()[0]
    Slurm(print, poll_seconds=0.2).run(MemberBatch(study, [name], options), lambda: None)
    assert study.outcome(name).code.startswith("CAP-")
    assert study.outcome(name).code != "CAP-Y025"


@pytest.mark.slow
def test_slurm_finds_an_array_by_the_name_of_its_job(cluster, study, options, tmp_path):
    names = tuple(study.missing())
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" && kill -KILL $PPID\n')
    wrapper.chmod(0o755)
    submitter = os.fork()
    if submitter == 0:
        os.environ["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"
        run(study, options)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(submitter, 0)[1])
    assert not arrays_of(study)
    Slurm(print)._recover(study)
    (array,) = arrays_of(study)
    assert array.members == names
    assert set(array.elements()) == set(names)
    slurm(*array.cancellation)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Take the place of Slurm's programs: each prints, or fails, as its script says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(**scripts):
        scripts = {"scontrol": "echo MaxArraySize = 1001", "sbatch": "echo 7"} | scripts
        for name, script in scripts.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{script}\n')
            path.chmod(0o755)
        return folder / "calls"

    return write


def run(study, options, names=None, noted=None, **settings):
    settings = {"poll_seconds": 0.0, "settle_seconds": 0.0} | settings
    note = (noted if noted is not None else []).append
    Slurm(note, **settings).run(MemberBatch(study, names or study.missing(), options), lambda: None)


def test_slurm_is_not_installed(study, options, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "scontrol" in refusal("CAP-Y021", run, study, options).message
    assert not (study.path / "slurm").exists()


def test_a_cluster_without_arrays(study, options, programs):
    programs(scontrol="echo MaxArraySize = 0")
    refusal("CAP-Y022", run, study, options)


def test_a_large_study_is_several_arrays_and_all_or_none_are_submitted(study, options, programs):
    names = study.missing()[:5]
    first = study.path / "members" / names[0]
    first.mkdir(parents=True)
    before = Outcome(code="CAP-E011", message="it failed", fix="mend it").document()
    (first / OUTCOME).write_bytes(before)

    calls = programs(
        scontrol="echo 'MaxArraySize            = 2'",
        sbatch='case "$*" in *0-0*) echo "sbatch: error: QOSMaxSubmitJob" >&2; exit 1;; esac\n'
        'grep -c sbatch "${0%/*}/calls"',
        scancel="",
    )
    error = refusal("CAP-Y022", run, study, options, names)
    assert "sbatch: error: QOSMaxSubmitJob" in error.message
    said = calls.read_text().splitlines()
    assert said[-2:] == ["scancel 1", "scancel 2"]
    assert not arrays_of(study)
    assert (first / OUTCOME).read_bytes() == before

    programs(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    run(study, options, names)
    assert [array.members for array in arrays_of(study)] == [tuple(names)]


def test_an_interrupted_submission_cancels_what_it_submitted(study, options, programs):
    # A terminal sends Ctrl-C to a whole group of processes, which sbatch must not belong to.
    calls = programs(
        scontrol="echo MaxArraySize = 1",
        sbatch='number=$(grep -c sbatch "${0%/*}/calls")\n'
        '[ $(cut -d " " -f 5 /proc/$$/stat) = $$ ] || exit\n'
        "if [ $number = 2 ]; then kill -INT $PPID; sleep 0.2; fi; echo $number",
        scancel="",
    )
    with pytest.raises(KeyboardInterrupt):
        run(study, options, study.missing()[:3])
    said = calls.read_text().splitlines()
    assert said[-2:] == ["scancel 1", "scancel 2"]
    assert len([line for line in said if line.startswith("sbatch")]) == 2
    assert not arrays_of(study)


def test_an_array_that_cannot_be_cancelled_is_named_and_found_again(study, options, programs):
    names = study.missing()[:3]
    programs(
        scontrol="echo MaxArraySize = 1",
        sbatch='number=$(grep -c sbatch "${0%/*}/calls")\n'
        'if [ $number = 3 ]; then echo "QOSMaxSubmitJob" >&2; exit 1; fi; echo $number',
        scancel="[ $1 != 1 ]",
    )
    error = refusal("CAP-Y022", run, study, options, names)
    assert "QOSMaxSubmitJob; jobs 1 had been submitted, and could not be" in error.message
    assert "'scancel 1' cancels them" in error.fix
    assert [array.members for array in arrays_of(study)] == [(names[0],)]

    # The first question is whether Slurm has got the third array after all.
    squeue = """
case "$*" in *--name=*) exit;; esac
if [ $(grep -c squeue "${0%/*}/calls") -gt 2 ]; then echo '0|FAILED|None'
else echo '0|RUNNING|None'; fi
"""
    programs(squeue=squeue)
    noted = []
    run(study, options, names[:1], noted)
    assert noted == ["Slurm job 1 still has members that wait or run"]


@pytest.mark.parametrize("printed", ["", "../7", "7;../x", "Submitted batch job 7"])
def test_a_number_of_a_job_that_is_not_one(study, options, programs, printed):
    programs(sbatch=f"echo '{printed}'")
    assert repr(printed) in refusal("CAP-Y022", run, study, options).message
    assert not arrays_of(study)


def test_a_job_that_slurm_has_forgotten(study, options, programs):
    programs(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    name, *_ = names = study.missing()
    with study.held(names[1]):  # a process runs this one
        run(study, options, names)
        assert study.state(names[1]).state == "running"
    assert study.outcome(names[1]) is None
    assert study.state(name).state == "failed"
    assert (
        study.outcome(name).message
        == "Slurm job 7_0 has ended, and Slurm has no record of how it ended"
    )


@pytest.mark.parametrize(
    ("line", "message", "fix"),
    [
        ("0|TIMEOUT|TimeLimit", "ended as TIMEOUT (TimeLimit)", "resources.minutes"),
        ("0|OUT_OF_MEMORY|OutOfMemory", "ended as OUT_OF_MEMORY", "resources.memory_mb"),
        ("0|NODE_FAIL|None", "ended as NODE_FAIL", "--resume"),
    ],
)
def test_the_report_of_a_lost_job_says_what_to_do(study, options, programs, line, message, fix):
    programs(squeue=f"echo '{line}'")
    name = study.missing()[0]
    run(study, options, [name])
    assert message in study.outcome(name).message
    assert fix in study.outcome(name).fix


def test_the_controller_stops_answering(study, options, programs):
    programs(squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    error = refusal("CAP-Y023", run, study, options, patience_seconds=0.0)
    assert "jobs 7 may still run" in error.message
    assert "Unable to contact" in error.message


def test_why_jobs_are_pending_is_said_once(study, options, programs):
    squeue = """
if [ $(grep -c squeue "${0%/*}/calls") -gt 3 ]; then echo '0|FAILED|None'
else echo '0|PENDING|PartitionTimeLimit'; echo '1|PENDING|Priority'; fi
"""
    programs(squeue=squeue)
    noted = []
    run(study, options, study.missing()[:2], noted)
    assert noted[1:] == ["members of Slurm job 7 wait: PartitionTimeLimit"]


def test_several_clusters(study, options, programs):
    calls = programs(sbatch="echo '7;alpha'", squeue="echo '0|FAILED|None'")
    name = study.missing()[0]
    run(study, options, [name])
    assert "squeue --clusters=alpha --job=7" in calls.read_text()


def test_what_is_reserved(options, programs, tmp_path):
    calls = programs(squeue="echo '0|FAILED|None'")
    limited = {**BASE, "limits": {"memory_mb": 2_000, "minutes": 30}}
    exact = {"cores": 4, "memory_mb": 3_000, "gpus": 1, "minutes": 5}
    for number, resources in enumerate(({}, exact)):
        lock = make_lock(base=limited, resources=resources)
        each = StudyDirectory.create(tmp_path / str(number), lock, resume=False)
        run(each, options, each.missing()[:1])
    implicit, explicit = (
        line for line in calls.read_text().splitlines() if line.startswith("sbatch")
    )
    assert "--cpus-per-task=1 --mem=2512M --time=30" in implicit
    assert "--gres" not in implicit
    assert "--cpus-per-task=4 --mem=3000M --time=5 --gres=gpu:1" in explicit


def test_a_key_and_a_folder_with_spaces(study, workplace, programs):
    key = workplace / "my key"
    os.link(workplace / "alice", key)
    programs(sbatch='cat > "${0%/*}/script"; echo 7', squeue="echo '0|FAILED|None'")
    run(study, RunOptions(key), study.missing()[:1])
    script = Path(workplace / "bin" / "script").read_text()
    assert f"--key '{key}' --engine auto" in script


def killed_while_it_submits(study, options, programs):
    """Submit by a process that is killed once Slurm has the job, and before it has the number."""
    calls = programs(sbatch="cat > /dev/null; kill -KILL $PPID; echo 7")
    submitter = os.fork()
    if submitter == 0:
        run(study, options)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(submitter, 0)[1])
    assert not arrays_of(study)
    return calls, re.search(r"--job-name=(\S+)", calls.read_text())[1]


def test_an_array_whose_number_was_never_seen_is_found_by_its_name(study, options, programs):
    names = tuple(study.missing())
    calls, name = killed_while_it_submits(study, options, programs)
    assert name.startswith(f"{study.lock.study.name}.")
    squeue = f"""
case "$*" in *--name={name}*) echo 7; echo 7; exit;; esac
[ $(grep -c squeue "${{0%/*}}/calls") -gt 2 ] || {{ echo '0|RUNNING|None'; exit; }}
echo '0|FAILED|None'
"""
    programs(squeue=squeue)
    noted = []
    run(study, options, names[:1], noted)
    assert noted == ["Slurm job 7 still has members that wait or run"]
    assert calls.read_text().count("sbatch") == 1
    assert arrays_of(study) == [SlurmArray("7", names)]
    assert not list((study.path / "slurm").glob("*.submission"))


def test_a_submission_that_still_waits_for_the_controller_is_waited_for(study, options, programs):
    # sbatch outlives the command that is killed, and submits the array when the test lets it.
    calls = programs(
        sbatch="kill -KILL $PPID; exec > /dev/null 2>&1; n=0; f=${0%/*}\n"
        "until [ -e $f/answer ] || [ $n = 600 ]; do sleep 0.1; n=$((n + 1)); done\n"
        "touch $f/submitted"
    )
    submitter = os.fork()
    if submitter == 0:
        run(study, options)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(submitter, 0)[1])
    squeue = """
case "$*" in *--name=*) [ ! -e ${0%/*}/submitted ] || echo 7;; *) echo '0|RUNNING|None';; esac
"""
    programs(squeue=squeue)
    noted = []

    def note(message):
        noted.append(message)
        (calls.parent / "answer").touch()

    Slurm(note)._recover(study)
    assert noted == ["waiting for the sbatch of an earlier command, which has not ended"]
    assert arrays_of(study) == [SlurmArray("7", tuple(study.missing()))]
    assert [path.name for path in (study.path / "slurm").iterdir()] == ["7.members"]


def test_an_array_that_slurm_never_got_is_submitted_again(study, options, programs):
    calls, _ = killed_while_it_submits(study, options, programs)
    programs(squeue='case "$*" in *--name=*) ;; *) echo "0|FAILED|None";; esac')
    run(study, options, study.missing()[:1])
    assert calls.read_text().count("sbatch") == 2
    assert not list((study.path / "slurm").glob("*.submission"))


def test_nothing_is_submitted_again_while_slurm_does_not_answer(study, options, programs):
    calls, _ = killed_while_it_submits(study, options, programs)
    programs(squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    refusal("CAP-Y022", run, study, options)
    assert calls.read_text().count("sbatch") == 1
    assert list((study.path / "slurm").glob("*.submission"))


def test_a_lost_array_is_looked_for_on_each_cluster(study, options, programs, monkeypatch):
    monkeypatch.setenv("SBATCH_CLUSTERS", "alpha,beta")
    killed_while_it_submits(study, options, programs)
    squeue = """
case "$*" in *--name=*--clusters=beta*) echo 'CLUSTER: beta'; echo 7;; *--name=*) ;;
*) echo '0|FAILED|None';; esac
"""
    programs(squeue=squeue)
    run(study, options, study.missing()[:1])
    assert "7;beta.members" in {path.name for path in (study.path / "slurm").iterdir()}


@pytest.mark.parametrize(
    ("exported", "cut"),
    [
        (None, []),
        ("ALL", []),
        ("ALL,X=1", []),
        ("NONE", ["CAPSULE_CACHE", "DOCKER_HOST"]),
        ("PATH,CAPSULE_CACHE", ["DOCKER_HOST"]),
        ("CAPSULE_CACHE=/x,DOCKER_HOST", []),
    ],
)
def test_variables_that_jobs_would_miss_are_named(
    study, options, programs, monkeypatch, exported, cut
):
    programs(squeue="echo '0|FAILED|None'")
    for name in list(os.environ):
        if re.match("CAPSULE_|XDG_|SBATCH_|TMPDIR|CONTAINER_|DOCKER_", name):
            monkeypatch.delenv(name)
    for name in ("CAPSULE_CACHE", "DOCKER_HOST", "OTHER"):
        monkeypatch.setenv(name, "/somewhere")
    if exported is not None:
        monkeypatch.setenv("SBATCH_EXPORT", exported)
    noted = []
    run(study, options, study.missing()[:1], noted)
    named = [note for note in noted if note.startswith(f"SBATCH_EXPORT={exported} ")]
    assert [note.partition("jobs: ")[2].partition(". ")[0].split(", ") for note in named] == (
        [cut] if cut else []
    )
