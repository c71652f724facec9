"""What runs in micro-batches: loss_fn and what it must not do, the gradients, the update."""
