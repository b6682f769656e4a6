"""A job's model as the transformers class that its config.json names, and one step of it as the job says: a factory for run.py.

The class comes from the installed transformers, by its model type; its weights are made on fake tensors. Nothing is downloaded, no
checkpoint read, and no code of the model's own (``auto_map``) run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ullage.engines.fsdp2.policy import unwrapped
from ullage.engines.reach import runs_along_the_sequence
from ullage.errors import InvalidInput, Unsupported
from ullage.job.adapted import ALL_LINEAR, model_type, unmodelled
from ullage.job.job import Job, Lora
from ullage.model.build import TARGET_LENGTH
from ullage.model.hf_config import decoder_spec, has_encoder
from ullage.trace.checkpointed import recompute
from ullage.trace.encoders import batch_of as arguments
from ullage.trace.encoders import class_of
from ullage.trace.patch import replaced
from ullage.trace.reach import not_built
from ullage.trace.run import Factory
from ullage.trace.wrapped import DTYPES, OPTIMIZERS, clip, cut, mesh_of, optimizer_of, unsynced, wrapped

ATTENTION = {"flash": "sdpa", "mem-efficient": "sdpa", "math": "sdpa", "eager": "eager"}
"""The implementation's name in transformers; which of sdpa's kernels runs is torch's choice."""
_ENGINES = ("single", "ddp", "zero1", "fsdp1", "fsdp2")
_REMEDY = "write a factory (ullage trace module:function), which may do anything that torch can"


def factory_of(job: Job) -> Factory:
    """Raises Unsupported for what a job can say and this builds not; a factory of one's own may do all that torch can."""
    _refuse(job)
    alone = unwrapped(job) if job.engine.name == "fsdp2" else None
    return lambda: _built(alone or job)


def _refuse(job: Job) -> None:
    layout, precision = job.layout, job.precision
    refused: dict[str, object] = {
        "stack": job.stack if job.stack != "transformers" else None,
        "engine.name": job.engine.name if job.engine.name not in _ENGINES else None,
        "engine.shard_group": 1 if job.engine.shard_group == 1 < layout.dp else None,
        "layout.sp": "true" if layout.sp and not runs_along_the_sequence(job) else None,
        "layout.pp": layout.pp if layout.pp > 1 else None,
        "layout.cp": layout.cp if layout.cp > 1 else None,
        "layout.ep": layout.ep if layout.ep > 1 else None,
        "recompute": not_built(job.recompute),
        "attention": job.attention if job.attention == "math" else None,
        "loss": job.loss.kind if job.loss.kind != "full" else None,
        **(unmodelled(job.lora) if job.lora is not None else {}),
        "lora.base": job.lora.base if job.lora is not None and job.lora.base != "bf16" else None,
        "compile": "true" if job.compile else None,
        "optimizer": job.optimizer.name if job.optimizer.name not in OPTIMIZERS else None,
        "optimizer.state": "8bit" if job.optimizer.state == "8bit" else None,
        "offload": "set" if {job.offload.optimizer, job.offload.params, job.offload.activations} != {"none"} else None,
        "precision.master": precision.master if precision.master not in (None, precision.params) else None,
        "precision.params": precision.params if precision.params not in DTYPES else None,
        "precision.compute": precision.compute if precision.compute not in DTYPES else None,
    }
    for key, value in refused.items():
        if value is not None:
            raise Unsupported("is not traced from a job", key=key, value=value, remedy=_REMEDY)


def config_of(job: Job) -> Any:
    """The installed transformers' configuration object."""
    try:
        import transformers
        from transformers import AutoConfig
    except ImportError:
        raise Unsupported("is not installed", key="transformers", remedy="pip install 'ullage[torch]'") from None
    keys = {
        key: value
        for key, value in job.model.keys.as_dict().items()
        if key not in ("auto_map", "model_type", "dtype", "torch_dtype")
    }
    if "num_labels" in keys:  # which counts, as from_pretrained has it
        keys = {key: value for key, value in keys.items() if key not in ("id2label", "label2id")}
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.for_model(job.model.model_type, **keys)
    except ValueError:
        raise Unsupported(
            f"is no model type of transformers {transformers.__version__}",
            key="model.model_type",
            value=job.model.model_type,
            remedy=_REMEDY,
        ) from None
    config.use_cache = False
    if has_encoder(job.model) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # which every published config.json has
    return config


def dropouts(job: Job) -> dict[str, float]:
    """Of what drops elements at random in a step: the job's keys, and their shares."""
    found = {f"model.{name}": value for name, value in config_of(job).to_dict().items() if _drops(name, value)}
    if job.lora is not None and job.lora.dropout:
        found["lora.dropout"] = job.lora.dropout
    return found


def _drops(name: str, value: object) -> bool:
    """Heads that a language model has not keep their keys in its configuration (GPT-2's summary_first_dropout)."""
    of_another = name.startswith(("summary_", "classifier_"))
    return "drop" in name and not of_another and isinstance(value, int | float) and value > 0


