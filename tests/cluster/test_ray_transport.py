"""Actors on a Ray cluster on this machine: the bits of one process, whatever is lost meanwhile."""

import hashlib
import os
import signal
import socket
import time
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError, ExitCode
from capsule.experiment.schedule_log import ScheduleLog
from capsule.experiment.spec import SeedsSpec
from capsule.training.acting.actor_worker import actor_streams
from capsule.training.acting.transports import Serial
from capsule.training.environments import make_environment
from capsule.training.impala.actors.actor_worker import UnrollSettings
from capsule.training.impala.actors.ray import connection
from capsule.training.impala.actors.ray import transport as ray_transport
from capsule.training.impala.actors.ray.preflight import pass_digest
from capsule.training.impala.actors.ray.transport import RayTransport, pins_of
from capsule.training.impala.schedule.executor import Executor
from capsule.training.impala.schedule.sources import Live, Lockstep, Recorded
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.actor_critic import make_actor_critic_network
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.state.streams import Stream
from tests.cluster.ray_cluster import HEAD, SECONDS, cluster_of, ray_token
from tests.conftest import one_processor
from tests.training.conftest import (
    BREAKOUT,
    CARTPOLE,
    claimed,
    finish_run,
    make_spec,
    merge,
    new_run,
    read,
    start_run,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.xdist_group("ray")]

ACTORS, BATCH, UPDATES = 5, 3, 12
SEEDS = SeedsSpec(root=3)
SPEC = make_spec(CARTPOLE, accelerator={"numerics": "native"})
PINS = pins_of(SPEC, "native")
PORTABLE_PINS = pins_of(make_spec(CARTPOLE, determinism={"hash_seed": 7}), "portable-v3")
NODES = ("node worker-1 (", "node odd (")  # begins of messages
OTHER_NUMERICS = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
TRAINER = {
    "algorithm": "impala",
    "network": "mlp",
    "hidden_units": 16,
    "actors": 4,
    "batch_size": 4,
    "unroll_length": 10,
    "micro_batches": [2, 2],
    "total_steps": 8_000,
}
RUN = merge(
    {**CARTPOLE, "trainer": TRAINER},
    {
        "evaluation": {"interval": 4_000},
        "recording": {"trace_interval": 40, "tensor_interval": 400, "checkpoint_interval": 1_000},
    },
)
# An update through the client of Ray takes several times as much work as one without it.
SHORT_RUN = merge(
    RUN,
    {
        "trainer": {"total_steps": 1_600},
        "evaluation": {"interval": 800},
        "recording": {"checkpoint_interval": 800},
    },
)


@pytest.fixture(scope="module")
def token():
    """A file with the token of every cluster here."""
    with ray_token() as path:
        yield path


@pytest.fixture(scope="module")
def cluster(token):
    """A head that plays nothing, and two nodes with one processor each.

    The second has other numerics, and is lost in one of the last tests.
    """
    odd = {"node_name": "odd", "env_vars": OTHER_NUMERICS}
    with cluster_of({"node_name": "worker-1"}, odd) as started:
        yield started


@pytest.fixture(scope="module")
def odd(cluster):
    """The node with other numerics."""
    return cluster.nodes[1]


class Starter:
    """Starts actors on a cluster, at most one transport at a time.

    The transport that a test has left open is given to the next one, if that wants as many
    processes with the same pins. The start of a process takes two seconds of processor time.
    """

    def __init__(self, cluster):
        self._cluster, self._transport, self._options = cluster, None, None

    def __call__(self, settings, workers=2, pins=PINS):
        options = {"workers": workers, "pins": pins}
        if options == self._options and not self._transport._cluster._left:
            prepare_again(self._transport, settings)
            return self._transport
        self.close()
        address = self._cluster.address
        self._transport = RayTransport(settings, ACTORS, cluster=address, lag=2, **options)
        self._options = options
        return self._transport

    def close(self):
        if self._transport is not None:
            self._transport.close()
        self._transport = self._options = None


def prepare_again(transport, settings):
    """Have the processes of a transport make new actors, as new processes would."""
    while transport._calls:
        transport.finished()
    transport._settings, transport._digest = settings, pass_digest(settings)
    transport._snapshots = {}
    transport.publish({})
    for worker in transport._workers:
        worker.known = set()
        answer = worker.handle.prepare.remote(settings, worker.played, transport._pins)
        transport._admit(worker, answer)


@pytest.fixture(scope="module")
def start(cluster):
    """A function that starts actors on the cluster; see :class:`Starter`."""
    starter = Starter(cluster)
    yield starter
    starter.close()


@pytest.fixture
def no_transport(start):
    """Leave the processors of the cluster to others."""
    start.close()


