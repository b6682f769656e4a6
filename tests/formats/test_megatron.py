"""Megatron-LM's arguments: its functional tests' configurations against the jobs that were measured with them, and scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.api import check
from ullage.errors import InvalidInput
from ullage.formats import megatron, shell_text
from ullage.formats.complete import document_of
from ullage.formats.convert import read_whole, write_job
from ullage.formats.known import UNKNOWN
from ullage.formats.registry import format_named
from ullage.formats.tree import flat
from ullage.job.read import read_job
from ullage.job.write import job_to_dict
from ullage.model.hf_config import decoder_spec

RECORDS = json.loads((Path(__file__).parent / "data" / "megatron_jobs.json").read_text())

SCRIPT = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
TP=${TP:-2}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 1
)
MODEL_ARGS=(
    --num-layers 32   # as Llama 2
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer
    --vocab-size 31999
    --hidden-dropout 0.0 --attention-dropout 0.0
)
TRAIN="\\
    --micro-batch-size 1 \\
    --global-batch-size 64 \\
    --seq-length 4096 \\
    --bf16 \\
    --data-path $DATA_PATH
"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} $TRAIN \\
    --tensor-model-parallel-size $TP --sequence-parallel
"""


def as_yaml(arguments: dict[str, object]) -> str:
    return "MODEL_ARGS:\n" + "".join(f"  {flag}: {json.dumps(value)}\n" for flag, value in arguments.items())


def as_script(arguments: dict[str, object]) -> str:
    lines = []
    for flag, value in arguments.items():
        if value is not False:
            lines.append(flag if value is True else f"{flag} '{value}'" if "(" in str(value) else f"{flag} {value}")
    return "torchrun pretrain_gpt.py \\\n  " + " \\\n  ".join(lines) + "\n"


@pytest.mark.parametrize("form", [as_yaml, as_script])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["source"].split("/")[-2])
def test_arguments_say_the_job_that_was_measured_with_them(record, form) -> None:
    from dataclasses import replace

    reading = megatron.read(form(record["arguments"]), "args")
    reading = replace(reading, keys={**reading.keys, "cluster": record["job"]["cluster"]})
    document, findings = document_of(reading)
    assert not findings
    found, wanted = read_job(document), read_job(record["job"])
    assert decoder_spec(found.model) == decoder_spec(wanted.model)
    theirs, ours = flat(job_to_dict(found), ""), flat(job_to_dict(wanted), "")
    for key, value in ours.items():
        if key[0] in ("model", "stack_version") or key[:2] == ("engine", "options"):
            continue
        assert theirs.get(key) == value, key
    for name, value in wanted.engine.options.items():
        if name in found.engine.options:  # a record writes Megatron's defaults out, a command line does not
            assert found.engine.options[name] == value, name


def test_a_script() -> None:
    tree = shell_text.parse(SCRIPT, "train.sh")
    assert tree.leaves["--tensor-model-parallel-size",] == 2
    assert tree.leaves["--nproc_per_node",] == 8
    assert tree.leaves["--bf16",] is True
    assert tree.leaves["--data-path",] == "$DATA_PATH"
    assert tree.lines["--num-layers",] == 10


def test_a_script_s_job(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    reading, job = read_whole(path, ("cluster=8xH100-SXM-80GB",))
    assert (job.layout.tp, job.layout.dp, job.layout.sp) == (2, 4, True)
    assert (job.data.micro_batch, job.data.grad_accum) == (1, 16)
    assert decoder_spec(job.model).vocab == 32000
    left = {one.key: one.why for one in reading.leftovers}
    assert left["--data-path"] == "a variable that is not set in this text"


def test_an_edit_keeps_the_script(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--micro-batch-size 1", "--micro-batch-size 4"))
    found = check(path, ("cluster=8xA100-SXM-80GB",))
    assert found.estimate.verdict != "fits"
    assert found.edit is not None
    changed = [line for line in found.edit.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 1 <= len(changed) <= 5


FLAGS = sorted(flag for flag, kind in shell_text.kinds().items() if kind == "value")


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(FLAGS), st.integers(0, 99), min_size=1, max_size=6),
    st.sampled_from(FLAGS),
    st.data(),
)
def test_put_and_drop(arguments, flag, data) -> None:
    """In an array, on continued lines, and on one line."""
    pairs = [f"{name} {value}" for name, value in arguments.items()]
    for text in (
        "A=(\n    " + "\n    ".join(pairs) + "\n)\n",
        "torchrun x.py \\\n  " + " \\\n  ".join(pairs) + "\n",
        "torchrun x.py " + " ".join(pairs) + "\n",
    ):
        before = {(name,): value for name, value in arguments.items()}
        assert dict(shell_text.parse(text, "").leaves) == before
        assert dict(shell_text.parse(shell_text.put(text, (flag,), 7), "").leaves) == {**before, (flag,): 7}
        gone = data.draw(st.sampled_from(sorted(arguments)))
        if len(arguments) > 1:
            del before[gone,]
            assert dict(shell_text.parse(shell_text.drop(text, (gone,)), "").leaves) == before


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2-xl", "qwen2.5-7b"])
def test_any_model_s_architecture_survives(name: str) -> None:
    job = read_job(
        {"model": name, "cluster": "8xH100-SXM-80GB", "engine": {"name": "megatron"}, "data": {"seq_len": 1024}}
    )
    text = write_job(job, format_named("megatron")).text
    document, _ = document_of(_on(megatron.read(text, "args"), "8xH100-SXM-80GB"))
    back, wanted = decoder_spec(read_job(document).model), decoder_spec(job.model)
    for field in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "glu",
        "norm",
        "tied",
        "positions",
        "latent",
    ):
        if field == "latent" and wanted.latent is not None:
            assert back.latent.kv_rank == wanted.latent.kv_rank
            continue
        if field == "head_dim" and wanted.latent is not None:
            continue  # a part of it, said by the latent dimensions
        assert getattr(back, field) == getattr(wanted, field), field


