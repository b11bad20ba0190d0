"""Tiny checkpoints of the GLM-5.3-Flash architecture, made on the spot without any hub, the same bytes every time."""
