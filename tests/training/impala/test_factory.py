"""IMPALA as a spec says: its schedule, its actors, their transport, network and replay memory."""

from array import array

import pytest
import torch

from capsule.experiment import contract
from capsule.experiment.errors import CapsuleError
from capsule.experiment.schedule_log import ScheduleLog, parse_schedule
from capsule.experiment.spec import CpuAccelerator
from capsule.training.acting.transports import Serial
from capsule.training.environments import make_environment
from capsule.training.impala.actors.unrolls import Unroll
from capsule.training.impala.factory import (
    make_network,
    make_replay,
    make_schedule,
    make_settings,
    make_transport,
)
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.state.streams import make_streams
from capsule.training.trainer import TrainerContext
from tests.training.conftest import ANY_GPU, make_spec, merge
from tests.training.impala.conftest import COUNTING, LIVE, edited, log_of, refusal_of, train
from tests.training.impala.test_language import BABYAI

pytestmark = pytest.mark.usefixtures("deterministic", "importable", "warm_workers")


def test_logs_that_do_not_fit_are_refused(make):
    learner = train(make(COUNTING, trainer=LIVE))
    data = log_of(learner)
    cut = refusal_of(make, data[:-1])
    changed = refusal_of(make, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert {cut.code, changed.code} == {"CAP-T341"}
    for changes in (
        {"seeds": {"root": 1}},
        {"trainer": {"learning_rate": 0.5}},
        {"trainer": {"schedule": {"policy_lag": 4}}},
        {"trainer": {"actors": 7}},
    ):
        assert refusal_of(make, data, **changes).code == "CAP-T344"
    assert refusal_of(make, b"").code == "CAP-T341"


def test_a_log_of_this_spec_that_no_run_of_it_can_have_made_is_refused(make):
    log = parse_schedule(log_of(train(make(COUNTING, trainer=LIVE))))
    late = log.lags[:]
    late[-1] = 4
    for changes in ({"actors": 7}, {"batch": 2}, {"batch": 1}, {"lags": late}):
        assert refusal_of(make, edited(log, **changes)).code == "CAP-T344"
    fewer = array("H", [actor % 5 for actor in log.played])
    with pytest.raises(CapsuleError):
        train(make(COUNTING, trainer=LIVE, replay=edited(log, actors=5, played=fewer)))


# --- the parts ------------------------------------------------------------------------------------


def parts(folder, document=COUNTING, workers=1, **changes):
    """Return a context, the section ``trainer``, and an example of the environment."""
    spec = make_spec(document, **changes).training()
    directory = folder / "run" / "state"
    directory.mkdir(parents=True)
    place = torch.device("cpu")
    context = TrainerContext(directory, spec, spec.seeds, {}, None, place, workers)
    example = make_environment(spec.environment, make_streams(spec.seeds), training=True)
    return context, spec.trainer, example


def test_lockstep_is_the_rule_of_the_spec_until_the_last_update(tmp_path):
    context, trainer, _ = parts(
        tmp_path, trainer={"schedule": {"mode": "lockstep", "policy_lag": 2}}
    )
    schedule = make_schedule(context, trainer)
    assert (schedule.kind, schedule.lag) == ("lockstep", 2)
    # 6 actors, 4 unrolls of 5 steps an update, 400 steps: 20 updates.
    assert schedule.choose(19, {}, [0, 1, 2, 3, 4, 5]) == [4, 5, 0, 1]
    assert schedule.version(1, 13, 99) == 17
    assert schedule.version(2, 13, 99) is None  # unroll 80


def test_a_recorded_schedule_is_live_unless_there_is_a_log_to_follow(tmp_path):
    context, trainer, _ = parts(tmp_path, trainer=LIVE)
    live = make_schedule(context, trainer)
    assert (live.kind, live.lag) == ("live", 3)
    played, lags = array("H", [5, 4, 3, 2]), array("H", [0, 0, 0, 0])
    log = ScheduleLog(context.spec.digest(), 6, 4, played, lags)
    (context.directory.parent / contract.SCHEDULE_REPLAY).write_bytes(log.document())
    recorded = make_schedule(context, trainer)
    assert (recorded.kind, recorded.lag) == ("replayed", 3)
    assert recorded.choose(0, {}, [2, 3, 4, 5]) == [5, 4, 3, 2]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"schedule": {"policy_lag": 4}}, "6 in batches of 4, up to 4"),
        ({"actors": 7}, "7 in batches of 4, up to 3"),
        ({"learning_rate": 0.5}, "6 in batches of 4, up to 3"),
    ],
)
def test_a_log_of_another_spec_is_named_with_both(tmp_path, changes, wanted):
    recorded, _, _ = parts(tmp_path / "recorded", trainer=LIVE)
    context, trainer, _ = parts(tmp_path / "replayed", trainer=merge(LIVE, changes))
    played, lags = array("H", [0, 1, 2, 3] * 2), array("H", [0, 0, 0, 0, 1, 0, 0, 0])
    log = ScheduleLog(recorded.spec.digest(), 6, 4, played, lags)
    (context.directory.parent / contract.SCHEDULE_REPLAY).write_bytes(log.document())
    with pytest.raises(CapsuleError) as refusal:
        make_schedule(context, trainer)
    assert refusal.value.code == "CAP-T344"
    assert refusal.value.message == (
        f"the schedule log is of the spec {recorded.spec.digest()}: 6 actors in batches of 4 with "
        f"a lag up to 1; this is {context.spec.digest()}: {wanted}"
    )
    assert "the spec that it was recorded with" in refusal.value.fix


