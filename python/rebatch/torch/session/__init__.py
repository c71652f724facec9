"""A session of the C library: its options, its reports, and what an exception becomes,
out-of-memory or not."""
