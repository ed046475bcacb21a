"""Actors on a cluster that is played in this process: bits, losses, refusals, and pins."""

import pickle
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import DeterminismSpec
from capsule.training.acting.actor_worker import ActorRequest
from capsule.training.acting.transports import Serial
from capsule.training.impala.actors.ray import transport as ray_transport
from capsule.training.impala.actors.ray.transport import RayTransport, WorkerPins, pins_of
from capsule.training.impala.schedule.executor import Executor
from capsule.training.impala.schedule.sources import Live, Lockstep
from tests.training.conftest import CARTPOLE, make_spec
from tests.training.impala.actors.conftest import parameters_of, settings_of

pytestmark = pytest.mark.usefixtures("one_thread")

ACTORS, BATCH, UPDATES = 5, 3, 6
PINS = WorkerPins({}, DeterminismSpec(), "native")


# --- a cluster in this process --------------------------------------------------------------------


class RayError(Exception):
    """As ``ray.exceptions.RayError``."""


class RayTaskError(RayError):
    """As its subclass for what a method raised."""

    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class Stored:
    """An object of the store; a process that reads it gets arrays that cannot be written to."""

    def __init__(self, value):
        self._bytes = pickle.dumps(value)

    def read(self):
        value = pickle.loads(self._bytes)  # noqa: S301 - pickled above
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        return value


class Handle:
    """A Ray actor. Calls are executed at once; what they return arrives when it is waited for."""

    def __init__(self, ray, kind, number):
        self._ray, self._made, self.number, self.dead = ray, kind(), number, False

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *given: self._call(method, given))

    def _call(self, method, given):
        self._ray.calls.append((self.number, method))
        self.dead = self.dead or self._ray.loses(self.number, method)
        if self.dead:
            return RayError("the actor died")
        given = [(part if isinstance(part, Stored) else Stored(part)).read() for part in given]
        try:
            return Stored(getattr(self._made, method)(*given))
        except Exception as error:  # noqa: BLE001 - Ray returns whatever a method raises
            return RayTaskError(error)


class Ray:
    """The part of Ray that the transport uses, and the cluster of it."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self):
        self.handles, self.calls, self.stored, self.left = [], [], 0, None
        self.order = random.Random(0)  # noqa: S311 - the order of answers
        self.loses = lambda number, method: False  # noqa: ARG005
        self.ray = self

    def remote(self, kind):
        def start():
            self.handles.append(Handle(self, kind, len(self.handles)))
            return self.handles[-1]

        made = SimpleNamespace(remote=start)
        made.options = lambda **_: made
        return made

    def put(self, value):
        self.stored += 1
        return Stored(value)

    def get(self, call):
        if isinstance(call, Exception):
            raise call
        return call.read()

    def wait(self, calls, seconds=None):  # noqa: ARG002
        return self.order.sample(calls, self.order.randint(1, len(calls)))

    def free_processors(self):
        return 2

    def node_name(self, node):
        return f"node {node}"

    def kill(self, handle):
        handle.dead = True

    def leave(self, handles):
        self.left = list(handles)

    def reached(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of this process, whose flags a worker leaves alone."""
    made = Ray()
    context = SimpleNamespace(get_node_id=lambda: "one")
    module = SimpleNamespace(get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setattr(ray_transport, "Cluster", lambda _address: made)
    monkeypatch.setattr(ray_transport, "check_start", lambda *_: None)
    monkeypatch.setattr(ray_transport, "settle", lambda *_: None)
    return made


def start(settings, workers=2, lag=2, pins=PINS):
    return RayTransport(settings, ACTORS, cluster="a:1", workers=workers, lag=lag, pins=pins)


def learned(transport, schedule, settings):
    """Follow a schedule; return what was learned, by digest."""
    executor = Executor(schedule, transport, ACTORS)
    found = []
    for update in range(UPDATES):
        executor.publish(update, parameters_of(settings, update).flat.numpy())
        found += [
            (item.actor, item.number, item.version, item.unroll.digest())
            for item in executor.collect(update)
        ]
    return found


def lockstep(lag=1):
    return Lockstep(ACTORS, BATCH, lag, UPDATES)


def of_one_process(settings, lag=1):
    return learned(Serial(settings, ACTORS, lag=lag), lockstep(lag), settings)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "lag"), [(1, 0), (2, 1), (3, 2), (9, 1)])
