"""GLM-4-0414: GLM with norms after the branches as well."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.decoder import DecoderSpec
from ullage.model.families import glm
from ullage.model.keys import Keys


def spec(keys: Keys) -> DecoderSpec:
    return replace(glm.spec(keys), post_norms=True)
