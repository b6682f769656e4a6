"""The registry of engine options."""

from __future__ import annotations

import pytest

from ullage.job.engine import ENGINES, STACKS
from ullage.job.options import OPTIONS, Status, find_option, not_modelled, read_options


def test_no_engine_has_two_options_of_one_name():
    for name, options in OPTIONS.items():
        for engine in ENGINES:
            for stack in STACKS:
                mine = [option for option in options if option.belongs_to(engine, stack)]
                # A word that everyone uses may be known more closely to one engine: the first table is taken.
                assert len({option.status for option in mine}) <= 1, (name, engine, stack)


def test_every_owner_exists():
    for options in OPTIONS.values():
        for option in options:
            assert option.engines <= set(ENGINES)
            assert option.stacks <= set(STACKS)


def test_values_come_in_one_spelling():
    options = read_options({"reduce_bucket_size": "5e8"}, "engine.options", "deepspeed", "transformers")
    assert options["reduce_bucket_size"] == 500_000_000
    options = read_options({"reduce_dtype": "float32"}, "engine.options", "fsdp2", "transformers")
    assert options["reduce_dtype"] == "fp32"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fp8_recipe": "mxfp8"}, ("fp8_recipe",)),
        ({"use_distributed_optimizer": True}, ()),
        ({"tp_comm_overlap": False}, ()),
        ({"cuda_graph_impl": "none"}, ()),
        ({"persist_layer_norm": False}, ("persist_layer_norm",)),
        ({"calculate_per_token_loss": True}, ()),
    ],
)
def test_what_is_not_modelled(options: dict[str, object], expected: tuple[str, ...]):
    assert not_modelled(options, "megatron", "megatron") == expected


def test_the_statuses_are_all_in_use():
    assert {option.status for options in OPTIONS.values() for option in options} == set(Status)


def test_megatron_arguments_under_other_engines_with_megatron_layers():
    assert find_option("masked_softmax_fusion", "deepspeed", "megatron") is not None
    assert find_option("masked_softmax_fusion", "deepspeed", "transformers") is None
