"""Plain-torch operators, one module a concern. They import torch alone, so that tests run them without vLLM."""
