"""The language channel: words and their numbers, torch.nn's values and gradients, bits by row."""

import contextlib
import io
import math

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from minigrid.core.constants import COLOR_NAMES
from minigrid.envs.babyai.core.verifier import LOC_NAMES, OBJ_TYPES
from torch import nn

from capsule.experiment.errors import CapsuleError
from capsule.training.layers import kernels
from capsule.training.layers.backends import FIXED_ORDER, LIBRARY
from capsule.training.networks.feedforward import Parameters, initialize
from capsule.training.networks.language import BABYAI_WORDS, NO_WORD, LanguageChannel, Vocabulary
from capsule.training.state.streams import Stream
from tests.training.networks.unrolls import CPU, leaves, parameters_of, same_bits

BABYAI = Vocabulary(BABYAI_WORDS, 40)
MISSIONS = (
    "go to the red ball",
    "pick up the grey key",
    "open a purple door behind you",
    "put the blue box next to a green object, then go to the yellow ball on your left",
    "",
)
BOTH = pytest.mark.parametrize("products", [FIXED_ORDER, LIBRARY], ids=["chained", "library"])


# --- words ----------------------------------------------------------------------------------------


def test_words_are_numbered_in_sorted_order_and_padded():
    vocabulary = Vocabulary(("the", "red", "go", "to", "ball", "red"), 7)
    assert vocabulary.words == ("ball", "go", "red", "the", "to")
    numbers = vocabulary.encode("Go to  the\tred BALL.")
    assert numbers.tolist() == [1, 4, 3, 2, 0, NO_WORD, NO_WORD]
    assert numbers.dtype == np.int64
    assert vocabulary.encode(" , ").tolist() == [NO_WORD] * 7
    assert vocabulary.encode("to to to to to to to,").tolist() == [4] * 7


@given(st.lists(st.sampled_from(BABYAI_WORDS), max_size=40), st.data())
def test_every_sequence_of_words_is_its_own_row(words, data):
    between = st.sampled_from([" ", "  ", ", ", " ,", "\n"])
    text = "".join(word + data.draw(between) for word in words)
    row = BABYAI.encode(text)
    assert [BABYAI.words[number] for number in row[: len(words)]] == words
    assert (row[len(words) :] == NO_WORD).all()


@pytest.mark.parametrize("word", ["go to", "Go", "ball,", "", " red"])
def test_a_vocabulary_is_of_single_words_in_small_letters(word):
    with pytest.raises(CapsuleError, match="not one word") as failure:
        Vocabulary(("the", word), 3)
    assert failure.value.code == "CAP-T241"


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("go to the pink ball", "the word 'pink', which is not among the 32"),
        ("go-to the ball", "the word 'go-to'"),
        ("a " * 41, "has 41 words; there is room for 40"),
    ],
)
def test_an_instruction_that_cannot_be_told_is_refused(instruction, message):
    with pytest.raises(CapsuleError, match=message) as failure:
        BABYAI.encode(instruction)
    assert failure.value.code == "CAP-T242"


def test_the_words_of_babyai_are_those_of_minigrid():
    """The verifier writes instructions of these lists and of the words below, none other."""
    lists = {*COLOR_NAMES, *OBJ_TYPES, *LOC_NAMES}
    phrases = "a the object", "in front of you behind you on your", "open go to pick up put next to"
    grammar = set(" ".join((*phrases, "then after you and")).split())
    assert set(BABYAI_WORDS) == lists | grammar
    assert list(BABYAI_WORDS) == sorted(set(BABYAI_WORDS))


@pytest.fixture(scope="module")
def missions():
    """Return instructions of every level of BabyAI that minigrid registers."""
    found = []
    for identifier in sorted(gymnasium.registry):
        if identifier.startswith("BabyAI-"):
            task = gymnasium.make(identifier, disable_env_checker=True)
            with contextlib.redirect_stdout(io.StringIO()):  # it reports what it rejects
                found += [task.reset(seed=seed)[0]["mission"] for seed in range(2)]
            task.close()
    return found


