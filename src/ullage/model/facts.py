"""The catalogue's models as facts that a person chooses by."""

from __future__ import annotations

from typing import NamedTuple

from ullage.model import catalogue
from ullage.model.hf_config import decoder_spec


class ModelFacts(NamedTuple):
    """One model of the catalogue. parameters: counted from its config.json, tied ones once; hidden: width of the stream."""

    name: str
    model_type: str
    parameters: int
    layers: int
    hidden: int
    hugging_face_id: str
    source: str


def facts(name: str) -> ModelFacts:
    """Of one model. UnknownName if the catalogue has none of this name."""
    entry = catalogue.entry(name)
    spec = decoder_spec(catalogue.model_config(entry.name))
    return ModelFacts(
        name=entry.name,
        model_type=entry.model_type,
        parameters=entry.parameters,
        layers=spec.layers,
        hidden=spec.hidden,
        hugging_face_id=entry.hugging_face_id,
        source=entry.source,
    )
