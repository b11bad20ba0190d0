"""`glm-vllm status`: both nodes on one screen."""

import json


def test_both_serve(node, peer, glm_vllm):
    peer.document["phase"] = "serving"
    node.env(GLM_API_URL="http://192.0.2.11:8888/v1")
    code, out, _ = glm_vllm("status")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) <= 24, "one screen"
    rows = {line[:12].strip(): line[12:] for line in lines}
    assert rows["node"].split("  ")[0].strip() == "spark-a (head)"
    assert "spark-b (worker)" in rows["node"]
    assert rows["phase"].split() == ["serving", "serving"]
    assert rows["release"].split() == ["r1", "r1"]
    assert rows["model"].split() == ["target@rev1", "target@rev1"]
    assert rows["executor"].split() == ["mp", "mp"]
    assert rows["speculator"].split() == ["dflash2", "dflash2"]
    assert rows["utilisation"].split() == ["0.87", "0.87"]
    assert "114.0 of 121.6 GiB available" in rows["memory"]
    assert f"{node.address} enp1s0f0np0 up mtu 9000" in rows["rail 0"]
    assert "spark-a last incident: none" in lines
    assert "endpoint: http://192.0.2.11:8888/v1" in lines


def test_json(node, peer, glm_vllm):
    peer.document["phase"] = "serving"
    code, out, _ = glm_vllm("status", "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["ok"]) == (0, 1, True)
    assert [entry["node"] for entry in document["nodes"]] == ["spark-a", "spark-b"]
    assert "endpoint" not in document


def test_a_peer_that_only_loads_is_a_finding(node, peer, glm_vllm):
    peer.document["phase"] = "loading"
    code, out, _ = glm_vllm("status", "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_a_silent_peer(node, glm_vllm):
    code, out, _ = glm_vllm("status")
    assert code == 1
    assert "no answer" in out.splitlines()[1]
    assert any(line.startswith("spark-b: no answer (") for line in out.splitlines())


def test_what_a_gate_waits_for_and_the_last_incident(node, peer, glm_vllm):
    peer.document["phase"] = "gate"
    peer.document["incident"] = {"schema": 1, "when": "2026-01-01T00:00:00+00:00", "what": "it broke", "seconds": None}
    node.unit("glm-vllm-head", ActiveState="failed", SubState="failed", Result="exit-code", StatusText="vLLM ended")
    out = glm_vllm("status")[1].splitlines()
    assert "spark-b: waiting for spark-a" in out
    assert "spark-b last incident: 2026-01-01T00:00:00+00:00 (not over): it broke" in out
    assert "spark-a: vLLM ended" in out


def test_unverified_weights_and_a_dead_rail_stand_out(node, peer, glm_vllm):
    node.weights("target", verified=False)
    node.addresses((node.root / "ip-addr.json").read_text().replace("LOWER_UP", "NO-CARRIER"))
    out = glm_vllm("status")[1]
    assert "target@rev1 NOT VERIFIED" in out
    assert "NO CARRIER" in out


def test_a_node_without_a_deployment_still_answers(node, peer, glm_vllm):
    (node.root / "var/lib/glm-vllm/deployments/current/deployment.json").unlink()
    (node.root / "etc/glm-vllm/serve.yaml").unlink()
    code, out, _ = glm_vllm("status")
    assert code == 1
    assert "release      none" in out


def test_a_transfer_that_is_under_way_and_one_that_was_killed(node, peer, glm_vllm):
    says = "fetching target from own/target@01234567: 41.2 GiB of 163.6 GiB, 310 MB/s, 7 min left"
    (node.root / "run/glm-vllm-model").mkdir()
    node.put("run/glm-vllm-model/progress.json", json.dumps({"schema": 1, "pid": 77, "says": says}))
    (node.root / "proc/77").mkdir(parents=True)
    assert f"spark-a: {says}" in glm_vllm("status")[1].splitlines()
    (node.root / "proc/77").rmdir()
    assert "41.2 GiB" not in glm_vllm("status")[1]
