"""Megatron-Core's and Megatron-LM's arguments that change memory or time, by the names of its command line.

Megatron-DeepSpeed and torch FSDP2 under Megatron take many of the same, hence the stack beside the engine.
A recipe's arguments are often given whole, so those without effect are known too.
"""

from __future__ import annotations

from ullage.job.options.spec import ANY, COUNT, DTYPE, FLAG, NUMBER, SHARE, TEXT, WORDS, Option, Status, table

OPTIONS: tuple[Option, ...] = table(
    {
        Status.MODELLED: {
            FLAG: """
                use_distributed_optimizer overlap_grad_reduce overlap_param_gather accumulate_allreduce_grads_in_fp32
                grad_reduce_in_bf16 gradient_accumulation_fusion
                bias_swiglu_fusion bias_gelu_fusion bias_dropout_fusion masked_softmax_fusion attention_softmax_in_fp32
                apply_rope_fusion cross_entropy_loss_fusion qk_layernorm multi_latent_attention deterministic_mode
                create_attention_mask_in_dataloader optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d
                pin_cpu_grads pin_cpu_params chunked_optimizer_state_offload offload_optimizer_states
                cpu_offloading cpu_offloading_activations cpu_offloading_weights
                moe_grouped_gemm moe_permute_fusion moe_pad_expert_input_to_capacity
                moe_router_force_load_balancing mtp_use_repeated_layer use_fused_weighted_squared_relu
                account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split""",
            TEXT: """
                transformer_impl cross_entropy_fusion_impl moe_token_dispatcher_type moe_router_load_balancing_type partition_method
                position_embedding_type normalization""",
            NUMBER: "moe_expert_capacity_factor",
            SHARE: "optimizer_offload_fraction optimizer_state_offload_fraction",
            COUNT: """
                checkpoint_num_layers cuda_graph_warmup_steps cpu_offloading_num_layers
                optimizer_state_offload_chunk_size_mb""",
            DTYPE: "moe_router_dtype megatron_fsdp_main_grads_dtype",
            # These say again what a key of the job says; restated.py holds the two together.
            ANY: "recompute_granularity recompute_method recompute_num_layers recompute_modules",
        },
        Status.NOT_MODELLED: {
            FLAG: """
                use_megatron_fsdp fsdp_double_buffer init_model_with_meta_device nccl_ub use_sharp
                use_precision_aware_optimizer store_param_remainders overlap_param_gather_with_optimizer_step
                fp8_param_gather fp8_param fp4_param_gather fp4_param keep_fp8_transpose_cache
                disable_parameter_transpose_cache reuse_grad_buf_for_mxfp8_param_ag reuse_grad_buf_for_mxfp8_param_gather
                first_last_layers_bf16 activation_func_fp8_input_store
                tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_bulk_dgrad tp_comm_bulk_wgrad
                tp_comm_split_ag tp_comm_split_rs sequence_parallel_input_regather
                moe_shared_expert_overlap moe_paged_stash overlap_moe_expert_parallel_comm delay_wgrad_compute
                moe_layer_recompute moe_input_jitter moe_apply_probs_on_input moe_router_fusion moe_router_padding_for_fp8
                moe_router_padding_for_quantization moe_use_legacy_grouped_gemm moe_use_upcycling moe_extended_tp
                distribute_saved_activations fine_grained_activation_offloading cpu_offloading_double_buffering
                enable_cuda_graph external_cuda_graph cuda_graph_use_single_mempool cuda_graph_share_io_buffers
                fp32_residual_connection untie_embeddings_and_output_weights apply_residual_connection_post_layernorm
                mla_down_proj_fusion fused_single_qkv_rope
                memory_efficient_layer_norm persist_layer_norm
                reset_attention_mask variable_seq_lengths
                defer_embedding_wgrad_compute
                batch_p2p_comm overlap_p2p_comm overlap_p2p_communication overlap_p2p_communication_warmup_flush
                fp16_lm_cross_entropy reduce_scatter_with_fp32_accumulation
                ddp_pad_buckets_for_high_nccl_busbw pad_buckets_for_high_nccl_busbw use_custom_fsdp
                split_transformers scattered_embeddings zero_overlap_variant use_flash_attn
                use_transformer_engine_op_fuser inference_rng_tracker te_rng_tracker""",
            COUNT: """
                num_distributed_optimizer_instances ddp_num_buckets ddp_bucket_size moe_latent_size
                moe_flex_dispatcher_num_sms moe_hybridep_num_sms moe_deepep_num_sms moe_shared_expert_intermediate_size
                wgrad_deferral_limit mtp_num_layers num_layers_at_start_in_bf16
                num_layers_at_end_in_bf16 num_microbatches_with_partial_activation_checkpoints
                microbatch_group_size_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage
                decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
                num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
                empty_unused_memory_level make_vocab_size_divisible_by""",
            NUMBER: "moe_expert_rank_capacity_factor activation_offload_fraction",
            DTYPE: """
                main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype megatron_fsdp_main_params_dtype
                megatron_fsdp_grad_comm_dtype pipeline_dtype""",
            TEXT: """
                data_parallel_sharding_strategy outer_dp_sharding_strategy moe_flex_dispatcher_backend
                pipeline_model_parallel_layout cp_comm_type cuda_graph_impl
                fp8 fp8_format fp8_recipe fp8_wgrad fp4 fp4_format fp4_recipe fp8_amax_compute_algo
                optimizer DDP_impl spec moe_dispatch pp_algorithm mtp_hybrid_override_pattern
                tp_comm_bootstrap_backend""",
            WORDS: "offload_modules cuda_graph_scope cuda_graph_modules high_priority_stream_groups",
            ANY: "hierarchical_context_parallel_sizes rampup_batch_size step_batch_size_schedule",
        },
        Status.NO_EFFECT: {
            FLAG: """
                average_in_collective ddp_average_in_collective calculate_per_token_loss keep_mtp_spec_in_bf16
                use_tp_pp_dp_mapping test_mode apply_layernorm_1p apply_query_key_layer_scaling
                check_for_nan_in_loss_and_grad check_for_nan_in_grad moe_router_enable_expert_bias moe_router_pre_softmax
                patch_primus_pipeline log_throughput log_params_norm log_num_zeros_in_grad
                use_checkpoint_args use_dist_ckpt async_save
                reset_position_ids eod_mask_loss use_mcore_models use_legacy_models moe_per_layer_logging
                align_grad_reduce align_param_gather no_load_optim no_load_rng
                rotary_interleaved use_rotary_position_embeddings swiglu squared_relu group_query_attention
                ckpt_fully_parallel_save mock_data use_torch_optimizer_for_cpu_offload""",
            COUNT: """
                moe_router_num_groups moe_router_group_topk rotary_base seed log_interval save_interval eval_interval
                eval_iters train_iters train_samples exit_interval timing_log_level num_workers manual_gc_interval""",
            NUMBER: """
                moe_router_topk_scaling_factor moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff rotary_percent
                rotary_scaling_factor mtp_loss_scaling_factor clip_grad lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps
                init_method_std norm_epsilon layernorm_epsilon initial_loss_scale min_loss_scale loss_scale_window hysteresis""",
            TEXT: """
                moe_router_score_function moe_token_drop_policy
                distributed_backend ckpt_format lr_decay_style tokenizer_type""",
        },
    },
    engines=("megatron",),
    stacks=("megatron",),
)
