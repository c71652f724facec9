"""Finding mistakes in a training step: step.check(), and the comparison at the first cut."""