def _on(reading, cluster: str):
    from dataclasses import replace

    return replace(reading, keys={**reading.keys, "cluster": cluster})


def test_every_argument_that_is_written_is_one_that_megatron_publishes() -> None:
    known = shell_text.kinds()
    for record in RECORDS:
        for path in megatron.leaves(read_job(record["job"])):
            assert path[0] in known, path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("--num-layers many --hidden-size 8", ["--num-layers = many", "line 1"]),
        ("--num-layers 2 --hidden-size 8 \\\n--clip-grad x", ["--clip-grad = x", "line 2"]),
        ("--num-layers 2 --hidden-size 8 --recompute-granularity sometimes", ["sometimes", "full, selective"]),
        ("echo hello", ["holds no arguments"]),
    ],
)
def test_bad_arguments(text: str, parts: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        megatron.read(text, "args.sh")
    for part in parts:
        assert part in str(error.value)


MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --seq-length 128 "
    "--vocab-file gpt2-vocab.json "
)


def said(text: str) -> dict[str, object]:
    reading = megatron.read(MODEL + text, "run.sh")
    return {".".join(path): value for path, value in flat(dict(reading.keys), "run.sh").items()}


@pytest.mark.parametrize(
    ("text", "recompute"),
    [
        ("--checkpoint-activations", "full"),
        ("--checkpoint-activations --checkpoint-num-layers 2", "full"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 1", 1),
        ("--recompute-granularity selective", "selective"),
        ("", None),
    ],
)
def test_old_forms_of_recomputation(text: str, recompute: object) -> None:
    """megatron/arguments.py of 2021 (bigscience-workshop/Megatron-DeepSpeed still has it) and of v2.7."""
    found = said(text)
    assert found.get("recompute", found.get("recompute.layers")) == recompute
    old = [one for one in megatron.read(MODEL + text, "run.sh").findings if "old form" in one.what]
    assert bool(old) == ("checkpoint" in text)


def test_a_fork_with_deepspeed_s_engine_is_told() -> None:
    """Megatron-DeepSpeed: none of its own arguments is called a mistake, and its engine is not passed over in silence."""
    reading = megatron.read(MODEL + "--deepspeed --zero-stage 1 --deepspeed_config ds.json --num-experts 1", "run.sh")
    assert any(one.key == "--deepspeed" and "Megatron-LM's own" in one.what for one in reading.findings)
    assert not [one for one in reading.leftovers if one.why.startswith(UNKNOWN)]
    model = reading.keys["model"]
    assert isinstance(model, dict)
    assert "num_experts" not in model


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("--padded-vocab-size 152064 --tensor-model-parallel-size 4", "model.vocab_size", 152064),
        ("--tensor-model-parallel-size $TP", "model.vocab_size", 50304),
        ("--position-embedding-type rotary", "model.position", "rope"),
        ("--position-embedding-type alibi", "model.position", "alibi"),
        ("--normalization rmsnorm", "model.norm", "rmsnorm"),
        ("--spec my.module get_spec", "engine.options.spec", "my.module get_spec"),
    ],
)
def test_words_of_forks(text: str, key: str, value: object) -> None:
    """alibaba/Pai-Megatron-Patch, Megatron-DeepSpeed and THUDM/slime write so; 50304: 50257 of GPT-2, to a multiple of 128."""
    assert said(text)[key] == value


def test_who_says_the_vocabulary_is_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(MODEL.replace("--vocab-file gpt2-vocab.json", "--tokenizer-type HuggingFaceTokenizer"))
    with pytest.raises(
        InvalidInput, match=r"model.vocab_size: is missing; the tokenizer's files say it; give it: --set"
    ):
        check(path, ("cluster=1xA100-SXM-80GB",))


def test_unknown_arguments_are_left_over_with_the_nearest_name() -> None:
    left = {
        one.key: one.why for one in megatron.read("--num-layers 2 --hidden-size 8 --micro-batchsize 4", "a").leftovers
    }
    assert "did you mean --micro-batch-size?" in left["--micro-batchsize"]
