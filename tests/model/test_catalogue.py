"""Which model is meant: names, ids, paths, mappings, changes; and each way to get it wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ullage.errors import InvalidInput, UllageError, UnknownKey, UnknownName, Unsupported
from ullage.job.read import read_job
from ullage.model import catalogue
from ullage.model.build import graph
from ullage.model.catalogue import entry, model_config, names

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}


def message(spec: object, error: type[UllageError] = UllageError, base_dir: Path | None = None) -> str:
    with pytest.raises(error) as caught:
        model_config(spec, base_dir)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/meta-llama-3.1-8b-instruct",
        "llama_3.1_8b",
    ],
)
def test_spellings_of_one_model(name: str) -> None:
    config = model_config(name)
    assert config.name == "llama-3.1-8b"
    assert config == model_config("llama-3.1-8b")


def test_names_are_short_and_sorted() -> None:
    assert list(names()) == sorted(names())
    assert {"llama-3.1-405b", "qwen2.5-7b", "deepseek-v3", "mixtral-8x7b", "gpt2", "gpt-oss-20b"} <= set(names())
    for name in names():
        assert name == name.lower()
        assert entry(name).hugging_face_id.count("/") == 1
        assert entry(name).source


def test_every_spelling_means_one_model() -> None:
    spelled = [spelling for name in names() for spelling in (entry(name).hugging_face_id, *entry(name).also)]
    assert len({spelling.lower() for spelling in spelled}) == len(spelled)


def test_one_file_is_read_for_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = catalogue.read_config
    monkeypatch.setattr(catalogue, "read_config", lambda path: read.append(path.name) or original(path))
    model_config("mixtral-8x7b")
    assert read == ["mixtral-8x7b.json"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama-3.1-9b", ["llama-3.1-9b", "nearest is llama-3.1-8b", "config.json"]),
        ("somebody/Llama-2-70b-chat", ["nearest is llama-2-70b", "config.json", "ullage models"]),
        ("nobody/nothing-like-it", ["config.json"]),
        ("", ["a catalogue name"]),
        ("llama\0", ["not in the catalogue"]),
        ("x" * 5000, ["not in the catalogue"]),
    ],
)
def test_an_unknown_name(name: str, parts: list[str]) -> None:
    text = message(name, InvalidInput if not name else UnknownName)
    assert all(part in text for part in parts)
    assert text.isprintable()


def test_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    keys = model_config(LLAMA).keys
    assert model_config(str(folder)).keys == keys
    assert model_config(str(folder / "config.json")).keys == keys
    assert model_config("checkpoint", tmp_path).keys == keys
    assert model_config("./checkpoint/config.json", tmp_path).keys == keys


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["is empty"]),
        (b"[1, 2]", ["a list"]),
        (b'"llama"', ["llama", "not keys"]),
        (b'{"model_type": "llama", "hidden_si', ["no valid JSON", "truncated", "line 1"]),
        (b'{"model_type": "llama",}', ["no valid JSON"]),
        (b"\x80\x02}q\x00", ["no text"]),
        (b'{"model_type": "lla\x00ma"}', ["binary"]),
        (b'{"hidden_size": 1, "hidden_size": 2}', ["hidden_size", "written twice"]),
        (b"[" * 100_000, ["nested too deep"]),
        (b'{"a": ' * 50 + b"1" + b"}" * 50, ["nested deeper"]),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", ["too long"]),
        (b" " * (5 << 20), ["longer than 4.00 MiB"]),
        (b"{}", ["model.model_type", "is missing"]),
        (b'{"model_type": "llama", "hidden_size": 0}', ["model.hidden_size = 0"]),
    ],
)
def test_a_bad_file(content: bytes, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    text = message(str(path), InvalidInput)
    assert all(part in text for part in [*parts, "config.json"]), text


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in message(str(tmp_path / "none.json"), InvalidInput)
    assert "holds no config.json" in message(str(tmp_path), InvalidInput)
    closed = tmp_path / "closed.json"
    closed.write_text(json.dumps(LLAMA))
    closed.chmod(0)
    if not os.access(closed, os.R_OK):
        assert "no permission" in message(str(closed), InvalidInput)


def test_changes_to_a_model() -> None:
    small = model_config({"base": "llama-3.1-8b", "num_hidden_layers": 12})
    assert graph(small).layers == 12
    assert small.keys == model_config({**model_config("llama-3.1-8b").keys, "num_hidden_layers": 12}).keys
    # a key that the base leaves to its default
    assert graph(model_config({"base": "llama-3.1-8b", "head_dim": 64})).size("head_dim") == 64
    # entries per layer are cut with the layers
    assert graph(model_config({"base": "gpt-oss-20b", "num_hidden_layers": 12})).layers == 12


@pytest.mark.parametrize(
    ("spec", "error", "parts"),
    [
        ({"base": "llama-3.1-8b", "num_layers": 12}, UnknownKey, ["model.num_layers", "num_hidden_layers?"]),
        ({"base": "llama-3.1-8b", "n_experts": 8}, UnknownKey, ["model.n_experts"]),
        ({"base": "llama-3.1-8"}, UnknownName, ["nearest is llama-3.1-8b"]),
        ({"base": 8}, InvalidInput, ["model.base = 8"]),
        ({"base": "gpt-oss-20b", "num_hidden_layers": 36}, InvalidInput, ["layer_types", "24 entries", "36"]),
        (LLAMA | {"num_key_value_head": 2}, UnknownKey, ["num_key_value_heads?"]),
        (LLAMA | {"num_key_value_heads": 3}, InvalidInput, ["num_key_value_heads = 3", "a divisor of 4"]),
        ({"model_type": "llama", "hiden_size": 64}, InvalidInput, ["model.hidden_size: is missing", "hiden_size"]),
        (LLAMA | {"hidden_act": "gleu"}, InvalidInput, ["gleu", "gelu?"]),
        (LLAMA | {"tokens": {1, 2}}, InvalidInput, ["model.tokens", "set"]),
        ({}, InvalidInput, ["model_type", "gpt"]),
        (7, InvalidInput, ["7", "a catalogue name"]),
    ],
)
def test_a_wrong_mapping(spec: object, error: type[UllageError], parts: list[str]) -> None:
    text = message(spec, error)
    assert all(part in text for part in parts), text


def test_what_is_no_architecture_is_tolerated() -> None:
    other = {
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "quantization_config": {"bits": 4},
        "use_cache": True,
    }
    assert graph(model_config(LLAMA | other)).parameter_count() == graph(model_config(LLAMA)).parameter_count()


def test_an_unsupported_type_says_what_would_do() -> None:
    text = message({"model_type": "mixtrall"}, Unsupported)
    for part in ("mixtrall", "is mixtral meant?", "model_type: gpt", "num_attention_heads", "qwen3_moe"):
        assert part in text
    assert "gpt" in message({"model_type": "mamba2"}, Unsupported)
    message({"model_type": "../llama"}, Unsupported)
    message({"model_type": ["llama"]}, Unsupported)


def test_the_text_part_of_a_multimodal_model() -> None:
    keys = {
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": True,
    }
    config = model_config(keys)
    assert config.model_type == "llama"
    assert "text part" in config.name
    assert graph(config).tied
    assert config.beside == ("vision_config",)
    text = {**LLAMA, "model_type": "qwen2_5_vl_text", "num_key_value_heads": 1}
    flat = {**text, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 8}}  # as Qwen wrote it
    for keys in (flat, {"model_type": "qwen2_5_vl", "text_config": text}):
        config = model_config(keys)
        assert config.model_type == "qwen2_5_vl_text"
        assert "text part" in config.name
    assert "multimodal" in message({"model_type": "x_vl", "text_config": {"model_type": "x"}}, Unsupported)


QWEN2 = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        # Qwen/Qwen2.5-VL-7B-Instruct's file is flat; its decoder is Qwen2.5-7B's.
        ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, **QWEN2}, 7_615_616_512),
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **QWEN2}}, 7_615_616_512),
        # llava-hf/llava-1.5-7b-hf leaves Llama's sizes to its class: Llama 2's 6,738,415,616 and 64 rows of two matrices.
        ({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}, 6_738_939_904),
        # mistral-community/pixtral-12b leaves the number of heads to it: Mistral NeMo's sizes.
        (
            {
                "model_type": "llava",
                "text_config": {
                    "model_type": "mistral",
                    "hidden_size": 5120,
                    "head_dim": 128,
                    "num_hidden_layers": 40,
                    "vocab_size": 131072,
                },
            },
            12_247_782_400,
        ),
        # OpenGVLab's InternVL keeps it under llm_config, haotian-liu/LLaVA flat in the file.
        ({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2", **QWEN2}}, 7_615_616_512),
        (
            {"model_type": "llava", "mm_vision_tower": "clip", **{k: v for k, v in LLAMA.items() if k != "model_type"}},
            None,
        ),
    ],
)
def test_decoders_of_multimodal_files(keys: dict[str, object], parameters: int | None) -> None:
    """transformers 5.24.0: a section holds what differs from its class's defaults (configuration_utils.py, to_diff_dict)."""
    config = model_config(keys)
    assert "text part" in config.name
    assert config.beside
    assert graph(config).parameter_count() == (parameters or graph(model_config(LLAMA)).parameter_count())


def test_what_stands_beside_a_decoder_is_told() -> None:
    job = read_job({"schema": 1, "model": {"model_type": "qwen2_vl", **QWEN2}, "cluster": "8xH100-SXM-80GB"})
    assert any("multimodal" in one and "not modelled" in one for one in job.warnings)
