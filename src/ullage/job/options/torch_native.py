"""Arguments of torch's own wrappers (DDP, ZeroRedundancyOptimizer, FSDP1, FSDP2) and of torchtitan's configuration."""

from __future__ import annotations

from ullage.job import fields
from ullage.job.options.spec import ANY, COUNT, DTYPE, FLAG, RESHARD, SWITCH, TEXT, WORDS, Option, Status, table

# Of `ullage train` alone: reduce_in_place, with which it reduces gradients itself (trace/replicas.py), and cast_once (trace/cast_once.py).
_DDP = table(
    {
        Status.MODELLED: {COUNT: "bucket_cap_mb", FLAG: "gradient_as_bucket_view reduce_in_place"},
        Status.NOT_MODELLED: {
            FLAG: "find_unused_parameters static_graph parameters_as_bucket_view overlap_with_ddp",
            COUNT: "first_bucket_cap_mb broadcast_bucket_size",
            TEXT: "comm_hook",
        },
        Status.NO_EFFECT: {FLAG: "broadcast_buffers check_reduction init_sync skip_all_reduce_unused_params"},
    },
    engines=("ddp", "zero1"),
)

_FSDP = table(
    {
        Status.MODELLED: {
            RESHARD: "reshard_after_forward",
            DTYPE: "reduce_dtype bnb_4bit_quant_storage",
            # Read into zero_stage, shard_group and recompute, or held against them.
            # Composer's mixed_precision says whose trainer it is; its types stand in precision.
            TEXT: "sharding_strategy mixed_precision",
            FLAG: "activation_checkpointing sync_each_batch use_orig_params",
            fields.choice("torch_crossentropy", "fused_crossentropy"): "loss_fn",
        },
        Status.NOT_MODELLED: {
            FLAG: """
                limit_all_gathers forward_prefetch
                activation_checkpointing_reentrant sync_module_states cpu_ram_efficient_loading keep_low_precision_grads
                cast_forward_inputs cast_root_forward_inputs use_torch_fsdp2
                optimizer_created_before_sharding te_linears reshard_after_backward""",
            DTYPE: "param_dtype buffer_dtype output_dtype",
            TEXT: "backward_prefetch norm_type",
            WORDS: "auto_wrap_policy custom_sharded_layers fsdp_transformer_layer_cls_to_wrap",
            COUNT: "set_reduce_scatter_max_input_buffers min_num_params",
        },
    },
    engines=("fsdp1", "fsdp2"),
)

_TITAN = table(
    {
        Status.MODELLED: {
            SWITCH: "compile_loss logits_upcast",
            TEXT: "loss_name memory_policy",
            FLAG: "force_load_balance graph_trainer simple_fsdp",
        },
        Status.NOT_MODELLED: {
            FLAG: """
                async_tp sac_saves_abs deterministic
                float8_all_gather float8_force_recompute_weight_in_bwd float8_grouped_mm float8_precompute_scale
                enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp enable_async_tensor_parallel
                force_recompute_fp8_weight_in_bwd early_stop""",
            TEXT: """
                float8_recipe float8_kernels float8_layers float8_scope compile_scope compile_backend
                compiler rmsnorm moe_dispatch expert_parallel_comm_backend""",
            COUNT: " selective_ac_option",
            ANY: "activation_memory_budget per_op_sac_force_recompute_mm_shapes_by_fqns",
        },
        Status.NO_EFFECT: {FLAG: "enable_wandb enable_tensorboard enable_profiling", COUNT: "gc_freq log_freq"},
    },
)

_LITGPT = table({Status.MODELLED: {FLAG: "lm_head_chunked"}}, stacks=("litgpt",))

_CAST_ONCE = table({Status.MODELLED: {FLAG: "cast_once"}}, engines=("single", "ddp", "zero1"))

OPTIONS: tuple[Option, ...] = _DDP + _CAST_ONCE + _FSDP + _TITAN + _LITGPT
