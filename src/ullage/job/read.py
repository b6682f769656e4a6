"""``read_job``: a job file, or a mapping of its shape, to a complete and checked Job. The format is docs/job.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ullage.errors import InvalidInput, UllageError
from ullage.frozen import replace
from ullage.job import fields
from ullage.job.checks import violations
from ullage.job.document import Document, read_document
from ullage.job.engine import ENGINES, SEQ_LEN, read_data, read_engine, read_layout, read_stack
from ullage.job.fields import Section, hint, show
from ullage.job.job import AttentionKernel, Job, Layout
from ullage.job.optimizer import read_optimizer
from ullage.job.overrides import apply_overrides
from ullage.job.precision import read_precision
from ullage.job.recipe import read_lora, read_loss, read_offload, read_recompute
from ullage.job.restated import contradictions

if TYPE_CHECKING:
    from ullage.hardware.cluster import Cluster
    from ullage.model.config import ModelConfig

SCHEMA = 1
ATTENTION = ("flash", "mem-efficient", "math", "eager")

_ORDER = (
    "schema", "model", "cluster", "data", "layout", "engine", "stack", "stack_version", "precision", "optimizer", "grad_clip",
    "recompute", "attention", "loss", "offload", "lora", "freeze", "compile",
)  # fmt: skip

_EXAMPLES = {
    "model": "a catalogue name such as llama-3.1-8b, a path to a config.json, or a mapping in its keys",
    "cluster": "GPUSxDEVICE such as 8xH100-SXM-80GB, NODESxGPUSxDEVICE, or a mapping with device and gpus_per_node",
}


def read_job(source: str | Path | Mapping[str, object], overrides: Sequence[str] = ()) -> Job:
    """The job that ``source`` (a path or a mapping) describes, each ``KEY=VALUE`` of ``overrides`` set before it is read.

    Every default is taken here and listed in ``Job.defaults``; ``Job.warnings`` names what is legal but doubtful, and each
    option that matters and is not modelled.

    Raises InvalidInput (UnknownKey, UnknownName, Contradiction) for what is written wrongly, and Infeasible for a layout
    that cannot exist. Each error names key, value, what is allowed, and file and line.
    """
    document = read_document(source)
    try:
        apply_overrides(document, overrides)
        job = _read(document)
        for contradiction in contradictions(job):
            raise contradiction
        return _checked(job)
    except UllageError as error:
        place = document.place(error.key)
        raise (error.at(place) if place else error) from None


def layout_of(source: Mapping[str, object], overrides: Sequence[str] = ()) -> Layout:
    """The layout alone, not checked against model or data: for a reader who needs dp to say how large a batch is."""
    document = read_document(source)
    apply_overrides(document, overrides)
    root = Section(document.values, "", [])
    name = root.inner("engine").take("name", fields.choice(*ENGINES), "fsdp2")
    return read_layout(root, _cluster(root).gpus, name)


def launch_of(source: Mapping[str, object], overrides: Sequence[str] = ()) -> tuple[str | None, int]:
    """The engine, where one is named, and the number of GPUs: for a reader of files that leave the engine to the launch."""
    document = read_document(source)
    apply_overrides(document, overrides)
    root = Section(document.values, "", [])
    name = root.inner("engine").values.get("name")
    return None if name is None else str(name), _cluster(root).gpus


def _checked(job: Job) -> Job:
    warnings = []
    for violation in violations(job):
        if violation.code != "warning":
            raise violation.error()
        warnings.append(str(violation))
    return replace(job, warnings=tuple(warnings))


def _read(document: Document) -> Job:
    from ullage.job import recurrent
    from ullage.model.build import TARGET_LENGTH, tokens_of_images
    from ullage.model.hf_config import defaults as model_defaults
    from ullage.model.hf_config import has_encoder

    defaults: list[str] = []
    root = Section(document.values, "", defaults)
    _check_schema(root)
    model = _model(root, document.base_dir)
    defaults.extend(model_defaults(model))
    cluster = _cluster(root)
    engine_section = root.inner("engine")
    name = engine_section.take("name", fields.choice(*ENGINES), "fsdp2")
    stack, stack_version = read_stack(root, name)
    layout = read_layout(root, cluster.gpus, name)
    engine = read_engine(engine_section, name, stack, layout, cluster)
    engine_section.close()
    precision = read_precision(root, name, engine.options, stack)
    job = Job(
        model=model,
        cluster=cluster,
        data=read_data(root, layout.dp, tokens_of_images(model) or SEQ_LEN),
        layout=layout,
        engine=engine,
        precision=precision,
        stack=stack,
        stack_version=stack_version,
        optimizer=read_optimizer(root, precision, name, stack, stack_version),
        grad_clip=root.take("grad_clip", fields.flag, True),
        recompute=read_recompute(root),
        attention=cast(AttentionKernel, root.take("attention", fields.choice(*ATTENTION), "flash")),
        loss=read_loss(root),
        offload=read_offload(root),
        lora=read_lora(root, engine.options, stack),
        freeze=root.take("freeze", fields.texts, ()),
        compile=root.take("compile", fields.flag, False),
    )
    root.close()
    defaults.extend(recurrent.defaults(job))
    if has_encoder(model) and TARGET_LENGTH not in engine.options:
        defaults.append(f"engine.options.{TARGET_LENGTH} = {job.data.seq_len}")
    return replace(job, defaults=tuple(sorted(defaults, key=_position)))


def _position(default: str) -> int:
    """The contract's order of keys; sorting by it keeps the order within a section."""
    return _ORDER.index(default.partition(" ")[0].partition(".")[0])


def _check_schema(root: Section) -> None:
    schema = root.take("schema", fields.integer(0), SCHEMA)
    if schema != SCHEMA:
        raise InvalidInput("is not read by this version", key="schema", value=schema, allowed=str(SCHEMA))


def _model(root: Section, base_dir: Path) -> ModelConfig:
    from ullage.model.catalogue import model_config

    value = _required(root, "model")
    if not isinstance(value, str | Mapping):
        raise InvalidInput("is no model", key="model", value=show(value), allowed=_EXAMPLES["model"])
    return model_config(value, base_dir)


def _cluster(root: Section) -> Cluster:
    from ullage.hardware.catalogue import cluster

    value = _required(root, "cluster")
    if not isinstance(value, str | Mapping):
        raise InvalidInput("is no cluster", key="cluster", value=show(value), allowed=_EXAMPLES["cluster"])
    return cluster(value)


def _required(root: Section, name: str) -> object:
    value = root.raw(name)
    if value is None:
        near = [key for key in root.values if hint(key, (name,))]
        remedy = f"{near[0]} looks like it" if near else None
        raise InvalidInput("is missing", key=name, allowed=_EXAMPLES[name], remedy=remedy)
    return value
