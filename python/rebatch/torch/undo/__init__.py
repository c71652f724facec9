"""What an attempt that failed has changed: put back, or told."""
