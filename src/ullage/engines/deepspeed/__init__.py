"""DeepSpeed: ZeRO stages 0 to 3, its BF16_Optimizer, and its pipeline engine."""
