"""`python -m glm_vllm_overlay` is `glm-vllm`."""

from glm_vllm_overlay.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
