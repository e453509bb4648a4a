"""lego-serve as its users start it: errors of one line, exit codes, lives and deaths."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from legorl.commands.serve.cli import main
from legorl.commands.serve.noise import apart

SERVE = Path(sys.executable).with_name("lego-serve")
ASK = """
import json, os, sys, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
request = urllib.request.Request(base + "/chat/completions", body, {"authorization": "Bearer " + key})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print(os.environ["LEGORL_SERVE"], os.environ["LEGORL_MODEL"], sep="\\n")
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text(json.dumps({"text": "good day"}))
    return path


def gone(pid: int) -> None:
    """Wait until the process `pid`, which need not be our child, has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 60)[0], f"process {pid} goes on"
    os.close(handle)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["nowhere"], 1, "nowhere: no such model folder; give a Hugging Face folder or a checkpoint of lego-train"),
        (["."], 1, "no config.json"),
        (["MODEL", "--engine", "script"], 2, "--engine script needs --script FILE"),
        (["MODEL", "--cores", "9999"], 2, "--cores: cores '9999': this process may use"),
        (["MODEL", "--cores", "some"], 2, "is not a list of cores"),
        (["MODEL", "--engine-arg", "logprobs_mode=raw_logprobs"], 2, "raw_logprobs: is lego-serve's to set"),
        (["MODEL", "--engine-arg", "data-parallel-size=2"], 2, "start a lego-serve a GPU instead"),
        (["MODEL", "--engine", "torch", "--engine-arg", "a=1"], 2, "a=1: needs NAME=VALUE and --engine vllm"),
        (["MODEL", "--", "no-such-command"], 1, "no-such-command: no such command"),
        (["MODEL", "--engine", "script", "--script", "bad.jsonl", "--", "true"], 1, "bad.jsonl:1: not a script line"),
        ([], 2, "Missing argument 'MODEL'"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_starts(
    arguments, code, line, tiny_model, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{")
    with pytest.raises(SystemExit) as stop:
        main.main([str(tiny_model) if a == "MODEL" else a for a in arguments])
    said = capfd.readouterr().err.strip().splitlines()
    assert stop.value.code == code and line in said[-1]
    assert code == 2 or len(said) == 1


def test_a_command_gets_the_api_and_its_exit_code_is_ours(tiny_model, script):
    done = subprocess.run(
        [SERVE, tiny_model, "--engine", "script", "--script", script, "--", sys.executable, "-c", ASK],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    answer, control, model = done.stdout.splitlines()
    assert done.returncode == 7 and answer == "good day" and model == str(tiny_model)
    assert not Path(control).exists()
    ready, text = done.stderr.splitlines()  # the libraries' words are kept apart
    assert "ready in" in ready and "tool calls: default" in text and "token by token" in text


def test_standing_alone_it_prints_its_socket_and_stops_when_asked(tiny_model, script):
    argv = [SERVE, tiny_model, "--engine", "script", "--script", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        control = Path(process.stdout.readline().strip())
        assert control.is_socket() and control.stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not control.exists()


def test_the_command_dies_with_the_server(tiny_model, script):
    argv = [SERVE, tiny_model, "--engine", "script", "--script", script, "--", "sh", "-c", "echo $$; exec sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        child = int(process.stdout.readline())
        process.kill()
        gone(child)


def test_what_libraries_print_goes_to_the_log(tmp_path, capfd):
    log = tmp_path / "log"
    with apart(log) as (stdout, stderr):
        os.write(1, b"a bar\n")
        os.write(2, b"a warning\n")
        os.write(stdout, b"data\n")
        os.write(stderr, b"words\n")
    os.write(1, b"after\n")
    assert log.read_text() == "a bar\na warning\n"
    assert capfd.readouterr() == ("data\nafter\n", "words\n")