def settings_of(document=CARTPOLE, products=FIXED_ORDER, **changes):
    """Return settings of actors with a small recurrent policy."""
    environment = make_spec(document, **changes).environment
    example = make_environment(environment, actor_streams(SEEDS, 0), training=True)
    network = make_actor_critic_network(
        "mlp" if document is CARTPOLE else "shallow",
        frame_stack=example.frame_stack,
        layout=example.layout,
        actions=example.actions,
        recurrent_units=20,
        hidden_units=12,
        products=products,
    )
    return UnrollSettings(tasks=(environment,), seeds=SEEDS, network=network, steps=7)


def play(transport, schedule, settings, during=None, updates=UPDATES):
    """Learn by a rule that shows every bit of every unroll in every later one.

    Returns:
        ``digest`` of all that was learned, and ``slots``, actor and lag of each unroll.
    """
    parameters = Parameters(settings.network.shapes, torch.device("cpu"))
    initialize(parameters, Stream("initialization", 1))
    flat = parameters.flat.numpy().copy()
    digest, slots = hashlib.sha256(), []
    executor = Executor(schedule, transport, ACTORS)
    executor.publish(0, flat)
    for update in range(updates):
        if during is not None:
            during(update)
        for item in executor.collect(update):
            digest.update(f"{item.actor} {item.version} {item.unroll.digest()}".encode())
            slots.append((item.actor, update - item.version))
        phase = int(digest.hexdigest()[:8], 16)
        flat = flat + 0.1 * np.sin(np.arange(len(flat)) + phase).astype(np.float32)
        executor.publish(update + 1, flat)
    return SimpleNamespace(digest=digest.hexdigest(), slots=slots, executor=executor)


def serial(settings, schedule, **options):
    return play(Serial(settings, ACTORS, lag=schedule.lag), schedule, settings, **options)


def lockstep(lag=1, updates=UPDATES):
    return Lockstep(ACTORS, BATCH, lag, updates)


def log_of(slots):
    actors, lags = (array("H", column) for column in zip(*slots, strict=True))
    return ScheduleLog("0" * 64, ACTORS, BATCH, actors, lags)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.soak  # those of losses show it, too
@pytest.mark.parametrize("workers", [1, 2])
def test_lockstep_on_a_cluster_has_the_bits_of_one_process(workers, start):
    settings = settings_of()
    made = play(start(settings, workers=workers), lockstep(), settings)
    assert made.digest == serial(settings, lockstep()).digest


@pytest.mark.slow
def test_frames_of_a_game_come_back_as_they_were(start):
    settings = settings_of(BREAKOUT)
    made = play(start(settings, 1, PORTABLE_PINS), lockstep(updates=4), settings, updates=4)
    assert made.digest == serial(settings, lockstep(updates=4), updates=4).digest


@pytest.mark.slow
def test_workers_have_the_variables_of_the_run_before_they_start(start):
    """And under a portable profile, though this process is under none."""
    settings = settings_of()
    transport = start(settings, 1, PORTABLE_PINS)
    assert PORTABLE_PINS.variables["PYTHONHASHSEED"] == "7"
    assert PORTABLE_PINS.variables["LD_PRELOAD"].endswith("libcapsule-math.so")
    made = play(transport, lockstep(updates=4), settings, updates=4)
    assert made.digest == serial(settings, lockstep(updates=4), updates=4).digest


@pytest.mark.slow
def test_a_variable_that_does_not_reach_a_worker_is_found(start):
    settings = settings_of()
    transport = start(settings, 1, PORTABLE_PINS)
    in_worker = transport._workers[0].handle.__ray_call__.remote
    transport._ray.get(in_worker(lambda _: os.environ.update(PYTHONHASHSEED="5")))
    with pytest.raises(CapsuleError) as failure:
        prepare_again(transport, settings)
    transport.close()
    assert failure.value.code == "CAP-T101"
    assert "PYTHONHASHSEED" in failure.value.message


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_with_other_numerics_is_refused_by_name(start, odd):
    with pytest.raises(CapsuleError) as failure:
        start(settings_of(products=LIBRARY))
    assert failure.value.code == "CAP-T351"
    assert failure.value.message.startswith(f"node odd ({odd.node_id[:8]}) (actor")
    assert failure.value.exit_code == ExitCode.INCONCLUSIVE


@pytest.mark.slow
def test_a_node_that_cannot_keep_the_profile_is_refused_by_name(start):
    variables = {**PORTABLE_PINS.variables, "LD_PRELOAD": ""}
    with pytest.raises(CapsuleError) as failure:
        start(settings_of(), 1, PORTABLE_PINS._replace(variables=variables))
    assert failure.value.code == "CAP-T108"
    assert failure.value.message.startswith(NODES)


