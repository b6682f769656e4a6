"""DeepSpeed's configuration keys that change memory or time (zero_optimization and its siblings, without their section).

Sources: deepspeed/runtime/zero/config.py, runtime/config.py, runtime/zero/offload_config.py.
"""

from __future__ import annotations

from ullage.job.options.spec import ANY, COUNT, DTYPE, FLAG, NUMBER, TEXT, Option, Status, table


def SIZE(value: object, key: str) -> object:  # noqa: N802 - a reader, named like its siblings
    """A number of elements, or Hugging Face's word for one that follows the hidden size."""
    return value if value == "auto" else COUNT(value, key)


OPTIONS: tuple[Option, ...] = table(
    {
        Status.MODELLED: {
            FLAG: """
                overlap_comm bf16_optimizer checkpoint_activations round_robin_gradients immediate_grad_update
                bf16_master_weights_and_grads fp16_master_weights_and_grads fp16_master_weights_and_gradients
                bf16_optimizer_states pin_memory partition_activations cpu_checkpointing""",
            SIZE: """
                reduce_bucket_size sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
                stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold""",
            COUNT: "zero_hpz_partition_size buffer_count buffer_size max_in_cpu",
            DTYPE: "communication_data_type grad_accum_dtype",
            TEXT: "deepspeed_version",
        },
        Status.NOT_MODELLED: {
            FLAG: """
                contiguous_gradients reduce_scatter memory_efficient_linear
                zero_quantized_weights zero_quantized_nontrainable_weights
                zero_quantized_gradients torch_autocast fp32_optimizer_states deepcompile double_buffer tiled_mlp_compute
                contiguous_memory_optimization synchronize_checkpoint_boundary
                reentrant_checkpointing offload_optimizer_pin_memory offload_param_pin_memory
                pipeline_read pipeline_write fast_init prescale_gradients sparse_gradients
                stage3_use_all_reduce_for_fetch_params zero_init mics_hierarchical_params_gather""",
            COUNT: """
                mics_shard_size
                number_checkpoints autotp_size stage3_module_granularity_threshold""",
            NUMBER: "ratio shard_param_frac gradient_predivide_factor",
            DTYPE: "seq_parallel_communication_data_type buffer_dtype",
            TEXT: "placement_policy real_engine moe_experts",
            ANY: "zenflow keep_in_fp32_modules",
        },
        Status.NO_EFFECT: {
            FLAG: """
                stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
                ignore_unused_parameters elastic_checkpoint load_from_fp32_weights zero_allow_untested_optimizer
                zero_force_ds_cpu_optimizer check_grad_overflow wall_clock_breakdown dump_state memory_breakdown
                legacy_stage1 allgather_partitions use_multi_rank_bucket_allreduce override_module_apply log_trace_cache_warnings""",
            COUNT: "allgather_bucket_size steps_per_print initial_scale_power loss_scale_window hysteresis",
            NUMBER: "gradient_clipping loss_scale min_loss_scale",
        },
    },
    engines=("deepspeed",),
)
