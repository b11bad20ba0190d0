"""`glm-vllm plan` without arguments is about this node's deployment; off a node, about the role's defaults."""

import argparse

import pytest
from glm_vllm_overlay.plan import command

GIB = 1 << 30


def completed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words)
    command.complete(args)
    return args


@pytest.fixture
def edited(node):
    """A node whose unit somebody edited."""
    node.unit("glm-vllm-head", Environment="GLM_GPU_MEMORY_UTILIZATION=0.8 GLM_SPECULATOR=mtp ABLIT=0")
    return node


def test_the_unit_is_what_counts(edited):
    args = completed()
    assert (args.speculator, args.utilisation, args.start_cost) == ("mtp", 0.8, 4 * GIB)
    assert args.config == str(edited.root / "etc/glm-vllm/serve.yaml")


def test_what_is_said_wins(edited):
    args = completed("--speculator", "none", "--utilisation", "0.9", "--start-cost", "0")
    assert (args.speculator, args.utilisation, args.start_cost) == ("none", 0.9, 0)


def test_off_a_node(node):
    (node.root / "etc/glm-vllm/node.env").unlink()
    args = completed()
    assert (args.speculator, args.utilisation, args.start_cost) == ("dflash2", 0.87, 6 * GIB)