@pytest.mark.slow
def test_a_foreseen_failure_keeps_its_code_and_gets_a_name(start):
    environment = make_spec(BREAKOUT, environment={"game": "no_such_game"}).environment
    settings = settings_of(BREAKOUT)
    broken = UnrollSettings((environment,), SEEDS, settings.network, 7)
    with pytest.raises(CapsuleError) as failure:
        start(broken)
    assert failure.value.code == "CAP-T212"


@pytest.mark.slow
@pytest.mark.parametrize("address", ["nowhere", "ray://host", "127.0.0.1:{free}"])
def test_an_address_without_a_cluster_is_refused(address, token):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = address.format(free=free.getsockname()[1])
        with pytest.raises(CapsuleError) as failure:
            RayTransport(settings_of(), ACTORS, cluster=place, workers=1, lag=1, pins=PINS)
    assert failure.value.code == "CAP-T352"
    assert failure.value.exit_code == ExitCode.NO_ENGINE


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a run without a cluster claims."""
    with one_processor():
        return whole_run(tmp_path_factory.mktemp("alone") / "run")


def variables_of(cluster):
    """Return the variables of a run's process that its spec does not have."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    token = {name: os.environ[name] for name in names}
    return {**token, contract.CLUSTER_VARIABLE: cluster.address}


def whole_run(directory, document=RUN, **options):
    if not directory.exists():
        new_run(directory, make_spec(document))
    status, errors = finish_run(directory, **options)
    assert status == 0, errors
    return claimed(directory)


@pytest.mark.usefixtures("no_transport")
@pytest.mark.soak  # the next test shows it from outside
def test_a_run_on_a_cluster_claims_what_it_claims_without(cluster, alone, tmp_path, token):
    directory = tmp_path / "run"
    assert whole_run(directory, added=variables_of(cluster), warm=False) == alone
    kept = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    assert not any(token.read_bytes() in content for content in kept)


@pytest.mark.slow
@pytest.mark.usefixtures("no_transport")
def test_a_run_reaches_a_cluster_from_outside(cluster, tmp_path):
    outside = {contract.CLUSTER_VARIABLE: cluster.client_address}
    variables = {**variables_of(cluster), **outside, contract.CLUSTER_HOSTS_VARIABLE: "2"}
    found = whole_run(tmp_path / "run", SHORT_RUN, added=variables, warm=False)
    with one_processor():
        assert found == whole_run(tmp_path / "alone", SHORT_RUN)


def test_names_of_clients_are_not_of_the_runs_randomness(monkeypatch, token):
    from ray.util.client import worker

    monkeypatch.setattr(worker, "make_client_id", lambda: "of Ray")
    monkeypatch.setattr(os, "urandom", bytes)
    connection._name_clients_apart()
    names = {worker.make_client_id() for _ in range(3)}
    assert len(names) == 3
    assert {len(name) for name in names} == {32}


@pytest.mark.parametrize("failures", [1, 3])
def test_a_head_that_cannot_serve_a_client_is_asked_again(monkeypatch, failures):
    answers = [ConnectionAbortedError("refused:\nTraceback\nRuntimeError: no server")] * failures

    def init(address, **options):
        if answers:
            raise answers.pop()

    monkeypatch.setattr(connection, "_package", lambda: SimpleNamespace(init=init))
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        if failures == 1:
            connection.Cluster(address)
        else:
            with pytest.raises(CapsuleError, match=r"Aborted.*refused: RuntimeError: no server"):
                connection.Cluster(address)
    assert not answers


