"""What model families share: products, norms, rotary embeddings, MLP, attention, and how parameters are sharded."""
