"""How evaluated networks choose: against the distribution, and the same at every evaluation."""

import numpy as np
import pytest
from scipy import special, stats

from capsule.experiment.errors import CapsuleError
from capsule.experiment.evaluation import EvaluationSpec
from capsule.experiment.spec import SeedsSpec
from capsule.training.evaluation.action_choice import Sampled, choice_of, greedy

LOGITS = np.array([[0.0, 1.0, -2.0], [5.0, -5.0, 0.5], [0.3, 0.3, 0.3]], np.float32)


def drawn(choose, steps, rows=(0, 1, 2)):
    return np.array([choose(LOGITS, rows) for _ in range(steps)])


def test_greedy_takes_the_first_of_the_largest_values_of_the_rows_asked_for():
    assert greedy(np.array([[0, 2, 2], [7, 0, 0], [1, 2, 3]], np.float32), [2, 0]) == [2, 1]


@pytest.mark.slow
def test_sampled_actions_have_the_probabilities_of_the_policy():
    found = drawn(Sampled(SeedsSpec(root=4), 3), 4_000)
    for row, probabilities in enumerate(special.softmax(LOGITS.astype(np.float64), axis=1)):
        counts = np.bincount(found[:, row], minlength=3)
        assert stats.chisquare(counts, 4_000 * probabilities).pvalue > 1e-4
    flat = found[:, 2]
    assert not np.array_equal(flat, found[:, 0])


def test_every_evaluation_draws_the_same_and_another_seed_does_not():
    first, again = (drawn(Sampled(SeedsSpec(root=4), 3), 60) for _ in range(2))
    assert np.array_equal(first, again)
    overridden = SeedsSpec(root=9, streams={"evaluation": 4})
    assert np.array_equal(drawn(Sampled(overridden, 3), 60), first)
    assert not np.array_equal(drawn(Sampled(SeedsSpec(root=5), 3), 60), first)


def test_a_row_draws_the_same_whoever_plays_beside_it():
    together, alone = Sampled(SeedsSpec(), 3), Sampled(SeedsSpec(), 3)
    found = drawn(together, 40)
    assert [alone(LOGITS, [1])[0] for _ in range(40)] == found[:, 1].tolist()


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(CapsuleError, match="CAP-T151"):
        Sampled(SeedsSpec(), 1)(np.full((1, 3), np.nan, np.float32), [0])


def test_the_spec_says_how_actions_are_chosen():
    assert choice_of(EvaluationSpec(), SeedsSpec(), 3) is greedy
    assert isinstance(choice_of(EvaluationSpec(actions="sampled"), SeedsSpec(), 3), Sampled)
