"""lego-tasks import harbor: task folders in every shape that is published; what cannot come over says why."""

import subprocess
from pathlib import Path

import pytest
from imports import TASKS, lego_import, tree

from legorl.task import load_task

HARBOR_TOML = """
version = "1.0"
[task]
name = "org/answer"
[metadata]
difficulty = "easy"
category = "files"
[verifier]
timeout_sec = 30.0
env = { WANTED = "${ANSWER:-42}" }
[environment]
cpus = 1
memory = "0.5G"
storage_mb = 200
"""
HARBOR_FILES = {
    "instruction.md": "Write 42 to /app/answer.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\n# a comment\nENV MODE=test\nWORKDIR /app\n"
    "COPY --chown=1:1 data/ \\\n  ./data/\nCOPY notes.txt .\n",
    "environment/data/a.txt": "a\n",
    "environment/notes.txt": "n\n",
    "tests/test.sh": '#!/bin/bash\nmkdir -p /logs/verifier\n[ -e /tests/extra.txt ] && [ "$MODE" = test ] || exit 1\n'
    '[ "$(cat /app/answer.txt)" = "$WANTED" ] && echo 1 > /logs/verifier/reward.txt || '
    "echo '{\"reward\": 0}' > /logs/verifier/reward.json\n",
    "tests/extra.txt": "x\n",
    "solution/solve.sh": "#!/bin/bash\ncp /solution/answer.txt /app/answer.txt\n",
    "solution/answer.txt": "42\n",
}


def harbor_folder(folder: Path, toml: str = HARBOR_TOML, **changes: str | None) -> Path:
    """A Harbor task with `changes` (path to text, None leaves the file out)."""
    for name, text in {**HARBOR_FILES, "task.toml": toml, **changes}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.mark.podman
def test_a_harbor_task_comes_over_and_holds_both_ways(tmp_path: Path) -> None:
    harbor_folder(tmp_path / "set" / "answer")
    done = lego_import("harbor", tmp_path / "set", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "answer: asks for a network (public), and runs without one" in done.stderr
    task = load_task(tmp_path / "out" / "answer")
    assert tree(task.repo) == {b"data/a.txt": b"a\n", b"notes.txt": b"n\n"}
    assert (task.workdir, task.kind, task.limits.memory_mb, task.limits.cpus) == ("/app", "files", 512, 1.0)
    assert task.limits.disk_mb == 200
    assert task.grade.command == ("env", "MODE=test", "WANTED=42", "bash", "/tests/test.sh")
    assert task.grade.timeout_s == 30
    assert b"+42" in task.solution
    checked = subprocess.run([TASKS, "check", task.path, "--runs", "1", "--json"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_harbor_folders_that_cannot_come_over(tmp_path: Path) -> None:
    network = HARBOR_TOML.replace("cpus = 1", 'network_mode = "no-network"')
    docker = HARBOR_FILES["environment/Dockerfile"]
    cases: dict[str, tuple[str, dict[str, str | None]]] = {
        "its schema is not known": (HARBOR_TOML.replace('"1.0"', '"2.0"'), {}),
        "not a whole task": (network, {"tests/test.sh": None}),
        "its Dockerfile runs commands": (network, {"environment/Dockerfile": docker + "RUN apt-get update\n"}),
        "its Dockerfile copies a here-document": (network, {"environment/Dockerfile": docker + "COPY <<E x\na\nE\n"}),
        "its Dockerfile copies what is not there": (network, {"environment/Dockerfile": docker + "COPY none x\n"}),
        "its Dockerfile copies to outside of its working folder": (
            network,
            {"environment/Dockerfile": docker + "COPY notes.txt /etc/\n"},
        ),
        "its Dockerfile copies from elsewhere": (
            network,
            {"environment/Dockerfile": docker + "ADD https://localhost/a b\n"},
        ),
        "its working folder is not one of its own": (network, {"environment/Dockerfile": "FROM a\nWORKDIR /root\n"}),
        "it has several steps": (network + "[[steps]]\nname = 'a'\n", {}),
        "it needs other services": (network, {"environment/docker-compose.yaml": "services: {}\n"}),
        "its verifier has an image of its own": (network + "[verifier.environment]\ndocker_image = 'x'\n", {}),
        "it needs a variable of the host": (network.replace("${ANSWER:-42}", "${ANSWER}"), {}),
        "it needs accelerators": (network + "gpus = 1\n", {}),
    }
    for number, (toml, files) in enumerate(cases.values()):
        harbor_folder(tmp_path / "set" / f"t{number:02}", toml, **files)
    done = lego_import("harbor", tmp_path / "set", "--out", tmp_path / "out")
    assert done.returncode == 1
    *skipped, _, _ = done.stderr.strip().splitlines()
    assert [line.split(": ")[1] for line in skipped] == list(cases)
    assert [path for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")] == []


def test_a_harbor_task_without_a_solution_comes_over_with_a_word(tmp_path: Path) -> None:
    toml = HARBOR_TOML.replace("cpus = 1", "allow_internet = false") + 'docker_image = "some/image:1"\n'
    harbor_folder(tmp_path / "answer", toml, **{"solution/solve.sh": None})
    done = lego_import("harbor", tmp_path / "answer", "--out", tmp_path / "out", "--image", "row", "--split", "dev")
    assert done.returncode == 0, done.stderr
    first, *_ = done.stderr.splitlines()
    assert first == "answer: has no solution: lego-tasks check cannot prove it"
    task = load_task(tmp_path / "out" / "answer")
    assert (task.image, task.split) == ("some/image:1", "dev")


def test_what_only_an_image_has_is_left_to_the_image(tmp_path: Path) -> None:
    docker = (
        "FROM golang:1 AS build\nRUN go build -o /tool\nCOPY notes.txt /src/\n"
        "FROM ubuntu:24.04\nCOPY --chmod=755 --from=build /tool /usr/bin/\nRUN <<'EOF'\nWORKDIR /elsewhere\nEOF\n"
        "WORKDIR /workspace\nCOPY notes.txt /workspace/sub/\nCOPY data/ /etc/data/\n"
    )
    for name in ("one/same", "two/same", "other"):
        harbor_folder(tmp_path / "set" / name, **{"environment/Dockerfile": docker, "solution/solve.sh": None})
    done = lego_import("harbor", tmp_path / "set", "--out", tmp_path / "out", "--image", "some/image:1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{tmp_path}/out/{name}" for name in ("one-same", "other", "two-same")]
    task = load_task(tmp_path / "out" / "one-same")
    assert (task.image, task.workdir) == ("some/image:1", "/workspace")
    assert tree(task.repo) == {b"sub/notes.txt": b"n\n"}
    assert "other: its Dockerfile copies /etc/data; the image some/image:1 must have it" in done.stderr
    assert "other: its Dockerfile makes 3 things that it does not copy from here" in done.stderr
    bare = lego_import("harbor", tmp_path / "set", "--out", tmp_path / "bare", "--ids", "other")
    assert bare.returncode == 1
    assert "runs commands: 'FROM ubuntu:24.04'; give --image IMAGE" in bare.stderr
