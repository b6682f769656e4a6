"""What Hugging Face's Trainer makes of its arguments, whose file soever says them: TRL's, LLaMA-Factory's, axolotl's.

Sources: transformers/training_args.py and integrations/deepspeed.py of 5.24.0; accelerate/accelerator.py and utils/fsdp_utils.py of 1.15.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path as FilePath

from ullage.errors import InvalidInput
from ullage.formats import accelerate, deepspeed, jsonc
from ullage.formats.reading import Batch, Keys, Leftover, Reading, lenient_flag, size
from ullage.formats.tree import Path, Tree, dotted
from ullage.frozen import replace
from ullage.job import fields
from ullage.job.text import read_text

ENGINES = ("fsdp2", "fsdp1", "ddp", "single", "deepspeed")
DEEPSPEED: Path = ("deepspeed",)
FSDP: Path = ("fsdp",)
FSDP_CONFIG = "fsdp_config"

OPTIMIZERS: Mapping[str, Mapping[str, object]] = {
    "adamw_torch": {"name": "adamw", "impl": "foreach"},
    "adamw_torch_fused": {"name": "adamw", "impl": "fused"},
    "adamw_apex_fused": {"name": "adamw", "impl": "fused"},
    "adamw_hf": {"name": "adamw", "impl": "for-loop"},
    "adamw_8bit": {"name": "adamw", "state": "8bit"},
    "adamw_bnb_8bit": {"name": "adamw", "state": "8bit"},
    "adamw_torch_8bit": {"name": "adamw", "state": "8bit"},
    "ao_adamw_8bit": {"name": "adamw", "state": "8bit"},
    "adamw_torch_4bit": {"name": "adamw", "state": "8bit"},
    "ao_adamw_4bit": {"name": "adamw", "state": "8bit"},
    "paged_adamw_32bit": {"name": "adamw", "state": "fp32", "paged": True},
    "paged_adamw": {"name": "adamw", "state": "fp32", "paged": True},
    "paged_adamw_8bit": {"name": "adamw", "state": "8bit", "paged": True},
    "sgd": {"name": "sgd"},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
    "lion_32bit": {"name": "lion", "state": "fp32"},
    "lion_8bit": {"name": "lion", "state": "8bit"},
    "paged_lion_32bit": {"name": "lion", "state": "fp32", "paged": True},
    "paged_lion": {"name": "lion", "state": "fp32", "paged": True},
    "paged_lion_8bit": {"name": "lion", "state": "8bit", "paged": True},
}
"""transformers' OptimizerNames, and axolotl's beside them. 4 bits: the option optimizer_state says so."""
_TORCHAO = {
    "adamw_torch_8bit": {},
    "ao_adamw_8bit": {},
    "adamw_torch_4bit": {"optimizer_state": "4bit"},
    "ao_adamw_4bit": {"optimizer_state": "4bit"},
}

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_FSDP_WORDS = (*_STRATEGIES, "offload", "auto_wrap")
_SHIPPED_STAGE = re.compile(r"(?:zero|zr|z)[-_]?(?:stage)?[-_]?([0-3])", re.IGNORECASE)
"""ds_z3_offload_config.json of LLaMA-Factory, zero3_bf16_cpuoffload_all.json of axolotl: the name says what the file does."""
_FOLDERS_ABOVE = 3
_FILLED: Mapping[Path, str] = {("train_micro_batch_size_per_gpu",): "micro", ("gradient_accumulation_steps",): "accum"}
_BY_ARGUMENTS: frozenset[Path] = frozenset({*_FILLED, ("train_batch_size",)})


def precisions(loaded: str, mixed: str | None, *, adapters: bool, upcast: bool = True) -> dict[str, object]:
    """The job's ``precision`` under each engine, of a model loaded in ``loaded`` (fp32, bf16, fp16) and trained under ``mixed``.

    Under FSDP accelerate makes fp32 of what is trained (upcast), so that shards are masters; DeepSpeed casts all, and keeps masters apart.
    """
    whole: object = loaded
    if loaded == "fp16":
        whole = dict.fromkeys(("params", "compute", "grads", "reduce"), "fp16") | {"master": None}
    cast: object = f"{mixed}-mixed" if mixed else whole
    under_autocast: object = cast
    if mixed and loaded != "fp32":
        types = {"params": loaded, "compute": mixed, "grads": loaded, "master": None, "reduce": loaded}
        under_autocast = {**types, "autocast": True}
    sharded = under_autocast if adapters else cast if upcast or not mixed else whole
    found = dict.fromkeys(("single", "ddp", "zero1"), under_autocast) | dict.fromkeys(("fsdp1", "fsdp2"), sharded)
    return {**found, "deepspeed": cast if mixed else "fp32"}


class Recipe(Keys):
    """The leaves of a trainer's file. What nobody wrote is taken as ``owner`` has it, and told (``assume``)."""

    def __init__(self, tree: Tree, place: str, owner: str) -> None:
        leaves = {path: _as_yaml_has_it(one) for path, one in tree.leaves.items() if one is not None}
        super().__init__(replace(tree, leaves=leaves), place)
        self.owner = owner
        self._assumed: list[str] = []
        self._per_row = 1
        self._engine: str | None = None
        self._by_engine: dict[str, dict[str, object]] = {}

    def written(self, name: str) -> bool:
        return (name,) in self.tree.leaves

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch at the top; ``default`` where nobody wrote it."""
        found = self.take((name,), lenient_flag)
        return default if found is None else found

    def assume(self, key: str, value: object, words: str) -> None:
        """A default of the trainer's that decides; words: as its file would say it."""
        self.put(key, value)
        self._assumed.append(words)

    def tell(self, words: str) -> None:
        self._assumed.append(words)

    # --- what all three files say alike ---

    def model(self, name: str) -> None:
        self.move((name,), "model", fields.text)

    def batch(self, micro: str, default: int, *, per_row: int = 1) -> Batch:
        """per_row: sequences in one row of the data (2: a chosen one and a rejected one)."""
        rows, accum = self.take((micro,), size), self.take(("gradient_accumulation_steps",), size)
        if rows is None:
            rows = default
            self.tell(f"{micro}: {default}")
        if accum is None:
            self.tell("gradient_accumulation_steps: 1")
        self._per_row = per_row
        steps = (accum or 1, ("gradient_accumulation_steps",))
        return Batch(micro=(rows * per_row, (micro,)), accum=steps)

    def optimizer(self, name: str, default: str) -> None:
        path = (name,)
        written = self.take(path, fields.text)
        key = str(written or default).lower().removeprefix("optimizernames.")
        if written is None:
            self.tell(f"{name}: {default}")
        if key not in OPTIMIZERS:
            what = f"{written}: an optimizer that no job holds; adamw stands for it"
            self.leftovers.append(Leftover(path=path, value=written, why=what.partition(": ")[2]))
            self.find("warning", name, what, f"write one of {', '.join(OPTIMIZERS)}")
            return
        if "optimizer" in self.job:
            if written is not None:
                self.leftovers.append(
                    Leftover(path=path, value=written, why="DeepSpeed's configuration names the one that runs")
                )
            return
        if self._on_the_host(name, OPTIMIZERS[key]):
            self.put("optimizer", {"name": OPTIMIZERS[key]["name"]}, path)
            return
        self.put("optimizer", dict(OPTIMIZERS[key]), path)
        if key in _TORCHAO:
            for option, value in {"optimizer_library": "torchao", **_TORCHAO[key]}.items():
                self.put_option(option, value, path)

    def _on_the_host(self, name: str, words: Mapping[str, object]) -> bool:
        """Whether 8-bit or paged states are to be stepped on the host: accelerate puts DeepSpeedCPUAdam in their place
        (utils/deepspeed.py, map_pytorch_optim_to_deepspeed), unless DeepSpeed's configuration forbids it."""
        engine, offload = self.job.get("engine"), self.job.get("offload")
        if self._engine != "deepspeed" or not isinstance(offload, dict) or offload.get("optimizer", "none") == "none":
            return False
        if words.get("state") != "8bit" and not words.get("paged"):
            return False
        options = engine.get("options", {}) if isinstance(engine, dict) else {}
        what = "accelerate puts DeepSpeedCPUAdam in its place, whose states are fp32"
        if options.get("zero_force_ds_cpu_optimizer") is False:
            what = "its states would be stepped on the host, where no kernel does; the account has fp32 ones"
        self.find("warning", name, f"the optimizer is offloaded: {what}", "write adamw_torch, or take the offload out")
        return True

    def attention(self, path: Path, written: str | None) -> None:
        """``attn_implementation`` in transformers' words; sdpa takes torch's flash kernel wherever no mask is passed."""
        if written is None:
            return
        name = written.rpartition("/")[2].lower()
        if name == "eager":
            self.put("attention", "eager", path)
        elif name == "flex_attention":
            self.put_option("attention_backend", "flex", path)
        elif name in ("sdpa", "auto") or "flash" in name:
            self.put("attention", "flash", path)
        else:
            self.leftovers.append(
                Leftover(path=path, value=written, why="an attention that no job holds; flash stands for it")
            )

    def clipping(self) -> float:
        path = ("max_grad_norm",)
        found = self.take(path, fields.number())
        if found is not None and "grad_clip" not in self.job:
            self.put("grad_clip", found > 0, path)
        return 1.0 if found is None else found

    def checkpointing(self, on: bool, path: Path) -> None:
        if on or "recompute" not in self.job:
            self.put("recompute", "full" if on else "none", path if path in self.tree.leaves else None)
        for kwargs in self.under((f"{path[0]}_kwargs",)):
            self.leave(kwargs, "which of torch's two ways of running again: both keep what a layer was given")

    def compiled(self) -> None:
        path = ("torch_compile",)
        found = self.raw(path)
        if found is not None:
            self.put("compile", found == "auto" or lenient_flag(found, dotted(path)), path)

    def adapters(self, found: Mapping[str, tuple[object, Path]]) -> None:
        """key of ``lora`` -> its value (None: the job's default) and where it stands."""
        self.job.setdefault("lora", {})
        for name, (value, path) in found.items():
            if value is not None:
                self.put(f"lora.{name}", value, path if path in self.tree.leaves else None)
        optimizer = self.job.get("optimizer")
        if found.get("dtype", (None, ()))[0] is None and isinstance(optimizer, dict):
            optimizer.setdefault("state", "fp32")  # PEFT's adapters are fp32, and moments have their parameters' type

    # --- the engine ---

    def engine(self, batch: Batch, mixed: str | None, *, version: int) -> Batch:
        """What wraps the model: DeepSpeed, FSDP, or by the number of processes. version: FSDP's, where nobody wrote one."""
        if self.under(DEEPSPEED) and self.tree.leaves.get(DEEPSPEED) not in ("", False, {}):
            return self._deepspeed(batch, mixed)
        self.raw(DEEPSPEED)
        if self._fsdp_is_on():
            self._fsdp(version)
        return batch

    def element_types(self, by_engine: Mapping[str, object], path: Path) -> None:
        """``precision``: of the engine that the file names, or of whichever the launch does."""
        origin = path if path in self.tree.leaves else None
        if self._engine is None:
            self._by_engine = {name: {"precision": value} for name, value in by_engine.items()}
            if origin:
                self.origins["precision"] = origin
        elif "precision" not in self.job:
            self.put("precision", by_engine[self._engine], origin)

    @property
    def named(self) -> str | None:
        """The engine that the file names."""
        return self._engine

    @property
    def zero3(self) -> bool:
        found = self.job.get("engine", {})
        return self._engine == "deepspeed" and isinstance(found, dict) and found.get("zero_stage") == 3

    def _deepspeed(self, batch: Batch, mixed: str | None) -> Batch:
        self._engine = "deepspeed"
        inner = self._deepspeed_tree()
        if inner is None:
            self.put("precision", f"{mixed}-mixed" if mixed else "fp32")
            return batch
        tree, place, own = inner
        said: dict[Path, object] = {
            ("bf16", "enabled"): mixed == "bf16",
            ("fp16", "enabled"): mixed == "fp16",
            ("gradient_clipping",): self._clip_written(),
        }
        leaves = {path: said.get(path, value) if value == "auto" else value for path, value in tree.leaves.items()}
        leaves = {path: one for path, one in leaves.items() if not (one == "auto" and path in _BY_ARGUMENTS)}
        if mixed and not any(path[0] == mixed for path in leaves):
            leaves[mixed, "enabled"] = True  # accelerate/utils/dataclasses.py, DeepSpeedPlugin.set_mixed_precision
        found = deepspeed.read_tree(replace(tree, leaves=leaves), place)
        self._merged(found, own)
        for path, name in _FILLED.items():
            theirs, mine = getattr(found.batch, name), getattr(batch, name)
            said_here = mine[0] // self._per_row if name == "micro" else mine[0]
            if theirs is not None and theirs[0] != said_here:
                what = f"{said_here}, and DeepSpeed's {path[0]} says {theirs[0]}: transformers stops at it"
                self.find("error", dotted(mine[1]), what, 'write "auto" there', (mine[1], theirs[0]))
        whole = found.batch.whole
        return batch if whole is None else replace(batch, whole=(whole[0] * self._per_row, (*DEEPSPEED, *whole[1])))

    def _clip_written(self) -> object:
        value = self.tree.leaves.get(("max_grad_norm",), 1.0)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 1.0

    def _deepspeed_tree(self) -> tuple[Tree, str, bool] | None:
        """(leaves, where they stand, whether in this file). None: the file is elsewhere, and its name says what it can."""
        if DEEPSPEED not in self.tree.leaves:
            inside = self.under(DEEPSPEED)
            leaves = {path[1:]: self.raw(path) for path in inside}
            lines = {path[1:]: line for path, line in self.tree.lines.items() if path[:1] == DEEPSPEED and path[1:]}
            return Tree(leaves=leaves, lines=lines), self.place, True
        file = self.take(DEEPSPEED, fields.text) or ""
        found = self._beside(file)
        if found is None:
            self._by_its_name(file)
            return None
        self.origins["engine.name"] = DEEPSPEED
        return jsonc.parse(read_text(found, "DeepSpeed's configuration"), str(found)), str(found), False

    def _beside(self, file: str) -> FilePath | None:
        """A file that this one names: from its folder, from where the trainer is started (a folder above), or beside it."""
        folder = FilePath(self.place).parent
        above = (FilePath(), folder, *list(folder.parents)[:_FOLDERS_ABOVE])
        places = (folder / file, folder / FilePath(file).name, *(one / file for one in above))
        return next((one for one in places if accelerate.is_file(one)), None)

    def _by_its_name(self, file: str) -> None:
        name = FilePath(file).name.lower()
        self.put("engine.name", "deepspeed", DEEPSPEED)
        stage = _SHIPPED_STAGE.search(name)
        told = "stage 3, DeepSpeed's other defaults"
        if stage:
            self.put("engine.zero_stage", int(stage[1]))
            told = f"ZeRO stage {stage[1]}"
            if "offload" in name and stage[1] in "23":
                params = stage[1] == "3"
                if not (params and "offload_params" in name):
                    self.put("offload.optimizer", "cpu")
                if params:
                    self.put("offload.params", "cpu")
                told += " with offload"
            told += ", as its name says"
        self.find("warning", "deepspeed", f"{file} is not here: taken as {told}", "put it beside this file")

    def _merged(self, found: Reading, own: bool) -> None:
        """The keys of DeepSpeed's configuration; ``own``: they stand in this file, so that an edit can reach them."""
        self.job = _joined(self.job, found.keys)
        if own:
            self.origins |= {key: (*DEEPSPEED, *path) for key, path in found.origins.items()}
        self.leftovers += [replace(one, path=(*DEEPSPEED, *one.path)) for one in found.leftovers]
        self.findings += [
            replace(one, key=f"deepspeed.{one.key}", fix=tuple(((*DEEPSPEED, *path), to) for path, to in one.fix))
            for one in found.findings
        ]

    def _fsdp_is_on(self) -> bool:
        """transformers needs ``fsdp``; axolotl takes its section alone."""
        value = self.tree.leaves.get(FSDP)
        if value in (None, "", False, [], "false"):
            self.raw(FSDP)
            return value is None and self.owner == "axolotl" and bool(self.under((FSDP_CONFIG,)))
        return True

    def _fsdp(self, default: int) -> None:
        path = FSDP
        words = self._fsdp_words(path)
        self._fsdp_file()
        own = next((one for one in (("fsdp_version",), *accelerate.fsdp_paths("version")) if self.has(one)), None)
        version = self.take(own, fields.integer(1)) if own else default
        self._engine = "fsdp2" if version == 2 else "fsdp1"
        if own is None:
            self.tell(f"fsdp_config.version: {default}")
        self.put("engine.name", self._engine, own or path)
        accelerate.read_fsdp(self, self._engine)
        strategy = next((word for word in words if word in _STRATEGIES), None)
        if strategy and "engine.zero_stage" not in self.origins:
            stages = {"full_shard": 3, "shard_grad_op": 2}
            if strategy in stages:
                self.put("engine.zero_stage", stages[strategy], path)
            elif self._engine == "fsdp1":
                name = strategy.upper()
                self.put_option("sharding_strategy", f"_{name}" if name.endswith("ZERO2") else name, path)
            else:
                self.find(
                    "error", "fsdp", f"{strategy} is FSDP1's alone", "set fsdp_config.version to 1, or write full_shard"
                )
        if "offload" in words or self.take((FSDP_CONFIG, "cpu_offload"), lenient_flag):
            self.put("offload", {"optimizer": "cpu", "params": "cpu"}, path)
            self.origins |= {"offload.optimizer": path, "offload.params": path}

    def _fsdp_file(self) -> None:
        """``fsdp_config`` may be the name of a JSON file: its leaves are read as if they stood here; no edit goes there."""
        path = (FSDP_CONFIG,)
        file = self.raw(path) if isinstance(self.tree.leaves.get(path), str) else None
        if file is None:
            return
        found = self._beside(str(file))
        if found is None:
            self.find(
                "warning", FSDP_CONFIG, f"{file} is not here: FSDP's defaults are taken", "put it beside this file"
            )
            return
        inner = jsonc.parse(read_text(found, "FSDP's configuration"), str(found))
        leaves = {(*path, *one): value for one, value in inner.leaves.items()}
        self.tree = replace(self.tree, leaves={**self.tree.leaves, **leaves})
        self.opened(leaves)

    def _fsdp_words(self, path: Path) -> tuple[str, ...]:
        value = self.raw(path)
        if value in (True, "true", None):
            return ()
        words = (
            value.replace(",", " ").split() if isinstance(value, str) else value if isinstance(value, list) else [value]
        )
        for word in words:
            try:
                fields.choice(*_FSDP_WORDS)(word, "fsdp")
            except InvalidInput as error:
                raise error.at(self.where(path)) from None
        return tuple(words)

    # --- the end ---

    def finished(self, name: str, batch: Batch, canonical: Mapping[str, Path]) -> Reading:
        """canonical: job key -> where ``leaves`` writes it, which a file may have under another name."""
        if self._assumed:
            told = ", ".join(self._assumed)
            self.find(
                "advice",
                "defaults",
                f"not written, and taken as {self.owner} has them: {told}",
                "write them where yours differ",
            )
        renamed = {path: self.origins[key] for key, path in canonical.items() if self.origins.get(key, path) != path}
        return replace(self.done(name, batch), renamed=renamed, by_engine=self._by_engine)


def _as_yaml_has_it(value: object) -> object:
    """500_000 is a number in YAML 1.1, which these trainers read."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d+(_\d+)+", value) else value


def _joined(mine: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, object]:
    found = dict(mine)
    for key, value in theirs.items():
        old = found.get(key)
        found[key] = _joined(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found
