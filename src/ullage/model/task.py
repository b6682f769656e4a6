"""What an encoder is trained for, and its head as ops: hidden tokens to be told (BERT, arXiv 1810.04805), or a class."""

from __future__ import annotations

from typing import Final

from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.model.graph import BATCH, SEQ, STREAM, Dim, Op, Tensor
from ullage.model.keys import Keys
from ullage.model.ops import dropout, linear, norm
from ullage.model.spec import DecoderSpec, Task

MASKED: Final = "ForMaskedLM"
IMAGES: Final = "ForImageClassification"
_KINDS: Final = {
    MASKED: "masked",
    "ForPreTraining": "pretraining",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
    IMAGES: "sequence",
}
"""What transformers calls a class, behind the name of the architecture."""
_PROBLEMS: Final = {
    "regression": "numbers",
    "single_label_classification": "classes",
    "multi_label_classification": "several-classes",
}
_OF_WORDS: Final = ("masked", "pretraining")
"""Tasks whose head has an output for each entry of the vocabulary."""


def task_of(
    keys: Keys, prefix: str, allowed: tuple[str, ...], *, dropout: float = 0.0, pooled: bool = True, labels: int = 2
) -> Task:
    """The task of the class that ``architectures`` names; the first of ``allowed`` where it names none, or the model without a head.

    prefix: of the family's classes ("Bert"). labels: where the file says nothing of them, as in transformers' configuration classes.
    """
    named = keys.texts("architectures")
    what = named[0].removeprefix(prefix) if named else "Model"
    head = allowed[0] if what == "Model" else what
    if head not in allowed:
        raise Unsupported(
            "has a head that is not modelled",
            key="model.architectures",
            value=named[0],
            allowed=", ".join(f"{prefix}{one}" for one in allowed),
        )
    count = keys.size("num_labels", default=keys.entries("id2label") or labels)
    usual = "regression" if count == 1 else "single_label_classification"
    problem = keys.choice("problem_type", allowed=tuple(_PROBLEMS), default=usual)
    if _KINDS[head] in _OF_WORDS:
        return Task(kind=_KINDS[head])
    if count == 1 and problem == "single_label_classification":
        raise keys.wrong("problem_type", "regression, where there is one label", "or give num_labels")
    is_whole = _KINDS[head] == "sequence"
    return Task(
        kind=_KINDS[head],
        labels=count,
        dropout=dropout,
        pooled=is_whole and pooled,
        problem=_PROBLEMS[problem] if is_whole else "classes",
    )


def has_words(task: Task | None) -> bool:
    """Whether the head has an output for each entry of the vocabulary."""
    return task is None or task.kind in _OF_WORDS


def task_ops(spec: DecoderSpec, task: Task, source: str) -> list[Op]:
    """From the last layer's output, or the norm's behind it, to "loss". The pooler is the model's own, and runs before any head."""
    if task.kind == "masked":
        return [*_transform(spec, source), _words(spec), _loss("loss", "logits", "loss", "words")]
    if task.kind == "pretraining":
        return [
            *pooler(source),
            *_transform(spec, source),
            _words(spec),
            dense("next_sentence", "pooled", Tensor(name="next_logits", dims=(BATCH, 2)), 2),
            _loss("loss", "logits", "words_loss", "words"),
            _loss("next_loss", "next_logits", "next_loss", "classes"),
            Op(name="add_losses", kind="add_losses", inputs=("words_loss", "next_loss"), outputs=(_scalar("loss"),)),
        ]
    rows: tuple[Dim, ...] = (BATCH, SEQ) if task.kind == "tokens" else (BATCH,)
    ops: list[Op] = []
    if task.kind == "sequence":
        ops += (
            pooler(source, task.pooler_act, task.dropout if task.drops_first else 0.0)
            if task.pooled
            else [_first_token(source, "pooled")]
        )
        source = "pooled"
    if task.dropout:
        ops.append(dropout("classifier_dropout", source, "classified", task.dropout, dims=(*rows, "hidden")))
        source = "classified"
    logits = Tensor(name="logits", dims=(*rows, task.labels))
    return [*ops, dense("classifier", source, logits, task.labels), _loss("loss", "logits", "loss", task.problem)]


def pooler(source: str, act: str = "tanh", drops: float = 0.0) -> list[Op]:
    """The first token through a dense layer and an activation."""
    first = Tensor(name="pooled", dims=(BATCH, "hidden"))
    read = "first_dropped" if drops else "first_token"
    return [
        _first_token(source, "first_token"),
        *([dropout("pooler_dropout", "first_token", read, drops, dims=first.dims)] if drops else []),
        dense("pooler", read, Tensor(name="pooler_up", dims=first.dims), "hidden"),
        activation("pooler_act", act, "pooler_up", first),
    ]


def _transform(spec: DecoderSpec, source: str) -> list[Op]:
    return [
        dense("lm_dense", source, Tensor(name="lm_up", dims=STREAM), "hidden"),
        activation("lm_act", spec.mlp, "lm_up", Tensor(name="lm_product", dims=STREAM), form=spec.mlp_form),
        norm(spec, "lm_norm", "lm_product", "transformed", module="head"),
    ]


def _words(spec: DecoderSpec) -> Op:
    logits = Tensor(name="logits", dims=(BATCH, SEQ, "vocab"))
    return linear("lm_head", "transformed", logits, ("vocab",), ("hidden",), parallel="column", bias=spec.head_bias)


def _loss(name: str, source: str, result: str, predicts: str) -> Op:
    attrs = FrozenMap({"softcap": False, "predicts": predicts})
    return Op(name=name, kind="loss", inputs=(source,), outputs=(_scalar(result),), attrs=attrs)


def _scalar(name: str) -> Tensor:
    return Tensor(name=name, dims=(1,), elements="fp32")


def _first_token(source: str, result: str) -> Op:
    out = Tensor(name=result, dims=(BATCH, "hidden"))
    return Op(name=result, kind="first_token", inputs=(source,), outputs=(out,), module="head")


def activation(name: str, act: str, before: str, after: Tensor, *, form: str = "") -> Op:
    attrs = FrozenMap({"act": act, "form": form or act, "glu": False, "bias": True})
    return Op(name=name, kind="activation", inputs=(before,), outputs=(after,), attrs=attrs, module="head")


def dense(name: str, before: str, after: Tensor, out: Dim) -> Op:
    return linear(name, before, after, (out,), ("hidden",), parallel="replicated", bias=True, module="head")
