"""What several test files need: a factory of a small transformers model in a mode, and traces side by side."""

import contextlib
from bisect import bisect

import torch

from ullage.trace.families import FAMILIES, TARGETS

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "autocast": torch.float32}


def language_model(
    family, *, precision="bf16", attention="sdpa", recompute=None, optimizer=None, mask=False, **changes
):
    """recompute: None, "reentrant" or "non-reentrant"."""

    def made():
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
        kind = transformers.AutoModelForCausalLM
        if family in TARGETS:
            kind, config.decoder_start_token_id = transformers.AutoModelForSeq2SeqLM, config.pad_token_id
        model = kind.from_config(config, attn_implementation=attention, dtype=DTYPES[precision]).train()
        if recompute:
            model.activation_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        stepper = torch.optim.AdamW(model.parameters(), **(optimizer or {"foreach": True}))
        ids = torch.randint(1, config.vocab_size, (2, 40))
        batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
        if mask:
            batch["attention_mask"] = torch.ones(2, 40, dtype=torch.long)
            batch["attention_mask"][0, -8:] = 0

        def step():
            with torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else contextlib.nullcontext():
                loss = model(**batch).loss
            loss.backward()
            del loss
            stepper.step()
            stepper.zero_grad()

        return model, stepper, step

    return made


def lives(trace):
    """Everything that was born in the steps, in order, with how many others were born before it died.

    What dies together dies in any order: autocast's cache is a hash table.
    """
    start, _ = trace.span(1)
    births = [one.birth for one in trace.allocations if one.birth >= start]
    return [
        (bisect(births, one.death or trace.end), one.bytes, one.category, one.module, one.op)
        for one in trace.allocations
        if one.birth >= start
    ]
