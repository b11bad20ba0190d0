"""Tiny checkpoints of the GLM-5.3-Flash architecture, made on the spot: no hub, no download, the same bytes every time."""
