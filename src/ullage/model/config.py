"""A model's architecture as facts: the keys of its config.json, read-only, with the name that a person gave it."""

from __future__ import annotations

from ullage.frozen import FrozenMap, frozen


@frozen
class ModelConfig:
    """``keys``: config.json as a FrozenMap, so that a cache may be keyed by a ModelConfig."""

    name: str
    keys: FrozenMap

    @property
    def model_type(self) -> str:
        return str(self.keys.get("model_type", ""))
