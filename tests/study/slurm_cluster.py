"""A Slurm cluster of this machine alone: munged, slurmctld and slurmd as children of the test."""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import free_port, wait_until

PATIENCE = 600.0
# The limits of time are long, because the machine may be busy.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
MinJobAge=3600
MessageTimeout=100
BatchStartTimeout=600
KillWait=600
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=4096
PartitionName=main Nodes=ALL Default=YES
"""


@contextmanager
def one_node_cluster():
    """Start a cluster with one core, so that one job runs at a time; yield its SLURM_CONF."""
    # The path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder = Path(name)
        path = _configure(folder)
        environment = {**os.environ, "SLURM_CONF": str(path)}
        munge = folder / "munge"
        for command in (
            (
                *("munged", "--foreground", "--force", f"--key-file={munge}/key"),
                *(f"--socket={munge}/socket", f"--pid-file={munge}/pid"),
                *(f"--seed-file={munge}/seed", f"--log-file={munge}/log"),
            ),
            ("slurmctld", "-D"),
            ("slurmd", "-D"),
        ):
            stack.enter_context(_running(command, environment, folder / f"{command[0]}.output"))
            if command[0] == "munged":
                wait_until((munge / "socket").exists)
        state = ("sinfo", "--noheader", "--format=%t")
        wait_until(lambda: _output(state, environment) == "idle")
        yield path
        # Before the daemons: a job would outlive them.
        _output(("scancel", f"--user={os.getuid()}"), environment)
        wait_until(lambda: not _output(("squeue", "--noheader"), environment))


def _configure(folder):
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    path = folder / "slurm.conf"
    path.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            controller_port=free_port(),
            node_port=free_port(),
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=folder,
        )
    )
    return path


@contextmanager
def _running(command, environment, log):
    # Debian has the daemons in a folder that is not on the PATH of every user.
    program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None, f"{command[0]} is not installed: see tests/run.sh"
    with log.open("wb") as stream:
        daemon = subprocess.Popen(
            [program, *command[1:]], env=environment, stdout=stream, stderr=stream
        )
    try:
        yield
        assert daemon.poll() is None, log.read_text()
    finally:
        daemon.terminate()
        daemon.wait(PATIENCE)


def _output(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def processes_of(configuration):
    """Return the processes that were started with a SLURM_CONF."""
    setting = f"SLURM_CONF={configuration}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is another user's
        if setting in words:
            found.append(int(path.parent.name))
    return found
