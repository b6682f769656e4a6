"""``python -m ullage.trace.whole``: whole steps, engine by engine and mode by mode, the closed form against the trace of the real code.

Of each step the peak of allocated memory and its moment. Left out is what a trace on the CPU has not: the libraries' workspaces.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ullage.engines.base import context_of
from ullage.engines.ddp.partition import fullest_rank
from ullage.engines.estimate import estimate
from ullage.engines.optimizer import stepped
from ullage.engines.registry import ranks_of
from ullage.errors import UllageError
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.model.build import graph as build
from ullage.trace.events import Trace
from ullage.trace.models import factory_of
from ullage.trace.run import trace

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 2000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": 2000}
_BERT = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 2000,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MODELS: Mapping[str, object] = {
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", **_GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "bert": {"model_type": "bert", **_BERT},
    "bert, sequences": {"model_type": "bert", **_BERT, "architectures": ["BertForSequenceClassification"]},
    "llama-3.2-1b": "llama-3.2-1b",
}

ENGINES: Mapping[str, Mapping[str, object]] = {
    "single": {"engine": "single"},
    "ddp": {"engine": "ddp", "layout": {"dp": 4}},
    "ddp, in place": {"engine": {"name": "ddp", "options": {"reduce_in_place": True}}, "layout": {"dp": 4}},
    "zero1": {"engine": "zero1", "layout": {"dp": 4}},
    "fsdp2, 2": {"engine": {"name": "fsdp2", "zero_stage": 2}, "layout": {"dp": 4}},
    "fsdp2, 3": {"engine": {"name": "fsdp2", "zero_stage": 3}, "layout": {"dp": 4}},
    "tp": {"engine": "fsdp2", "layout": {"tp": 4, "dp": 1}},
    "tp along the sequence": {"engine": "fsdp2", "layout": {"tp": 4, "dp": 1, "sp": True}},
    "tp along the sequence x fsdp2": {
        "engine": {"name": "fsdp2", "zero_stage": 3},
        "layout": {"tp": 2, "dp": 2, "sp": True},
    },
    "tp x fsdp2": {"engine": {"name": "fsdp2", "zero_stage": 3}, "layout": {"tp": 2, "dp": 2}},
}

_SHORT = {"seq_len": 32, "micro_batch": 1}
_LONG = {"seq_len": 256, "micro_batch": 2}
MODES: Mapping[str, Mapping[str, object]] = {
    "bf16": {"precision": "bf16"},
    "fp32, short": {"precision": "fp32", "data": _SHORT},
    "mixed": {"precision": "bf16-mixed"},
    "mixed, fused, short": {"precision": "bf16-mixed", "optimizer": "fused", "data": _SHORT},
    "for-loop, short": {"precision": "bf16", "optimizer": "for-loop", "data": _SHORT},
    "sgd, long": {"precision": "bf16", "optimizer": "sgd", "data": _LONG},
    "accumulation": {"precision": "bf16", "data": {"seq_len": 128, "micro_batch": 2, "grad_accum": 3}},
    "mixed, accumulation, short": {"precision": "bf16-mixed", "data": {**_SHORT, "grad_accum": 2}},
    "recompute, long": {"precision": "bf16", "recompute": "full", "data": _LONG},
    "mixed, recompute": {"precision": "bf16-mixed", "recompute": "full"},
    "eager": {"precision": "bf16", "attention": "eager"},
    "mixed, eager, recompute": {"precision": "bf16-mixed", "attention": "eager", "recompute": "full"},
}
_OPTIMIZERS = {
    "foreach": {"name": "adamw", "impl": "foreach"},
    "for-loop": {"name": "adamw", "impl": "for-loop"},
    "fused": {"name": "adamw", "impl": "fused"},
    "sgd": {"name": "sgd", "impl": "foreach"},
}
_NO_PLAN = frozenset({"gpt2", "bert", "bert, sequences"})
"""Models that transformers cannot cut by tensor parallelism."""


class Case(NamedTuple):
    """One step: keys of MODELS, ENGINES and MODES."""

    model: str
    engine: str
    mode: str

    def __str__(self) -> str:
        return " | ".join(self)

    @property
    def job(self) -> Job:
        settings = {"data": {"seq_len": 128, "micro_batch": 2}, "optimizer": "foreach", **MODES[self.mode]}
        layout = ENGINES[self.engine].get("layout", {})
        assert isinstance(layout, dict)
        gpus = layout.get("dp", 1) * layout.get("tp", 1)
        engine = ENGINES[self.engine]["engine"]
        return read_job(
            {
                "schema": 1,
                "model": MODELS[self.model],
                "cluster": f"{gpus}xH100-SXM-80GB",
                "stack": "transformers",
                **settings,
                "engine": {"name": engine} if isinstance(engine, str) else engine,
                "layout": layout,
                "optimizer": _OPTIMIZERS[str(settings["optimizer"])],
            }
        )


class Row(NamedTuple):
    """A step's two peaks in bytes, and their moments."""

    case: Case
    closed: int
    traced: int
    closed_moment: str
    traced_moment: str

    @property
    def error(self) -> float:
        return self.closed / self.traced - 1


