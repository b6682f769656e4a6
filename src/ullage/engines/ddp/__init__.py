"""torch's DistributedDataParallel, and ZeroRedundancyOptimizer on top of it."""
