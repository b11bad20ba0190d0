"""EXL3 trellis-quantised experts: format, encoder, loader, vLLM quantisation method and kernels.

Nothing is imported here: `format`, `encode` and `checkpoint` need torch only, `quantization` needs vLLM,
`ops` needs the compiled kernels.
"""
