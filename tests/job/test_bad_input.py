"""Whatever is wrong gives one message that names the value, what is allowed, the place and a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ullage.errors import Contradiction, Infeasible, InvalidInput, UllageError, UnknownKey
from ullage.job.read import read_job

WriteJob = Callable[[str], Path]


def message(source: object, *overrides: str, error: type[UllageError] = UllageError) -> str:
    with pytest.raises(error) as caught:
        read_job(source, overrides)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.mark.parametrize(
    ("rest", "error", "parts"),
    [
        (
            "layout: {tp: 3}",
            Infeasible,
            ["layout.tp = 3: 32 attention heads do not divide by 3; use 1, 2, 4, 8, 16 or 32"],
        ),
        ("layout:\n  tpp: 2", UnknownKey, ["layout.tpp = 2", "did you mean tp?", "job.yaml, line 4"]),
        ("layuot: {tp: 2}", UnknownKey, ["layuot", "did you mean layout?", "line 3"]),
        ("data: {seq_len: -1}", InvalidInput, ["data.seq_len = -1", "at least 1", "line 3"]),
        ("data: {micro_batch: 0}", InvalidInput, ["data.micro_batch = 0", "at least 1"]),
        ("data: {seq_len: 4.5}", InvalidInput, ["data.seq_len = 4.5", "whole"]),
        ("data: {seq_len: 1e400}", InvalidInput, ["data.seq_len", "whole"]),
        ("layout: {tp: true}", InvalidInput, ["layout.tp = true", "whole number"]),
        ("layout: [1]", InvalidInput, ["layout = [1]", "is no mapping"]),
        ("layout: {dp: 4}", Infeasible, ["layout.dp = 4", "8 GPUs", "use 8, or leave dp out"]),
        ("layout: {cp: 16}", Infeasible, ["layout.cp = 16", "8 GPUs"]),
        ("layout: {sp: true}", Contradiction, ["layout.sp = true", "tp is 1", "set tp"]),
        ("layout: {cp: 8}\ndata: {seq_len: 1000}", Infeasible, ["layout.cp = 8", "992 or 1008"]),
        (
            "layout: {cp_kind: ulyses}",
            InvalidInput,
            ["layout.cp_kind", "ring, ulysses, allgather", "did you mean ulysses?"],
        ),
        (
            "layout: {cp: 2, cp_kind: ulysses, tp: 4}\nengine: {name: megatron}\ndata: {seq_len: 63}",
            Infeasible,
            ["seq_len"],
        ),
        ("layout: {pp: 8, vpp: 2}", Contradiction, ["layout.vpp = 2", "1f1b", "use schedule interleaved-1f1b"]),
        ("layout: {pp: 8, schedule: interleaved-1f1b}", Contradiction, ["layout.vpp = 1", "set vpp to 2"]),
        ("layout: {vpp: 2}", Contradiction, ["layout.vpp = 2", "pp is 1"]),
        ("layout: {schedule: gpipe}", Contradiction, ["layout.schedule = gpipe", "pp is 1"]),
        ("layout: {pp: 2, pp_split: [15, 16]}", Infeasible, ["adds up to 31", "32 layers", "[16, 16]"]),
        ("layout: {pp: 2, pp_split: [10, 10, 12]}", Infeasible, ["3 entries", "2 stages"]),
        ("layout: {pp: 2, pp_split: uneven}", InvalidInput, ["layout.pp_split = uneven", "even"]),
        ("layout: {ep: 2}", Infeasible, ["layout.ep = 2", "no experts"]),
        (
            "layout: {pp: 4, vpp: 2, schedule: interleaved-1f1b}\nengine: {name: megatron}\ndata: {grad_accum: 6}",
            Infeasible,
            ["data.grad_accum = 6", "groups of 4", "use 4 or 8"],
        ),
        ("engine: {name: fsdp3}", InvalidInput, ["engine.name = fsdp3", "did you mean fsdp2?"]),
        ("engine: fsdp2", InvalidInput, ["engine = fsdp2", "write engine: {name: fsdp2}"]),
        ("engine: {zero_stage: 1}", InvalidInput, ["engine.zero_stage = 1", "2 or 3"]),
        ("engine: {name: ddp, zero_stage: 3}", InvalidInput, ["engine.zero_stage = 3", "allowed: 0"]),
        ("engine: {name: ddp}\nlayout: {tp: 2}", Contradiction, ["layout.tp = 2", "ddp has no tp"]),
        ("engine: {name: single}", Infeasible, ["8 GPUs", "single uses one"]),
        ("engine: {name: deepspeed, zero_stage: 2}\nlayout: {pp: 2}", Infeasible, ["engine.zero_stage = 2", "0 or 1"]),
        ("engine: {shard_group: 3}", Infeasible, ["engine.shard_group = 3", "1, 2, 4 or 8"]),
        (
            "engine: {name: deepspeed, options: {reduce_bucket_sise: 5e8}}",
            UnknownKey,
            ["engine.options.reduce_bucket_sise = 500000000", "did you mean reduce_bucket_size?"],
        ),
        (
            "engine: {options: {reduce_bucket_size: 5e8}}",
            Contradiction,
            ["engine.options.reduce_bucket_size", "option of engine deepspeed", "fsdp2"],
        ),
        ("engine: {name: deepspeed, options: {overlap_comm: 1}}", InvalidInput, ["overlap_comm = 1", "true or false"]),
        (
            "engine: {zero_stage: 3, options: {reshard_after_forward: never}}",
            Contradiction,
            ["reshard_after_forward = never", "engine.zero_stage = 3"],
        ),
        (
            "engine: {name: megatron, zero_stage: 0, options: {use_distributed_optimizer: true}}",
            Contradiction,
            ["use_distributed_optimizer = true", "engine.zero_stage = 0"],
        ),
        ("engine: {options: {lora_dtype: fp32}}", Contradiction, ["lora_dtype", "lora = null"]),
        ("precision: bf16mixed", InvalidInput, ["precision = bf16mixed", "did you mean bf16-mixed?"]),
        ("precision: {params: int3}", InvalidInput, ["precision.params = int3", "fp32, bf16, fp16"]),
        ("precision: {fp8_params: true}", Contradiction, ["precision.fp8_params", "precision.compute"]),
        ("optimizer: adamw8bit", InvalidInput, ["optimizer = adamw8bit", "did you mean adamw-8bit?"]),
        ("optimizer: {name: adamw-8bit, state: fp32}", Contradiction, ["optimizer.state = fp32", "adamw-8bit"]),
        ("recompute: ful", InvalidInput, ["recompute = ful", "did you mean full?"]),
        ("recompute: {every: 2, layers: 3}", InvalidInput, ["recompute", "{every: 2}, {layers: 12}"]),
        ("loss: {kind: full, chunks: 3}", Contradiction, ["loss.chunks = 3", "has no chunks"]),
        ("offload: {params: cpu}", Contradiction, ["offload.params = cpu", "offload.optimizer: cpu"]),
        ("offload: {optimizer: nvme}", Contradiction, ["offload.optimizer = nvme", "deepspeed"]),
        ("lora: {rank: 0}", InvalidInput, ["lora.rank = 0", "at least 1"]),
        ("lora: {dropout: 2}", InvalidInput, ["lora.dropout = 2", "from 0 to 1"]),
        ("lora: {targets: q_proj}", InvalidInput, ["lora.targets = q_proj", "all-linear"]),
        ("freeze: layers", InvalidInput, ["freeze = layers", "[a, b, ...]"]),
        ("compile: yes", InvalidInput, ["compile = yes", "true or false"]),
        ("schema: 2", InvalidInput, ["schema = 2", "allowed: 1"]),
        ("data: {global_batch: 12}", Contradiction, ["data.global_batch = 12", "multiples of 8", "use 8 or 16"]),
        ("data: {global_batch: 8, grad_accum: 1}", Contradiction, ["data.global_batch", "data.grad_accum"]),
        ("data: {seq_len_mean: 5000}", Contradiction, ["data.seq_len_mean = 5000", "4096"]),
        ("engine: {options: {optimizer_in_bwd: true}}", Contradiction, ["grad_clip = true", "set grad_clip: false"]),
        (
            "engine: {name: ddp, options: {reduce_in_place: true, bucket_cap_mb: 10}}",
            Contradiction,
            ["engine.options.bucket_cap_mb = 10", "reduce_in_place has none", "leave one of them out"],
        ),
        (
            "engine: {name: ddp, options: {cast_once: true}}\nprecision: fp32",
            Contradiction,
            ["precision = fp32", "nothing is cast", "leave engine.options.cast_once out"],
        ),
        (
            "engine: {name: ddp, options: {cast_once: true}}\nlora: {rank: 8}",
            Contradiction,
            ["lora = set", "adapters cast for themselves"],
        ),
        ("stack: vllm", InvalidInput, ["stack = vllm", "transformers"]),
        ("stack: transformers\nengine: {name: megatron}", Contradiction, ["stack = transformers", "Megatron"]),
    ],
)
def test_a_wrong_value(write_job: WriteJob, rest: str, error: type[UllageError], parts: list[str]):
    text = message(write_job(rest), error=error)
    assert "job.yaml" in text
    for part in parts:
        assert part in text, text


def test_the_example_of_the_style_guide(write_job: WriteJob):
    path = write_job("data:\n  seq_len: 4096\nlayout:\n  dp: 1\n  pp: 1\n  cp: 1\n  tp: 3")
    wanted = f"layout.tp = 3: 32 attention heads do not divide by 3; use 1, 2, 4, 8, 16 or 32 ({path}, line 9)"
    assert message(path) == wanted


def test_missing_keys_say_what_they_hold(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("modle: llama-3.1-8b\ncluster: 8xH100-SXM-80GB\n")
    assert "model: is missing; allowed: a catalogue name" in message(path)
    assert "modle looks like it" in message(path)


def test_place_of_a_toml_key(tmp_path: Path, minimal):
    path = tmp_path / "job.toml"
    path.write_text('cluster = "8xH100-SXM-80GB"\nmodel = "llama-3.1-8b"\n[layout]\n# three\ntp = 3\n')
    assert "job.toml, line 5" in message(path)


def test_place_of_a_json_key(tmp_path: Path, minimal):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(minimal(layout={"tp": 3}), indent=1))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if '"tp"' in text)
    assert f"job.json, line {line}" in message(path)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("layout.tp", ["is no assignment", "KEY=VALUE"]),
        ("layout..tp=2", ["is no assignment"]),
        ("layout.tp=[1", ["is no valid YAML", "--set layout.tp=[1"]),
        ("layout.tp=3", ["layout.tp = 3", "--set layout.tp=3"]),
        ("precision.params=bf16", ["precision = bf16-mixed", "is no mapping", "--set 'precision={...}'"]),
        ("layuot.tp=2", ["layuot", "did you mean layout?", "--set layuot.tp=2"]),
    ],
)
def test_a_wrong_override(write_job: WriteJob, override: str, parts: list[str]):
    text = message(write_job("precision: bf16-mixed"), override)
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("job.yaml", b"", ["is empty", "model: llama-3.1-8b"]),
        ("job.yaml", b"# nothing\n", ["is empty"]),
        ("job.json", b"", ["is empty"]),
        ("job.toml", b"", ["is empty"]),
        ("job.yaml", b"- a\n- b\n", ["a list at the top"]),
        ("job.json", b"[1, 2]", ["a list at the top"]),
        ("job.yaml", b"llama", ["only 'llama' at the top"]),
        ("job.json", b'{"model": "llama-3.1-8b", "clus', ["no valid JSON", "truncated", "line 1"]),
        ("job.json", b'{"model": "a", "model": "b"}', ["model", "written twice"]),
        ("job.json", b'{"grad_clip": NaN}', ["NaN", "finite"]),
        ("job.json", b'{"a":' * 100_000, ["nested too deep"]),
        ("job.json", b'{"data": ' + b"9" * 5000 + b"}", ["no valid JSON"]),
        ("job.toml", b"model = ", ["no valid TOML", "end of document"]),
        ("job.yaml", b"model: a\nmodel: b\n", ["model", "first time in line 1", "line 2"]),
        ("job.yaml", b"model: [a\ncluster: b\n", ["no valid YAML", "line 2"]),
        ("job.yaml", b"model: a\n---\nmodel: b\n", ["a second document"]),
        ("job.yaml", b"model: !!python/object:os.system ls\n", ["python/object"]),
        ("job.yaml", b"model: &a [*a]\n", ["*a"]),
        ("job.yaml", b"model: " + b"[" * 5000, ["nest"]),
        ("job.yaml", b"\x7fELF\x00\x01\x02\xff", ["no text file"]),
        ("job.yaml", b"model\x00: a", ["binary"]),
        ("job.yaml", b"? [a, b]\n: c\n", ["a key must be a plain word"]),
    ],
)
def test_a_wrong_file(tmp_path: Path, name: str, content: bytes, parts: list[str]):
    path = tmp_path / name
    path.write_bytes(content)
    text = message(path, error=InvalidInput)
    assert name in text
    for part in parts:
        assert part in text, text


def test_aliases_that_explode(tmp_path: Path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(levels))
    assert "aliases written out" in message(path, error=InvalidInput)


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path):
    path = tmp_path / "job.yaml"
    with path.open("wb") as file:
        file.truncate(200 * 10**6)
    text = message(path, error=InvalidInput)
    assert "190.73 MiB" in text
    assert "at most 1.00 MiB" in text


def test_no_such_file_and_a_directory(tmp_path: Path):
    assert "no such file" in message(tmp_path / "nothing.yaml", error=InvalidInput)
    assert "is a directory" in message(tmp_path, error=InvalidInput)


def test_no_permission(write_job: WriteJob, monkeypatch: pytest.MonkeyPatch):
    path = write_job("")

    def refuse(*args: object, **keys: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything, so chmod would prove nothing
    assert "no permission to read it" in message(path, error=InvalidInput)