def test_missions_of_every_level_of_babyai_can_be_told(missions):
    assert len(missions) > 150
    rows = [BABYAI.encode(mission) for mission in missions]
    assert len({row.tobytes() for row in rows}) == len(set(missions))
    assert max((row != NO_WORD).sum() for row in rows) > 20
    for row, mission in zip(rows, missions, strict=True):
        told = " ".join(BABYAI.words[number] for number in row if number != NO_WORD)
        assert told == mission.replace(",", "")


# --- the channel ----------------------------------------------------------------------------------


def channel(products=FIXED_ORDER, vocabulary=BABYAI):
    return LanguageChannel(len(vocabulary.words), products)


def told(*instructions, vocabulary=BABYAI):
    return torch.from_numpy(np.stack([vocabulary.encode(text) for text in instructions]))


def test_the_channel_has_the_papers_sizes():
    assert LanguageChannel(1000, FIXED_ORDER).shapes == {
        "language.embedding.weight": (1000, 20),
        "language.lstm.inputs.weight": (256, 20),
        "language.lstm.recurrent.weight": (256, 64),
        "language.lstm.bias": (256,),
    }
    assert channel().width == 64


def test_every_parameter_starts_within_its_fan_in():
    parameters = Parameters(channel().shapes, CPU)
    initialize(parameters, Stream("initialization", 0))
    for name, width in (("embedding.weight", 20), ("lstm.inputs.weight", 20), ("lstm.bias", 64)):
        largest = parameters.views[f"language.{name}"].abs().max().item()
        assert 0.9 / math.sqrt(width) < largest <= 1 / math.sqrt(width)


def reference(weights, instructions):
    """Read every row alone with torch's layers, without any padding."""
    embedding, lstm = nn.Embedding(len(BABYAI.words), 20), nn.LSTM(20, 64)
    table = {"weight": weights["language.embedding.weight"]}
    names = "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"
    parts = [
        weights[f"language.lstm.{key}"] for key in ("inputs.weight", "recurrent.weight", "bias")
    ]
    theirs = dict(zip(names, [*parts, torch.zeros(256)], strict=True))
    rows = []
    for row in instructions:
        words = row[row != NO_WORD]
        if len(words):
            embedded = torch.func.functional_call(embedding, table, (words,))
            rows.append(torch.func.functional_call(lstm, theirs, (embedded,))[0][-1])
        else:
            rows.append(torch.zeros(64))
    return torch.stack(rows)


@pytest.mark.slow
@BOTH
def test_features_and_gradients_equal_torchs(products):
    net = channel(products)
    instructions = told(*MISSIONS, MISSIONS[0], "go", MISSIONS[3])
    results = []
    for ours in (True, False):
        weights = leaves(parameters_of(net))
        features = (net.features if ours else reference)(weights, instructions)
        generator = torch.Generator().manual_seed(1)
        loss = (torch.randn(features.shape, generator=generator) * features).sum()
        results.append([features, *torch.autograd.grad(loss, list(weights.values()))])
    assert results[0][0].shape == (8, 64)
    for mine, theirs in zip(*results, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6 * scale)


def results_of(net, instructions):
    """Return features, and gradients of a loss that weighs every feature by its place."""
    weights = leaves(parameters_of(net))
    features = net.features(weights, instructions)
    loss = (torch.linspace(-1, 2, 64) * features).sum()
    return [features, *torch.autograd.grad(loss, list(weights.values()))]


@pytest.mark.parametrize("mission", MISSIONS[:4])
def test_room_for_words_changes_no_bit_of_features_and_gradients(mission):
    net, row = channel(), told(mission)
    words = int((row != NO_WORD).sum())
    tight = results_of(net, row[:, :words])
    for room in (words + 1, 40):
        assert all(map(same_bits, results_of(net, row[:, :room]), tight))


def test_a_longer_instruction_in_the_batch_changes_no_bit():
    """The shorter one is then read on beyond its end, of which nothing may come through."""
    net = channel()
    weights = leaves(parameters_of(net))
    long, *others = net.features(weights, told(MISSIONS[3], *MISSIONS[:3]))
    for mission, features in zip(MISSIONS[:3], others, strict=True):
        alone = results_of(net, told(mission))
        assert same_bits(features, alone[0][0])
        loss = (torch.linspace(-1, 2, 64) * features).sum() + 0 * long.sum()
        gradients = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
        for mine, theirs in zip(gradients, alone[1:], strict=True):
            assert torch.equal(mine, theirs)


