"""The `glm-vllm` command: finds the subcommand's module, runs it, and turns its outcome into an exit code.

Exit codes: 0 fine, 1 a finding or refusal, 2 bad usage or unusable input, 3 internal error.
A subcommand's module has `add_arguments(parser)` and `run(args) -> int`; only the chosen one is imported.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from glm_vllm_overlay import __version__
from glm_vllm_overlay.node.errors import Refusal, Unusable

COMMANDS = {
    "serve": ("glm_vllm_overlay.node.serve", "run this node's vLLM rank and stop it when the peer is lost"),
    "gate": ("glm_vllm_overlay.node.gate", "wait until this node and its peer may start together"),
    "hold": ("glm_vllm_overlay.node.hold", "keep a Ray worker node in service while its peer lives"),
    "watch": ("glm_vllm_overlay.node.watch", "answer the peer's questions about this node and note incidents"),
    "guard": ("glm_vllm_overlay.node.guard", "end the engine before this node's memory runs out"),
    "fabric": ("glm_vllm_overlay.node.fabric", "resolve the fabric rails and write fabric.env"),
    "doctor": ("glm_vllm_overlay.node.doctor", "say what is wrong with this node, or with a recorded one"),
    "status": ("glm_vllm_overlay.node.status", "show both nodes on one screen"),
    "check-config": ("glm_vllm_overlay.node.check_config", "compare a serve.yaml with what vLLM's parser makes of it"),
    "verify": ("glm_vllm_overlay.node.verify", "compare every byte of the weights with their manifest"),
    "fetch": ("glm_vllm_overlay.node.fetch", "bring what is missing or wrong of a model"),
    "manifest": (
        "glm_vllm_overlay.node.manifest",
        "list a model's files with size and SHA-256, from a folder or the hub",
    ),
    "inspect": ("glm_vllm_overlay.inspect", "read a checkpoint's headers and say whether this overlay can serve it"),
    "plan": ("glm_vllm_overlay.plan.command", "say what a node's memory would be used for and whether it fits"),
    "build": ("glm_vllm_overlay.build", "compile kernels, modules and all else that an engine needs, before weights"),
    "key": ("glm_vllm_overlay.node.keys", "make, list and revoke API keys"),
    "cert": ("glm_vllm_overlay.node.certs", "make or renew the gateway's certificate"),
    "probe": ("glm_vllm_overlay.node.probe", "ask the endpoint for an answer and check it"),
}


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser for all commands, with the arguments of `chosen` (imported) and of no other."""
    parser = argparse.ArgumentParser(prog="glm-vllm", description="Runs and watches one node of the pair.")
    parser.add_argument("--version", action="version", version=f"glm-vllm-overlay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        # "resolve" lets a command describe --json in its own words.
        command = commands.add_parser(name, help=summary, description=summary, conflict_handler="resolve")
        command.add_argument("--json", action="store_true", help='print one JSON document: {"schema": 1, "ok": ...}')
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    return parser


def report(args: argparse.Namespace, message: str, code: int) -> int:
    """Say in one sentence why the command failed: on stderr, and as JSON on stdout where that was asked for."""
    print(f"glm-vllm {args.command}: {message}", file=sys.stderr)
    if args.json:
        print(json.dumps({"schema": 1, "ok": False, "message": message}))
    return code


def keep_traceback(command: str) -> str:
    """Store the current traceback in a file, in the place of the last one's; returns where the details are."""
    import traceback

    try:
        for old in Path(tempfile.gettempdir()).glob(f"glm-vllm-{command}-*.txt"):
            if old.lstat().st_uid == os.getuid():
                old.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile("w", prefix=f"glm-vllm-{command}-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
    except OSError:
        return "nowhere, because no temporary folder can be written (set TMPDIR)"
    return file.name


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if not word.startswith("-")), None)
    command = chosen if chosen in COMMANDS else "-"
    args = argparse.Namespace(command=command, json="--json" in argv)
    try:
        args = build_parser(chosen).parse_args(argv)
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except Refusal as error:
        return report(args, str(error), 1)
    except Unusable as error:
        return report(args, str(error), 2)
    except KeyboardInterrupt:
        return report(args, "interrupted", 1)
    except BrokenPipeError:
        # The reader went away (`glm-vllm status | head`); the flush at exit must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last line of defence: a user never sees a traceback
        details = keep_traceback(args.command)
        return report(args, f"internal error ({type(error).__name__}: {error}); the details are in {details}", 3)
