"""The reference trainer: a small byte-level GPT, one readable file for each parallel strategy."""
