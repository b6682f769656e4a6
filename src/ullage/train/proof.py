"""The job's ranks against one device: the same seed, data and steps, and what came out of each."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import distributed

from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.trace.models import dropouts
from ullage.train.answers import Proof, Row
from ullage.train.batches import micro_batches, tokens_of
from ullage.train.composed import alone, run_of
from ullage.train.settings import Settings

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 1e-2}
"""Relative, by the type that is computed in. fp32: the order of sums. bf16 and fp16 keep 8 and 11 bits: a sum in another order may round
the other way, by half a unit in the last place, 2^-8 or 2^-11, in each of the few roundings that a number goes through; of fp16 most is
what STEP_TOLERANCES lets weights drift."""

DRIFT_TOLERANCES = {**TOLERANCES, "fp32": 1e-4}
"""Of weights, and of gradients at weights that have drifted. Adam divides a gradient by its own size: one that is all rounding moves its
weight like any other. Where ranks round other sums than one device does in every layer (tensor parallelism), fp32 weights are 2e-5 apart
after 20 steps of four layers, and norms 4e-5."""

STEP_TOLERANCES = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 5e-2}
"""Of how far the weights have moved: the root of the share of gradients that are all rounding. Of bf16 that is one in a hundred under
tensor parallelism, of fp16 one in some hundreds; in fp32 1.6e-4 was seen there."""


def prove(job: Job, settings: Settings) -> Proof | None:
    """Runs the job on its ranks and then on one of them alone. The proof on rank 0, None on the others."""
    for key, value in dropouts(job).items():
        raise Unsupported(
            "each rank drops other elements than one device", key=key, value=value, remedy="prove it with 0"
        )
    losses, norms, weights, _ = _ran(job, settings)
    if distributed.is_initialized() and distributed.get_rank():
        return None
    one = alone(job)
    expected, expected_norms, expected_weights, start = _ran(one, settings)
    return Proof(
        ranks=job.layout.world,
        rows=tuple(
            Row(step=step, loss=loss, loss_on_ranks=found, grad_norm=norm, grad_norm_on_ranks=found_norm)
            for step, (loss, found, norm, found_norm) in enumerate(
                zip(expected, losses, expected_norms, norms, strict=True), 1
            )
        ),
        loss_error=_largest(losses, expected),
        norm_error=_largest(norms, expected_norms),
        weight_error=_apart(weights, expected_weights) / _norm(expected_weights),
        step_error=_apart(weights, expected_weights) / _apart(expected_weights, start),
        tolerance=TOLERANCES[job.precision.compute],
        drift_tolerance=DRIFT_TOLERANCES[job.precision.compute],
        step_tolerance=STEP_TOLERANCES[job.precision.compute],
    )


_Weights = Mapping[str, torch.Tensor]


def _ran(job: Job, settings: Settings) -> tuple[list[float], list[float | None], _Weights, _Weights]:
    """Losses, gradient norms, the weights at the end and at the start."""
    run = run_of(job, seed=settings.seed, lr=settings.lr, weight_decay=settings.weight_decay, weights=settings.weights)
    tokens = tokens_of(job, settings)
    start = run.weights()
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(settings.steps):
        stepped = run.step(micro_batches(job, tokens, step))
        losses.append(run.mean_loss(stepped))
        norms.append(None if stepped.grad_norm is None else float(stepped.grad_norm))
    return losses, norms, run.weights(), start


def _largest(found: list[float] | list[float | None], expected: list[float] | list[float | None]) -> float:
    """Relative difference; infinite where either is no number."""
    pairs = [pair for pair in zip(found, expected, strict=True) if None not in pair]
    gaps = [abs(one - two) / abs(two) for one, two in pairs]  # type: ignore[operator, arg-type]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def _apart(found: _Weights, expected: _Weights) -> float:
    return _norm({name: found[name].double() - expected[name].double() for name in expected})


def _norm(weights: _Weights) -> float:
    return math.sqrt(sum(float(weight.double().square().sum()) for weight in weights.values()))
