"""Broken inventories, one fault each, and the one sentence that each must give."""

from __future__ import annotations

import copy
import subprocess
from typing import Any

import pytest

GROUPS = {"sparks": ["spark-a", "spark-b"], "head": ["spark-a"], "workers": ["spark-b"]}
SOURCE = {"repo": "owner/name", "revision": "0" * 40, "licence": "Apache-2.0"}
KEY = "0123456789abcdef" * 4


@pytest.fixture
def problems(rules, schema, sparks):
    """Problems of inventory/sparks with ``changes`` on every host and ``hosts`` on single ones."""

    def find(groups: dict | None = None, hosts: dict | None = None, base: dict = sparks, **changes: Any) -> list[str]:
        members = GROUPS if groups is None else groups
        every = {host for names in members.values() for host in names}
        variables = {host: copy.deepcopy(base) | changes | (hosts or {}).get(host, {}) for host in every}
        return rules.check(rules.Inventory(members, variables), schema)

    return find


def test_the_shipped_inventory_has_no_problem(problems):
    assert problems() == []


def test_no_variable_at_all_is_right_too(problems):
    assert problems(base={}) == []


BROKEN = {
    # types
    "bool_as_text": (
        {"glm_vllm_overlay_prefix_caching": "true"},
        'glm_vllm_overlay_prefix_caching is the text "true": write true or false without quotes.',
    ),
    "bool_as_number": (
        {"glm_vllm_overlay_enforce_eager": 1},
        "glm_vllm_overlay_enforce_eager is the number 1: write true or false.",
    ),
    "number_as_text": (
        {"glm_vllm_overlay_max_num_seqs": "4"},
        'glm_vllm_overlay_max_num_seqs is the text "4": write a whole number without quotes.',
    ),
    "words_for_a_number": (
        {"glm_vllm_overlay_max_model_len": "1M"},
        'glm_vllm_overlay_max_model_len is the text "1M": write a whole number.',
    ),
    "fraction_for_a_whole_number": (
        {"glm_vllm_overlay_max_num_seqs": 4.5},
        "glm_vllm_overlay_max_num_seqs is the number 4.5: write a whole number.",
    ),
    "bool_for_a_number": (
        {"glm_vllm_overlay_gate_timeout": True},
        "glm_vllm_overlay_gate_timeout is true: write a whole number.",
    ),
    "float_as_text": (
        {"glm_vllm_overlay_gpu_memory_utilization": "0.87"},
        'glm_vllm_overlay_gpu_memory_utilization is the text "0.87": write a number without quotes.',
    ),
    "number_for_a_text": (
        {"glm_vllm_overlay_served_name": 53},
        "glm_vllm_overlay_served_name is the number 53: "
        "write a text, in quotes where it looks like a number or a boolean.",
    ),
    "bare_off": (
        {"glm_vllm_overlay_http": False},
        'glm_vllm_overlay_http is false, for so YAML reads a bare off: write "off" with quotes.',
    ),
    "bare_true": (
        {"cuda_sm121_headless": True},
        'cuda_sm121_headless is true, for so YAML reads a bare true: write "true" with quotes.',
    ),
    "text_for_a_list": (
        {"glm_vllm_overlay_allowed_networks": "10.0.0.0/8"},
        'glm_vllm_overlay_allowed_networks is the text "10.0.0.0/8": write a list.',
    ),
    "list_for_a_dict": (
        {"glm_vllm_overlay_extra_args": ["max-logprobs"]},
        "glm_vllm_overlay_extra_args is a list: write keys and values.",
    ),
    "empty": (
        {"glm_vllm_overlay_wheelhouse": None},
        "glm_vllm_overlay_wheelhouse is empty: give a value or remove the line.",
    ),
    "unknown_member": (
        {"glm_vllm_overlay_limit_mm": {"images": 4, "image": 4, "video": 1}},
        "glm_vllm_overlay_limit_mm.images is unknown: write image.",
    ),
    "missing_member": (
        {"glm_vllm_overlay_limit_mm": {"image": 4}},
        "glm_vllm_overlay_limit_mm lacks video: add video.",
    ),
    # choices and ranges
    "executor": (
        {"glm_vllm_overlay_executor": "mpi"},
        'glm_vllm_overlay_executor is the text "mpi": choose mp or ray.',
    ),
    "speculator": (
        {"glm_vllm_overlay_speculator": "eagle"},
        'glm_vllm_overlay_speculator is the text "eagle": choose dflash2, mtp or none.',
    ),
    "load_format": (
        {"glm_vllm_overlay_load_format": "instanttensor"},
        'glm_vllm_overlay_load_format is the text "instanttensor": choose auto or safetensors.',
    ),
    "utilisation_in_percent": (
        {"glm_vllm_overlay_gpu_memory_utilization": 87},
        "glm_vllm_overlay_gpu_memory_utilization is the number 87: give a value from 0.01 to 1.",
    ),
    "utilisation_of_nothing": (
        {"glm_vllm_overlay_gpu_memory_utilization": 0},
        "glm_vllm_overlay_gpu_memory_utilization is the number 0: give a value from 0.01 to 1.",
    ),
    "context_too_long": (
        {"glm_vllm_overlay_max_model_len": 1048577},
        "glm_vllm_overlay_max_model_len is the number 1048577: give a value from 1 to 1048576.",
    ),
    "no_context": (
        {"glm_vllm_overlay_max_model_len": 0},
        "glm_vllm_overlay_max_model_len is the number 0: give a value from 1 to 1048576.",
    ),
    "privileged_port": (
        {"glm_vllm_overlay_api_port": 80},
        "glm_vllm_overlay_api_port is the number 80: give a value from 1024 to 65535.",
    ),
    "member_out_of_range": (
        {"glm_vllm_overlay_limit_mm": {"image": -1, "video": 1}},
        "glm_vllm_overlay_limit_mm.image is the number -1: give a value from 0 to 999.",
    ),
    # names
    "misspelt": (
        {"glm_vllm_overlay_max_modle_len": 1000},
        "glm_vllm_overlay_max_modle_len is no variable of any role: write glm_vllm_overlay_max_model_len.",
    ),
    "wrong_role": (
        {"cx7_network_min_gbs": 80},
        "cx7_network_min_gbs is no variable of any role: write cx7_network_min_gbps.",
    ),
    "like_nothing": (
        {"model_fetch_zzzzzzzzzzzzzz": 1},
        "model_fetch_zzzzzzzzzzzzzz is no variable of any role: "
        "remove it; the roles' README files list every variable.",
    ),
    # contradictions
    "autotune_with_two_nodes": (
        {"glm_vllm_overlay_flashinfer_autotune": True},
        "glm_vllm_overlay_flashinfer_autotune is true with 2 nodes, and FlashInfer's tuner deadlocks GB10 pairs: "
        "set it to false.",
    ),
    "ablation_without_a_file": (
        {"glm_vllm_overlay_ablation_enabled": True},
        "glm_vllm_overlay_ablation_enabled is true and glm_vllm_overlay_ablation_file is empty: set it to false.",
    ),
    "ablation_with_a_file_that_is_not_there": (
        {"glm_vllm_overlay_ablation_enabled": True, "glm_vllm_overlay_ablation_file": "/nonexistent/r.safetensors"},
        "glm_vllm_overlay_ablation_file names /nonexistent/r.safetensors, which is no file on this controller: "
        "correct the path.",
    ),
    "ablation_layers_backwards": (
        {"glm_vllm_overlay_ablation_layers": [45, 15]},
        "glm_vllm_overlay_ablation_layers is [45, 15]: give the first and the last layer, from 0 to 45.",
    ),
    "step_below_a_block": (
        {"glm_vllm_overlay_max_num_batched_tokens": 2048},
        "glm_vllm_overlay_max_num_batched_tokens is 2048, less than one KV block (4608) and the 32 tokens that "
        "4 requests with dflash2 decode beside it: give a value from 4640 to 8191.",
    ),
    "step_too_small_for_more_requests": (
        {"glm_vllm_overlay_max_num_seqs": 8},
        "glm_vllm_overlay_max_num_batched_tokens is 4640, less than one KV block (4608) and the 64 tokens that "
        "8 requests with dflash2 decode beside it: give a value from 4672 to 8191.",
    ),
    "step_of_8192": (
        {"glm_vllm_overlay_max_num_batched_tokens": 8192},
        "glm_vllm_overlay_max_num_batched_tokens is 8192, and the indexer's shared memory can't hold 8192 tokens: "
        "give a value from 4640 to 8191.",
    ),
    "kv_bytes_in_words": (
        {"glm_vllm_overlay_kv_cache_memory_bytes": "11GiB"},
        'glm_vllm_overlay_kv_cache_memory_bytes is the text "11GiB": '
        "write auto, or the bytes as a whole number without quotes.",
    ),
    "no_kv_bytes": (
        {"glm_vllm_overlay_kv_cache_memory_bytes": True},
        "glm_vllm_overlay_kv_cache_memory_bytes is true: write auto, or the bytes as a whole number without quotes.",
    ),
    "guard_before_its_warning": (
        {"glm_vllm_overlay_guard_bytes": 2147483648, "glm_vllm_overlay_reserve_bytes": 1073741824},
        "glm_vllm_overlay_guard_bytes is 2147483648, more than glm_vllm_overlay_reserve_bytes (1073741824), "
        "so nothing would be warned of: give a smaller one.",
    ),
    "certificate_name_with_a_space": (
        {"glm_vllm_overlay_tls_names": ["198.51.100.7", "my head"]},
        'glm_vllm_overlay_tls_names[1] is the text "my head": write a host name or an address.',
    ),
    "key_of_the_wrong_form": (
        {"glm_vllm_overlay_api_keys": [{"name": "me", "key": "secret"}]},
        "glm_vllm_overlay_api_keys[0].key is not 64 lower-case hex digits: take one from `openssl rand -hex 32`.",
    ),
    "key_of_the_wrong_type": (
        {"glm_vllm_overlay_api_keys": [{"name": "me", "key": 12345}]},
        "glm_vllm_overlay_api_keys[0].key is not of the right type: "
        "write a text, in quotes where it looks like a number or a boolean.",
    ),
    "key_name_with_a_space": (
        {"glm_vllm_overlay_api_keys": [{"name": "my laptop", "key": KEY}]},
        'glm_vllm_overlay_api_keys[0].name is the text "my laptop": write a word of letters, digits, dots and dashes.',
    ),
    "key_names_twice": (
        {"glm_vllm_overlay_api_keys": [{"name": "me", "key": KEY}, {"name": "me", "key": KEY[::-1]}]},
        "glm_vllm_overlay_api_keys[1].name names me again: give each key a name of its own.",
    ),
    "network_with_host_bits": (
        {"glm_vllm_overlay_allowed_networks": ["192.168.0.1/16"]},
        'glm_vllm_overlay_allowed_networks[0] is the text "192.168.0.1/16": '
        "write a network such as 192.168.0.0/16, without host bits.",
    ),
    "one_port_twice": (
        {"glm_vllm_overlay_https_port": 8888},
        "glm_vllm_overlay_https_port is 8888, a port of glm_vllm_overlay_api_port: choose another.",
    ),
    "port_of_the_state_service": (
        {"glm_vllm_overlay_api_port": 8890},
        "glm_vllm_overlay_api_port is 8890, a port of the state service of the nodes: choose another.",
    ),
    "port_among_rays": (
        {"ray_cluster_port": 8800},
        [
            "glm_vllm_overlay_api_port is 8888, a port of ray_cluster_port: choose another.",
            "ray_cluster_port is 8800, and the 120 ports above it hold 8890 of the state service of the nodes: "
            "choose another.",
        ],
    ),
    "ray_by_hand": (
        {"ray_cluster_enabled": True},
        "ray_cluster_enabled follows glm_vllm_overlay_executor: remove it.",
    ),
    "false_in_extra_args": (
        {"glm_vllm_overlay_extra_args": {"enable-prefix-caching": False}},
        "glm_vllm_overlay_extra_args, enable-prefix-caching: false would be dropped by vLLM without a word; "
        "write no-enable-prefix-caching: true.",
    ),
    "secret_in_extra_args": (
        {"glm_vllm_overlay_extra_args": {"api-key": "x"}},
        "glm_vllm_overlay_extra_args, api-key: take it out, keys belong to the gateway: use glm_vllm_overlay_api_keys.",
    ),
    "branch_for_a_revision": (
        {"model_fetch_sources": [SOURCE | {"revision": "main"}]},
        'model_fetch_sources[0].revision is the text "main": '
        "write the 40 hex digits of a commit, a branch or tag may move.",
    ),
    "repo_without_revision": (
        {"model_fetch_sources": [{"repo": "owner/name", "licence": "Apache-2.0"}]},
        "model_fetch_sources[0] has a repo and no revision: pin it to the 40 hex digits of a commit.",
    ),
    "neither_repo_nor_path": (
        {"model_fetch_sources": [{"licence": "none"}]},
        "model_fetch_sources[0] must have one of repo, url and path: name one of the three.",
    ),
    "licence_by_another_name": (
        {"model_fetch_accept_licences": ["Apache"]},
        'model_fetch_accept_licences[0] is the text "Apache": choose ShapleyMCG-1.0, Apache-2.0 or CC-BY-NC-ND-4.0.',
    ),
    "no_source": (
        {"model_fetch_sources": []},
        "model_fetch_sources is empty: name at least one source of the weights.",
    ),
    "repo_without_owner": (
        {"model_fetch_sources": [SOURCE | {"repo": "name"}]},
        'model_fetch_sources[0].repo is the text "name": write owner/name.',
    ),
    "rails_in_one_subnet": (
        {"cx7_network_rails": [{"subnet": "192.168.177.0/24"}, {"subnet": "192.168.177.0/24"}]},
        "cx7_network_rails[1].subnet is 192.168.177.0/24 and overlaps rail 0 (192.168.177.0/24): "
        "give each rail a subnet of its own.",
    ),
    "rail_without_a_length": (
        {"cx7_network_rails": [{"subnet": "192.168.177.0"}]},
        'cx7_network_rails[0].subnet is the text "192.168.177.0": '
        "write a network such as 192.168.177.0/24, without host bits.",
    ),
    "rail_too_small": (
        {"cx7_network_rails": [{"subnet": "192.168.177.0/30"}]},
        "cx7_network_rails[0].subnet is 192.168.177.0/30, which has no hosts 11 to 12 for the nodes: "
        "take an IPv4 network such as a /24.",
    ),
    "mtu_as_text": (
        {"cx7_network_mtu": "9000"},
        'cx7_network_mtu is the text "9000": write auto, or bytes from 1280 to 9978 without quotes.',
    ),
    "no_drafter": (
        {"model_fetch_drafter_sources": []},
        "model_fetch_drafter_sources is empty and glm_vllm_overlay_speculator is dflash2: name a drafter, or set mtp.",
    ),
    "no_such_wheelhouse": (
        {"glm_vllm_overlay_wheelhouse": "/nowhere/wheels"},
        "glm_vllm_overlay_wheelhouse names /nowhere/wheels, which is no folder on this controller: correct the path.",
    ),
    "relative_wheelhouse": (
        {"glm_vllm_overlay_wheelhouse": "wheels"},
        'glm_vllm_overlay_wheelhouse is the text "wheels": write the whole path from /.',
    ),
    "no_such_bundle": (
        {"glm_bundle": "/nowhere/bundle"},
        "glm_bundle names /nowhere/bundle, which is no folder on this controller: correct the path.",
    ),
    "private_key_alone": (
        {"glm_vllm_overlay_tls_key": __file__},
        "glm_vllm_overlay_tls_key is set and glm_vllm_overlay_tls_cert is empty: name both files, or none.",
    ),
    "relative_source": (
        {"model_fetch_sources": [{"path": "models/mine", "licence": "none"}]},
        'model_fetch_sources[0].path is the text "models/mine": write the whole path from /.',
    ),
    "certificate_alone": (
        {"glm_vllm_overlay_tls_cert": __file__},
        "glm_vllm_overlay_tls_cert is set and glm_vllm_overlay_tls_key is empty: name both files, or none.",
    ),
    "no_certificate": (
        {"glm_vllm_overlay_tls_cert": __file__, "glm_vllm_overlay_tls_key": __file__},
        f"glm_vllm_overlay_tls_key does not fit the certificate {__file__}, or one of the two is no PEM file or has a "
        "passphrase: name a certificate and its own key.",
    ),
    "certificate_elsewhere": (
        {"glm_vllm_overlay_tls_cert": "/nowhere/crt", "glm_vllm_overlay_tls_key": "/nowhere/key"},
        [
            "glm_vllm_overlay_tls_cert names /nowhere/crt, which is no file on this controller: correct the path.",
            "glm_vllm_overlay_tls_key names /nowhere/key, which is no file on this controller: correct the path.",
        ],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variable(problems, name):
    changes, sentence = BROKEN[name]
    assert problems(**changes) == (sentence if isinstance(sentence, list) else [sentence])


GROUPINGS = {
    "no_head": (
        {"sparks": ["b"], "head": [], "workers": ["b"]},
        ["Group head has no host: name the node that serves the API below head in hosts.yml."],
    ),
    "two_heads": (
        {"sparks": ["a", "b", "c"], "head": ["a", "b"], "workers": ["c"]},
        ["Group head has 2 hosts (a, b): leave exactly one there."],
    ),
    "two_workers": (
        {"sparks": ["a", "b", "c"], "head": ["a"], "workers": ["b", "c"]},
        ["Group workers has 2 hosts (b, c), and a pair has one: leave exactly one there."],
    ),
    "no_worker": (
        {"sparks": ["a"], "head": ["a"], "workers": []},
        ["Group workers has no host: name the other node below workers in hosts.yml."],
    ),
    "host_in_both": (
        {"sparks": ["a"], "head": ["a"], "workers": ["a"]},
        ["Host a is in head and in workers: leave it in one of the two."],
    ),
    "outside_sparks": (
        {"sparks": ["a"], "head": ["a"], "workers": ["b"]},
        ["Group sparks does not hold b: make head and workers children of sparks in hosts.yml."],
    ),
    "neither": (
        {"sparks": ["a", "b", "c"], "head": ["a"], "workers": ["b"]},
        ["Host c is in sparks but neither in head nor in workers: put it into one of the two."],
    ),
    "nothing": (
        {},
        [
            "Group head has no host: name the node that serves the API below head in hosts.yml.",
            "Group workers has no host: name the other node below workers in hosts.yml.",
        ],
    ),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_broken_groups(problems, name):
    groups, sentences = GROUPINGS[name]
    assert problems(groups=groups) == sentences


def test_a_value_of_one_host_names_the_host(problems):
    assert problems(hosts={"spark-b": {"cx7_network_min_gbps": "80"}}) == [
        'cx7_network_min_gbps is the text "80" on spark-b: write a whole number without quotes.'
    ]


def test_numbers_as_ansible_reads_them_are_numbers(problems):
    class Tagged(int):
        pass

    assert problems(glm_vllm_overlay_kv_cache_memory_bytes=Tagged(2**30), cx7_network_mtu=Tagged(9000)) == []


def test_hosts_that_differ(problems):
    assert problems(hosts={"spark-b": {"glm_vllm_overlay_max_num_seqs": 3}}) == [
        "glm_vllm_overlay_max_num_seqs differs between spark-a and spark-b: set it once, in group_vars/all."
    ]


def test_one_address_for_two_hosts(problems):
    assert problems(ansible_host="192.0.2.11") == [
        "ansible_host is 192.0.2.11 for spark-a and for spark-b: give each node its own in hosts.yml."
    ]


def test_a_rail_that_holds_the_management_address(problems):
    rails = [{"subnet": "192.0.2.0/24"}]
    assert problems(hosts={"spark-a": {"ansible_host": "192.0.2.11"}}, cx7_network_rails=rails) == [
        "cx7_network_rails[0].subnet is 192.0.2.0/24 and holds the management address of spark-a, 192.0.2.11: "
        "take a subnet that nothing else uses."
    ]


def test_an_expression_that_ansible_cannot_evaluate(problems, rules):
    assert problems(glm_vllm_overlay_wheelhouse=rules.Broken("'folder' is undefined")) == [
        "glm_vllm_overlay_wheelhouse can't be evaluated, 'folder' is undefined: correct the expression."
    ]


def test_all_problems_at_once(problems):
    found = problems(
        groups={"sparks": ["spark-a"], "head": ["spark-a"], "workers": []},
        glm_vllm_overlay_executor="mpi",
        glm_vllm_overlay_api_port=80,
        glm_vllm_overlay_ablation_enabled=True,
    )
    assert [sentence.split(" ")[0] for sentence in found] == [
        "Group",
        "glm_vllm_overlay_api_port",
        "glm_vllm_overlay_executor",
        "glm_vllm_overlay_ablation_enabled",
    ]


def test_a_wheelhouse_without_wheels(problems, tmp_path):
    assert problems(glm_vllm_overlay_wheelhouse=str(tmp_path)) == [
        f"glm_vllm_overlay_wheelhouse names {tmp_path}, which holds no wheel: fill it, or leave it empty for an index."
    ]
    (tmp_path / "uv-0-py3-none-any.whl").touch()
    assert problems(glm_vllm_overlay_wheelhouse=str(tmp_path)) == []


def test_a_bundle_beside_a_wheelhouse(problems, tmp_path):
    (tmp_path / "uv-0-py3-none-any.whl").touch()
    assert problems(glm_bundle=str(tmp_path), glm_vllm_overlay_wheelhouse=str(tmp_path)) == [
        "glm_vllm_overlay_wheelhouse is set beside glm_bundle, which brings its own wheels: leave one."
    ]


def test_a_certificate_and_its_key(problems, tmp_path):
    """Fails when a pair that fits is refused, or another key, or one with a passphrase, is taken."""
    for name, lock in (("own", ("-nodes",)), ("other", ("-nodes",)), ("locked", ("-passout", "pass:secret"))):
        files = ("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.crt")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=x"]
        subprocess.run([*command, *lock, *files], check=True, capture_output=True)
    (tmp_path / "vaulted.key").write_text("$ANSIBLE_VAULT;1.1;AES256\n00\n")

    def found(cert: str, key: str) -> list[str]:
        return problems(
            glm_vllm_overlay_tls_cert=str(tmp_path / f"{cert}.crt"),
            glm_vllm_overlay_tls_key=str(tmp_path / f"{key}.key"),
        )

    assert found("own", "own") == found("own", "vaulted") == []
    for cert, key in (("own", "other"), ("locked", "locked")):
        assert "name a certificate and its own key" in found(cert, key)[0]


def test_no_secret_is_ever_printed(problems):
    secret = "Hunter2-but-long"
    found = problems(
        glm_vllm_overlay_api_keys=[{"name": "me", "key": secret}],
        model_fetch_token=[secret],
    )
    assert len(found) == 2
    assert not any(secret in sentence for sentence in found)


def test_the_file_and_line_are_named(rules, tmp_path):
    (tmp_path / "group_vars/all").mkdir(parents=True)
    (tmp_path / "host_vars").mkdir()
    file = tmp_path / "group_vars/all/serving.yml"
    file.write_text("---\n# glm_x: 1\nglm_x: 2\n")
    (tmp_path / "host_vars/other.yml").write_text("glm_x: 3\n")
    assert rules.locate("glm_x", ["spark-a"], [tmp_path]) == f"{file}, line 3"
    assert rules.locate("glm_x", ["other"], [tmp_path]) == "", "two places: none is named"
    assert rules.locate("glm_y", ["spark-a"], [tmp_path]) == ""


def test_both_ends_of_every_range(problems, rules):
    for name, (least, most) in rules.RANGES.items():
        variable, _, member = name.partition(".")
        for value, right in ((least, True), (most, True), (least - 1, False), (most + 1, False)):
            given = {"image": 1, "video": 1, member: value} if member else value
            refused = [sentence for sentence in problems(**{variable: given}) if sentence.startswith(f"{name} is the")]
            assert (refused == []) is right, f"{name}: {value}"


def test_every_range_belongs_to_a_numeric_variable(rules, schema):
    for name in rules.RANGES:
        variable, _, member = name.partition(".")
        option = schema.options[variable]
        option = option["options"][member] if member else option
        assert option["type"] in ("int", "float"), name
