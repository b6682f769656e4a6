"""torchtitan's TOML: its own files read, and what is written held against its own parser (0.2.2)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.jobs import some, written

from ullage.api import check
from ullage.errors import InvalidInput
from ullage.formats import toml_text, torchtitan
from ullage.formats.convert import read_whole
from ullage.formats.known import names
from ullage.formats.tree import dotted, nested

# From torchtitan/models/llama3/train_configs/llama3_405b.toml, pytorch/torchtitan@238fa995.
TODAY = """\
# torchtitan Config.toml
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 8e-5
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0  # grad norm clipping
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full" # ["none", "selective", "full"]
[compile]
enable=true
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""

# From torchtitan's train_configs/llama3_8b.toml of October 2024, pytorch/torchtitan@9ccc1610.
OF_2024 = """\
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
seq_len = 8192
max_norm = 1.0
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = false
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = 'selective'  # ['none', 'selective', 'full']
selective_ac_option = 'op'
[float8]
enable_float8_linear = false
"""

# The configuration alone: the package's own __init__ loads kernels that need a GPU's triton.
PARSER = """
import importlib.util, json, sys, types
spec = importlib.util.find_spec("torchtitan")
if spec is None:
    sys.exit("No module named 'torchtitan'")
sys.modules["torchtitan"] = package = types.ModuleType("torchtitan")
package.__path__ = list(spec.submodule_search_locations)
from torchtitan.config import ConfigManager
answers = []
for path in json.load(sys.stdin):
    try:
        read = ConfigManager().parse_args(["--job.config_file", path])
        answers.append([read.training.seq_len, read.training.local_batch_size, read.parallelism.tensor_parallel_degree,
                        read.activation_checkpoint.mode, read.compile.enable])
    except BaseException as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


def test_torchtitan_itself_reads_what_is_written(tmp_path: Path) -> None:
    jobs = list(some("fsdp2", 20, "torchtitan"))
    paths = [str(tmp_path / f"{number}.toml") for number in range(len(jobs))]
    for path, job in zip(paths, jobs, strict=True):
        Path(path).write_text(written(job, "torchtitan").text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSER],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'torchtitan'" in done.stderr:
        pytest.skip("torchtitan 0.2.2 is not installed")
    assert done.returncode == 0, done.stderr[-2000:]
    for job, answer in zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True):
        piped = job.layout.pp > 1
        local = job.data.micro_batch * (job.data.grad_accum if piped else 1)
        mode = {"none": "none", "full": "full", "selective": "selective"}[job.recompute.kind]
        compiled = job.compile
        assert answer == [job.data.seq_len, local, job.layout.tp, mode, compiled], answer


def test_keys_are_those_that_torchtitan_publishes() -> None:
    published = set(names("torchtitan"))
    for job in some("fsdp2", 40, "torchtitan"):
        for path in torchtitan.leaves(job):
            assert dotted(path) in published, path


@pytest.mark.parametrize(
    ("text", "cluster", "wanted"),
    [
        (
            TODAY,
            "64x8xH100-SXM-80GB",
            {
                "layout.tp": 8, "layout.dp": 64, "layout.sp": True, "data.micro_batch": 2, "data.grad_accum": 1, "recompute.kind": "full",
                "precision.compute": "fp8", "compile": True, "stack": "torchtitan", "loss.kind": "vocab-parallel",
            },
        ),
        (
            OF_2024,
            "8xH100-SXM-80GB",
            {"layout.dp": 8, "data.micro_batch": 1, "data.seq_len": 8192, "recompute.kind": "selective", "precision.compute": "bf16"},
        ),
    ],
    ids=["today", "of 2024"],
)  # fmt: skip
def test_its_own_files(tmp_path: Path, text: str, cluster: str, wanted: dict[str, object]) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text)
    _, job = read_whole(path, (f"cluster={cluster}",))
    for key, value in wanted.items():
        found: object = job
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


def test_an_edit_is_in_the_file_s_own_layout(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(OF_2024.replace("batch_size = 1", "batch_size = 4"))
    found = check(path, ("cluster=8xA100-SXM-40GB",))
    assert found.estimate.verdict != "fits"
    assert found.edit is not None
    assert "[parallelism]" not in found.edit
    assert "local_batch_size" not in found.edit


NAMES = st.text("abc_", min_size=1, max_size=4)
VALUES = (
    st.booleans() | st.integers(-9, 10**6) | st.text("ab#=\"' ", max_size=6) | st.lists(st.integers(0, 9), max_size=3)
)


@settings(deadline=None)
@given(
    st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, min_size=1, max_size=4), min_size=1, max_size=3),
    NAMES,
    NAMES,
    VALUES,
)
def test_put_and_drop(document, table, name, value) -> None:
    before = {(section, key): one for section, keys in document.items() for key, one in keys.items()}
    text = toml_text.render(before, ("a comment",))
    assert nested(toml_text.parse(text, "").leaves) == document
    after = toml_text.put(text, (table, name), value)
    assert dict(toml_text.parse(after, "").leaves) == {**before, (table, name): value}
    back = dict(toml_text.parse(toml_text.drop(after, (table, name)), "").leaves)
    assert {path: one for path, one in back.items() if one != {}} == {
        path: one for path, one in before.items() if path != (table, name)
    }


def test_an_edit_keeps_comments() -> None:
    text = toml_text.put(TODAY, ("parallelism", "tensor_parallel_degree"), 4)
    assert text == TODAY.replace("tensor_parallel_degree = 8  #", "tensor_parallel_degree = 4  #")
    text = toml_text.put(TODAY, ("activation_checkpoint", "mode"), "none")
    assert text == TODAY.replace('mode = "full" #', 'mode = "none" #')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[training]\nseq_len = \nsteps = 1", ["no valid TOML", "line 2"]),
        ("[training]\nseq_len = 'long'", ["training.seq_len = long", "line 2"]),
        ("[training]\nlocal_batch_size = 0", ["local_batch_size = 0", "line 2"]),
        ("[activation_checkpoint]\nmode = 'sometimes'", ["sometimes", "selective, full"]),
        ("[parallelism]\ntensor_parallel_degree = 2\ntensor_parallel_degree = 4", ["no valid TOML"]),
    ],
)
def test_bad_files(text: str, parts: list[str]) -> None:
    with pytest.raises(InvalidInput) as error:
        torchtitan.read(text, "t.toml")
    for part in parts:
        assert part in str(error.value)


def test_unknown_keys_are_left_over_with_the_nearest_name() -> None:
    left = {
        one.key: one.why for one in torchtitan.read("[training]\nseq_lenn = 4\n[metrics]\nlog_freq = 1", "t").leftovers
    }
    assert "did you mean training.seq_len?" in left["training.seq_lenn"]
    assert "no job says it" in left["metrics.log_freq"]


@pytest.mark.parametrize(
    ("name", "flavor", "model"),
    [
        ("llama2", "7B", "llama-2-7b"),
        ("llama4", "17bx16e", "llama-4-scout-17b-16e"),
        ("gpt_oss", "20b", "gpt-oss-20b"),
        ("gpt_oss", "20B", "gpt-oss-20b"),
    ],
)
def test_flavors_of_other_years(name: str, flavor: str, model: str) -> None:
    """train_configs/llama2_7b.toml of 2024, experiments/llama4 and experiments/gpt_oss of 2025, models/gpt_oss of 0.2.2."""
    reading = torchtitan.read(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n[training]\nseq_len = 128\n', "a.toml")
    assert reading.keys["model"] == model


def test_a_model_that_no_catalogue_has_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[model]\nname = "kimi_linear"\nflavor = "48B"\n[training]\nseq_len = 128\n')
    with pytest.raises(InvalidInput, match=r"model.flavor name none that is known here; give it: --model"):
        check(path, ("cluster=8xH100-SXM-80GB",))


def test_what_steps_in_backward_clips_nothing() -> None:
    """components/optimizer.py: each gradient is gone before clip_grad_norm_ of train.py looks for it."""
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nearly_step_in_backward = true\n[training]\nmax_norm = 1.0\n'
    reading = torchtitan.read(text, "a.toml")
    assert reading.keys["grad_clip"] is False
    assert [one.key for one in reading.findings] == ["training.max_norm"]


def test_a_reduction_in_another_type_is_not_passed_over() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nmixed_precision_reduce = "{}"\n'
    left = {word: torchtitan.read(text.format(word), "a.toml").leftovers for word in ("float32", "bfloat16")}
    assert not left["float32"]
    assert [one.key for one in left["bfloat16"]] == ["training.mixed_precision_reduce"]
