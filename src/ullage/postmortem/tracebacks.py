"""What a program was doing when it died: the phase that the functions of a traceback, or the words of a message, speak of."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from ullage.postmortem.snapshot_frames import Frame

Phase = Literal[
    "load", "engine-init", "forward", "attention", "experts", "loss", "backward", "gather", "clipping", "optimizer-first-step", "optimizer",
    "save", "evaluation", "collective", "unpad", "pinning", "engine", "mask",
]  # fmt: skip

_FRAME = re.compile(
    r'File "(?P<python>[^"\n]{1,300})", line (\d{1,7}), in ([^\s:]{1,120})'
    r"|(?<!\S)File (?P<ipython>[^\s:\"]{1,300}):(\d{1,7}), in ([\w.<>]{1,120})"
    r"|(?<!\S)\[?(?P<ipython7>[^\s:\"\[\]]{1,300}\.py)(?:\]\(\S{1,100}\))? in ([\w.<>]{1,120})\("
    r"|\u2502 (?P<rich>[^\s\u2502:]{1,300}):(\d{1,7}) in ([^\s\u2502:]{1,120})"
    r"|(?<!\S)(?P<pytest>[^\s:]{1,300}\.py):(\d{1,7}): in (\w{1,120})"
)
_CODE = {
    "ipython7": re.compile(r"\n-{1,9}> \d{1,7} ([^\n]{0,200})"),
    "ipython": re.compile(r"\n-{1,9}> \d{1,7} ([^\n]{0,200})"),
    "rich": re.compile(r"\u2771 *\d{1,7} \u2502([^\n]{0,200})"),
}
"""The line of code that is marked among its neighbours; elsewhere it is the next one."""
_STATEMENT = re.compile(
    r"(?:^|[\s:>])((?:return |[\w.]{1,60}(?:, [\w.]{1,60}){0,5} [-+*/]?= ?)[\w.]{1,100}\([^\n]{0,200})\s*$"
)
"""A text's last line where it is code: what people leave of a traceback above its message."""
_WRAPPED = re.compile(r"(\S) \u2502\r?\n\u2502 (\S)")
"""A path that is longer than rich's box."""
_BELOW = 2000
_MOST_FRAMES = 200
_LONGEST_CODE = 200


class Called(NamedTuple):
    """A frame, and the line of code that stood below it."""

    frame: Frame
    code: str


def frames_of(text: str) -> tuple[Called, ...]:
    """The calls of the last traceback in ``text``, outermost first: Python's, and as IPython (before version 8 without lines), rich and
    pytest print it. Of one that was cut down to its last statement, that statement."""
    text = text[text.rfind("Traceback (most recent call last)") :] if "Traceback (most recent" in text else text
    text = _WRAPPED.sub(r"\1\2", text)
    found = []
    for match in _FRAME.finditer(text):
        file, *line, function = (group for group in match.groups() if group is not None)
        below = text[match.end() : match.end() + _BELOW]
        style = next(name for name, group in match.groupdict().items() if group is not None)
        if style in _CODE:
            marked = _CODE[style].search(below)
            code = marked[1].strip(" \u2502") if marked is not None else ""
        else:
            code = below[:_LONGEST_CODE].lstrip("\r\n").partition("\n")[0].strip()
        found.append(Called(Frame(file, function, int(line[0]) if line else 0), code))
    if not found and (statement := _STATEMENT.search(text[-_BELOW:])) is not None:
        return (Called(Frame("", "", 0), statement[1]),)
    return tuple(found[-_MOST_FRAMES:])


class _Rule(NamedTuple):
    phase: Phase
    where: re.Pattern[str]


def _rule(phase: Phase, where: str) -> _Rule:
    return _Rule(phase, re.compile(where, re.IGNORECASE))


