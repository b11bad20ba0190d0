"""`glm-vllm check-config FILE`: whether vLLM's own parser makes of a serve.yaml exactly what stands in it.

vLLM drops some of what a --config file says without a word (`enable-x: false`), takes a shortened name for the option
that it begins, and lets a later key win over an earlier one. So every key is compared with the parsed value.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from glm_vllm_overlay.node.errors import Unusable

# Where the pinned versions keep `vllm serve`'s options: 0.33.0, then 0.32.0.
CLI_MODULES = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


class ParserRefuses(Exception):
    """vLLM's parser would end the process; holds its words."""


def read_config(path: Path) -> dict[str, Any]:
    """The file's keys and values as vLLM reads them; raises Unusable when it could not read it."""
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise Unusable(f"{path} is not named .yaml or .yml, so vLLM would not read it: rename it")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror}): name a serve.yaml that exists") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Unusable(f"{path} is not YAML ({' '.join(str(error).split())}): run playbooks/serve.yml") from None
    if not isinstance(config, dict):
        raise Unusable(f"{path} holds no keys: run playbooks/serve.yml")
    return {str(key): value for key, value in config.items()}


def find_cli() -> ModuleType:
    """The module of this environment's vLLM that defines `vllm serve`'s options."""
    if importlib.util.find_spec("vllm") is None:
        raise Unusable("this Python has no vLLM: use /usr/local/bin/glm-vllm, which belongs to a release")
    from vllm import platforms

    # Without a device the option set cannot be built; vLLM's own tools then stand in the CPU platform.
    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    for name in CLI_MODULES:
        if importlib.util.find_spec(name):
            return importlib.import_module(name)
    raise Unusable("this vLLM is none of the pinned versions: check-config does not know its parser")


def build_parsers(cli: ModuleType) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """vLLM's command line as its `main` builds it: (the whole, the one of `serve`)."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise ParserRefuses(message)

    whole = FlexibleArgumentParser(prog="vllm")
    serve = cli.make_arg_parser(whole.add_subparsers(dest="subparser").add_parser("serve"))
    whole.error = serve.error = refuse
    return whole, serve


def known_problem(key: str, value: Any, options: dict[str, argparse.Action]) -> str:
    """What is wrong with a key by itself, as a sentence; "" when nothing is."""
    if option_name(key) not in options:
        return f"{key}: this vLLM has no option of that exact name"
    if value is False:
        other = key.removeprefix("no-") if key.startswith("no-") else f"no-{key}"
        return f"{key}: vLLM drops false without a word; write {other}: true"
    if value is None:
        return f"{key}: it has no value, and vLLM would read the word None; give it one or take it out"
    if value == []:
        return f"{key}: vLLM drops an empty list without a word; take it out"
    if options[option_name(key)].nargs == 0 and value is not True:
        return f"{key}: it is a switch, and vLLM would take {value} for the model's name; write true"
    return ""


def option_name(key: str) -> str:
    """A key of the file as vLLM looks it up: underscores in the name count as dashes, those behind a dot do not."""
    name, dot, rest = key.partition(".")
    return f"--{name.replace('_', '-')}{dot}{rest}"


def meant(option: str, value: Any, action: argparse.Action) -> Any:
    """The value that the parser has to arrive at, as far as it can be said beforehand."""
    if action.nargs == 0:
        if action.const is not None:
            return action.const
        negative = getattr(
            action, "negative_option_strings", [name for name in action.option_strings if name[:5] == "--no-"]
        )
        return option not in negative
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def same(wanted: Any, parsed: Any, action: argparse.Action) -> bool:
    """Whether a parsed value says what was written: configuration objects by their fields, words by their text."""
    if isinstance(wanted, dict):
        if not isinstance(parsed, dict):
            return all(
                hasattr(parsed, key) and same(item, getattr(parsed, key), action) for key, item in wanted.items()
            )
        return all(key in parsed and same(item, parsed[key], action) for key, item in wanted.items())
    if isinstance(wanted, list):
        parsed = list(parsed) if isinstance(parsed, (list, tuple)) else [parsed]
        return len(parsed) == len(wanted) and all(same(w, p, action) for w, p in zip(wanted, parsed, strict=True))
    if isinstance(parsed, (list, tuple)) and len(parsed) == 1:
        parsed = parsed[0]
    if isinstance(parsed, enum.Enum):
        return str(wanted) in (str(parsed.value), parsed.name)
    if isinstance(wanted, bool) or isinstance(parsed, bool):
        return wanted is parsed
    if wanted == parsed or str(wanted) == str(parsed):
        return True
    # Such as 1m for a million: the option's own reading of the word decides.
    with contextlib.suppress(Exception):
        return bool(action.type(str(wanted)) == parsed)
    return False


def parse(whole: argparse.ArgumentParser, config: dict[str, Any], more: Sequence[str] = ()) -> argparse.Namespace:
    """Parse `serve --config` of these keys, and `more` of the command line; raises ParserRefuses."""
    import yaml

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(config, file, sort_keys=False)
        file.flush()
        try:
            return whole.parse_args(["serve", "--config", file.name, *more])
        except ParserRefuses:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises, the engine would end with it
            raise ParserRefuses(str(error)) from None


def compare(config: dict[str, Any]) -> list[tuple[str, str]]:
    """(key, sentence) for all that vLLM's parser refuses, does not know, drops or changes; [] for a sound file."""
    cli = find_cli()
    whole, serve = build_parsers(cli)
    options = serve._option_string_actions
    problems = {key: problem for key, value in config.items() if (problem := known_problem(key, value, options))}
    findings = list(problems.items())
    sound = {key: value for key, value in config.items() if key not in problems}
    try:
        parsed = parse(whole, sound)
    except ParserRefuses as error:
        return [*findings, ("", f"vLLM's parser refuses the file: {' '.join(str(error).split())}")]
    for key, value in sound.items():
        option = option_name(key)
        action = options[option]
        outcome = getattr(parsed, action.dest)
        if not same(meant(option, value, action), outcome, action):
            lost = " (its default, so the key was dropped)" if outcome == serve.get_default(action.dest) else ""
            findings.append((key, f"{key}: {value} arrives in the engine as {outcome}{lost}"))
    # The second one, about parser names, is elsewhere in 0.32.0.
    for name in ("validate_parsed_serve_args", "validate_api_server_args"):
        try:
            getattr(cli, name, lambda _: None)(parsed)
        except Exception as error:  # noqa: BLE001  each is one of vLLM's own checks before it loads anything
            findings.append(("", f"vLLM refuses these options together: {' '.join(str(error).split())}"))
            break
    return findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm check-config FILE`."""
    parser.add_argument("file", type=Path, help="a serve.yaml, vLLM's --config file")


def run(args: argparse.Namespace) -> int:
    """`glm-vllm check-config`: exit 0 when every key arrives as written, 1 with a sentence for each that does not."""
    config = read_config(args.file)
    # vLLM's log lines go to standard output, which is ours for the outcome.
    with contextlib.redirect_stdout(sys.stderr):
        findings = compare(config)
    if args.json:
        listed = [{"key": key, "message": sentence} for key, sentence in findings]
        print(json.dumps({"schema": 1, "ok": not findings, "keys": len(config), "findings": listed}))
    elif not findings:
        print(f"{args.file}: all {len(config)} keys arrive in the engine as written")
    for _, sentence in findings:
        print(f"glm-vllm check-config: {sentence}", file=sys.stderr)
    return 1 if findings else 0
