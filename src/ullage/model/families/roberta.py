"""RoBERTa (arXiv 1907.11692): BERT's layers; positions are counted from behind the padding token's id."""

from __future__ import annotations

from ullage.model.encoder import bert_like
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.task import MASKED

HEADS = (MASKED, "ForSequenceClassification", "ForTokenClassification")


def spec(keys: Keys) -> DecoderSpec:
    return in_keys(keys, "Roberta", vocab=50265)


def in_keys(keys: Keys, prefix: str, *, vocab: int) -> DecoderSpec:
    """Of a family in RoBERTa's keys, whose classes begin with ``prefix``."""
    offset = keys.count("pad_token_id", default=1) + 1
    return bert_like(keys, prefix, HEADS, vocab=vocab, drops_first=True, position_offset=offset)
