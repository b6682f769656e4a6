"""Megatron-Core: contiguous parameter and gradient buffers, fp32 main gradients, optional distributed optimizer."""
