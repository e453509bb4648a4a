"""Sandboxes on other Podman hosts: two services of root's on this machine, by Unix socket and through an sshd.

The first is sent everything for real. Commands are real, too: a rollout and its grading go over both hosts, one of
which dies in the middle.
"""

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import shard, small_task
from grading import attempt, grade
from podman_hosts import Service, services
from sandbox.boxes import SMALL, sh, tar

from legorl import paths
from legorl.sandbox import LimitsError, SandboxLost, Spec, limits, owner
from legorl.sandbox.errors import HostsGone
from legorl.sandbox.hosts import open_hosts
from legorl.sandbox.podman import podman
from legorl.shards import open_shard
from legorl.task import Limits

BIN = Path(__file__).parents[2] / "bin"
needs_root = pytest.mark.skipif(not paths.is_root(), reason="a Podman service of its own here is root's")

# Asks the model once, does as it says, and is in no hurry.
AGENT = """#!/usr/bin/env python3
import json, os, subprocess, time, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "make it"}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), {
    "authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
subprocess.run(["bash", "-c", answer], check=True)
time.sleep(2)
"""


async def _prepare(url: str) -> None:
    async with open_hosts([url]) as hosts:
        await hosts.ensure_ready({SMALL})


@pytest.fixture(scope="module")
def two() -> Iterator[list[Service]]:
    with services(2, lambda first: asyncio.run(_prepare(first.url))) as made:
        yield made


@needs_root
@pytest.mark.podman
def test_a_sandbox_on_another_host_is_like_one_here(two: list[Service], tmp_path: Path) -> None:
    """Mounts and links are there, files go in, a patch comes out, and limits show in the evidence."""
    tools = tmp_path / "tools"
    (tools / "bin").mkdir(parents=True)
    (tools / "bin" / "tool").write_text("#!/bin/sh\necho a tool\n")
    (tools / "bin" / "tool").chmod(0o700)
    (tools / "again").symlink_to("bin/tool")

    async def use() -> None:
        async with open_hosts([two[0].url]) as hosts:
            spec = Spec("far", "tests", SMALL, mounts=((tools, "/opt/tools"),), links=(("/app", "/ws/repo"),))
            async with hosts.open(spec) as box:
                await box.put(tar({"a.txt": b"a\n"}), "/ws/repo")
                await box.commit("/ws/repo")
                seen = await sh(box, "/opt/tools/again; cat /app/a.txt; echo b >/app/a.txt; cat /proc/self/uid_map")
                log = seen.log.decode().split("\n")
                assert log[:2] == ["a tool", "a"]
                assert log[2].split()[1] != "0", "root inside is root of the host"
                assert b"+b\n" in await box.diff("/ws/repo")
                assert box.evidence().oom_kills == 0
                size = 2 * limits.memory_bytes(SMALL)
                assert (await sh(box, f"exec python3 /lego/bombs.py memory {size}")).exit_code == 137
                assert box.evidence().oom_kills > 0
                peak = box.evidence().memory_peak
                assert peak is None or 0.9 * limits.memory_bytes(SMALL) < peak <= limits.memory_bytes(SMALL)
                assert box.name in two[0].containers()
            assert box.evidence().oom_kills > 0  # known after the end, too
            with pytest.raises(LimitsError, match="does not fit the Podman host unix:"):
                await hosts.ensure_ready({Limits(memory_mb=1 << 30)})

    asyncio.run(use())
    assert two[0].containers() == []


@needs_root
@pytest.mark.podman
def test_only_containers_of_dead_owners_are_reaped_there(two: list[Service]) -> None:
    image = two[0].ask("images", "--format", "{{.Repository}}:{{.Tag}}", "localhost/legorl-sent").split()[0]
    dead, elsewhere = "00000000.1.1", "00000000.1"

    def leave(name: str, mark: str, view: str) -> str:
        labels = ("--label", "legorl=1", "--label", f"legorl.owner={mark}", "--label", f"legorl.view={view}")
        two[0].ask("create", "--network", "none", "--name", name, *labels, image, "true")
        return name

    async def reap() -> list[str]:
        async with open_hosts([two[0].url]) as hosts:
            host = hosts.places[0].host
            assert host is not None
            return await host.reap()

    gone = leave("left", dead, owner.view())
    stay = {leave("mine", owner.mine(), owner.view()), leave("theirs", dead, elsewhere)}
    try:
        assert asyncio.run(reap()) == [gone]
        assert set(two[0].containers()) == stay
    finally:
        two[0].ask("rm", "-f", *stay)


