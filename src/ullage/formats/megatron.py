"""Megatron-LM's arguments: a launch script, a fragment of one, or YAML with an argument a line.

Which argument means what: megatron/training/arguments.py at the commit that data/megatron.json names. The architecture becomes a
``model_type: gpt`` mapping (docs/job.md); what has no key of its own in a job goes to engine.options under Megatron's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ullage.errors import InvalidInput
from ullage.formats import shell_text
from ullage.formats.known import UNKNOWN, published
from ullage.formats.megatron_model import model_leaves, read_model
from ullage.formats.megatron_pipeline import pipeline_leaves, read_pipeline
from ullage.formats.megatron_recompute import read_recompute, recompute_leaves
from ullage.formats.reading import Batch, Keys, Reading, lenient_flag, size
from ullage.formats.tree import Leaves, Path
from ullage.job import fields
from ullage.job.job import Job
from ullage.job.options import find_option
from ullage.job.precision import SHORT_NAMES, resolve
from ullage.job.yaml_tree import scalar

NAME = "megatron"
TITLE = "Megatron-LM arguments"
ENGINES = ("megatron",)
SYNTAX = shell_text

CANNOT: Mapping[str, str] = {
    "cluster": "torchrun names the machines",
    "layout.dp": "the GPUs that the other degrees leave",
    "layout.schedule": "Megatron runs 1F1B, interleaved with several chunks a rank",
    "layout.pp_split": "Megatron takes a longer or shorter first and last stage; other splits need --pipeline-model-parallel-layout",
    "layout.cp_kind": "no context parallelism",
    "data.seq_len_mean": "the data set decides",
    "data.padding_mask": "the data set decides",
    "engine.name": "the arguments are Megatron's",
    "engine.shard_group": "--num-distributed-optimizer-instances, which the options hold",
    "engine.options": "Megatron's own default, or no argument of it",
    "engine.zero_stage": "Megatron's distributed optimizer is stage 1; Megatron-FSDP's stages are among the options",
    "stack": "Megatron brings its own layers",
    "stack_version": "the checkout decides",
    "precision": "no arguments for these element types",
    "optimizer": "no argument of Megatron's",
    "recompute": "Megatron recomputes all, blocks of layers, or modules",
    "attention": "--attention-backend chooses",
    "loss": "the loss is vocabulary-parallel",
    "offload": "Megatron offloads by options of its own",
    "lora": "not in Megatron-LM",
    "freeze": "not in Megatron-LM",
    "compile": "not in Megatron-LM",
}

_MARKS = re.compile(
    r"--(num-layers|tensor-model-parallel-size|micro-batch-size|hidden-size|pipeline-model-parallel-size)\b"
)
_YAML_MARKS = re.compile(
    r"^(num-layers|tensor-model-parallel-size|micro-batch-size|hidden-size|transformer-impl|seq-length)\s*:", re.M
)

_DEGREES = {
    "--tensor-model-parallel-size": "layout.tp",
    "--pipeline-model-parallel-size": "layout.pp",
    "--context-parallel-size": "layout.cp",
    "--expert-model-parallel-size": "layout.ep",
    "--expert-tensor-parallel-size": "layout.etp",
}
_OLD = {"--model-parallel-size": "--tensor-model-parallel-size", "--batch-size": "--micro-batch-size"}
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon"}
_CP_KINDS = {"p2p": "ring", "a2a+p2p": "ring", "a2a": "ulysses", "allgather": "allgather", "all_gather": "allgather"}
_LAUNCHER = (
    "nproc-per-node",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
)
_EAGER = ("unfused", "local")
_OFFLOAD, _AWARE = "--optimizer-cpu-offload", "--use-precision-aware-optimizer"
_DEEPSPEED: Path = ("--deepspeed",)
_FORK = (
    "is Megatron-DeepSpeed's: DeepSpeed's engine shards the states there, and what is read here is Megatron-LM's own"
)


def detect(text: str, name: str) -> bool:
    return _MARKS.search(text) is not None or _YAML_MARKS.search(text) is not None


def read(text: str, place: str) -> Reading:
    keys = Keys(shell_text.parse(text, place), place)
    for old, new in _OLD.items():
        if keys.has((old,)):
            keys.find("warning", old, "is the old form", f"write {new}")
    keys.put("engine.name", "megatron")
    fork = keys.has(_DEEPSPEED)
    if fork:
        keys.find("warning", _DEEPSPEED[0], _FORK, "a job file says it: engine.name: deepspeed, stack: megatron")
    _variables(keys)
    _launcher(keys)
    _degrees(keys)
    read_model(keys)
    keys.move(("--seq-length",), "data.seq_len", size)
    _precision(keys)
    _optimizer(keys)
    read_recompute(keys)
    _attention(keys)
    _loss(keys)
    _offload(keys)
    _options(keys)
    batch = Batch(
        micro=_number(keys, "--micro-batch-size") or _number(keys, "--batch-size"),
        whole=_number(keys, "--global-batch-size"),
    )
    keys.rest(_why_in_fork if fork else _why)
    return keys.done(NAME, batch)


def _number(keys: Keys, flag: str) -> tuple[int, Path] | None:
    value = keys.take((flag,), size)
    return None if value is None else (value, (flag,))


def _flag(keys: Keys, flag: str) -> bool:
    return keys.take((flag,), lenient_flag) is True


def _why(path: Path) -> str:
    from ullage.errors import nearest

    known = shell_text.kinds()
    if path[0] in known:
        return "Megatron reads it, and no job says it"
    if not path[0].startswith("--"):
        return "no argument"
    near = nearest(path[0], known)
    return f"{UNKNOWN} Megatron reads" + (f"; did you mean {near}?" if near else "")


def _why_in_fork(path: Path) -> str:
    """What Megatron-LM does not know is the fork's own."""
    why = _why(path)
    return "not Megatron-LM's: the fork may read it, and no job says it" if why.startswith(UNKNOWN) else why


