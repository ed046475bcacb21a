"""``python -m capsule.training.film RUN_DIRECTORY``: play the last evaluation again, and film it.

The directory contains the job of the run (``job.json``), the episodes to play
(``episode-order.json``) and the tensors of the last checkpoint. All episodes are played, and not
only the one that is filmed, so that the host can compare the whole evaluation with the claimed one.
"""

from __future__ import annotations

import sys
import zlib
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING

from capsule.experiment import contract
from capsule.experiment.contract import EpisodeOrder, EvaluationPoint, Film, Job
from capsule.experiment.errors import CapsuleError
from capsule.training.determinism import flags
from capsule.training.state.run_directory import read_job, record_failure, write_document

if TYPE_CHECKING:
    from capsule.training.environments import Environment


def film(directory: Path) -> None:
    """Play the evaluation that a directory describes, and write its scores and screens.

    Raises:
        CapsuleError: CAP-T217, there are no pictures of the environment; or an error of the
            determinism flags, the environment or the policy.
    """
    job = read_job(directory)
    order = EpisodeOrder.parse((directory / contract.EPISODE_ORDER).read_bytes())
    flags.prepare(job.spec)
    flags.apply(job.spec)
    with (directory / contract.SCREENS).open("wb") as stream:
        camera = Camera(order.episode, stream)
        point = play(directory, job, order, camera)
        camera.close()
    rows, columns = camera.size
    document = Film(
        point=point, screens=camera.screens, rows=rows, columns=columns, rate=camera.rate
    )
    write_document(directory / contract.FILM, document)


def play(directory: Path, job: Job, order: EpisodeOrder, camera: Camera) -> EvaluationPoint:
    """Play every episode of the last evaluation, and return the scores.

    Args:
        directory: The directory, with the tensors of the last checkpoint.
        job: The job of the run.
        order: The starts, the seed and the step of the evaluation.
        camera: Films one of the episodes.
    """
    # These import torch, which must not happen before flags.prepare().
    from safetensors.numpy import load_file

    from capsule.training.evaluation.action_choice import choice_of
    from capsule.training.evaluation.protocol import evaluate, evaluation_environments
    from capsule.training.registry import make_policy

    spec = job.spec.training()
    seeds = spec.seeds.model_copy(update={"root": order.seed})
    name = f"{contract.checkpoint_name(order.step)}.safetensors"
    tensors = load_file(directory / contract.CHECKPOINTS / name)
    group = "parameters/"  # prefix of the network's parameters in a checkpoint
    arrays = {
        each.removeprefix(group): array for each, array in tensors.items() if each.startswith(group)
    }
    return evaluate(
        evaluation_environments(spec.environment, seeds, spec.evaluation.starts),
        order.starts,
        spec.evaluation,
        make_policy(spec, seeds, flags.device_of(spec), arrays),
        order.step,
        choice_of(spec.evaluation, seeds, len(order.starts)),
        camera,
    )


class Camera:
    """Writes the screens of one episode.

    Attributes:
        screens: Number of screens written.
        size: Number of rows and columns of a screen.
        rate: Screens per second.
    """

    def __init__(self, episode: int, stream: BufferedWriter) -> None:
        self._episode, self._stream = episode, stream
        self._packer = zlib.compressobj(level=1)  # screens compress well; higher levels take longer
        self.screens, self.size, self.rate = 0, (0, 0), 0.0

    def __call__(self, episode: int, environment: Environment) -> None:
        """Write the screen of the environment, if the episode is the one that is filmed."""
        if episode != self._episode:
            return
        screen = environment.screen()
        self._stream.write(self._packer.compress(screen.tobytes()))
        self.screens += 1
        self.size, self.rate = screen.shape[:2], environment.screen_rate

    def close(self) -> None:
        """Write the rest of the compressed data."""
        self._stream.write(self._packer.flush())


def main(arguments: list[str]) -> int:
    """Film the evaluation in the directory named by the only argument; return the exit status."""
    directory = Path(arguments[0])
    try:
        film(directory)
    except CapsuleError as error:
        record_failure(directory, error, None)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
