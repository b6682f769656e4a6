"""GLM-4-0414: GLM with norms after the branches as well."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import glm
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return replace(glm.spec(keys), post_norms=True)