def _variables(keys: Keys) -> None:
    """A value that the text does not set is someone else's."""
    for path, value in keys.tree.leaves.items():
        if any(isinstance(one, str) and "$" in one for one in (value if isinstance(value, list) else [value])):
            keys.leave(path, "a variable that is not set in this text")


def _launcher(keys: Keys) -> None:
    """torchrun's own options say how many GPUs there are."""
    found = {}
    for path in list(keys.tree.leaves):
        name = path[0].removeprefix("--").replace("_", "-")
        if name in _LAUNCHER:
            value = keys.tree.leaves[path]
            if keys.has(path) and isinstance(value, int) and not isinstance(value, bool):
                found[name] = value
            keys.leave(path, "torchrun reads it, and the cluster says it")
    gpus = found.get("nproc-per-node", 0) * found.get("nnodes", 1)
    degrees = [keys.tree.leaves.get((flag,), 1) for flag in list(_DEGREES)[:3]]
    model = 1
    for degree in degrees:
        model *= degree if isinstance(degree, int) else 1
    if gpus and gpus % model == 0:
        path = next(path for path in keys.tree.leaves if path[0].replace("_", "-") == "--nproc-per-node")
        keys.put("layout.dp", gpus // model, path)


def _degrees(keys: Keys) -> None:
    if keys.has(("--model-parallel-size",)):
        keys.move(("--model-parallel-size",), "layout.tp", size)
    for flag, key in _DEGREES.items():
        keys.move((flag,), key, size)
    experts = keys.tree.leaves.get(("--num-experts",))
    if experts is not None and "layout.etp" not in keys.origins and "layout.tp" in keys.origins:
        tp = keys.tree.leaves[keys.origins["layout.tp"]]
        keys.put("layout.etp", tp)  # arguments.py: expert_tensor_parallel_size defaults to tensor_model_parallel_size
    if _flag(keys, "--sequence-parallel") and keys.tree.leaves.get(("--tensor-model-parallel-size",), 1) != 1:
        keys.put("layout.sp", True, ("--sequence-parallel",))  # arguments.py turns it off where tp is 1
    kind = keys.tree.leaves.get(("--cp-comm-type",))
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in _CP_KINDS and "+" not in str(kind):
        keys.raw(("--cp-comm-type",))
        if keys.tree.leaves.get(("--context-parallel-size",), 1) != 1:
            keys.put("layout.cp_kind", _CP_KINDS[str(kind)], ("--cp-comm-type",))
    read_pipeline(keys)


def _precision(keys: Keys) -> None:
    on = {name: _flag(keys, f"--{name}") for name in ("bf16", "fp16")}
    if all(on.values()):
        keys.find(
            "error", "--fp16", "fp16 and bf16 are both on; Megatron refuses that", "keep --bf16", (("--fp16",), None)
        )
    eight = any(keys.tree.leaves.get((flag,)) is not None for flag in ("--fp8-format", "--fp8"))
    if eight and on["bf16"]:
        keys.put("precision", "fp8-mixed", ("--bf16",))
    elif on["bf16"] or on["fp16"]:
        name = "bf16" if on["bf16"] else "fp16"
        keys.put("precision", f"{name}-mixed", (f"--{name}",))
    elif eight:
        gathered = keys.tree.leaves.get(("--fp8-param-gather",)) is True
        types = dict.fromkeys(("params", "grads", "master", "reduce"), "fp32")
        keys.put("precision", {**types, "compute": "fp8", "fp8_params": gathered})
    else:
        keys.put("precision", "fp32")


def _optimizer(keys: Keys) -> None:
    name = keys.tree.leaves.get(("--optimizer",), "adam")
    if name in _OPTIMIZERS:
        keys.raw(("--optimizer",))
        keys.put("optimizer.name", _OPTIMIZERS[str(name)], ("--optimizer",))
    flag = ("--use-distributed-optimizer",)
    fsdp = keys.tree.leaves.get(("--use-megatron-fsdp",)) is True
    if not fsdp:
        keys.put("engine.zero_stage", 1 if _flag(keys, flag[0]) else 0, flag)
    keys.raw(flag)
    clip = keys.take(("--clip-grad",), fields.number())
    if clip is not None:
        keys.put("grad_clip", clip > 0, ("--clip-grad",))
        if clip not in (0, 1):
            keys.put_option("clip_grad", clip, ("--clip-grad",))


def _attention(keys: Keys) -> None:
    path: Path = ("--attention-backend",)
    backend = keys.take(path, fields.text)
    local = keys.tree.leaves.get(("--transformer-impl",)) == "local"
    if backend is not None:
        keys.put_option("attention_backend", backend, path)
    flash = keys.tree.leaves.get(("--use-flash-attn",)) is True
    eager = backend in _EAGER or (local and not flash and backend is None)
    keys.put("attention", "eager" if eager else "flash", path if backend else ("--transformer-impl",))


def _loss(keys: Keys) -> None:
    fused = _flag(keys, "--cross-entropy-loss-fusion")
    keys.put("loss", "vocab-parallel-fused" if fused else "vocab-parallel", ("--cross-entropy-loss-fusion",))


def _offload(keys: Keys) -> None:
    if not _flag(keys, _OFFLOAD):
        return
    keys.put("offload.optimizer", "cpu", (_OFFLOAD,))
    if keys.tree.leaves.get((_AWARE,)) is not True:
        what = f"is refused by Megatron without {_AWARE}, whose code its optimizer on the host shares"
        keys.find("error", _OFFLOAD, what, f"add {_AWARE}", ((_AWARE,), True))


def _destinations() -> Mapping[str, tuple[str, str]]:
    """flag -> (kind, the name under which Megatron keeps it)."""
    arguments = published("megatron")["arguments"]
    assert isinstance(arguments, dict)
    return {flag: (entry[0], entry[1]) for flag, entry in arguments.items()}


def _options(keys: Keys) -> None:
    destinations = _destinations()
    for path in list(keys.tree.leaves):
        if not keys.has(path) or path[0] not in destinations:
            continue
        kind, name = destinations[path[0]]
        own = path[0].removeprefix("--").replace("-", "_")
        name = own if find_option(own, "megatron", "megatron") else name
        option = find_option(name, "megatron", "megatron")
        if option is None:
            continue
        value = keys.tree.leaves[path]
        if kind == "words" and isinstance(value, str):
            value = [scalar(word) for word in value.split()]
        if kind == "words" and isinstance(value, list) and (len(value) == 1 or name == "spec"):
            value = " ".join(map(str, value)) if name == "spec" else value[0]  # --spec takes a module and a function
        if kind.startswith("flag"):
            value = lenient_flag(value, path[0]) is not (kind == "flag-off")
        try:
            option.read(value, path[0])
        except InvalidInput as error:
            raise error.at(keys.where(path)) from None
        keys.raw(path)
        keys.put_option(name, value, path)


def leaves(job: Job) -> dict[Path, object]:
    """The job as Megatron's arguments."""
    layout, data, options = job.layout, job.data, job.engine.options
    found: dict[Path, object] = {(flag,): value for flag, value in model_leaves(job).items()}
    for flag, key in _DEGREES.items():
        degree = getattr(layout, key.removeprefix("layout."))
        if degree > 1 or flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
            found[flag,] = degree
    if ("--num-experts",) in found and layout.tp > 1:
        found["--expert-tensor-parallel-size",] = layout.etp
    found |= pipeline_leaves(job)
    if layout.sp:
        found["--sequence-parallel",] = True
    if layout.cp > 1 and "cp_comm_type" not in options:
        found["--cp-comm-type",] = {"ring": "p2p", "ulysses": "a2a", "allgather": "allgather"}[layout.cp_kind]
    found["--seq-length",] = data.seq_len
    found["--micro-batch-size",] = data.micro_batch
    found["--global-batch-size",] = data.micro_batch * data.grad_accum * layout.dp
    found |= _recipe_leaves(job)
    return found | _option_leaves(job)


def _recipe_leaves(job: Job) -> dict[Path, object]:
    found: dict[Path, object] = {}
    name = next(
        (one for one in SHORT_NAMES if resolve(one, "megatron", job.engine.options, job.stack) == job.precision), None
    )
    if name in ("bf16-mixed", "fp8-mixed", "bf16") or (name is None and job.precision.params == "bf16"):
        found["--bf16",] = True
    elif name == "fp16-mixed" or (name is None and job.precision.params == "fp16"):
        found["--fp16",] = True
    if name == "fp8-mixed" and not {"fp8", "fp8_format"} & set(job.engine.options):
        found["--fp8-format",] = "hybrid"
    by_name = {ours: theirs for theirs, ours in _OPTIMIZERS.items()}
    if job.optimizer.name in by_name:
        found["--optimizer",] = by_name[job.optimizer.name]
    if job.engine.zero_stage >= 1:
        found["--use-distributed-optimizer",] = True
    if job.engine.zero_stage >= 2:
        found["--use-megatron-fsdp",] = True
        found["--data-parallel-sharding-strategy",] = {2: "optim_grads", 3: "optim_grads_params"}[job.engine.zero_stage]
    found["--clip-grad",] = job.engine.options.get("clip_grad", 1.0) if job.grad_clip else 0.0
    if job.loss.kind == "vocab-parallel-fused":
        found["--cross-entropy-loss-fusion",] = True
    if job.offload.optimizer == "cpu":
        found[_OFFLOAD,] = found[_AWARE,] = True
    if "attention_backend" not in job.engine.options and job.attention == "eager":
        found["--attention-backend",] = "unfused"
    return found | recompute_leaves(job)


_SAID_ELSEWHERE = frozenset(
    {
        "use_distributed_optimizer", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "cross_entropy_loss_fusion", "optimizer_cpu_offload", "clip_grad", "optimizer",
    }
)  # fmt: skip


def _option_leaves(job: Job) -> dict[Path, object]:
    """Each option under its argument; a flag that is at Megatron's default has none to say so."""
    flags: dict[tuple[str, bool], str] = {}
    valued: dict[str, str] = {}
    for flag, (kind, name) in _destinations().items():
        if kind.startswith("flag"):
            flags.setdefault((name, kind == "flag"), flag)
        else:
            valued.setdefault(name, flag)
            valued.setdefault(flag.removeprefix("--").replace("-", "_"), flag)
    found: dict[Path, object] = {}
    for name, value in job.engine.options.items():
        if name in _SAID_ELSEWHERE:
            continue
        if isinstance(value, bool) and (name, value) in flags:
            found[flags[name, value],] = True
        elif not isinstance(value, bool) and name in valued:
            found[valued[name],] = list(value) if isinstance(value, tuple) else value
    return found


def notes(job: Job) -> tuple[str, ...]:
    own = ("data, tokenizer, learning rate, iterations and checkpoints: add your own arguments",)
    if job.offload.optimizer == "none" or job.engine.options.get("use_precision_aware_optimizer"):
        return own
    why = f"Megatron's command line asks for it beside {_OFFLOAD}, and then main parameters go to the host too"
    return (*own, f"{_AWARE}: {why}")


def write(found: Leaves, comments: tuple[str, ...]) -> str:
    return shell_text.render(found, comments)
