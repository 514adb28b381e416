"""Model definitions, and how their weights get from files onto a mesh.

`pdjax.models.checkpoint.load_model` loads a model folder, `pdjax.models.folder` says what such a folder holds.
"""