@needs_root
@pytest.mark.podman
def test_a_service_that_ignores_limits_is_refused(tmp_path: Path) -> None:
    """Podman's rootless service on cgroup v1 takes every limit without a word, and sets none."""
    if (limits.CGROUPS / "cgroup.controllers").exists():
        pytest.skip("cgroup v2: a rootless service can limit")
    from legorl.sandbox.podman import SERVICE_RUNTIME, command, context

    path = SERVICE_RUNTIME / f"test-{os.getpid()}.sock"
    service = subprocess.Popen(command("system", "service", "-t", "0", f"unix://{path}"), **context())
    made = ("localhost/legorl-sandbox", "localhost/legorl-files", "localhost/legorl-sent")

    async def names() -> set[str]:
        listed = await podman("images", "--format", "{{.Repository}}:{{.Tag}}")
        return {name for name in listed.out.decode().split() if name.startswith(made)}

    before = asyncio.run(names())
    try:
        while not path.exists():
            assert service.poll() is None
            time.sleep(0.05)
        with pytest.raises(LimitsError, match=r"not enforced on unix:.*memory \(exit code 0.*a service of root's"):
            asyncio.run(_prepare(f"unix://{path}"))
    finally:
        service.kill()
        service.wait()
        path.unlink(missing_ok=True)
        if mess := sorted(asyncio.run(names()) - before):
            asyncio.run(podman("rmi", *mess, check=False))


def test_hosts_that_do_not_answer_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async def use(*urls: str) -> list[str]:
        async with open_hosts(urls) as hosts:
            return [place.label for place in hosts.places]

    nobody = f"unix://{tmp_path}/nobody.sock"
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(use(nobody, "local")) == ["local"]
    assert f"going on without the Podman host {nobody}" in caplog.text
    with pytest.raises(HostsGone, match=nobody):
        asyncio.run(use(nobody))
    with pytest.raises(ValueError, match="neither unix"):
        asyncio.run(use("tcp://somewhere:1"))

    given = shard(tmp_path / "g.parquet", [attempt(small_task(tmp_path / "tasks", "t"), 0, b"")])
    gone = grade(given, "--out", tmp_path / "graded", "--podman", nobody, check=False)
    assert gone.returncode == 3 and gone.stdout == ""
    assert gone.stderr.splitlines()[-1].startswith(f"lego-grade: no Podman host answers of {nobody}")
    for wrong in (("--podman", "tcp://somewhere:1"), ("--shard", "3/2")):
        assert grade(given, "--out", tmp_path / "graded", *wrong, check=False).returncode == 2


@needs_root
@pytest.mark.slow
@pytest.mark.podman
def test_a_host_that_dies_costs_its_attempts_a_retry(two: list[Service], tiny_model: Path, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"match": "make it", "text": "echo hi > hello.txt"}))
    hosts = [word for each in two for word in ("--podman", each.url)]
    tasks = [str(small_task(tmp_path / "tasks", f"t{k}")) for k in range(3)]
    # fmt: off
    argv = [BIN / "lego-serve", tiny_model, "--engine", "script", "--script", script, "--",
            BIN / "lego-rollout", *tasks, "--out", tmp_path / "out", "--harness", f"command:{agent}",
            "-n", "2", "-c", "4", *hosts]
    # fmt: on
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(name.startswith("legorl-r-") for name in two[1].containers()):
        assert process.poll() is None, process.communicate()
    two[1].kill()
    out, err = process.communicate(timeout=300)
    two[1].start()
    assert process.returncode == 0, err
    assert f"going on without the Podman host {two[1].url}: it does not answer any more (1 of 2 left)" in err
    rows = [row for path in out.split() for row in open_shard(path).rows()]
    assert [row["outcome"] for row in rows] == ["finished"] * 6, err
    lost = [one for row in rows for one in row["history"]]
    assert lost and {(one["blame"], two[1].url in one["detail"]) for one in lost} == {("infra", True)}

    # Graded in two parts, of which each knows of the whole round: neither misses anything.
    rewards = []
    for part in (1, 2):
        argv = [
            BIN / "lego-grade",
            "-",
            "--out",
            tmp_path / f"graded-{part}",
            "--shard",
            f"{part}/2",
            "-c",
            "4",
            *hosts,
        ]
        graded = subprocess.run(argv, input=out, capture_output=True, text=True)
        assert graded.returncode == 0, graded.stderr
        rewards.append([row["reward"] for path in graded.stdout.split() for row in open_shard(path).rows()])
    assert rewards == [[1.0] * 4, [1.0] * 2]
    # What the killed service had left was reaped by the grader.
    assert two[0].containers() == two[1].containers() == []


