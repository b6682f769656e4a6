"""Parameter counts are exact: those of every published model of the catalogue, and those of transformers' own classes on small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ullage.frozen import FrozenMap
from ullage.model.build import graph
from ullage.model.catalogue import entry, model_config, names
from ullage.model.config import ModelConfig
from ullage.model.count import active_parameter_count, flops_per_token, parameter_count
from ullage.model.hf_config import supported

DATA = Path(__file__).parent / "data"
PUBLISHED = json.loads((DATA / "counts.json").read_text(encoding="utf-8"))["models"]
SMALL = json.loads((DATA / "small_configs.json").read_text(encoding="utf-8"))["models"]


def small(keys: dict[str, object]) -> ModelConfig:
    return ModelConfig(name="small", keys=FrozenMap(keys))


def test_every_model_of_the_catalogue_is_counted() -> None:
    assert set(PUBLISHED) == set(names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model(name: str) -> None:
    expected = PUBLISHED[name]
    counted = parameter_count(graph(model_config(name)))
    assert counted == expected["counted"] == entry(name).parameters
    if expected["match"] == "exact":
        assert counted == expected["published"]
    elif expected["match"] == "rounded":
        assert counted == pytest.approx(expected["published"], rel=0.08)
    else:
        assert expected["difference"]


@pytest.mark.parametrize("model", SMALL, ids=lambda model: model["config"]["model_type"])
def test_against_transformers(model: dict[str, dict[str, object]]) -> None:
    """Biases, tied heads, odd head sizes, dense and sparse layers: whatever config.json can switch."""
    assert graph(small(model["config"])).parameter_count() == model["parameters"]


def test_every_family_is_held_against_something() -> None:
    shown = {entry(name).model_type for name in names()} | {model["config"]["model_type"] for model in SMALL}
    assert set(supported()) - {kind.replace("-", "_") for kind in shown} == {"gpt"}  # ours: test_gpt.py


@pytest.mark.parametrize(
    ("name", "billions", "embedding"),
    [
        ("mixtral-8x7b", 12.9, True),  # arXiv 2401.04088
        ("deepseek-v2", 21.4, True),  # arXiv 2405.04434: 21B
        ("deepseek-v3", 37.6, True),  # arXiv 2412.19437: 37B
        ("qwen3-30b-a3b", 3.35, True),  # arXiv 2505.09388: 3B
        ("qwen3-235b-a22b", 22.2, True),  # arXiv 2505.09388: 22B
        ("qwen1.5-moe-a2.7b", 2.69, True),  # model card: 2.7B
        ("llama-4-maverick-17b-128e", 17.2, True),  # model card: 17B
        ("nemotron-3-nano-30b-a3b", 3.6, True),  # model card: 3.6B, embeddings included
        ("gpt-oss-20b", 3.61, False),  # arXiv 2508.10925, table 1: 3.61B, embedding left out
        ("gpt-oss-120b", 5.13, False),  # the same: 5.13B
    ],
)
def test_published_active_parameters(name: str, billions: float, embedding: bool) -> None:
    model = graph(model_config(name))
    active = active_parameter_count(model)
    if not embedding:
        active -= model.size("vocab") * model.size("hidden")
    assert round(active / 10**9, 2) == pytest.approx(billions, abs=0.06)


def test_a_dense_model_is_all_active() -> None:
    model = graph(model_config("llama-3.1-8b"))
    assert active_parameter_count(model) == parameter_count(model)


def test_flops_of_a_dense_model() -> None:
    """6 x (parameters - embedding - norms) + 12 x layers x hidden x seq_len; a tied head multiplies all the same."""
    llama = graph(model_config("llama-3.1-8b"))
    matmuls = 8030261248 - 128256 * 4096 - (2 * 32 + 1) * 4096
    assert flops_per_token(llama, 8192) == 6 * matmuls + 12 * 32 * 4096 * 8192
    tied = graph(model_config("llama-3.2-1b"))
    assert flops_per_token(tied, 1) == 6 * (1235814400 - (2 * 16 + 1) * 2048) + 12 * 16 * 2048


def test_flops_of_a_window_stop_growing() -> None:
    mistral = graph(model_config("mistral-7b-v0.1"))
    assert flops_per_token(mistral, 4096) == flops_per_token(mistral, 32768)


def test_flops_of_experts_are_those_that_run() -> None:
    keys = model_config("mixtral-8x7b").keys
    one, two = (graph(small({**keys, "num_experts_per_tok": top_k})) for top_k in (1, 2))
    expert = 3 * 4096 * 14336
    assert flops_per_token(two, 1) - flops_per_token(one, 1) == 6 * 32 * expert