# Over "file function code" of a frame, the most particular first. Names of torch 1.x and 2.x, transformers, DeepSpeed, Megatron-LM.
_RULES = (
    _rule("unpad", r"unpad_input|index_first_axis|_get_unpad_data"),
    _rule("save",
          r"\bstate_dict\b(?!.*load)|save_pretrained|save_checkpoint|_save_to_state_dict|full_state_dict|save_model"
          r"|safe_save|_save\b|save_16bit|_consolidated_16bit|save_fsdp_|save_accelerator_state|state_dict_saver"
          r"|_post_state_dict_hook|get_peft_model_state_dict"),
    _rule("load",
          r"from_pretrained|load_state_dict|load_checkpoint|_load_(?:rng|optimizer)|torch\.load|_load_state_dict"
          r"|load_model\b|resume|persistent_load|load_opt_state|restore_checkpoint|torch/serialization\.py _?load\b|load_fsdp_|load_state\b"
          r"|state_dict_loader"),
    _rule("engine",
          r"\bvllm/|\bsglang/|_move_model_to_vllm|sync_(?:model_)?weights|sharding_manager/|update_weights?_from|wake_up\b|\bLLM\("),
    _rule("evaluation", r"evaluation_loop|prediction_loop|prediction_step|\bevaluate\b|nested_concat|compute_metrics|validation_step"
          r"|_run_sanity_check|evaluation_step|val(?:id|idate|idation)?_(?:one_)?epoch|\bvalidate\b"),
    _rule("optimizer-first-step",
          r"_init_group|zeros_like.{0,60}(?:adam|exp_avg)|exp_avg(?:_sq)?.{0,40}zeros_like|initialize_optimizer_states"
          r"|init_state"),
    _rule("load", r"torch/nn/modules/module\.py (?:to|cuda|_apply|convert)\b|_move_model_to_device"),
    _rule("clipping", r"clip_grad|get_total_norm|_unfused_norm|foreach_norm|grad_norm"),
    _rule("optimizer",
          r"torch/optim/|optimizer\.step|adamw?\.py|_multi_tensor_adam|_single_tensor_adam|optim.{0,30}\bstep\b|denom ?="),
    _rule("loss",
          r"cross_?entropy|nll_loss|log_softmax|lm_head|logits(?:\.float|_to_keep| ?=)|compute_loss"
          r"|\.float\(\).{0,20}logits|from_logits|token_log_?p|log_?probs_from|logsumexp\(logits|_convert_to_fp32"),
    _rule("pinning", r"\bpin_memory\(|\.pin_memory\b|cudaHostAlloc|cudaHostRegister"),
    _rule("mask",
          r"_expand_mask|expand_mask_4d|_prepare_(?:4d_|decoder_)?\w{0,20}attention_mask|_make_causal_mask|_update_causal_mask"
          r"|create_causal_mask|get_ltor_masks"),
    _rule("attention", r"softmax|baddbmm|attn_weights|attention_scores|eager_attention|core_attention|scaled_dot_product|-> b i j"),
    _rule("experts",
          r"\bexperts?\b|expert_layer|\bmoe_|_moe\b|/moe/|MoEBlock|MoELayer|token_dispatcher|grouped_g?e?mm|permute_tokens"),
    _rule("gather", r"all_gather(?!_object)|unshard|_alloc_padded_unsharded|fetch_sub_module|_prefetch"),
    _rule("collective", r"distributed_c10d|all_reduce|broadcast|process_group"),
    _rule("engine-init",
          r"deepspeed/__init__.{0,40}initialize|_configure_(?:zero_)?optimizer|stage_1_and_2.{0,40}__init__|fully_shard|"
          r"FullyShardedDataParallel.{0,40}__init__|accelerator\.prepare|flatten_dense"),
    _rule("backward", r"\bbackward\b|_engine_run_backward|run_backward"),
    _rule("forward", r"\bforward\b|_call_impl"),
)  # fmt: skip


def phases(called: tuple[Called, ...], words: str) -> tuple[Phase, ...]:
    """The phases that the frames speak of, the most particular first, each once; words: what the message says besides its numbers."""
    texts = [f"{one.frame.file} {one.frame.function} {one.code}" for one in called]
    texts.append(words)
    return tuple(dict.fromkeys(rule.phase for rule in _RULES if any(rule.where.search(text) for text in texts)))
