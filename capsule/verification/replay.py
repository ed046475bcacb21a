"""``capsule replay``: the last evaluation of a run, played again, and the screens of an episode.

The network of the last checkpoint plays in the image of the run. What it plays is what the bundle
claims, as every return and length is compared before anything is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from capsule import execution
from capsule.bundle import run_bundle
from capsule.bundle.bundle import open_bundle
from capsule.bundle.run_bundle import RecordedRun
from capsule.bundle.trust import Signer
from capsule.experiment import contract
from capsule.experiment.contract import EpisodeOrder, Evaluation, EvaluationPoint, Film
from capsule.experiment.spec import EntropySpec
from capsule.experiment.trainers import CommandTrainer
from capsule.host.errors import CapsuleError
from capsule.host.reporter import Reporter
from capsule.host.wording import counted
from capsule.image.cache import Cache
from capsule.machine.fingerprint import take_fingerprint
from capsule.machine.requirements import check_requirements
from capsule.verification.execution.admission import (
    check_code,
    confined_engine,
    prepare_executor,
    require_claimed_image,
)
from capsule.verification.execution.reexecution import reexecution_folder
from capsule.verification.integrity.consistency import check_consistency
from capsule.verification.request import VerifyRequest


@dataclass(frozen=True)
class Replay:
    """An evaluation that was played again and gave what its bundle claims.

    Attributes:
        claim_id: The run's.
        signer: The first signer whose signature counts, or else the one that the bundle names.
        authentic: Whether the user trusts that signer.
        episode: Index of the episode that was filmed.
        film: What was played.
        screens: File with the screens of the episode.
    """

    claim_id: str
    signer: Signer
    authentic: bool
    episode: int
    film: Film
    screens: Path


@contextmanager
def replayed(
    request: VerifyRequest, episode: int | None, cache: Cache, reporter: Reporter
) -> Iterator[Replay]:
    """Play the last evaluation of a run again; its screens exist inside the context.

    Args:
        request: The bundle, and what is trusted and executed.
        episode: The episode to film; None: the first of those with the highest return.
        cache: Content-addressed store of packages and layers.
        reporter: Told about each stage.

    Raises:
        CapsuleError: CAP-V090, the run has no evaluation of one network that can be played, or not
            this episode, or its environment may have drawn randomness that a replay does not draw;
            CAP-V091 (exit status 1), the evaluation gave something other than the bundle claims;
            CAP-E011, there are more screens than steps;
            what ``capsule verify`` raises of a bundle that it does not execute.
    """
    reporter.note(f"checking {request.bundle.name}")
    # These are the checks of verify(), in the same order, before anything of the bundle is
    # executed.
    with open_bundle(request.bundle, request.trust) as bundle:
        run = RecordedRun.read(bundle)
        check_consistency(run)
        request.require_trust(bundle)
        claimed, order = _order(run, episode)
        engine = confined_engine(request, run, reporter.note)
        if unmet := check_requirements(run.lock, take_fingerprint(engine.describe())):
            raise unmet[0]
        check_code(run.lock, request.code)
        executor, image = prepare_executor(request, run, engine, cache, reporter)
        require_claimed_image(request, run, image)
        with reexecution_folder(reporter.note) as directory:
            film = execution.film(
                run.lock,
                engine,
                directory,
                order,
                bundle.member(run_bundle.checkpoint_member(order.step)),
                limits=executor.limits,
                data=executor.data,
                reporter=reporter,
            )
            _compare(claimed, film.point, run.lock.spec.entropy)
            # The film was made by code of the bundle's image. One screen for the start and one for
            # each step is all that an episode has, and more would let that code have any number of
            # screens drawn.
            if film.screens > claimed.lengths[order.episode] + 1:
                raise CapsuleError(
                    "CAP-E011",
                    f"{contract.FILM} is malformed: {counted(film.screens, 'screen')} of an "
                    f"episode of {counted(claimed.lengths[order.episode], 'step')}",
                    fix="Do not trust the training code of this bundle.",
                )
            # The screens are in the run directory, which is removed at the end of the block.
            yield Replay(
                claim_id=bundle.claim_id,
                signer=bundle.signer,
                authentic=bundle.authentic,
                episode=order.episode,
                film=film,
                screens=directory / contract.SCREENS,
            )


def _order(run: RecordedRun, episode: int | None) -> tuple[EvaluationPoint, EpisodeOrder]:
    """Return the last evaluation of a run as it is claimed, and what to do to play it again."""
    trainer = run.lock.spec.trainer
    if isinstance(trainer, CommandTrainer):
        raise _unplayable("it is the run of a user program, whose agent Capsule does not know")
    if getattr(trainer, "population", None) is not None:
        raise _unplayable("it trained a population, and does not state which member was evaluated")
    evaluation = run.bundle.read(run_bundle.RUN + contract.EVALUATION, Evaluation)
    last = evaluation.points[-1] if evaluation.points else None
    if last is None or not 0 < len(last.returns) == len(last.lengths):
        raise _unplayable("it has no evaluation with a return and a length of each episode")
    try:
        returns = [float.fromhex(score) for score in last.returns]
    except (ValueError, OverflowError) as error:
        raise _unplayable("its last evaluation has a return that is not a number") from error
    if episode is None:
        episode = returns.index(max(returns))
    if episode >= len(returns):
        raise CapsuleError(
            "CAP-V090",
            f"--episode {episode}: the evaluation has {counted(len(returns), 'episode')}",
            fix=f"Give a number from 0 to {len(returns) - 1}.",
        )
    streams = run.bundle.read(run_bundle.STREAMS, contract.StreamProfiles).streams
    seed = next((stream.seed for stream in streams if stream.name == "evaluation"), None)
    if seed is None:
        raise _unplayable("it has no random stream 'evaluation'")
    return last, EpisodeOrder(seed=seed, step=last.step, starts=evaluation.starts, episode=episode)


def _compare(claimed: EvaluationPoint, played: EvaluationPoint, entropy: EntropySpec) -> None:
    """Reject an evaluation that is not the claimed one."""
    claims, plays = (
        [*zip(point.returns, point.lengths, strict=False)] for point in (claimed, played)
    )
    # An episode that only one side has differs from None.
    for number, (claim, play) in enumerate(zip_longest(claims, plays)):
        if claim == play:
            continue
        difference = (
            f"of {counted(len(claims), 'episode')}, number {number} is the first that differs"
        )
        # The evaluation of an honest run differs if its environment draws such randomness.
        if entropy.mode != "virtual":
            raise CapsuleError(
                "CAP-V090",
                f"the run cannot be replayed: {difference}, and with entropy.mode "
                f"{entropy.mode!r}, a replay draws other randomness of the system than the run",
                fix="Find out with 'capsule verify' whether the run is reproduced.",
            )
        raise CapsuleError(
            "CAP-V091",
            f"the evaluation of step {claimed.step:,}, played again, is not the claimed one: "
            f"{difference}",
            fix="Find out with 'capsule verify' what else differs. An environment that "
            "draws randomness of the system gets other values in a replay than in the run.",
        )


def _unplayable(reason: str) -> CapsuleError:
    return CapsuleError(
        "CAP-V090",
        f"the run cannot be replayed: {reason}",
        fix="Give the bundle of a run of one agent by one of Capsule's trainers.",
    )
