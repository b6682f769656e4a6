"""What is not run is refused by its key; whatever passes is run by tests/distributed/test_proofs.py."""

from typing import Any

import pytest
from tests.distributed.training import job_of

from ullage.errors import Unsupported
from ullage.train.reach import refuse_what_is_not_run

PP: dict[str, Any] = {"pp": 2, "pp_split": [2, 1]}
DEEPSPEED = {"engine": "deepspeed", "zero_stage": 2}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("engine.zero_stage", {"engine": "deepspeed", "zero_stage": 0, "precision": "bf16-mixed"}),
    ("engine.options.round_robin_gradients", {**DEEPSPEED, "options": {"round_robin_gradients": True}}),
    ("engine.options.reduce_bucket_size", {**DEEPSPEED, "options": {"reduce_bucket_size": "auto"}}),
    ("precision", {**DEEPSPEED, "precision": "bf16"}),
    ("engine.name", {"engine": "fsdp1"}),
    ("layout.sp", {"layout": {"tp": 2, "sp": True}, "model": {"model_type": "phi3"}}),
    ("layout.sp", {"layout": {"tp": 2, "sp": True, **PP}, "ranks": 4}),
    ("layout.schedule", {"layout": {**PP, "schedule": "zb-h2"}}),
    ("data.grad_accum", {"layout": PP, "data": {"grad_accum": 1}}),
    ("engine.options.sync_each_batch", {"layout": PP, "options": {"sync_each_batch": True}}),
    ("recompute", {"layout": PP, "recompute": {"sqrt": True}}),
    ("layout.cp", {"layout": {"cp": 2}}),
    ("layout.dp", {"ranks": 1}),
    ("stack", {"stack": "liger"}),
    ("stack_version", {"stack_version": "5.1"}),
    ("data.padding_mask", {"data": {"padding_mask": True}}),
    ("data.seq_len_mean", {"data": {"seq_len_mean": 12}}),
    ("recompute", {"recompute": {"modules": ["core_attn"]}}),
    ("attention", {"attention": "mem-efficient"}),
    ("loss", {"loss": "chunked"}),
    ("lora", {"engine": "zero1", "lora": {"rank": 4}}),
    ("lora", {"layout": {"tp": 2}, "precision": "bf16", "lora": {"rank": 4}}),
    ("lora", {"layout": PP, "precision": "bf16", "lora": {"rank": 4}}),
    ("precision", {"lora": {"rank": 4}}),
    ("lora.base", {"engine": "ddp", "precision": "bf16", "lora": {"rank": 4, "base": "nf4"}}),
    ("precision", {"engine": "ddp", "lora": {"rank": 4}}),
    ("optimizer.state", {"engine": "ddp", "precision": "bf16-mixed", "lora": {}, "optimizer": "adamw-bf16"}),
    ("lora.dtype", {**DEEPSPEED, "precision": "bf16-mixed", "lora": {"rank": 4, "dtype": "fp32"}}),
    ("precision", {**DEEPSPEED, "precision": "bf16", "lora": {"rank": 4}}),
    ("freeze", {"freeze": ["*norm*"]}),
    ("compile", {"compile": True}),
    ("optimizer", {"optimizer": "lion"}),
    ("optimizer.state", {"optimizer": "adamw-bf16"}),
    ("optimizer.impl", {"optimizer": {"name": "sgd", "impl": "fused"}}),
    ("offload.optimizer", {"offload": {"optimizer": "cpu"}}),
    ("offload.optimizer", {"engine": "deepspeed", "zero_stage": 3, "offload": {"optimizer": "nvme"}}),
    ("offload.activations", {"offload": {"activations": "cpu"}}),
    ("precision", {"precision": "fp8-mixed"}),
    ("precision", {"precision": {"params": "bf16", "master": "fp32"}}),
    ("engine.shard_group", {"shard_group": 1}),
    ("engine.options.limit_all_gathers", {"options": {"limit_all_gathers": True}}),
    ("engine.options.static_graph", {"engine": "ddp", "options": {"static_graph": True}}),
]


@pytest.mark.parametrize(("key", "changes"), REFUSED, ids=lambda one: one if isinstance(one, str) else "")
def test_refused_by_its_key(key: str, changes: dict[str, Any]) -> None:
    settings = {"engine": "fsdp2", "ranks": 2, **changes}
    job = job_of(settings.pop("engine"), settings.pop("ranks"), **settings)
    with pytest.raises(Unsupported) as caught:
        refuse_what_is_not_run(job)
    assert caught.value.key == key


def test_what_is_run_passes() -> None:
    for engine, ranks in (("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp2", 2), ("deepspeed", 2)):
        assert refuse_what_is_not_run(job_of(engine, ranks)) is None
