"""Where a process stands, from what launchers set."""

import pytest

from ullage.errors import InvalidInput
from ullage.train.places import Place, first_node, is_first, place

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "1234",
}  # fmt: skip
DEEPSPEED = {  # launcher/launch.py, main
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2", "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


def test_torchruns_environment() -> None:
    assert place(TORCHRUN) == Place(rank=5, local_rank=1, world=8, local_world=4, master="host0", port=1234)


def test_deepspeeds_environment() -> None:
    assert place(DEEPSPEED) == Place(rank=5, local_rank=1, world=8, local_world=4, master="host0", port=29500)


def test_slurms_environment() -> None:
    assert place(SLURM) == Place(rank=5, local_rank=1, world=8, local_world=4, master="gpu07", port=29500)


def test_no_launcher() -> None:
    assert place({}) is None
    assert place({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None  # a batch script's own shell
    assert is_first({})
    assert not is_first(TORCHRUN)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("gpu[07-09,12],login", "gpu07"),
        ("a1,a2", "a1"),
        ("node3", "node3"),
        ("r[2,4]n", "r2n"),
        ("rack[2,4]-n[1-3]", "rack2-n1"),
    ],
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["gpu[07", "[a-b]", "gpu]7", ""])
def test_what_is_no_list_of_nodes(nodes: str) -> None:
    with pytest.raises(InvalidInput, match="SLURM_STEP_NODELIST"):
        first_node(nodes)


def test_a_step_of_srun_may_have_other_tasks_than_its_job() -> None:
    found = place({**SLURM, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert found is not None
    assert found.local_world == 4


def test_a_launcher_that_says_nonsense() -> None:
    with pytest.raises(InvalidInput, match="WORLD_SIZE"):
        place({**TORCHRUN, "WORLD_SIZE": "eight"})