def test_lockstep_has_the_bits_of_one_process(cluster, workers, lag):
    settings = settings_of(length=3)
    transport = start(settings, workers, lag)
    assert len(cluster.handles) == min(workers, ACTORS)
    assert learned(transport, lockstep(lag), settings) == of_one_process(settings, lag)


def test_without_a_number_there_is_a_worker_for_each_free_processor(cluster):
    start(settings_of(length=3), workers=None)
    assert len(cluster.handles) == 2


def test_a_live_schedule_takes_what_arrives_first_and_has_its_bits(cluster):
    settings = settings_of(length=3)
    found = learned(start(settings), Live(ACTORS, BATCH, 2), settings)
    worker = settings.make_worker(range(ACTORS))
    given = set()
    for actor, _, version, digest in sorted(found, key=lambda each: (each[2], each[0], each[1])):
        flat = parameters_of(settings, version).flat.numpy()
        (played,) = worker.play(
            [ActorRequest(actor, version)], {} if version in given else {version: flat}, 99
        )
        given.add(version)
        assert played.experience.digest() == digest


def test_a_policy_version_is_stored_once_and_only_where_it_is_played_with(cluster):
    settings = settings_of(length=3)
    learned(start(settings, workers=3), lockstep(), settings)
    # Lockstep with lag 1 never plays with the last version.
    assert cluster.stored == UPDATES - 1


def test_snapshots_are_copies_that_do_not_keep_the_answer(cluster):
    settings = settings_of(length=3)
    transport = start(settings)
    transport.publish({0: parameters_of(settings, 0).flat.numpy()})
    transport.begin([ActorRequest(3, 0)])
    (played,) = transport.finished()
    assert played.actor == 3
    for array in played.after[1:]:
        assert array.base is None
        assert array.flags.writeable


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["prepare", "play", "restore"])
def test_losses_cost_no_bit(cluster, method):
    """Every second call of a method is lost, with the process that it was sent to."""
    settings = settings_of(length=3)
    counted = []

    def loses(_number, called):
        if method == "restore" and called == "play":  # without a loss nothing is restored
            counted.append(called)
            return len(counted) == 4
        if called == method:
            counted.append(called)
        return called == method and len(counted) % 2 == 0

    cluster.loses = loses
    assert learned(start(settings), lockstep(), settings) == of_one_process(settings)
    assert len(cluster.handles) > 2


def test_a_run_continues_from_snapshots_though_a_worker_is_lost_meanwhile(cluster):
    settings = settings_of(length=3)
    parameters = {0: parameters_of(settings, 0).flat.numpy()}
    whole = Serial(settings, ACTORS, lag=0)
    whole.publish(parameters)
    requests = [ActorRequest(actor, 0) for actor in range(ACTORS)]
    whole.begin(requests)
    snapshots = {played.actor: played.after for played in whole.finished()}
    whole.begin(requests)
    expected = {played.actor: played.experience.digest() for played in whole.finished()}
    transport = start(settings)
    cluster.loses = lambda number, _: number == 1
    transport.restore(snapshots)
    transport.publish(parameters)
    transport.begin(requests)
    found = {}
    while len(found) < ACTORS:
        found |= {played.actor: played.experience.digest() for played in transport.finished()}
    assert found == expected


def test_a_worker_that_is_always_lost_is_given_up(cluster):
    settings = settings_of(length=3)
    transport = start(settings)
    transport.publish({0: parameters_of(settings, 0).flat.numpy()})
    cluster.loses = lambda number, method: method == "play"  # noqa: ARG005
    transport.begin([ActorRequest(3, 0)])
    with pytest.raises(CapsuleError) as failure:
        transport.finished()
    assert failure.value.code == "CAP-T354"
    assert failure.value.message == (
        "node one (actors 1 and 3) was lost 4 times in a row: RayError: the actor died"
    )
    assert "resumes from its last saved state" in failure.value.fix