# -- ssh --


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """An sshd on loopback that takes one key; `ssh` on PATH uses it. Gives its port and its process."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("no sshd here (openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)  # where it hides itself from what it serves
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "authorized").write_text((tmp_path / "key.pub").read_text())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/authorized\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
    )
    (tmp_path / "ssh_config").write_text(
        f"IdentityFile {tmp_path}/key\nUserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking accept-new\n"
    )
    own = tmp_path / "bin"
    own.mkdir()
    (own / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
    (own / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{own}:{os.environ['PATH']}")
    process = subprocess.Popen([program, "-D", "-q", "-f", tmp_path / "sshd_config"], start_new_session=True)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert process.poll() is None
            time.sleep(0.02)
    try:
        yield port, process
    finally:
        for session in _sessions(process.pid):
            os.kill(session, 9)
        process.kill()
        process.wait()


def _sessions(pid: int) -> list[int]:
    """The processes of an sshd that serve a connection, without what they run for it."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    servers = [child for child in found if Path(f"/proc/{child}/comm").read_text().startswith("sshd")]
    return [*servers, *(each for child in servers for each in _sessions(child))]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """A folder with an llm.sock whose server answers one line with the same in capitals."""
    folder = tmp_path / "llm"
    folder.mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "llm.sock"))
    server.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(connection.recv(100).upper())

    threading.Thread(target=serve, daemon=True).start()
    yield folder
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@needs_root
@pytest.mark.podman
def test_a_host_by_ssh_reaches_the_model_and_is_set_aside_when_the_line_is_cut(
    two: list[Service], sshd: tuple[int, Any], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port, process = sshd
    url = f"ssh://root@127.0.0.1:{port}{two[0].url.removeprefix('unix://')}"
    spec = Spec("far", "tests", SMALL, llm_dir=model)
    ask = "exec 3<>/dev/tcp/127.0.0.1/8400; echo hello >&3; cat <&3"
    carried: list[Path] = []

    async def use() -> None:
        async with open_hosts([url]) as hosts:
            await hosts.ensure_ready({SMALL})
            async with hosts.open(spec) as one, hosts.open(spec) as other:
                assert (await sh(one, ask)).log == b"HELLO\n"
                assert (await sh(other, ask)).log == b"HELLO\n"
                host = hosts.places[0].host
                assert host is not None
                carried.append(Path(await host.model_folder(model)))
                assert carried[0].is_dir() and carried[0].parent.stat().st_mode & 0o077 == 0
                running = asyncio.ensure_future(one.run(["sleep", "1000"]))
                await asyncio.sleep(0)
                for session in _sessions(process.pid):  # one for each connection
                    os.kill(session, 9)
                process.kill()
                with pytest.raises(SandboxLost, match=f"on {url}"):
                    await running
            with pytest.raises(HostsGone, match=url):
                async with hosts.open(spec):
                    raise AssertionError("opened")

    with caplog.at_level(logging.WARNING):
        asyncio.run(use())
    assert f"going on without the Podman host {url}" in caplog.text
    assert not list(paths.private_dir().glob(f"ssh-{owner.mine()}*"))
    until = time.monotonic() + 60
    while carried[0].parent.exists():  # the shell there sees that the line is cut, and tidies up
        assert time.monotonic() < until, f"{carried[0].parent} is still there"
        time.sleep(0.05)


@needs_root
@pytest.mark.podman
@pytest.mark.slow
def test_the_probe_command_names_each_host(two: list[Service]) -> None:
    argv = [sys.executable, "-m", "legorl.sandbox", "probe", "--json", "--podman", two[0].url]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["host"] for row in rows} == {two[0].url} and all(row["ok"] for row in rows)
