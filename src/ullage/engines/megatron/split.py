"""How Megatron cuts layers into virtual stages: its options that job.md's pp_split cannot say."""

from __future__ import annotations

import re
from dataclasses import replace

from ullage.errors import InvalidInput
from ullage.job.job import Job, Layout

_TOKEN = re.compile(r"[A-Za-z]|\||\(|\)|\*\d+")


def layout(job: Job, layers: int) -> Layout:
    """The job's layout with the layers of every virtual stage written out, where an option of Megatron's decides them."""
    options = job.engine.options
    text = options.get("pipeline_model_parallel_layout")
    if isinstance(text, str):
        return replace(job.layout, pp_split=tuple(stage.count("t") for stage in stages(text)))
    before = bool(options.get("account_for_embedding_in_pipeline_split"))
    after = bool(options.get("account_for_loss_in_pipeline_split"))
    if before or after:
        return replace(job.layout, pp_split=accounted(layers, job.layout.pp * job.layout.vpp, before, after))
    return job.layout


def accounted(layers: int, chunks: int, before: bool, after: bool) -> tuple[int, ...]:
    """Even cuts of the layers with embedding and loss counted as one layer each (transformer_block.py get_num_layers_to_build)."""
    each = (layers + before + after) // chunks
    split = [each] * chunks
    split[0] -= before
    split[-1] -= after
    return tuple(split)


def stages(text: str) -> list[str]:
    """The stages of a layout text: ``Et*3|(tt|)*6L`` is ["Ettt", "tt", ..., "L"]; ``x*n`` repeats what stands before it."""
    groups: list[list[str]] = [[]]
    for token in _TOKEN.findall(text):
        if token == "(":
            groups.append([])
        elif token == ")":
            inner = "".join(groups.pop())
            groups[-1].append(inner)
        elif token.startswith("*"):
            if not groups[-1]:
                raise InvalidInput("repeats nothing", key="engine.options.pipeline_model_parallel_layout", value=text)
            groups[-1][-1] *= int(token[1:])
        else:
            groups[-1].append(token)
    if len(groups) != 1:
        raise InvalidInput("has an open bracket", key="engine.options.pipeline_model_parallel_layout", value=text)
    return "".join(groups[0]).split("|")
