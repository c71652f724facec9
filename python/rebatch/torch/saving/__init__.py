"""Ways to use less memory for each sample, and how many of them are on."""
