"""How Megatron's arguments cut a pipeline, against transformer_block.py's get_num_layers_to_build and pipeline_parallel_layer_layout.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import ullage
from ullage.engines.megatron import split
from ullage.formats import megatron
from ullage.formats.convert import read_whole, write_job
from ullage.job.job import Job
from ullage.memory.rank import layers_per_chunk

ARGUMENTS = (
    "--num-layers 30 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 128256 "
    "--micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --bf16 "
)


def _read(tmp_path: Path, more: str) -> Job:
    file = tmp_path / "pretrain.sh"
    file.write_text(f"python pretrain_gpt.py {ARGUMENTS}{more}\n", encoding="utf-8")
    return read_whole(file, ["cluster=2x8xH100-SXM-80GB"])[1]


@pytest.mark.parametrize(
    ("more", "vpp", "chunks"),
    [
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 1, [7, 8, 8, 7]),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2",
            2,
            [3, 4, 4, 4, 4, 4, 4, 3],
        ),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 4",
            2,
            [3, 4, 4, 4, 4, 4, 4, 3],
        ),
        ("--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 8", 1, [6, 8, 8, 8]),
        ('--pipeline-model-parallel-layout "Ettt|(tttt|)*6tttL"', 2, [3, 4, 4, 4, 4, 4, 4, 3]),
        ('--pipeline-model-parallel-layout "Et*6|(t*8|)*2t*8L"', 1, [6, 8, 8, 8]),
    ],
)
def test_a_cut_is_the_engines(tmp_path: Path, more: str, vpp: int, chunks: list[int]) -> None:
    job = _read(tmp_path, more)
    assert (job.layout.pp, job.layout.vpp) == (4, vpp)
    assert layers_per_chunk(30, job.layout) == chunks
    assert layers_per_chunk(30, split.layout(job, 30)) == chunks


@pytest.mark.parametrize(("vpp", "said"), [(1, True), (2, True), (4, True)])
def test_a_layer_for_each_end_is_written_as_megatron_counts_it(vpp: int, said: bool) -> None:
    job = ullage.read_job(
        {
            "model": "llama-3.1-405b",
            "cluster": "128x8xH100-SXM-80GB",
            "data": {"seq_len": 8192, "grad_accum": 192},
            "engine": {"name": "megatron", "zero_stage": 1},
            "stack": "megatron",
            "layout": {
                "dp": 8, "tp": 8, "sp": True, "cp": 2, "pp": 8, "vpp": vpp,
                "schedule": "interleaved-1f1b" if vpp > 1 else "1f1b", "pp_split": [15, 16, 16, 16, 16, 16, 16, 15],
            },
        }
    )  # fmt: skip
    found = write_job(job, megatron)
    assert ("--account-for-loss-in-pipeline-split" in found.text) is said
    assert "--decoder-first-pipeline-num-layers" not in found.text
    assert "layout.pp_split" not in [one.key for one in found.unsaid]