SENTENCES = st.lists(st.sampled_from(BABYAI_WORDS), max_size=9).map(" ".join)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(SENTENCES, min_size=1, max_size=21))
def test_a_row_alone_gets_what_it_gets_in_a_batch(sentences):
    net = channel()
    parameters = parameters_of(net).views
    instructions = told(*sentences)
    batch = net.features(parameters, instructions)
    for row in range(len(sentences)):
        part = slice(row, row + 1)
        assert same_bits(net.features(parameters, instructions[part]), batch[part])


def recording(products):
    """Return products that note the sizes of the inputs of dense layers, and the notes."""
    sizes = []

    class Recording(type(products)):
        def dense(self, inputs, weight, bias):
            sizes.append(tuple(inputs.shape))
            return super().dense(inputs, weight, bias)

    return Recording(products.fixed_order), sizes


def test_equal_instructions_are_read_once_and_none_beyond_the_longest():
    products, sizes = recording(FIXED_ORDER)
    net = channel(products)
    net.features(parameters_of(net).views, told("go", "red ball", "go", "go"))
    words, distinct = 2, 2
    step = (distinct, 64)
    assert sizes == [(words * distinct, 32), (words * distinct, 20), step, step, (4, distinct)]


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 3, 15])
def test_with_libraries_a_row_keeps_its_sizes_and_its_bits_whatever_the_others_are(row):
    """As actors are evaluated: batches of 16, of which another process plays some rows."""
    everyone = told(*(MISSIONS[n % 5] for n in range(16)))
    found = []
    for others in (everyone, torch.zeros_like(everyone), told("").expand(16, -1), everyone.flip(0)):
        batch = others.clone()
        batch[row] = everyone[row]
        products, sizes = recording(LIBRARY)
        net = channel(products)
        found.append((sizes, net.features(parameters_of(net).views, batch)[row]))
    for sizes, features in found[1:]:
        assert sizes == found[0][0]
        assert same_bits(features, found[0][1])


def test_instruction_sets_give_equal_bits():
    net, results = channel(), {}
    for name in ("AVX2", "AVX-512"):
        if kernels.limit_instruction_set(name) == name:
            results[name] = results_of(net, told(*MISSIONS))
    kernels.limit_instruction_set("AVX-512")
    first, *others = results.values()
    for other in others:
        assert all(map(same_bits, first, other))


@pytest.mark.slow
@BOTH
def test_no_instruction_has_features_and_gradients_of_zero(products):
    features, *gradients = results_of(channel(products), told("", ""))
    assert features.shape == (2, 64)
    assert not features.any()
    assert not any(gradient.any() for gradient in gradients)


def test_only_words_that_were_told_get_a_gradient():
    embedding = results_of(channel(), told("go to the red ball", "open the red door"))[1]
    read = [word for word, row in zip(BABYAI.words, embedding, strict=True) if row.any()]
    assert read == ["ball", "door", "go", "open", "red", "the", "to"]


def test_order_length_and_words_all_count():
    net = channel()
    sentences = ("red ball", "ball red", "ball", "red", "red ball ball", "red key")
    features = net.features(parameters_of(net).views, told(*sentences))
    assert len({tuple(row.tolist()) for row in features}) == len(sentences)


def test_missions_of_babyai_have_features_of_their_own(missions):
    net = channel()
    parameters = parameters_of(net).views
    features = net.features(parameters, told(*missions))
    assert len({tuple(row.tolist()) for row in features}) == len(set(missions))
    for row in range(0, len(missions), 37):
        assert same_bits(net.features(parameters, told(missions[row]))[0], features[row])


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32")
def test_a_gpu_comes_close_to_the_cpu():
    net, results = channel(LIBRARY), []
    for device in (CPU, torch.device("cuda")):
        weights = leaves(parameters_of(net, device=device))
        features = net.features(weights, told(*MISSIONS).to(device))
        gradients = torch.autograd.grad(features.square().sum(), list(weights.values()))
        results.append([part.cpu() for part in (features, *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)
