"""Vision Transformer (arXiv 2010.11929): patches for tokens, norms before the branches, a class told from the first token."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Patches
from ullage.model.standard import head_size
from ullage.model.task import IMAGES, task_of


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size", default=768)
    heads = keys.size("num_attention_heads", default=12)
    act = keys.activation("hidden_act", default="gelu")
    patches = _patches(keys)
    return DecoderSpec(
        name="",
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads),
        ffn=keys.size("intermediate_size", default=3072),
        vocab=0,
        mlp=act.act,
        mlp_form=act.form,
        glu=False,
        norm="layernorm",
        qkv_bias=keys.flag("qkv_bias", default=True),
        out_bias=True,
        mlp_bias=True,
        causal=False,
        positions="learned",
        max_positions=patches.tokens,
        patches=patches,
        hidden_dropout=keys.rate("hidden_dropout_prob"),
        attention_dropout=keys.rate("attention_probs_dropout_prob"),
        task=task_of(keys, "ViT", (IMAGES,), pooled=False),
    )


def _patches(keys: Keys) -> Patches:
    image, patch = keys.pair("image_size", 224), keys.pair("patch_size", 16)
    if patch[0] > image[0] or patch[1] > image[1]:
        raise keys.wrong("patch_size", f"up to image_size, {image[0]} x {image[1]}")
    return Patches(channels=keys.size("num_channels", default=3), image=image, patch=patch)
