"""`glm-vllm build --rehearsal SERVE_YAML`: what the engine compiles by itself, compiled before there are weights.

DeepGEMM, TileLang and Triton compile a kernel when a shape first meets it, so only a running engine knows what it
needs. This runs one: the deployment's own options, random weights, experts in the first few layers only and a rank's
share of every width, which is what one GPU holds at any tensor-parallel size. It is asked for all that serving may ask.
What was compiled lies where the real start looks for it; a list of it, last of all, is what the gate wants to see, and
an archive of it is what the other node gets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from glm_vllm_overlay.inspect import read_checkpoint
from glm_vllm_overlay.node import release, serve
from glm_vllm_overlay.node.check_config import ParserRefuses, build_parsers, find_cli, parse, read_config
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import write_atomically
from glm_vllm_overlay.node.settings import Settings

# Widths that tensor parallelism divides, by whose configuration names them. The vocabulary is left whole: its
# multiplication compiles nothing, and the sampler sees all of it on every rank.
TARGET_WIDTHS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_heads",
    "intermediate_size",
    "moe_intermediate_size",
)
DRAFTER_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
# Where and how the pair serves, and what belongs to its weights: an engine of one GPU without weights has none of it.
OF_THE_PAIR = (
    "nnodes",
    "master-addr",
    "master-port",
    "distributed-executor-backend",
    "model-loader-extra-config",
    "chat-template",
)
# vLLM's check at a start; the KV cache has its own size, the served one.
UTILISATION = 0.5
# Tokens of ordinary text: above those that a small vocabulary begins with, below those that a large one ends with.
FIRST_TOKEN, TOKENS = 20, 900
# Beyond the indexer's choice of 2048 keys, and beyond 8192 pools of four, where another kernel chooses.
LONG = (2304, 40000, 131072)
ARCHIVE = "rehearsal.tar"


def divide(config: dict[str, Any], names: Iterable[str], ranks: int) -> dict[str, Any]:
    """A copy of `config` with a rank's share of the widths `names`; Refusal for one that does not divide."""
    shared = dict(config)
    for name in names:
        if name not in config:
            continue
        if config[name] % ranks:
            raise Refusal(f"config.json says {name} {config[name]}, which cannot be split over {ranks} ranks")
        shared[name] = config[name] // ranks
    return shared


