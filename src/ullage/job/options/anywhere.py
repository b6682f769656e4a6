"""Knobs of the layer code, of fine-tuning, of optimizers and of the allocator: not tied to one engine.

Names as their own users write them: PEFT, bitsandbytes, torchao, torchtune, PYTORCH_CUDA_ALLOC_CONF, NCCL.
"""

from __future__ import annotations

from ullage.job import fields
from ullage.job.options.spec import ANY, COUNT, DTYPE, FLAG, NUMBER, SWITCH, TEXT, WORDS, Option, Status, table

OPTIONS: tuple[Option, ...] = (
    table(
        {
            Status.MODELLED: {
                # use_dora, lora_dtype, modules_to_save: read into lora.
                FLAG: "expandable_segments optimizer_in_bwd use_dora quantize_moe_experts xielu_cuda fla causal_conv1d",
                SWITCH: "attention_backend",
                DTYPE: "lora_dtype",
                WORDS: "modules_to_save lora_target_parameters",
                NUMBER: "momentum",
            },
            Status.NOT_MODELLED: {
                TEXT: """
                base_quantization optimizer_library optimizer_state optimizer_variant weights matmul device_map
                init_lora_weights bnb_4bit_quant_type""",
                DTYPE: "bnb_4bit_compute_dtype",
                FLAG: """
                use_rslora use_bdlora lora_on_experts autocast_adapter_dtype
                use_reentrant cudnn_benchmark use_cache amsgrad nesterov packed""",
                NUMBER: "beta1 garbage_collection_threshold per_process_memory_fraction",
                COUNT: "max_split_size_mb roundup_power2_divisions torch_empty_cache_steps optimizer_block_size nccl_buffsize",
                ANY: "large_segment_size_mb cublas_workspace_config",
            },
            Status.NO_EFFECT: {
                FLAG: "pinned_use_cuda_host_register group_by_length dataloader_pin_memory",
                COUNT: "dataloader_num_workers logging_steps save_steps",
                TEXT: "report_to",
            },
        },
    )
    + table({Status.MODELLED: {FLAG: "offload_gradients"}}, engines=("single",))
    + table({Status.MODELLED: {fields.integer(1): "max_target_length"}}, stacks=("transformers",))
)
