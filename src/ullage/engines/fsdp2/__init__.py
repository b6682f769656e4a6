"""PyTorch FSDP2 (``fully_shard``), alone and under torch's pipeline schedules."""
