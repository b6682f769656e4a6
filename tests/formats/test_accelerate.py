"""Accelerate's YAML: people's files read, and what is written held against Accelerate's own loader and launcher."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.formats.jobs import some, written

from ullage.api import check
from ullage.errors import InvalidInput
from ullage.formats import accelerate
from ullage.formats.convert import read_file, read_whole
from ullage.formats.known import UNKNOWN

ON = ("model=llama-2-7b",)

PARSER = """
import json, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
answers = []
for path in json.load(sys.stdin):
    try:
        config = load_config_from_file(path)
        args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
        args.nondefault = set()
        args, _, _ = _validate_launch_command(args)
        answers.append([config.distributed_type.value, args.num_processes, args.mixed_precision, args.use_fsdp, args.use_deepspeed,
                        getattr(args, "fsdp_version", None)])
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def test_accelerate_itself_reads_what_is_written(tmp_path: Path) -> None:
    jobs = [job for engine in ("fsdp1", "fsdp2", "ddp", "deepspeed") for job in some(engine, 12)]
    paths = []
    for number, job in enumerate(jobs):
        paths.append(str(tmp_path / f"{number}.yaml"))
        Path(paths[-1]).write_text(written(job, "accelerate").text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSER],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'accelerate'" in done.stderr:
        pytest.skip("accelerate is not installed")
    assert done.returncode == 0, done.stderr
    types = {"fsdp1": "FSDP", "fsdp2": "FSDP", "ddp": "MULTI_GPU", "deepspeed": "DEEPSPEED"}
    for job, answer in zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        engine = job.engine.name
        assert answer[:2] == [types[engine], job.layout.world], answer
        assert answer[3:5] == [engine.startswith("fsdp"), engine == "deepspeed"]
        if engine.startswith("fsdp"):
            assert str(answer[5]) == engine[-1]


@pytest.mark.parametrize(
    ("name", "overrides", "wanted"),
    [
        (
            "trl_1980-accelerate_fsdp.yaml",
            ("cluster=2xA100-SXM-80GB",),
            {
                "engine.name": "fsdp1", "engine.zero_stage": 3, "offload.params": "cpu", "recompute.kind": "full",
                "precision.compute": "bf16", "layout.dp": 2, "compile": True,
            },
        ),
        ("LlamaFactory_2379-accelerate_config.yaml", ("cluster=8xA100",), {"engine.name": "ddp", "precision.compute": "fp16"}),
        (
            "LlamaFactory_3035-accelerate.yaml",
            ("cluster=2xA100-SXM-80GB",),
            {"engine.name": "deepspeed", "engine.zero_stage": 3, "precision.params": "bf16"},
        ),
        (
            "peft_306-accelerate.yaml",
            ("cluster=4xH100-SXM-80GB",),
            {"engine.zero_stage": 3, "offload.params": "cpu", "offload.optimizer": "none", "data.grad_accum": 1},
        ),
    ],
)  # fmt: skip
def test_people_s_files(data: Path, name: str, overrides: tuple[str, ...], wanted: dict[str, object]) -> None:
    overrides = tuple(one.replace("8xA100", "8xA100-SXM-80GB") if one.endswith("8xA100") else one for one in overrides)
    _, job = read_whole(data / name, (*ON, *overrides))
    for key, value in wanted.items():
        found: object = job
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_the_file_that_it_names_is_read_with_it(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "StableAvatar_57-accelerate.yaml", tmp_path / "accelerate.yaml")
    reading = read_file(tmp_path / "accelerate.yaml")
    assert any("is not here" in one.what for one in reading.findings)
    shutil.copy(data / "StableAvatar_57-zero2_offload_cpu.json", tmp_path / "zero2_offload_cpu.json")
    reading, job = read_whole(tmp_path / "accelerate.yaml", (*ON, "cluster=4xA100-SXM-80GB"))
    assert (job.engine.zero_stage, job.offload.optimizer) == (2, "cpu")
    assert any(one.key.endswith("scheduler.type") for one in reading.leftovers)


