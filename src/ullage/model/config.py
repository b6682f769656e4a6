"""A model's architecture as facts: the keys of its config.json, read-only, with the name that a person gave it."""

from __future__ import annotations

from ullage.frozen import FrozenMap, frozen


@frozen
class ModelConfig:
    """``keys``: config.json as a FrozenMap, so that a cache may be keyed by a ModelConfig.

    beside: of a multimodal file, whose decoder ``keys`` are, what says that there is more.
    """

    name: str
    keys: FrozenMap
    beside: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.keys.get("model_type", ""))
