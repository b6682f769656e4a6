"""A rank that fails is told of with its traceback, and no process outlives a call."""

from __future__ import annotations

import os
import time

import pytest
from tests.distributed.world import Failed, run

pytestmark = pytest.mark.xdist_group("deepspeed")


def _sum_of_ranks() -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    mine = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(mine)
    return os.getpid(), mine.item()


def _fails_on(rank: int, folder: str) -> None:
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(str(os.getpid()))
    if rank == int(os.environ["RANK"]):
        print("a word before", flush=True)
        raise ValueError("on purpose")
    time.sleep(60)


def _exits() -> None:
    os._exit(7)


def _sleeps() -> None:
    time.sleep(60)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_answers(ranks: int) -> None:
    answers = run(_sum_of_ranks, (), ranks=ranks, timeout_s=30)
    assert len({pid for pid, _ in answers}) == ranks
    assert [total for _, total in answers] == [sum(range(ranks))] * ranks


def test_a_failure_is_told_with_its_traceback_and_leaves_no_process(tmp_path) -> None:
    with pytest.raises(Failed, match="on purpose") as raised:
        run(_fails_on, (1, str(tmp_path)), ranks=2, timeout_s=30)
    assert "rank 1 of 2" in str(raised.value)
    assert "_fails_on" in str(raised.value)
    assert "a word before" in str(raised.value)
    for started in tmp_path.iterdir():
        assert not os.path.exists(f"/proc/{started.read_text()}")


def test_a_rank_that_dies_is_told_of() -> None:
    with pytest.raises(Failed, match="died, exit code 7"):
        run(_exits, (), ranks=2, timeout_s=30)


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    with pytest.raises(Failed, match=r"rank 0, 1 of 2: no answer in 3 s"):
        run(_sleeps, (), ranks=2, timeout_s=3)
