"""What changes vLLM in memory, and what it was written for. Nothing here is imported before vLLM asks for it."""
