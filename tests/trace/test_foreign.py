"""Modules that no one here wrote, under ZeRO-3 and recompute: what is estimated of them against what the real code does."""

import pytest
import torch
from benchmarks.foreign import JOBS, MODULES, Foreign, compared
from tests.trace.factories import Recurrent

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # returns a view: logits cut to the labels, a transpose

QUICK = (
    "UNet2DModel", "AutoencoderKL", "PixArtTransformer2DModel", "ViTForImageClassification", "ConvNextForImageClassification",
    "ResNetForImageClassification", "BertForMaskedLM", "GPT2LMHeadModel", "Wav2Vec2ForCTC", "T5ForConditionalGeneration",
)  # fmt: skip
"""Of the modules that the table of benchmarks/foreign.py shows, those that are traced in a few seconds."""


@pytest.mark.parametrize("foreign", [one for one in MODULES if one.kind in QUICK], ids=str)
def test_a_foreign_module_under_zero_3_and_recompute(foreign: Foreign) -> None:
    peak = compared(foreign, ["ZeRO-3, recompute"])["ZeRO-3, recompute"]
    assert peak.estimated == pytest.approx(peak.traced, rel=0.01)


class LongShortTermMemory(Foreign):
    def module(self) -> torch.nn.Module:
        return Recurrent().train()


def test_a_layer_that_saves_what_it_returns() -> None:
    """An LSTM's output is read by the next layer and saved by its own; checkpointed, it is kept by neither where a copy follows."""
    peaks = compared(LongShortTermMemory(library="torch", kind="LSTM", batch=lambda: {"x": torch.randn(16, 100, 32)}))
    assert set(peaks) == set(JOBS)
    for peak in peaks.values():
        assert peak.estimated == pytest.approx(peak.traced, rel=0.01)


class Frozen(Foreign):
    def module(self) -> torch.nn.Module:
        model = super().module()
        for part in ("vit.embeddings", "vit.layers.0", "vit.layers.1.mlp"):
            model.get_submodule(part).requires_grad_(False)
        return model


def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    """Of the first layers all, of another a part: beside trained ones in a group of parameters that are gathered together."""
    (vit,) = (one for one in MODULES if one.kind == "ViTForImageClassification")
    frozen = Frozen(library=vit.library, kind=vit.kind, keys=vit.keys, batch=vit.batch)
    whole = compared(vit, ["plain"])["plain"]
    for name, peak in compared(frozen).items():
        assert peak.estimated == pytest.approx(peak.traced, rel=0.01), name
        assert peak.estimated < 0.95 * whole.estimated, name
