"""The parts that a step's seconds are told in, by the names that ``StepTime.parts`` and the JSON answer have for them."""

from __future__ import annotations

PARTS = {
    "matmul": "matrix multiplications",
    "attention": "attention",
    "memory": "kernels bound by memory bandwidth",
    "recompute": "recomputation",
    "tp": "waiting for tensor parallelism",
    "cp": "waiting for context parallelism",
    "ep": "waiting for expert parallelism",
    "shard": "waiting for gathers and reductions of shards",
    "dp": "waiting for data parallelism",
    "gradients": "gradients added up, zeroed and checked",
    "host": "waiting for the host to issue kernels",
    "offload": "waiting for copies to the host and back",
    "optimizer": "optimizer",
    "bubble": "pipeline bubble and sends",
}
