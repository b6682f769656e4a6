"""DeepSpeed's configuration keys that change memory or time (zero_optimization and its siblings, without their section).

Sources: deepspeed/runtime/zero/config.py, runtime/config.py, runtime/zero/offload_config.py.
"""

from __future__ import annotations

from ullage.job.options.spec import ANY, COUNT, DTYPE, FLAG, NUMBER, TEXT, Option, Status, table

OPTIONS: tuple[Option, ...] = table(
    {
        Status.MODELLED: {
            FLAG: "overlap_comm bf16_optimizer checkpoint_activations",
            COUNT: """
                reduce_bucket_size sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
                stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold""",
        },
        Status.NOT_MODELLED: {
            FLAG: """
                contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients memory_efficient_linear
                use_multi_rank_bucket_allreduce zero_quantized_weights zero_quantized_nontrainable_weights
                zero_quantized_gradients bf16_master_weights_and_grads fp16_master_weights_and_grads
                fp16_master_weights_and_gradients bf16_optimizer_states torch_autocast fp32_optimizer_states
                immediate_grad_update deepcompile double_buffer tiled_mlp_compute
                partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary
                reentrant_checkpointing offload_optimizer_pin_memory offload_param_pin_memory pin_memory
                pipeline_read pipeline_write fast_init prescale_gradients sparse_gradients
                stage3_use_all_reduce_for_fetch_params zero_init mics_hierarchical_params_gather""",
            COUNT: """
                allgather_bucket_size zero_hpz_partition_size mics_shard_size buffer_count buffer_size max_in_cpu
                number_checkpoints autotp_size stage3_module_granularity_threshold""",
            NUMBER: "ratio shard_param_frac gradient_predivide_factor",
            DTYPE: "communication_data_type grad_accum_dtype seq_parallel_communication_data_type buffer_dtype",
            TEXT: "placement_policy real_engine moe_experts",
            ANY: "zenflow keep_in_fp32_modules",
        },
        Status.NO_EFFECT: {
            FLAG: """
                stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
                ignore_unused_parameters elastic_checkpoint load_from_fp32_weights zero_allow_untested_optimizer
                zero_force_ds_cpu_optimizer check_grad_overflow wall_clock_breakdown dump_state memory_breakdown
                legacy_stage1 override_module_apply log_trace_cache_warnings""",
            COUNT: "steps_per_print initial_scale_power loss_scale_window min_loss_scale hysteresis",
            NUMBER: "gradient_clipping loss_scale",
        },
    },
    engines=("deepspeed",),
)
