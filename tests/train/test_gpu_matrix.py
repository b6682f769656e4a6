"""benchmarks/gpu_truth.py: every job of its matrix is one that is run and estimated."""

from __future__ import annotations

import pytest
from benchmarks.gpu_truth import SHAPES, VARIANTS, matrix

from ullage.engines.estimate import estimate
from ullage.job.read import read_job
from ullage.train.reach import refuse_what_is_not_run

JOBS = dict(matrix("H200-SXM-141GB", small=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_the_matrix(name: str) -> None:
    job = read_job(JOBS[name])
    refuse_what_is_not_run(job)
    assert estimate(job).verdict == "fits"


def test_each_shape_meets_each_variant() -> None:
    assert len(JOBS) == len(SHAPES) * len(VARIANTS)
