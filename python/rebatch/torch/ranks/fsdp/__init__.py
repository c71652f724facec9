"""Models of fully_shard() (FSDP2): in a window of whole parameters, or in lockstep."""
