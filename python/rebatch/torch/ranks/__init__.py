"""Several ranks that train one model: votes, agreement, and DistributedDataParallel."""