def build(job: Job, weights: Path | None = None) -> nn.Module:
    """The model itself, in training mode, with recomputation on where the job says so.

    weights: a folder with safetensors; None: they are drawn, from torch's generator as it stands.
    """
    config = config_of(job)
    of: Any = class_of(decoder_spec(job.model))
    if job.model.beside and type(config) not in of._model_mapping:
        what = "is the text part of a multimodal model, which transformers builds as a whole alone"
        raise Unsupported(what, key="model", value=job.model.name, remedy=_REMEDY)
    chosen = {"attn_implementation": ATTENTION[job.attention], "dtype": DTYPES[model_type(job)]}
    try:
        if weights is None:
            model = of.from_config(config, trust_remote_code=False, **chosen)
            own_head(model)
        else:
            model = _loaded(of, weights, config=config, **chosen)
    except (ValueError, AssertionError) as error:  # the latter is torch's, of a padding token beyond the vocabulary
        raise InvalidInput(
            f"transformers refuses it: {' '.join(str(error).split())[:160]}", key="model", value=job.model.name
        ) from None
    model.train()
    recompute(job, model)
    if job.lora is not None:
        model = _adapted(job, job.lora, model)
    for name, param in model.named_parameters():
        if any(fnmatchcase(name, glob) for glob in job.freeze):
            param.requires_grad_(False)
    assert isinstance(model, nn.Module)
    return model


def own_head(model: Any) -> None:
    """Gives a T5 of v1.1 the head that its checkpoints hold: transformers ties what it draws, and leaves what it loads by itself."""
    if getattr(model.config, "scale_decoder_outputs", True) is False:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))


def _loaded(of: Any, folder: Path, **given: Any) -> Any:
    """The model with the folder's weights, all of them: transformers draws what it does not find, and says so only in its log."""
    if not [*folder.glob("*.safetensors")]:  # which transformers would ask the network for
        what = "holds no .safetensors" if folder.is_dir() else "is no folder"
        raise InvalidInput(what, key="--weights", value=str(folder), remedy="name a folder that save_pretrained wrote")
    try:
        model, told = of.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **given,
        )
    except OSError as error:
        reason = " ".join(str(error).split())[:160]
        raise InvalidInput(f"cannot be read: {reason}", key="--weights", value=str(folder)) from None
    wrong = sorted(told["missing_keys"]) + sorted(name for name, *_ in told["mismatched_keys"])
    if wrong:
        raise InvalidInput(
            f"is of another model: {len(wrong)} tensors are missing or have another shape, such as {wrong[0]}",
            key="--weights",
            value=str(folder),
        )
    return model


def _adapted(job: Job, lora: Lora, model: Any) -> Any:
    """The model in PEFT's hands."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Unsupported("is not installed", key="peft", remedy="pip install 'ullage[torch]'") from None
    if job.recompute.kind != "none":
        model.enable_input_require_grads()
    targets = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT multiplies by alpha / rank, whole or not
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(), replaced(torch.Tensor, "__deepcopy__", _copied):
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that it gives up
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        return get_peft_model(model, config, autocast_adapter_dtype=lora.dtype in (None, "fp32"))


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy that fake tensors know too, whose storage cannot be read (PEFT copies modules that it trains in full)."""
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def batch_of(job: Job) -> dict[str, Any]:
    """Arguments of one micro-batch's forward."""
    shape = (job.data.micro_batch, job.data.seq_len)
    batch = arguments(decoder_spec(job.model), *shape)
    if has_encoder(job.model):
        target = job.engine.options.get(TARGET_LENGTH, job.data.seq_len)
        batch["labels"] = batch["labels"].new_zeros(job.data.micro_batch, int(str(target)))
    if job.data.padding_mask:
        mask = torch.ones(shape, dtype=torch.long)
        mask[:, -max(1, job.data.seq_len // 4) :] = 0
        batch["attention_mask"] = mask
    return batch


def _built(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    mesh = mesh_of(job)
    with torch.device("meta") if job.layout.tp > 1 else nullcontext():
        bare = build(job)
    if job.layout.tp > 1:
        cut(bare, mesh["tp"], along_the_sequence=job.layout.sp)
    model = wrapped(job, bare, mesh)
    optimizer = optimizer_of(job, model)
    batch = batch_of(job)

    def step() -> None:
        for number in range(job.data.grad_accum):
            with unsynced(job, model, last=number == job.data.grad_accum - 1):
                with autocast(job):
                    loss = model(**batch).loss
                loss.backward()
                del loss
        if job.grad_clip:
            clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


def autocast(job: Job, device: str = "cpu") -> AbstractContextManager[Any]:
    """accelerate's, which under FSDP1 tells beside adapters: PEFT may cast their inputs to another type than they are gathered in."""
    flat = job.engine.name == "fsdp1" and job.lora is not None and job.precision.compute != "fp32"
    if not (job.precision.autocast or flat):
        return nullcontext()
    return torch.autocast(device, dtype=DTYPES[job.precision.compute])