def target_config(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The model's config.json as wide as one rank of `ranks`, with experts in few layers and all layers in place.

    Experts are what a model weighs. But how the layers share the KV cache is written into kernels, as strides, so none
    of them may go: behind the first layers, in which every kind of layer is, they get the dense MLP instead. The last
    one keeps its own, since the MTP layer is made like it.
    """
    text = divide(config["text_config"], TARGET_WIDTHS, ranks)
    types = list(text["mlp_layer_types"])
    kinds = list(zip(text["layer_types"], types, strict=False))
    whole = max(kinds.index(kind) + 1 for kind in set(kinds))
    for number in range(whole, len(types) - 1):
        types[number] = "dense"
    return {**config, "text_config": text | {"mlp_layer_types": types}}


def options(served: dict[str, Any], model: Path) -> dict[str, Any]:
    """serve.yaml's options as the rehearsal's: the same but for what belongs to the pair and to the weights."""
    kept = {key: value for key, value in served.items() if key not in OF_THE_PAIR}
    extra = _object(kept.get("additional-config"))
    extra.pop("ablation", None)  # a matter of weights
    if extra:
        kept["additional-config"] = json.dumps(extra)
    return kept | {
        "model": str(model),
        "load-format": "dummy",
        "tensor-parallel-size": 1,
        "gpu-memory-utilization": UTILISATION,
    }


def _object(value: Any) -> dict[str, Any]:
    """An option that is a JSON object, or its text; {} for none."""
    return dict(json.loads(value) if isinstance(value, str) else value or {})


def ladder(budget: int, longest: int) -> list[int]:
    """Lengths of the prompts that are read one by one: DeepGEMM and TileLang choose by every 64 tokens of a step.

    budget: tokens a step; longest: of a context, in which two more tokens have to fit.
    """
    stride = max(64, budget // 72 // 64 * 64)
    small = [1, 2, 3, 4, 8, 16, 24, 32, 33, 48]
    steps = [*range(stride, budget, stride), budget]
    beyond = [budget + 65, *LONG]
    return sorted({length for length in (*small, *steps, *beyond) if length <= longest - 2} | {min(longest - 2, 64)})


def prompt(length: int, number: int, vocabulary: int) -> list[int]:
    """Token ids of an ordinary text; another `number`, another text from its first token on."""
    choice = min(TOKENS, vocabulary) - FIRST_TOKEN
    return [FIRST_TOKEN + (number * 7919 + place * 104729) % choice for place in range(length)]


def play(llm: Any) -> int:
    """Ask everything of a vLLM `LLM` that changes the shape of what it runs; how many prompts that were."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    limits = llm.llm_engine.vllm_config
    budget, requests = limits.scheduler_config.max_num_batched_tokens, limits.scheduler_config.max_num_seqs
    longest, vocabulary = limits.model_config.max_model_len, limits.model_config.get_vocab_size()
    asked = 0

    def ask(lengths: list[int], sampling: Any) -> None:
        nonlocal asked
        texts = [prompt(length, asked + i, vocabulary) for i, length in enumerate(lengths)]
        llm.generate([TokensPrompt(prompt_token_ids=text) for text in texts], sampling, use_tqdm=False)
        asked += len(texts)

    greedy = {"temperature": 0.0, "ignore_eos": True}
    for length in ladder(budget, longest):
        ask([length], SamplingParams(max_tokens=2, **greedy))
    # The same text twice: the second time its states and pages come from the cache.
    again = TokensPrompt(prompt_token_ids=prompt(min(longest - 2, 3 * budget), 1, vocabulary))
    for _ in range(2):
        llm.generate([again], SamplingParams(max_tokens=2, **greedy), use_tqdm=False)
        asked += 1
    few = min(32, longest // 2)
    for width in range(1, requests + 1):
        ask([few] * width, SamplingParams(max_tokens=few, **greedy))
    # Prompts that are still being read beside answers that are being written, more of them than fit.
    halves = [min(longest // 2, tokens) for tokens in (2 * budget, budget // 2)]
    ask([few, halves[0], few, halves[1], few], SamplingParams(max_tokens=few, **greedy))
    chosen: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 40},
        {"top_p": 0.9, "top_k": 40},
        {"seed": 1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"logprobs": 5},
    ]
    for more in [{}, *chosen]:
        for width in (1, requests):
            ask([few] * width, SamplingParams(max_tokens=8, temperature=0.8, ignore_eos=True, **more))
    # Any text at all, so that every vocabulary can write it: what masks the logits is the same for all grammars.
    grammar = StructuredOutputsParams(regex="[ -~]*")
    for width in (1, requests):
        ask([few] * width, SamplingParams(max_tokens=8, temperature=0.8, structured_outputs=grammar))
    return asked


def write_models(served: dict[str, Any], drafter: Path | None, work: Path) -> tuple[Path, Path | None]:
    """Folders in `work` that stand for model and drafter: configuration, and all of the real ones but weights."""
    ranks = int(served.get("tensor-parallel-size") or 1)
    small = None
    if drafter is not None:
        small = _stand_in(drafter, divide(_config(drafter), DRAFTER_WIDTHS, ranks), work / "drafter")
    real = Path(str(served["model"]))
    return _stand_in(real, target_config(_stamped(real), ranks), work / "model"), small


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unusable(f"{folder}/config.json cannot be read ({error}): run playbooks/weights.yml") from None


def _stamped(folder: Path) -> dict[str, Any]:
    """A model's configuration with bits and codebook as its tensors have them, for there will be no tensors."""
    checkpoint, config = read_checkpoint(folder), _config(folder)
    if checkpoint.expert_layers:
        found = {"quant_method": "exl3", "bits": checkpoint.bits, "codebook": checkpoint.codebook}
        config["quantization_config"] = found
    return config


def _stand_in(real: Path, config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in real.iterdir():
        weights = ".safetensors" in file.name or file.suffix in (".bin", ".pt")
        if file.is_file() and not weights and file.name not in ("config.json", "quantization_config.json"):
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cache_folder() -> Path:
    """The folder of all caches of this shape of engine; Unusable when the environment names none, or several."""
    named = {name: os.environ.get(name, "") for name in release.SHAPED}
    if missing := [name for name, value in named.items() if not value]:
        raise Unusable(f"{missing[0]} is not set: run this with the environment of the engine's unit")
    folders = {Path(value).parent for value in named.values()}
    if len(folders) != 1:
        raise Unusable(f"the caches lie in several folders ({', '.join(sorted(map(str, folders)))}), not in one")
    return folders.pop()


def machine_code(folder: Path) -> dict[str, int]:
    """Path below `folder` → bytes of every library and cubin in it."""
    found = release.machine_code({name: os.environ[name] for name in release.SHAPED})
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(found)}


def write_list(folder: Path, key: str, nvcc: Path, arch: str) -> dict[str, Any]:
    """The list of a finished rehearsal, and the archive for the other node; Refusal when nothing was compiled."""
    files = machine_code(folder)
    if not files:
        raise Refusal(f"the rehearsal left nothing in {folder}: its libraries keep their caches elsewhere now")
    document = {
        "schema": 1,
        "key": key,
        "toolkit": release.toolkit_version(nvcc),
        "nvcc": str(nvcc),
        "arch": arch,
        "files": files,
    }
    (folder / release.REHEARSAL).unlink(missing_ok=True)
    text = json.dumps(document, indent=1) + "\n"
    listing = folder / f".{release.REHEARSAL}"
    listing.write_text(text, encoding="utf-8")
    listing.chmod(0o644)
    # The driver's own cache stays: nothing says that another machine's driver would take it.
    own = Path(os.environ.get("CUDA_CACHE_PATH") or folder / "cuda")
    draft = folder / f".{ARCHIVE}"
    with tarfile.open(draft, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path != own and not path.name.startswith((".", ARCHIVE)):
                archive.add(path, path.name)
        archive.add(listing, release.REHEARSAL)  # last, so that half an archive is no list
    os.replace(draft, folder / ARCHIVE)
    listing.unlink()
    write_atomically(folder / release.REHEARSAL, text)
    return document


def speculation(speculator: str, drafter: Path | None) -> list[str]:
    """vLLM's option for the speculator, on one GPU."""
    deployment = {"drafter": None if drafter is None else {"path": str(drafter)}}
    return serve.speculation(Settings(UTILISATION, speculator), deployment, 1)


def engine_arguments(wanted: dict[str, Any], speculator: str, drafter: Path | None, text: str) -> Any:
    """vLLM's EngineArgs for these options, by the parser of `vllm serve`; Unusable with its own words."""
    whole, _ = build_parsers(find_cli())
    more = [*speculation(speculator, drafter), *serve.capture_sizes(speculator, text)]
    try:
        parsed = parse(whole, wanted, more)
    except ParserRefuses as error:
        raise Unusable(f"vLLM's parser refuses the rehearsal's options: {' '.join(str(error).split())}") from None
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs.from_cli_args(parsed)


def rehearse(config: Path, speculator: str, drafter: Path | None, nvcc: Path, jobs: int) -> dict[str, Any]:
    """Run the engine that `config` (a serve.yaml) describes, without its weights; the list of what that compiled.

    Refusal with the engine's own last words when it does not start or does not answer.
    """
    folder = cache_folder()
    served = read_config(config)
    text = config.read_text(encoding="utf-8")
    # From nothing: a damaged entry of Triton's would end this engine, and what is not needed should not be on the list.
    for name in release.SHAPED:
        shutil.rmtree(os.environ[name], ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    # In this process, so that the list is of all that was compiled; and by as many compilers as memory allows.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", MAX_JOBS=str(jobs), ABLIT="0")
    before = release.machine_code({release.FLASHINFER: os.environ.get(release.FLASHINFER, "")})
    with tempfile.TemporaryDirectory(prefix="glm-rehearsal-") as work, contextlib.redirect_stdout(sys.stderr):
        model, small = write_models(served, drafter if speculator == "dflash2" else None, Path(work))
        wanted = options(served, model)
        try:
            from vllm import LLM

            prompts = play(LLM.from_engine_args(engine_arguments(wanted, speculator, small, text)))
        except (Refusal, Unusable):
            raise
        except Exception as error:  # noqa: BLE001  whatever the engine raises, its real start would raise it later
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise Refusal(f"the engine does not get through a rehearsal without weights ({said[:400]})") from error
        document = write_list(folder, folder.name, nvcc, _arch())
    late = release.compiled_since(before, {release.FLASHINFER: os.environ.get(release.FLASHINFER, "")})
    return {**document, "prompts": prompts, "flashinfer": late}


def _arch() -> str:
    """The GPU's compute capability, such as 12.1; cpu without one."""
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else "cpu"