@pytest.mark.slow
def test_a_run_without_the_token_is_refused(cluster, tmp_path):
    directory = new_run(tmp_path / "run", make_spec(RUN))
    variables = variables_of(cluster)
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    status, _ = finish_run(directory, added={**variables, "RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert status == ExitCode.NO_ENGINE
    failure = read(directory, contract.FAILURE)
    assert failure["code"] == "CAP-T352"


@pytest.mark.slow
def test_a_run_whose_cluster_loses_its_head_is_resumed_without_it(alone, tmp_path, token):
    from ray.cluster_utils import Cluster

    directory = new_run(tmp_path / "run", make_spec(RUN))
    doomed = Cluster(True, head_node_args={**HEAD, "num_cpus": 1})
    try:
        doomed.wait_for_nodes(SECONDS)
        process = start_run(directory, added=variables_of(doomed))
        wait_for(directory / contract.CHECKPOINTS / "step-000000002000.json", process)
        doomed.head_node.kill_gcs_server(check_alive=False)
        _, errors = process.communicate(timeout=1_000)
    finally:
        doomed.shutdown()
    assert process.returncode == ExitCode.TRAINING_FAILED, errors
    failure = read(directory, contract.FAILURE)
    assert failure["code"] == "CAP-T353"
    assert 2_000 <= failure["step"] < 20_000
    with one_processor():
        assert whole_run(directory) == alone


def wait_for(path, process):
    deadline = time.monotonic() + 1_000
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- losses of nodes and workers ------------------------------------------------------------------


@pytest.mark.slow
def test_sums_of_our_own_have_these_bits_on_that_node_too_whose_loss_costs_no_bit(
    start, cluster, odd
):
    settings = settings_of()
    transport = start(settings)
    assert odd.node_id in {worker.node for worker in transport._workers}

    def lose(update):
        if update == 4:
            cluster.remove_node(odd, allow_graceful=False)
            # The head gives work to a node until it knows that the node is gone: the worker that
            # begins in place of the lost one would be lost at once.
            cluster.wait_for_nodes(SECONDS)

    made = play(transport, lockstep(), settings, during=lose)
    assert odd.node_id not in {worker.node for worker in transport._workers}
    assert made.digest == serial(settings, lockstep()).digest


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_bit(start):
    settings = settings_of()
    transport = start(settings)
    made = play(transport, lockstep(), settings, during=killer(transport, [3, 4, 8]))
    assert made.digest == serial(settings, lockstep()).digest
    assert made.digest != serial(settings, lockstep(lag=2)).digest


def killer(transport, updates):
    """Return a function that kills the process of a worker before each of some updates."""

    def kill(update):
        if update in updates:
            worker = transport._workers[update % 2]
            pid = transport._ray.get(worker.handle.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(transport._ray.exceptions.RayActorError):
                transport._ray.get(worker.handle.__ray_call__.remote(lambda _: None))

    return kill


# --- schedules and snapshots ----------------------------------------------------------------------


@pytest.mark.slow
def test_it_goes_on_from_snapshots(start):
    settings = settings_of()
    whole = serial(settings, lockstep())
    first = serial(settings, lockstep(), updates=6).executor
    transport = start(settings)
    second = Executor(lockstep(), transport, ACTORS)
    second.restore(first.snapshots, first.trained, first.versions)
    again = Executor(lockstep(), Serial(settings, ACTORS, lag=1), ACTORS)
    again.restore(first.snapshots, first.trained, first.versions)
    found = []
    for executor in (second, again):
        executor.publish(6, first.versions[6])
        items = executor.collect(6)
        found.append([(item.actor, item.number, item.unroll.digest()) for item in items])
    assert found[0] == found[1]
    assert whole.slots[18:21] == [(actor, 1) for actor, _, _ in found[0]]


@pytest.mark.slow
def test_a_live_schedule_is_replayed_on_any_transport(start):
    settings = settings_of()
    live = play(start(settings), Live(ACTORS, BATCH, 2), settings)
    log = log_of(live.slots)
    assert serial(settings, Recorded(log, 2)).digest == live.digest
    assert play(start(settings, 1), Recorded(log, 2), settings).digest == live.digest


def end_worker(ray, handle):
    """Kill a worker, and wait until it has ended; until then, it would still answer requests."""
    ray.kill(handle)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            ray.get(handle.__ray_ready__.remote())


@pytest.mark.slow
def test_an_exception_in_a_worker_is_told_and_one_that_is_always_lost_is_given_up(
    start, monkeypatch, tmp_path
):
    class Dying:
        """Neither it nor what it is given is of the package, whose import is most of a start."""

        def prepare(self, *_):
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return "", digest

        def restore(self, _):
            pass

        def play(self, *_):
            os.kill(os.getpid(), signal.SIGKILL)

    settings, died = settings_of(), tmp_path / "died"
    request = SimpleNamespace(actor=1, version=0)
    transport = start(settings, 1)
    digest = transport._digest
    transport.publish({0: np.zeros(3, np.float32)})
    transport.begin([request])
    with pytest.raises(CapsuleError) as failure:
        transport.finished()
    assert failure.value.code == "CAP-T332"
    assert "RuntimeError" in failure.value.message
    assert failure.value.message.startswith(NODES)
    monkeypatch.setattr(ray_transport, "NodeWorker", Dying)
    transport._settings, transport._pins = None, SimpleNamespace(variables=PINS.variables)
    end_worker(transport._ray, transport._workers[0].handle)
    transport.begin([request])
    with pytest.raises(CapsuleError) as failure:
        transport.finished()
    transport.close()
    assert failure.value.code == "CAP-T354"
    assert "(actors 0 to 4) was lost 4 times in a row: ActorDiedError" in failure.value.message
    assert failure.value.exit_code == ExitCode.TRAINING_FAILED
