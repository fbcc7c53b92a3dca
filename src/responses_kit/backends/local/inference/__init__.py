"""From prompt tokens to outputs: engine, pool, sampling and tokenizer."""
