"""`glm-vllm plan`: what a node's memory is used for, before anything starts."""