def test_losses_with_unrolls_between_them_are_put_down_to_chance(cluster):
    settings = settings_of(length=3)
    transport = start(settings, workers=1)
    transport.publish({0: parameters_of(settings, 0).flat.numpy()})
    for _ in range(6):
        calls = []

        def loses(_number, method, calls=calls):
            calls.append(method)
            return calls == ["play"]

        cluster.loses = loses
        transport.begin([ActorRequest(0, 0)])
        assert [played.actor for played in transport.finished()] == [0]
    assert len(cluster.handles) == 7


# --- refusals -------------------------------------------------------------------------------------


def test_a_node_with_other_bits_is_refused_by_name(cluster, monkeypatch):
    digests = iter(["a" * 64, "b" * 64, "b" * 64])
    monkeypatch.setattr(ray_transport, "pass_digest", lambda _settings: next(digests))
    with pytest.raises(CapsuleError) as failure:
        start(settings_of(length=3))
    assert failure.value.code == "CAP-T351"
    assert failure.value.message == (
        "node one (actors 0, 2, …, 4) computes other bits: a pass of the run's network has the "
        "digest bbbbbbbbbbbbbbbb there and aaaaaaaaaaaaaaaa here"
    )
    assert "portable profile in accelerator.numerics" in failure.value.fix
    assert cluster.left == cluster.handles


def test_a_worker_that_does_not_begin_in_time_is_named(cluster):
    cluster.wait = lambda _calls, seconds=None: [] if seconds else pytest.fail("waits for ever")
    with pytest.raises(CapsuleError) as failure:
        start(settings_of(length=3), workers=1)
    assert failure.value.code == "CAP-T354"
    assert failure.value.message == (
        "a node of the cluster (actors 0 to 4) has not begun within 180 s"
    )
    assert "'ray status'" in failure.value.fix
    assert cluster.left == cluster.handles


def test_an_exception_in_a_worker_is_told(cluster):
    transport = start(settings_of(length=3), workers=1)
    transport.publish({0: np.zeros(3, np.float32)})
    transport.begin([ActorRequest(1, 0)])
    with pytest.raises(CapsuleError) as failure:
        transport.finished()
    assert failure.value.code == "CAP-T332"
    assert failure.value.message.startswith("node one (actors 0 to 4): RuntimeError: ")


def test_a_foreseen_failure_keeps_its_code_and_gets_a_name(cluster):
    settings = settings_of(length=3)
    transport = start(settings, workers=ACTORS)
    transport.publish({0: parameters_of(settings, 0).flat.numpy()})
    transport.begin([ActorRequest(1, 0)])
    (played,) = transport.finished()
    with pytest.raises(CapsuleError, match=r"^CAP-T201 node one \(actor 2\): ") as failure:
        transport.restore({2: played.after})
    assert failure.value.code == "CAP-T201"


def test_a_variable_that_does_not_reach_a_worker_is_found(cluster, monkeypatch):
    from capsule.training.determinism.child_processes import check_start

    monkeypatch.setattr(ray_transport, "check_start", check_start)
    variables = {"CAPSULE_TESTS_NEVER_SET": "7", "PYTHONHASHSEED": "0"}
    with pytest.raises(CapsuleError, match="CAPSULE_TESTS_NEVER_SET is None") as failure:
        start(settings_of(length=3), workers=1, pins=PINS._replace(variables=variables))
    assert failure.value.code == "CAP-T101"
    assert failure.value.message.startswith("node one (actors 0 to 4): ")


def test_workers_are_ended_when_the_transport_is_closed(cluster):
    transport = start(settings_of(length=3))
    transport.close()
    assert cluster.left == cluster.handles
    assert len(cluster.left) == 2


# --- pins -----------------------------------------------------------------------------------------


def test_pins_are_what_a_run_of_the_spec_starts_with():
    spec = make_spec(CARTPOLE, determinism={"hash_seed": 7})
    pins = pins_of(spec, "portable-v3")
    assert pins.variables["PYTHONHASHSEED"] == "7"
    assert pins.variables["LD_PRELOAD"].endswith("/libcapsule-math.so")
    assert pins.variables["OMP_NUM_THREADS"] == "1"
    assert (pins.determinism, pins.numerics) == (spec.determinism, "portable-v3")


def test_where_numerics_are_native_nothing_is_preloaded():
    pins = pins_of(make_spec(CARTPOLE), "native")
    assert "LD_PRELOAD" not in pins.variables
    assert pins.numerics == "native"
