"""Recommendation models to try LoKA on: Wukong, DLRM, DCNv2, InterFormer.

``loka.models.registry.build_model(name, preset, schema)`` makes one. Each has two parts, which are trained differently:
``model.embeddings`` looks ids up in a table (eager, row-sparse gradients), and ``model.dense_part`` maps plain tensors of fixed
shape to logits (it compiles into one graph). Adding a model is adding a file here that registers it.
"""