def test_a_log_to_follow_does_not_matter_to_a_rule(tmp_path):
    context, trainer, _ = parts(tmp_path)
    (context.directory.parent / contract.SCHEDULE_REPLAY).write_bytes(b"no log")
    assert make_schedule(context, trainer).kind == "lockstep"


def test_actors_have_the_settings_of_the_spec(tmp_path):
    language = {"vocabulary": ["go", "to"], "longest": 3}
    context, trainer, example = parts(
        tmp_path,
        BABYAI,
        trainer={"language": language, "truncation": "terminal"},
        determinism={"batch_invariance": False},
    )
    settings = make_settings(context, trainer, example)
    assert settings.tasks == (context.spec.environment,)
    assert (settings.steps, settings.truncation) == (5, "terminal")
    assert (settings.vocabulary.words, settings.vocabulary.longest) == (("go", "to"), 3)
    assert settings.determinism == context.spec.determinism
    assert (settings.network.actions, settings.network.words) == (7, 3)


@pytest.mark.parametrize(
    ("inference", "rows"), [({"mode": "actor"}, 16), ({"mode": "server", "rows": 5}, 5)]
)
def test_rows_of_a_batch_are_those_of_the_server_if_there_is_one(tmp_path, inference, rows):
    parts_of_it = parts(tmp_path, trainer={"inference": inference})
    assert make_settings(*parts_of_it).rows == rows


def test_actors_act_on_the_cpu_whatever_the_learner_computes_on(tmp_path):
    context, trainer, example = parts(tmp_path, accelerator=ANY_GPU)
    assert make_settings(context, trainer, example).network.products is FIXED_ORDER
    assert make_network(trainer, example, context.spec.accelerator).products is LIBRARY
    assert make_network(trainer, example, CpuAccelerator()).products is FIXED_ORDER


def test_the_network_has_the_units_of_the_spec(tmp_path):
    context, trainer, example = parts(tmp_path)
    shapes = make_network(trainer, example, context.spec.accelerator).shapes
    assert shapes["dense1.weight"] == (9, 3)  # numbers of an observation
    assert shapes["policy.weight"] == (3, 7)  # actions, recurrent units
    assert shapes["baseline.weight"] == (1, 7)
    assert shapes["lstm.recurrent.weight"] == (4 * 7, 7)


def test_a_vocabulary_of_something_else_than_words_is_refused(tmp_path):
    language = {"vocabulary": ["go", "Red"], "longest": 3}
    context, trainer, example = parts(tmp_path, BABYAI, trainer={"language": language})
    with pytest.raises(CapsuleError, match="the vocabulary has 'Red'") as refusal:
        make_network(trainer, example, context.spec.accelerator)
    assert refusal.value.code == "CAP-T241"


def test_there_is_a_replay_memory_if_the_spec_asks_for_one(tmp_path):
    context, trainer, example = parts(tmp_path / "none")
    network = make_network(trainer, example, context.spec.accelerator)
    blank = Unroll.blank(trainer.unroll_length, example, network)
    assert make_replay(context, trainer, blank) is None
    replay = {"replay": {"unrolls": 2, "capacity": 5}}
    context, trainer, _ = parts(tmp_path / "some", trainer=replay)
    assert make_replay(context, trainer, blank).count == 0


@pytest.mark.parametrize("inference", [{"mode": "actor"}, {"mode": "server", "rows": 4}])
def test_on_one_processor_this_process_plays_and_answers(tmp_path, inference):
    context, trainer, example = parts(tmp_path, trainer={"inference": inference})
    settings = make_settings(context, trainer, example)
    transport = make_transport(context, trainer, settings, lag=1)
    assert isinstance(transport, Serial)
    assert transport.replicas == 0


def test_a_trainer_moves_no_stream_but_that_of_its_network(make):
    learner = make(COUNTING)
    drawn = {name for name, stream in learner.streams.items() if stream.draws}
    assert drawn == {"initialization"}