def test_a_stage_without_parameter_offload(data: Path) -> None:
    found = check(data / "trl_1268-accelerate_ds2.yaml", (*ON, "cluster=8xA100-SXM-80GB"))
    error = next(one for one in found.findings if one.severity == "error")
    assert error.key == "deepspeed_config.offload_param_device"
    assert "-  offload_param_device: cpu" in found.edit


def test_gpus_that_are_not_there(data: Path) -> None:
    with pytest.raises(Exception, match=r"num_processes"):
        read_whole(data / "LlamaFactory_2379-accelerate_config.yaml", (*ON, "cluster=4xA100-SXM-80GB"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num_processes: 8\n", ["distributed_type", "is missing", "FSDP"]),
        ("distributed_type: FSPD\n", ["FSPD", "did you mean FSDP?", "line 1"]),
        ("distributed_type: FSDP\nmixed_precision: bf61\n", ["bf61", "line 2"]),
        ("distributed_type: FSDP\nfsdp_config:\n\tfsdp_version: 2\n", ["no valid YAML", "line 3"]),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULLSHARD\n", ["FULLSHARD", "line 3"]),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: perhaps}\n",
            ["perhaps", "true or false", "line 2"],
        ),
        ("distributed_type: [", ["no valid YAML"]),
    ],
)
def test_bad_files(text: str, parts: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        accelerate.read(text, "a.yaml")
    for part in parts:
        assert part in str(error.value)


def test_unknown_and_unread_keys_are_left_over() -> None:
    text = "distributed_type: FSDP\nnum_proceses: 8\nfsdp_config:\n  fsdp_offload_param: true\ndeepspeed_config:\n  zero_stage: 3\n"
    left = {one.key: one.why for one in accelerate.read(text, "a.yaml").leftovers}
    assert "did you mean num_processes?" in left["num_proceses"]
    assert "fsdp_offload_params" in left["fsdp_config.fsdp_offload_param"]
    assert "does not read this section" in left["deepspeed_config.zero_stage"]


@pytest.mark.parametrize("name", ["MULTI_NPU", "MULTI_XPU", "MULTI_HPU"])
def test_data_parallelism_on_what_is_no_gpu(name: str) -> None:
    """accelerate/utils/dataclasses.py, DistributedType."""
    reading = accelerate.read(f"distributed_type: {name}\nnum_processes: 2\n", "a.yaml")
    assert reading.keys["engine"] == {"name": "ddp"}


def test_an_empty_section_is_no_unknown_key() -> None:
    """configs/accelerate/ddp.yaml of CarperAI/trlx has one of each."""
    text = "distributed_type: MULTI_GPU\ndynamo_config: {}\nmegatron_lm_config: {}\nfsdp_config: {}\nnonsense: {}\n"
    unknown = [one.key for one in accelerate.read(text, "a.yaml").leftovers if one.why.startswith(UNKNOWN)]
    assert unknown == ["nonsense"]


def test_a_file_whose_name_no_file_can_have() -> None:
    text = f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {'9' * 400}.json\n"
    assert any("is not here" in one.what for one in accelerate.read(text, "a.yaml").findings)


def test_an_edit_keeps_order_and_comments(tmp_path: Path) -> None:
    text = """\
# our box
distributed_type: FSDP
mixed_precision: bf16   # not fp16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false  # faster
machine_rank: 0
"""
    path = tmp_path / "a.yaml"
    path.write_text(text)
    found = check(path, ("model=llama-2-7b", "cluster=8xA100-SXM-40GB", "data.seq_len=4096"))
    assert found.estimate.verdict != "fits"
    assert found.edit is not None
    changed = [line for line in found.edit.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert all("fsdp_" in line for line in changed)
    assert 1 <= len(changed) <= 4
