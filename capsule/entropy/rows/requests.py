"""Rows on actors that ask for their actions: batches, seeds and routes of the requests."""

from __future__ import annotations

from collections.abc import Callable

from capsule.entropy.evidence import Evidence, Judgement, LedgerSource
from capsule.experiment.inference import Inference
from capsule.host.wording import agreeing, counted


def _batching(inference: Inference) -> Judgement:
    requests, tested = inference.requests, inference.tested_rows
    tested_rows = counted(tested, "row")
    same = f"{tested_rows} of a batch gave the same result alone and in a batch at the start"
    if inference.independent:
        if not tested:
            return "assumed", "layers of independent rows were used but not tested on this machine"
        answered = f"layers of independent rows answered {counted(requests, 'request')}"
        return "eliminated", f"{answered}; {same}"
    if tested and inference.own_row == requests:
        rows = f"the row of its actor in a batch of {inference.rows}"
        return "ordered", f"each of {counted(requests, 'request')} had {rows}; {same}"
    return "unsupported", (
        f"{_answered(requests - inference.own_row, requests)} in batches as they arrived; "
        f"{counted(tested, 'row was', 'rows were')} tested at the start"
    )


def _answered(some: int, requests: int) -> str:
    return f"{some:,} of {counted(requests, 'request')} {agreeing(some, 'was', 'were')} answered"


def _seeds(inference: Inference) -> Judgement:
    requests, other = inference.requests, inference.requests - inference.own_stream
    if other:
        return "unsupported", (
            f"{other:,} of {counted(requests, 'action')} {agreeing(other, 'was', 'were')} not "
            f"drawn from the stream of {agreeing(other, 'its', 'their')} request"
        )
    return "seeded", (
        f"each of {counted(requests, 'action')} was drawn from the stream of its request, as its "
        "actor confirmed"
    )


def _routing(inference: Inference) -> Judgement:
    requests, replicas = inference.requests, inference.replicas
    if not replicas:
        return None
    if inference.misrouted:
        return "unsupported", (
            f"{_answered(inference.misrouted, requests)} by another replica than the one of "
            f"{agreeing(inference.misrouted, 'its', 'their')} actor"
        )
    if replicas == 1:
        return "eliminated", f"one replica answered {counted(requests, 'request')}"
    return "ordered", (
        f"{counted(requests, 'request was', 'requests were')} answered by the replica of "
        f"{agreeing(requests, 'its', 'their')} actor, one of {replicas}"
    )


def _of_inference(judge: Callable[[Inference], Judgement]) -> Callable[[Evidence], Judgement]:
    """Judge runs whose actors asked for their actions."""

    def judged(evidence: Evidence) -> Judgement:
        trainer = evidence.mechanisms.trainer
        if trainer is None or trainer.inference is None or not trainer.inference.requests:
            return None
        return judge(trainer.inference)

    return judged


SOURCES = (
    LedgerSource("Batching of inference", _of_inference(_batching), "other layers, not tested"),
    LedgerSource(
        "Seeds of requests",
        _of_inference(_seeds),
        "a policy with its own generator",
    ),
    LedgerSource("Routing of requests", _of_inference(_routing), "a replica with state"),
)
