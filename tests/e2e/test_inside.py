"""What a harness finds around itself, on the real way from lego-rollout to a sandbox: the model's API, no more."""

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
from e2e.driving import BIN, Run, harness, rows

pytestmark = pytest.mark.podman

# Everything that the harness can read is searched for words that could be keys, and for the canaries of hidden files.
# It hands out digests of them, which are compared outside: so neither the program nor its report holds one itself.
LOOK = """
import hashlib, json, os, re, socket, subprocess, sys, urllib.error, urllib.request
base, key, model, task = sys.argv[1:]
found = {"net": sorted(os.listdir("/sys/class/net")), "words": [], "sockets": []}

def ask(path, bearer, data=None):
    request = urllib.request.Request(base + path, data, {"authorization": "Bearer " + bearer, "user-agent": "loop/1"})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code

def look(path):
    try:
        with open(path, "rb") as file:
            for word in re.findall(rb"canary[0-9a-f]{32}|[0-9A-Za-z_-]{40,64}", file.read(1 << 22)):
                found["words"].append(hashlib.sha256(word).hexdigest()[:8])
    except OSError:
        pass

for pid in os.listdir("/proc"):
    if pid.isdigit():
        for name in ("environ", "cmdline", "mountinfo"):
            look(f"/proc/{pid}/{name}")
for top in ("/ws", "/tmp", "/home", "/run", "/opt/h", "/lego", "/dev/shm", "/var", "/etc", "/mnt", "/srv", "/root"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                found["sockets"] += [path] if os.path.exists(path) and not os.path.islink(path) else []
            else:
                look(path)
found["llm"] = os.path.exists("/run/llm/llm.sock")
found["own"] = hashlib.sha256(key.encode()).hexdigest()[:8]
found["words"] = sorted(set(found["words"]))
found["models"] = ask("/v1/models", key), ask("/v1/models", "0" * 64)
methods = [(p, data) for p in ("/health", "/metrics", "/sessions", "/weights") for data in (None, b"{}")]
found["control"] = [ask(path, key, data) for path, data in methods]
for name, family, address in (
    ("inet", socket.AF_INET, ("192.0.2.1", 80)), ("metadata", socket.AF_INET, ("169.254.169.254", 80)),
    ("vsock", socket.AF_VSOCK, (2, 1024)),
):
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(5)
            sock.connect(address)
        found[name] = "connected"
    except OSError as error:
        found[name] = os.strerror(error.errno or 0)
with open("found.json", "w") as file:
    json.dump(found, file)
"""


def digest(word: str) -> str:
    return sha256(word.encode()).hexdigest()[:8]


def test_a_harness_finds_loopback_its_own_key_and_the_model(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    made = run.do(BIN / "lego-tasks", "shell", "--out", tmp_path / "t", "--count", 1, "--kind", "create", "--level", 0)
    task = Path(made.stdout.strip())
    shown, hidden, secret = (f"canary{os.urandom(16).hex()}" for _ in range(3))
    (task / "repo" / "shown.txt").write_text(shown)
    with (task / "tests" / "test_task.py").open("a") as file:
        file.write(f"\n# {hidden}\n")
    (task / "solution.patch").write_text((task / "solution.patch").read_text() + f"\n# {secret}\n")
    (tmp_path / "script.jsonl").write_text(json.dumps({"text": "unused"}))
    out = run.folder / "out"
    # A second session, by hand, is open all the time: its key stands in the environment of the rollout.
    argv = [
        BIN / "lego-serve",
        tiny_model,
        "--engine",
        "script",
        "--script",
        tmp_path / "script.jsonl",
        "--",
        "bash",
        "-c",
    ]
    command = f"echo $OPENAI_API_KEY; bin/lego-rollout {task} --out {out} --harness {harness(tmp_path, LOOK)} -n 2"
    done = run.do(*argv, command + " --run test_inside")
    assert done.returncode == 0, done.stderr
    other = done.stdout.split()[0]
    all_found = []
    for row in rows(out):
        assert row["outcome"] == "finished" and row["patch_files"] == ["found.json"], row["log_tail"]
        text = row["patch"].decode()
        found = json.loads(next(line for line in text.splitlines() if line.startswith("+{"))[1:])
        all_found.append(found)
        assert found["net"] == ["lo"]
        assert (found["llm"], found["sockets"]) == (True, [])  # there, in a folder that it cannot list
        assert found["models"] == [200, 401]
        assert all(code in (404, 405) for code in found["control"]), found["control"]
        assert found["inet"] == found["metadata"] == "Network is unreachable"
        assert found["vsock"] == "Function not implemented"
        # It finds what it may know, so the search works; and nothing of the rest.
        assert {found["own"], digest(shown)} <= set(found["words"])
        assert not {digest(hidden), digest(secret), digest(other)} & set(found["words"])
    first, second = all_found
    assert first["own"] not in second["words"] and second["own"] not in first["words"]
    run.wait_gone()
    assert run.left() == []
