"""GLM-5.3-Flash on two DGX Sparks: the node program and the vLLM overlay."""

__version__ = "0.1.0"
