"""BERT (arXiv 1810.04805): an encoder, and the head that ``architectures`` names."""

from __future__ import annotations

from ullage.model.encoder import bert_like
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.task import MASKED

HEADS = (MASKED, "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")


def spec(keys: Keys) -> DecoderSpec:
    return bert_like(keys, "Bert", HEADS, vocab=30522)
