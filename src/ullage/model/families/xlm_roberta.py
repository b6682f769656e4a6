"""XLM-RoBERTa (arXiv 1911.02116): RoBERTa with a vocabulary of a hundred languages."""

from __future__ import annotations

from ullage.model.families.roberta import in_keys
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return in_keys(keys, "XLMRoberta", vocab=30522)