def cases(models: Sequence[str] = tuple(MODELS)) -> Iterator[Case]:
    for model in models:
        for engine in ENGINES:
            if "tp" not in engine or model not in _NO_PLAN:
                yield from (Case(model, engine, mode) for mode in MODES)


def row(case: Case) -> Row:
    job = case.job
    answer = estimate(job)
    found = traced(job)
    return Row(
        case=case,
        closed=answer.peak.allocated_bytes - by_category(answer.ledger).get("workspace", 0),
        traced=found.steady.bytes,
        closed_moment=answer.peak.moment.partition(":")[0],
        traced_moment=moment(found),
    )


def traced(job: Job) -> Trace:
    """The trace of the rank that the estimate is of."""
    return trace(factory_of(job), rank=_rank(job), world=job.layout.world)


def _rank(job: Job) -> int:
    if job.engine.name != "zero1":
        return 0
    graph = build(job.model)
    (rank,) = ranks_of(job, graph)
    return fullest_rank(stepped(rank, context_of(job, graph), job.precision.params), job.layout.dp)


# -- the moment of a trace's peak, in an estimate's words

_LAYER = re.compile(r"\.\d+(\.|$)")


def moment(found: Trace) -> str:
    """ "backward of layer, micro-batch 1"; "optimizer step"."""
    peak = found.steady
    mark = found.phase(peak.at)
    if mark.what not in ("forward", "backward"):
        return "optimizer step" if mark.what == "optimizer" else "gradient clipping"
    passes = [one for one in found.marks if (one.step, one.what) == (mark.step, mark.what) and one.at <= peak.at]
    if mark.what == "backward" and not peak.module and _is_behind_embedding(found, mark.at, peak.at):
        return f"reducing the root's gradients, micro-batch {len(passes)}"
    return f"{mark.what} of {_part(found, peak.module)}, micro-batch {len(passes)}"


def _part(found: Trace, module: str) -> str:
    if _LAYER.search(module):
        return "layer"
    return "embedding" if dict(found.modules).get(module) == "Embedding" else "head"


def _is_behind_embedding(found: Trace, start: int, at: int) -> bool:
    """Whether the embedding's own backward has run between the two times."""
    return any(_part(found, one.module) == "embedding" for one in found.allocations if start <= one.birth < at)


# -- the table

HEAD = """\
| model | engine | mode | closed form | traced | difference | moment |
|---|---|---|---|---|---|---|
"""


def line(row: Row) -> str:
    """One of Markdown's: a step under an engine in a mode."""
    when = row.closed_moment
    if row.traced_moment != when:
        when = f"{when}; traced: {row.traced_moment}"
    return f"| {' | '.join(row.case)} | {row.closed:,} | {row.traced:,} | {row.error:+.2%} | {when} |\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ullage.trace.whole", description=__doc__)
    parser.add_argument("--model", default=",".join(MODELS), help=f"of {', '.join(MODELS)}, with commas between")
    parser.add_argument("--engine", default="", help="only engines with this in their name")
    parser.add_argument("--mode", default="", help="only modes with this in their name")
    arguments = parser.parse_args(argv)
    errors = []
    sys.stdout.write(HEAD)
    for case in cases([name for name in MODELS if name in arguments.model.split(",")]):
        if arguments.engine not in case.engine or arguments.mode not in case.mode:
            continue
        try:
            found = row(case)
        except UllageError as error:
            sys.stderr.write(f"{case}: {error}\n")
            continue
        errors.append(abs(found.error))
        sys.stdout.write(line(found))
        sys.stdout.flush()
    if errors:
        sys.stderr.write(f"{len(errors)} steps, the worst {max(errors):.2%} off\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
