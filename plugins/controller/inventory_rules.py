"""What makes an inventory right, as plain functions over plain data: no Ansible, no host, no network.

``check`` returns every problem at once, each one sentence that names the variable and the fix.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

PREFIXES = ("glm_", "cuda_sm121_", "cx7_network_", "ray_cluster_", "model_fetch_")

# The same on every node: serve.yaml must be byte-identical, and both nodes must hold the same weights.
SAME_EVERYWHERE = ("glm_", "ray_cluster_", "model_fetch_")

GIB = 1 << 30

# Inclusive ends; an exclusive lower end is written as the smallest value allowed in practice.
RANGES: dict[str, tuple[float, float]] = {
    "glm_vllm_overlay_gpu_memory_utilization": (0.01, 1),
    "glm_vllm_overlay_max_model_len": (1, 1048576),
    "glm_vllm_overlay_max_num_seqs": (1, 256),
    "glm_vllm_overlay_default_max_tokens": (1, 1048576),
    "glm_vllm_overlay_limit_mm.image": (0, 999),
    "glm_vllm_overlay_limit_mm.video": (0, 999),
    "glm_vllm_overlay_api_port": (1024, 65535),
    "glm_vllm_overlay_https_port": (1024, 65535),
    "glm_vllm_overlay_master_port": (1024, 65535),
    "glm_vllm_overlay_drain_timeout": (0, 3600),
    "glm_vllm_overlay_gate_timeout": (10, 3600),
    "glm_vllm_overlay_rate_limit": (1, 1000),
    "glm_vllm_overlay_connection_limit": (1, 1000),
    "glm_vllm_overlay_reload_timeout": (1, 3600),
    "glm_vllm_overlay_reserve_bytes": (GIB, 64 * GIB),
    "glm_vllm_overlay_guard_bytes": (GIB // 4, 64 * GIB),
    "glm_vllm_overlay_guard_pressure": (1, 101),
    "glm_vllm_overlay_ablation_alpha": (0.01, 2),
    "ray_cluster_port": (1024, 65535),
    "ray_cluster_object_store_bytes": (75 * 2**20, 16 * GIB),
    "cuda_sm121_driver_branch": (580, 9999),
    "cx7_network_min_gbps": (0, 200),
}

PORTS = (
    "glm_vllm_overlay_api_port",
    "glm_vllm_overlay_https_port",
    "glm_vllm_overlay_master_port",
)
STATE_PORT = 8890
# Ray's workers take ports right above the head's.
RAY_PORTS = 120

# Tokens of one KV block of this model; a step also decodes a token and its drafts for every running request.
KV_BLOCK = 4608
DRAFTED = {"dflash2": 7, "mtp": 2, "none": 0}
# Steps of 8192 tokens and more do not fit the shared memory of the indexer's kernel.
STEP_LIMIT = 8191
LAYERS = 45
# The head's host number in every rail; the workers follow.
FIRST_HOST = 11


HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
# How a file begins that ansible-vault has encrypted; Ansible decrypts it on its way to the node.
VAULTED = b"$ANSIBLE_VAULT"

BOOLEANS = {True: ("true", "on", "yes"), False: ("false", "off", "no")}


@dataclass(frozen=True)
class Inventory:
    """Groups and variables as Ansible reads them.

    groups: group name -> host names. hosts: host name -> variables set by the inventory, templated; a value that could
    not be templated is a ``Broken``. files: folders of the inventory, to tell where a variable was set.
    """

    groups: Mapping[str, Sequence[str]]
    hosts: Mapping[str, Mapping[str, Any]]
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class Broken:
    """A value that Ansible could not evaluate, with its reason."""

    reason: str


@dataclass(frozen=True)
class Schema:
    """What the roles take: options of all argument_specs (name -> option) and the defaults of the same variables.

    refuse_argument: why serve.yaml can't hold this vLLM option and value, as a sentence; empty when it can.
    """

    options: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any]
    refuse_argument: Callable[[str, Any], str]


@dataclass(frozen=True)
class Problem:
    """One wrong thing: ``what`` is wrong with ``variable``, where it was set, and the ``fix``."""

    variable: str
    what: str
    fix: str
    host: str = ""
    where: str = ""

    def __str__(self) -> str:
        at = f" on {self.host}" if self.host else ""
        place = f" ({self.where})" if self.where else ""
        return f"{self.variable} {self.what}{at}{place}: {self.fix}."


def check(inventory: Inventory, schema: Schema) -> list[str]:
    """Every problem of ``inventory`` as a sentence, in the order of topology, single variables, combinations."""
    problems: list[Problem | str] = list(_topology(inventory.groups))
    nodes = _nodes(inventory.groups)
    bad: set[tuple[str, str]] = set()
    singles: dict[Problem, list[str]] = {}
    for host in nodes:
        for name, value in sorted(inventory.hosts.get(host, {}).items()):
            for problem in _variable(name, value, schema.options):
                bad.add((host, name))
                singles.setdefault(problem, []).append(host)
    everywhere = len(nodes)
    for problem, hosts in singles.items():
        host = "" if len(hosts) == everywhere else " and ".join(hosts)
        variable = re.split(r"[.\[]", problem.variable)[0]
        problems.append(
            Problem(problem.variable, problem.what, problem.fix, host, locate(variable, hosts, inventory.files))
        )
    problems += _differences(inventory, nodes, bad)
    problems += _combinations(inventory, schema, nodes, {name for _, name in bad})
    return list(dict.fromkeys(str(problem) for problem in problems))


def locate(variable: str, hosts: Sequence[str], folders: Sequence[Path]) -> str:
    """``file, line N`` of the one place under ``folders`` that sets ``variable``; empty when there is none or several.

    Files of other hosts in host_vars are passed over.
    """
    pattern = re.compile(rf"^\s*{re.escape(variable)}\s*:")
    found = []
    for folder in folders:
        files = sorted(folder.rglob("*.y*ml")) if folder.is_dir() else [folder]
        for file in files:
            parts = file.parts
            if "host_vars" in parts and not any(host in (*parts, file.stem) for host in hosts):
                continue
            try:
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError:
                continue
            found += [f"{file}, line {number}" for number, line in enumerate(lines, 1) if pattern.match(line)]
    return found[0] if len(found) == 1 else ""


def _nodes(groups: Mapping[str, Sequence[str]]) -> list[str]:
    members = [*groups.get("sparks", ()), *groups.get("head", ()), *groups.get("workers", ())]
    return list(dict.fromkeys(members))


def _topology(groups: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    head, workers, sparks = (list(groups.get(name, ())) for name in ("head", "workers", "sparks"))
    if not head:
        yield Problem("Group head", "has no host", "name the node that serves the API below head in hosts.yml")
    if len(head) > 1:
        yield Problem("Group head", f"has {_count(len(head), 'host')} ({', '.join(head)})", "leave exactly one there")
    if not workers:
        yield Problem("Group workers", "has no host", "name the other node below workers in hosts.yml")
    if len(workers) > 1:
        yield Problem(
            "Group workers",
            f"has {len(workers)} hosts ({', '.join(workers)}), and a pair has one",
            "leave exactly one there",
        )
    for host in head:
        if host in workers:
            yield Problem("Host", f"{host} is in head and in workers", "leave it in one of the two")
    for host in [*head, *workers]:
        if host not in sparks:
            yield Problem(
                "Group sparks", f"does not hold {host}", "make head and workers children of sparks in hosts.yml"
            )
    for host in sparks:
        if host not in head and host not in workers:
            yield Problem(
                "Host", f"{host} is in sparks but neither in head nor in workers", "put it into one of the two"
            )


def _variable(name: str, value: Any, options: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    if not name.startswith(PREFIXES):
        return
    if name not in options:
        near = get_close_matches(name, options, n=1, cutoff=0.6)
        fix = f"write {near[0]}" if near else "remove it; the roles' README files list every variable"
        yield Problem(name, "is no variable of any role", fix)
        return
    if isinstance(value, Broken):
        yield Problem(name, f"can't be evaluated, {value.reason}", "correct the expression")
        return
    yield from _value(name, value, options[name])


def _value(name: str, value: Any, option: Mapping[str, Any]) -> Iterator[Problem]:
    kind = option.get("type", "str")
    wrong = list(_type(name, value, kind, option))
    if wrong:
        yield from wrong
        return
    choices = option.get("choices")
    # Choices of a list are those of its elements.
    if choices is not None and kind != "list" and value not in choices:
        yield Problem(name, f"is {_show(value, option)}", f"choose {_either(choices)}")
        return
    bounds = RANGES.get(re.sub(r"\[\d+\]", "", name))
    if bounds and kind in ("int", "float") and not bounds[0] <= value <= bounds[1]:
        yield Problem(
            name, f"is {_show(value, option)}", f"give a value from {_number(bounds[0])} to {_number(bounds[1])}"
        )
    if kind == "dict" and "options" in option:
        yield from _members(name, value, option["options"])
    if kind == "list":
        inner = {key: option[key] for key in ("options", "choices", "no_log") if key in option}
        for index, item in enumerate(value):
            yield from _value(f"{name}[{index}]", item, {"type": option.get("elements", "raw"), **inner})


def _members(name: str, value: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    for key, item in value.items():
        if key in options:
            yield from _value(f"{name}.{key}", item, options[key])
            continue
        near = get_close_matches(str(key), options, n=1, cutoff=0.5)
        yield Problem(f"{name}.{key}", "is unknown", f"write {near[0]}" if near else f"use {_either(list(options))}")
    for key, option in options.items():
        if option.get("required") and key not in value:
            yield Problem(name, f"lacks {key}", f"add {key}")


def _type(name: str, value: Any, kind: str, option: Mapping[str, Any]) -> Iterator[Problem]:
    if kind == "raw":
        return
    if value is None:
        yield Problem(name, "is empty", "give a value or remove the line")
        return
    shown = _show(value, option)
    match kind:
        case "bool":
            if isinstance(value, bool):
                return
            quoted = isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off")
            yield Problem(name, f"is {shown}", "write true or false" + (" without quotes" if quoted else ""))
        case "int":
            if isinstance(value, int) and not isinstance(value, bool):
                return
            quoted = isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+\s*", value)
            yield Problem(name, f"is {shown}", "write a whole number" + (" without quotes" if quoted else ""))
        case "float":
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return
            quoted = isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d*\.?\d+\s*", value)
            yield Problem(name, f"is {shown}", "write a number" + (" without quotes" if quoted else ""))
        case "list":
            if not isinstance(value, (list, tuple)):
                yield Problem(name, f"is {shown}", "write a list")
        case "dict":
            if not isinstance(value, Mapping):
                yield Problem(name, f"is {shown}", "write keys and values")
        case _:
            if isinstance(value, str):
                return
            # YAML reads bare words such as off and true as booleans.
            words = BOOLEANS.get(value, ()) if isinstance(value, bool) else ()
            word = next((word for word in words if word in option.get("choices", ())), None)
            if word:
                yield Problem(name, f"is {shown}, for so YAML reads a bare {word}", f'write "{word}" with quotes')
            else:
                yield Problem(name, f"is {shown}", "write a text, in quotes where it looks like a number or a boolean")


def _differences(inventory: Inventory, nodes: Sequence[str], bad: set[tuple[str, str]]) -> Iterator[Problem]:
    if len(nodes) < 2:
        return
    names = sorted(
        {name for node in nodes for name in inventory.hosts.get(node, {}) if name.startswith(SAME_EVERYWHERE)}
    )
    absent = object()
    for name in names:
        if any((node, name) in bad for node in nodes):
            continue
        values = [inventory.hosts.get(node, {}).get(name, absent) for node in nodes]
        other = next((node for node, value in zip(nodes, values, strict=True) if value != values[0]), None)
        if other:
            yield Problem(name, f"differs between {nodes[0]} and {other}", "set it once, in group_vars/all")


class _Effective:
    """Value of a variable as the roles will see it (inventory before default), and where it was set."""

    def __init__(self, inventory: Inventory, schema: Schema, nodes: Sequence[str], bad: set[str]) -> None:
        self.variables: Mapping[str, Any] = inventory.hosts.get(nodes[0], {}) if nodes else {}
        self.defaults, self.options, self.bad = schema.defaults, schema.options, bad
        self.nodes, self.files = nodes, inventory.files

    def __getitem__(self, name: str) -> Any:
        """The value, or None for a variable that no role knows or that was already refused."""
        if name in self.bad:
            return None
        return self.variables.get(name, self.defaults.get(name))

    def problem(self, name: str, what: str, fix: str, *, member: str = "") -> Problem:
        return Problem(name + member, what, fix, where=locate(name, self.nodes, self.files))


def _combinations(inventory: Inventory, schema: Schema, nodes: Sequence[str], bad: set[str]) -> Iterator[Problem | str]:
    get = _Effective(inventory, schema, nodes, bad)
    yield from _engine(get)
    yield from _ablation(get)
    yield from _gateway(get)
    yield from _guard(get)
    yield from _ports(get)
    yield from _extra_args(get, schema.refuse_argument)
    yield from _sources(get)
    yield from _rails(get, inventory)
    yield from _addresses(inventory, nodes)
    yield from _files(get)


def _engine(get: _Effective) -> Iterator[Problem]:
    nodes = len(get.nodes)
    if get["glm_vllm_overlay_flashinfer_autotune"] and nodes > 1:
        yield get.problem(
            "glm_vllm_overlay_flashinfer_autotune",
            f"is true with {nodes} nodes, and FlashInfer's tuner deadlocks GB10 pairs",
            "set it to false",
        )
    if "ray_cluster_enabled" in get.variables:
        yield get.problem("ray_cluster_enabled", "follows glm_vllm_overlay_executor", "remove it")
    step, seqs = get["glm_vllm_overlay_max_num_batched_tokens"], get["glm_vllm_overlay_max_num_seqs"]
    speculator = get["glm_vllm_overlay_speculator"]
    if step is not None and seqs is not None and speculator is not None:
        least = KV_BLOCK + seqs * (DRAFTED[speculator] + 1)
        if step < least:
            yield get.problem(
                "glm_vllm_overlay_max_num_batched_tokens",
                f"is {step}, less than one KV block ({KV_BLOCK}) and the {least - KV_BLOCK} tokens that "
                f"{_count(seqs, 'request')} with {speculator} decode beside it",
                f"give a value from {least} to {STEP_LIMIT}",
            )
        if step > STEP_LIMIT:
            yield get.problem(
                "glm_vllm_overlay_max_num_batched_tokens",
                f"is {step}, and the indexer's shared memory can't hold {STEP_LIMIT + 1} tokens",
                f"give a value from {least} to {STEP_LIMIT}",
            )
    kv_bytes = get["glm_vllm_overlay_kv_cache_memory_bytes"]
    if kv_bytes is not None and kv_bytes != "auto" and not _whole(kv_bytes, 1):
        yield get.problem(
            "glm_vllm_overlay_kv_cache_memory_bytes",
            f"is {_show(kv_bytes, {})}",
            "write auto, or the bytes as a whole number without quotes",
        )


def _ablation(get: _Effective) -> Iterator[Problem]:
    if get["glm_vllm_overlay_ablation_enabled"] and not get["glm_vllm_overlay_ablation_file"]:
        yield get.problem(
            "glm_vllm_overlay_ablation_enabled",
            "is true and glm_vllm_overlay_ablation_file is empty",
            "set it to false",
        )
    layers = get["glm_vllm_overlay_ablation_layers"]
    if layers is not None and not (len(layers) == 2 and 0 <= layers[0] <= layers[1] <= LAYERS):
        yield get.problem(
            "glm_vllm_overlay_ablation_layers",
            f"is {list(layers)}",
            f"give the first and the last layer, from 0 to {LAYERS}",
        )


def _gateway(get: _Effective) -> Iterator[Problem]:
    yield from _certificate(get)
    names: set[str] = set()
    for index, entry in enumerate(get["glm_vllm_overlay_api_keys"] or ()):
        if not re.fullmatch(r"[0-9a-f]{64}", entry["key"]):
            yield get.problem(
                "glm_vllm_overlay_api_keys",
                "is not 64 lower-case hex digits",
                "take one from `openssl rand -hex 32`",
                member=f"[{index}].key",
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", entry["name"]):
            yield get.problem(
                "glm_vllm_overlay_api_keys",
                f"is {_show(entry['name'], {})}",
                "write a word of letters, digits, dots and dashes",
                member=f"[{index}].name",
            )
        if entry["name"] in names:
            yield get.problem(
                "glm_vllm_overlay_api_keys",
                f"names {entry['name']} again",
                "give each key a name of its own",
                member=f"[{index}].name",
            )
        names.add(entry["name"])
    for index, network in enumerate(get["glm_vllm_overlay_allowed_networks"] or ()):
        if _network(network) is None:
            yield get.problem(
                "glm_vllm_overlay_allowed_networks",
                f"is {_show(network, {})}",
                "write a network such as 192.168.0.0/16, without host bits",
                member=f"[{index}]",
            )


def _guard(get: _Effective) -> Iterator[Problem]:
    floor, reserve = get["glm_vllm_overlay_guard_bytes"], get["glm_vllm_overlay_reserve_bytes"]
    if floor is not None and reserve is not None and floor > reserve:
        yield get.problem(
            "glm_vllm_overlay_guard_bytes",
            f"is {floor}, more than glm_vllm_overlay_reserve_bytes ({reserve}), so nothing would be warned of",
            "give a smaller one",
        )


def _certificate(get: _Effective) -> Iterator[Problem]:
    pair = ("glm_vllm_overlay_tls_cert", "glm_vllm_overlay_tls_key")
    for name, other in (pair, pair[::-1]):
        if get[name] and get[other] == "":
            yield get.problem(name, f"is set and {other} is empty", "name both files, or none")
    cert, key = (Path(get[name] or "") for name in pair)
    if cert.is_file() and key.is_file() and not any(file.read_bytes().startswith(VAULTED) for file in (cert, key)):
        try:
            # Without a passphrase to hand out, or OpenSSL would ask on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            yield get.problem(
                pair[1],
                f"does not fit the certificate {cert}, or one of the two is no PEM file or has a passphrase",
                "name a certificate and its own key",
            )
    for index, name in enumerate(get["glm_vllm_overlay_tls_names"] or ()):
        if _address(name) is None and not HOST_NAME.fullmatch(name):
            yield get.problem(
                "glm_vllm_overlay_tls_names",
                f"is {_show(name, {})}",
                "write a host name or an address",
                member=f"[{index}]",
            )


def _ports(get: _Effective) -> Iterator[Problem]:
    taken = {STATE_PORT: "the state service of the nodes"}
    ray = get["ray_cluster_port"]
    if ray is not None:
        taken |= dict.fromkeys(range(ray, ray + RAY_PORTS + 1), "ray_cluster_port")
    for name in PORTS:
        port = get[name]
        if port is None:
            continue
        if port in taken:
            yield get.problem(name, f"is {port}, a port of {taken[port]}", "choose another")
        taken[port] = name
    if ray is not None and STATE_PORT in range(ray, ray + RAY_PORTS + 1):
        yield get.problem(
            "ray_cluster_port",
            f"is {ray}, and the {RAY_PORTS} ports above it hold {STATE_PORT} of the state service of the nodes",
            "choose another",
        )


def _extra_args(get: _Effective, refuse: Callable[[str, Any], str]) -> Iterator[str]:
    for key, value in (get["glm_vllm_overlay_extra_args"] or {}).items():
        if sentence := refuse(str(key), value):
            yield sentence


def _sources(get: _Effective) -> Iterator[Problem]:
    for name in ("model_fetch_sources", "model_fetch_drafter_sources"):
        sources = get[name]
        if sources is None:
            continue
        if not sources and name == "model_fetch_sources":
            yield get.problem(name, "is empty", "name at least one source of the weights")
        if not sources and name != "model_fetch_sources" and get["glm_vllm_overlay_speculator"] == "dflash2":
            yield get.problem(name, "is empty and glm_vllm_overlay_speculator is dflash2", "name a drafter, or set mtp")
        for index, source in enumerate(sources):
            yield from _source(get, name, f"[{index}]", source)


def _source(get: _Effective, name: str, member: str, source: Mapping[str, Any]) -> Iterator[Problem]:
    repo, path, url, revision = (source.get(key) for key in ("repo", "path", "url", "revision"))
    if sum(map(bool, (repo, path, url))) != 1:
        yield get.problem(name, "must have one of repo, url and path", "name one of the three", member=member)
    if url and not re.fullmatch(r"(https?|rsync)://[^\s/]+/\S*", url):
        yield get.problem(
            name,
            f"is {_show(url, {})}",
            "write https://, http:// or rsync:// with host and folder",
            member=f"{member}.url",
        )
    if repo and not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        yield get.problem(name, f"is {_show(repo, {})}", "write owner/name", member=f"{member}.repo")
    if path and not Path(path).is_absolute():
        yield get.problem(name, f"is {_show(path, {})}", "write the whole path from /", member=f"{member}.path")
    if (repo or url) and not revision:
        yield get.problem(
            name,
            f"has a {'repo' if repo else 'url'} and no revision",
            "pin it to the 40 hex digits of a commit",
            member=member,
        )
    if revision is not None and not re.fullmatch(r"[0-9a-f]{40}", revision):
        yield get.problem(
            name,
            f"is {_show(revision, {})}",
            "write the 40 hex digits of a commit, a branch or tag may move",
            member=f"{member}.revision",
        )


def _rails(get: _Effective, inventory: Inventory) -> Iterator[Problem]:
    mtu = get["cx7_network_mtu"]
    if mtu is not None and mtu != "auto" and not _whole(mtu, 1280, 9978):
        yield get.problem(
            "cx7_network_mtu", f"is {_show(mtu, {})}", "write auto, or bytes from 1280 to 9978 without quotes"
        )
    seen: list[tuple[int, ipaddress.IPv4Network | ipaddress.IPv6Network]] = []
    for index, rail in enumerate(get["cx7_network_rails"] or ()):
        text = rail.get("subnet")
        network = _network(text)
        member = f"[{index}].subnet"
        if network is None:
            yield get.problem(
                "cx7_network_rails",
                f"is {_show(text, {})}",
                "write a network such as 192.168.177.0/24, without host bits",
                member=member,
            )
            continue
        if network.version != 4 or network.num_addresses < FIRST_HOST + len(get.nodes) + 1:
            yield get.problem(
                "cx7_network_rails",
                f"is {network}, which has no hosts {FIRST_HOST} to {FIRST_HOST + len(get.nodes) - 1} for the nodes",
                "take an IPv4 network such as a /24",
                member=member,
            )
        for earlier, other in seen:
            if network.version == other.version and network.overlaps(other):
                yield get.problem(
                    "cx7_network_rails",
                    f"is {network} and overlaps rail {earlier} ({other})",
                    "give each rail a subnet of its own",
                    member=member,
                )
        seen.append((index, network))
        for node in get.nodes:
            address = _address(inventory.hosts.get(node, {}).get("ansible_host"))
            if address is not None and address in network:
                yield get.problem(
                    "cx7_network_rails",
                    f"is {network} and holds the management address of {node}, {address}",
                    "take a subnet that nothing else uses",
                    member=member,
                )


def _addresses(inventory: Inventory, nodes: Sequence[str]) -> Iterator[Problem]:
    owner: dict[str, str] = {}
    for node in nodes:
        address = inventory.hosts.get(node, {}).get("ansible_host")
        port = inventory.hosts.get(node, {}).get("ansible_port", 22)
        if address is None:
            continue
        first = owner.setdefault(f"{address}:{port}", node)
        if first != node:
            yield Problem(
                "ansible_host", f"is {address} for {first} and for {node}", "give each node its own in hosts.yml"
            )


def _files(get: _Effective) -> Iterator[Problem]:
    if get["glm_bundle"] and get["glm_vllm_overlay_wheelhouse"]:
        yield get.problem(
            "glm_vllm_overlay_wheelhouse", "is set beside glm_bundle, which brings its own wheels", "leave one"
        )
    wanted = {
        "glm_bundle": "folder",
        "glm_vllm_overlay_wheelhouse": "folder",
        "glm_vllm_overlay_chat_template": "file",
        "glm_vllm_overlay_tls_cert": "file",
        "glm_vllm_overlay_tls_key": "file",
        "glm_vllm_overlay_ablation_file": "file",
    }
    for name, kind in wanted.items():
        text = get[name]
        if not text:
            continue
        path = Path(text)
        if not path.is_absolute():
            yield get.problem(name, f"is {_show(text, {})}", "write the whole path from /")
        elif not (path.is_dir() if kind == "folder" else path.is_file()):
            yield get.problem(name, f"names {path}, which is no {kind} on this controller", "correct the path")
        elif name == "glm_vllm_overlay_wheelhouse" and not any(path.glob("*.whl")):
            yield get.problem(name, f"names {path}, which holds no wheel", "fill it, or leave it empty for an index")


def _network(text: Any) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text) if isinstance(text, str) and "/" in text else None
    except ValueError:
        return None


def _address(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _show(value: Any, option: Mapping[str, Any]) -> str:
    if option.get("no_log"):
        return "not of the right type"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, Mapping):
        return "a set of keys and values"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f"the number {value}"


def _whole(value: Any, least: int, most: float = float("inf")) -> bool:
    # isinstance, since Ansible's own numbers are subclasses of int.
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _either(choices: Sequence[Any]) -> str:
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
