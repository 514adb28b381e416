"""Serve large language models from JAX meshes with prefill and decode apart."""
