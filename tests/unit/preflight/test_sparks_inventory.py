"""inventory/sparks: what an owner reads and edits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

INVENTORY = Path(__file__).parents[3] / "inventory/sparks"
FILES = sorted((INVENTORY / "group_vars/all").glob("*.yml"))
COMMENTED = re.compile(r"^# ([a-z0-9_]+): (.*)$")


def test_the_files_that_a_user_edits():
    assert [file.stem for file in FILES] == ["network", "serving", "site", "vault", "weights"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_commented_line_shows_the_default(file, schema):
    for row in file.read_text().splitlines():
        found = COMMENTED.match(row)
        if found:
            name, text = found.groups()
            assert name in schema.options, f"{name} is no variable of any role"
            assert yaml.safe_load(text) == schema.options[name]["default"], name


def test_what_is_set_is_the_default(sparks, schema):
    """A value that stands in the file and one that does not must mean the same pair."""
    for name, value in sparks.items():
        if name in schema.defaults:
            assert value == schema.defaults[name], name


def test_every_public_variable_is_shown_once(schema):
    shown = re.findall(r"(?m)^(?:# )?([a-z0-9_]+):", "\n".join(file.read_text() for file in FILES))
    assert len(shown) == len(set(shown)), "a variable stands twice"
    # One is the twin's, the other follows from the executor.
    assert set(schema.options) - {"glm_profile", "ray_cluster_enabled"} == set(shown) - {"ansible_user"}


def test_documentation_addresses_and_no_secret(sparks):
    hosts = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["sparks"]["children"]
    addresses = [host["ansible_host"] for group in hosts.values() for host in group["hosts"].values()]
    assert all(address.startswith("192.0.2.") for address in addresses)
    assert sparks["glm_vllm_overlay_api_keys"] == []
    assert sparks["model_fetch_token"] == ""
    assert sparks["model_fetch_accept_licences"] == []
