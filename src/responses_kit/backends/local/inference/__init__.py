"""Inference: engine, pool, tokenizer, sampling and decoding of outputs."""
