"""`glm-vllm key`: what is stored, who may read it, and what is refused."""

from __future__ import annotations

import io
import json
import re
import stat
import threading

import pytest
from glm_vllm_overlay import cli
from glm_vllm_overlay.node import keys
from glm_vllm_overlay.node.files import locked
from glm_vllm_overlay.node.paths import Paths

A, B = "a1" * 32, "b2" * 32


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A machine in a folder, seen by root."""
    monkeypatch.setenv("GLM_ROOT", str(tmp_path))
    monkeypatch.setattr(keys.os, "geteuid", lambda: 0)
    return tmp_path


@pytest.fixture
def call(capsys, monkeypatch):
    """Run `glm-vllm key ...`; returns (exit code, stdout, stderr)."""

    def run(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = cli.main(["key", *words])
        return (code, *capsys.readouterr())

    return run


def stored(root):
    return json.loads((root / "etc/glm-vllm/api-keys").read_text())


def the_map(root):
    return (root / "etc/nginx/glm-vllm/keys.map").read_text()


def test_new_prints_the_key_and_nothing_else(call, root):
    """64 hex digits on stdout; the store and the map hold the same."""
    code, out, err = call("new", "laptop")
    assert code == 0 and re.fullmatch(r"[0-9a-f]{64}\n", out) and err == ""
    document = stored(root)
    assert document["schema"] == 1
    assert [(entry["name"], entry["key"]) for entry in document["keys"]] == [("laptop", out.strip())]
    assert the_map(root) == keys.MAP_HEADER + f'"~^{out.strip()}$" "laptop";\n'


def test_keys_differ(call):
    """No two keys are alike."""
    assert len({call("new", f"k{number}")[1] for number in range(8)}) == 8


def test_modes(call, root):
    """Root's alone, and never wider for a moment: the files are born with their modes."""
    call("new", "laptop")
    for path, mode in (("etc/glm-vllm/api-keys", 0o600), ("etc/nginx/glm-vllm/keys.map", 0o640)):
        assert stat.S_IMODE((root / path).stat().st_mode) == mode
    (root / "etc/glm-vllm/api-keys").chmod(0o644)
    call("new", "other")
    assert stat.S_IMODE((root / "etc/glm-vllm/api-keys").stat().st_mode) == 0o600


def test_list_shows_no_key(call):
    """Names and dates, in both forms."""
    key = call("new", "laptop")[1].strip()
    for words in (("list",), ("list", "--json")):
        code, out, _ = call(*words)
        assert code == 0 and "laptop" in out and key not in out
    assert [entry["name"] for entry in json.loads(out)["keys"]] == ["laptop"]


def test_a_taken_name_is_refused(call, root):
    """A second key of one name would hide which one a log means."""
    call("new", "laptop")
    before = stored(root)
    code, out, err = call("new", "laptop")
    assert code == 1 and out == "" and "revoke it first" in err and stored(root) == before


def test_revoke_closes_the_door(call, root):
    """The key leaves the store and the map; the other stays."""
    gone, kept = call("new", "gone")[1].strip(), call("new", "kept")[1].strip()
    assert call("revoke", "gone")[0] == 0
    assert gone not in the_map(root) and kept in the_map(root)
    assert [entry["name"] for entry in stored(root)["keys"]] == ["kept"]
    code, _, err = call("revoke", "gone")
    assert code == 1 and "there are: kept" in err


def test_import_is_idempotent_and_replaces(call, root):
    """The vault's word counts: the same key changes nothing, another one takes the name over."""
    assert json.loads(call("import", "ci", "--json", stdin=A + "\n")[1]) == {
        "schema": 1,
        "ok": True,
        "changed": True,
        "name": "ci",
    }
    before = stored(root)
    assert json.loads(call("import", "ci", "--json", stdin=A)[1])["changed"] is False
    assert stored(root) == before
    assert json.loads(call("import", "ci", "--json", stdin=B)[1])["changed"] is True
    assert A not in the_map(root) and B in the_map(root)


@pytest.mark.parametrize("bad", ["", "short", A[:-1], A + "0", A.upper(), "g" * 64, f"{A} {B}"])
def test_import_refuses_what_is_no_key(call, root, bad):
    """One sentence that names the key's owner and not the key."""
    code, out, err = call("import", "ci", stdin=bad)
    assert code == 2 and out == "" and "ci is not 64 hex digits" in err and (not bad or bad not in err)
    assert not (root / "etc/glm-vllm/api-keys").exists()


def test_one_key_has_one_name(call):
    """nginx would log whichever name came first."""
    call("import", "ci", stdin=A)
    code, _, err = call("import", "other", stdin=A)
    assert code == 1 and "the same key" in err and A not in err


@pytest.mark.parametrize("name", ["", "a b", '"; include /etc/shadow', "x" * 65, "-n", "ü", "a\nb"])
def test_names_are_fit_for_a_log_and_for_nginx(call, root, name):
    """A name can break neither nginx's syntax nor a log line."""
    assert call("new", "--", name)[0] == 2
    assert not (root / "etc/nginx/glm-vllm/keys.map").exists()


def test_a_missing_name_is_said(call):
    """Each action that needs a name says so."""
    for action in ("new", "import", "revoke"):
        code, _, err = call(action)
        assert code == 2 and f"glm-vllm key {action}" in err


def test_map_mends_what_was_changed_by_hand(call, root):
    """The map follows the store; a second run changes nothing."""
    call("new", "laptop")
    good = the_map(root)
    (root / "etc/nginx/glm-vllm/keys.map").write_text("")
    assert json.loads(call("map", "--json")[1])["changed"] is True
    assert the_map(root) == good
    assert json.loads(call("map", "--json")[1])["changed"] is False


def test_map_of_no_keys_exists(call, root):
    """nginx includes the file, so it is there before the first key."""
    assert call("map")[0] == 0 and the_map(root) == keys.MAP_HEADER


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": [{"name": "a"}]}', '{"keys": [{"name": "a", "key": "x"}]}'])
def test_a_damaged_store_is_not_overwritten(call, root, text):
    """What cannot be read stays as it is, with one sentence."""
    file = root / "etc/glm-vllm/api-keys"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    code, _, err = call("new", "laptop")
    assert code == 2 and "api-keys" in err and file.read_text() == text


def test_only_root(call, monkeypatch):
    """Anybody else is told what to type."""
    monkeypatch.setattr(keys.os, "geteuid", lambda: 1000)
    code, _, err = call("list")
    assert code == 2 and "sudo glm-vllm key list" in err


def test_two_at_once_lose_nothing(root):
    """Concurrent commands wait for each other."""

    def make(number):
        store = keys.Store(Paths(root))
        with locked(root):
            keys.add(store, f"k{number}", f"{number:064x}")

    threads = [threading.Thread(target=make, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stored(root)["keys"]) == 12


def test_reload_failure_is_told(call, root, monkeypatch):
    """A key that nginx has not read yet is not silently useless."""
    monkeypatch.setenv("PATH", str(root))
    (root / "systemctl").write_text("#!/bin/sh\necho nginx.service is not active. >&2\nexit 1\n")
    (root / "systemctl").chmod(0o755)
    code, out, err = call("new", "laptop", "--reload")
    assert code == 1 and "nginx.service is not active" in err and out.strip() == stored(root)["keys"][0]["key"]
    code, out, _ = call("revoke", "laptop", "--reload", "--json")
    assert code == 1 and json.loads(out)["ok"] is False
