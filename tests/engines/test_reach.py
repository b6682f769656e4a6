"""No engine accepts a key that its account ignores."""

from __future__ import annotations

import pytest
from tests.properties.jobs import ENGINES, job

from ullage.api import estimate
from ullage.engines.reach import ADAPTERS, FREEZES
from ullage.errors import Unsupported

LORA = {"rank": 8, "targets": ["q_proj"]}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize(("key", "value"), [("lora", LORA), ("freeze", ["*embed*"])])
def test_what_no_account_reads_is_refused_by_name(engine: dict[str, object], key: str, value: object) -> None:
    if key == "lora" and engine["name"] in ADAPTERS:
        pytest.skip("its account knows adapters")
    if key == "freeze" and engine["name"] in FREEZES:
        pytest.skip("its account knows a part that is frozen")
    with pytest.raises(Unsupported, match=key):
        estimate(job(engine, data={"seq_len": 256}, **{key: value}))


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp1", "fsdp2"])
def test_offload_that_an_engine_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=r"offload\.optimizer"):
        estimate(job({"name": name}, data={"seq_len": 256}, offload={"optimizer": "cpu"}))


@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b", "llama-3.1-8b"])
def test_a_head_whose_gradient_is_made_in_the_forward_is_refused_where_it_would_be_lost(model: str) -> None:
    """torchtitan's chunked loss, of a head that is tied or not: DeepSpeed's flat gradients would miss it."""
    with pytest.raises(Unsupported, match=r"loss = fused-linear"):
        estimate(
            job(
                {"name": "deepspeed", "zero_stage": 0},
                model=model,
                stack="torchtitan",
                precision="fp32",
                loss="fused-linear",
                data={"seq_len": 128},
            )
        )


def test_what_stands_against_a_key_is_told() -> None:
    """Not the engine, which knows DoRA, but the base beside it."""
    lora = {**LORA, "base": "nf4", "dora": True}
    with pytest.raises(Unsupported, match=r"in stack transformers beside a base in nf4"):
        estimate(job({"name": "single"}, data={"seq_len": 128}, lora=lora))


def test_sequence_parallelism_is_estimated_where_transformers_code_runs_it() -> None:
    along = {"stack": "transformers", "layout": {"tp": 2, "sp": True}, "data": {"seq_len": 2048}}
    whole = {**along, "layout": {"tp": 2}}
    cut_bytes, whole_bytes = (estimate(job({"name": "fsdp2"}, **keys)).peak.allocated_bytes for keys in (along, whole))
    assert cut_bytes < whole_bytes
    for engine, changes in (("fsdp2", {"stack": "liger"}), ("deepspeed", {}), ("fsdp2", {"model": "gemma-2-2b"})):
        with pytest.raises(Unsupported, match=r"layout\.sp"):
            estimate(job({"name": engine}, **{**along, **changes}))
