"""Harness files, templates, installation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from legorl import harness as h
from legorl.harness.install import install_all, keep_only

VALUES = {
    "task": "do it",
    "base_url": "http://127.0.0.1:8400",
    "key": "k3y",
    "model": "tiny",
    "home": "/home/agent",
    "max_turns": 3,
    "turn_tokens": 64,
    "context": 2048,
}
MINIMAL = """
name = "mine"
version = "1"
protocol = "openai-chat"
[run]
argv = ["sh", "-c", "{task}"]
env = { KEY = "{key}", KEEP = "1" }
[presets.loud]
env = { KEY = "loud {key}" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("name", h.built_in())
def test_every_built_in_harness_loads_with_every_preset_and_fills_every_field(name: str) -> None:
    plain = h.load_harness(name)
    import tomllib

    presets = tomllib.loads((h.BUILT_IN / f"{name}.toml").read_text()).get("presets", {})
    for preset in ["", *presets]:
        loaded = h.load_harness(f"{name}:{preset}" if preset else name)
        launch = loaded.launch(VALUES)
        everything = json.dumps([launch.argv, launch.env, launch.files])
        assert "do it" in everything and "k3y" in everything and "http://127.0.0.1:8400" in everything
        assert not [f for f in h.FIELDS if f"{{{f}}}" in everything.replace("{{task}}", "")]
        assert (loaded.digest == plain.digest) == (preset == "")
        assert loaded.install.empty or loaded.version in "".join([*loaded.install.pip, *loaded.install.npm])


def test_files_of_the_built_in_harnesses_are_well_formed() -> None:
    models = h.load_harness("pi").launch(VALUES).files["/home/agent/.pi/agent/models.json"]
    local = json.loads(models)["providers"]["local"]
    assert (local["apiKey"], local["models"][0]["contextWindow"], local["models"][0]["maxTokens"]) == ("k3y", 2048, 64)
    small = h.load_harness("mini-swe-agent:small").launch(VALUES).files["/home/agent/small.yaml"]
    assert "Task: {{task}}" in yaml.safe_load(small)["agent"]["instance_template"]


def test_the_documented_example_is_a_harness(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "harnesses.md").read_text()
    (tmp_path / "loop.toml").write_text(text.split("```toml\n")[1].split("```")[0])
    launch = h.load_harness(str(tmp_path / "loop.toml")).launch(VALUES)
    assert launch.argv[1] == "/home/agent/loop.py"
    compile(launch.files["/home/agent/loop.py"], "loop.py", "exec")


def test_the_docs_list_every_harness_with_its_release_and_presets() -> None:
    import tomllib

    text = (Path(__file__).parents[1] / "docs" / "harnesses.md").read_text()
    table = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 7}
    assert sorted(table) == h.built_in()
    for name, line in table.items():
        data = tomllib.loads((h.BUILT_IN / f"{name}.toml").read_text())
        assert name == "command" or f"| {data['version']} " in line
        assert not [preset for preset in data.get("presets", {}) if f"`{preset}`" not in line], name
    keys = {*h._KEYS, *(f"install.{k}" for k in h._INSTALL_KEYS)} - {"install", "run", "presets"}
    assert not [key for key in keys if f"`{key}`" not in text and f"\n{key} = " not in text]


def test_default_is_the_plain_preset() -> None:
    assert h.load_harness("mini-swe-agent:default") == h.load_harness("mini-swe-agent")


def test_preset_overrides_what_it_names_and_keeps_the_rest(file: Path) -> None:
    launch = h.load_harness(f"{file}:loud").launch(VALUES)
    assert launch.argv == ["sh", "-c", "do it"]
    assert launch.env == {"KEY": "loud k3y", "KEEP": "1"}
    assert h.load_harness(f"{file}:loud").label == "mine:loud"


def test_preset_overrides_protocol_and_user_agent(file: Path) -> None:
    file.write_text(MINIMAL + 'protocol = "anthropic"\nuser_agent = "^other"\n')
    plain, loud = h.load_harness(str(file)), h.load_harness(f"{file}:loud")
    assert (plain.protocol, plain.user_agent) == ("openai-chat", "")
    assert (loud.protocol, loud.user_agent) == ("anthropic", "^other")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGORL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "agent.sh"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o700)
    return path


def test_a_program_is_copied_for_sandboxes_and_known_by_its_content(program: Path) -> None:
    first = h.load_harness(f"command:{program}")
    first.make_ready()
    first.make_ready()
    copy = first.folder / "agent.sh"
    assert (copy.read_text(), copy.stat().st_mode & 0o777) == ("#!/bin/sh\n", 0o755)
    assert first.mounts == ((first.folder, "/opt/h"),) and first.label == "command:agent.sh"
    assert first.launch(VALUES).argv == ["/opt/h/agent.sh", "do it"]
    program.write_text("#!/bin/sh\ntrue\n")
    second = h.load_harness(f"command:{program}")
    assert second.folder != first.folder and second.digest != first.digest
    assert [p.name for p in first.folder.parent.iterdir()] == [first.folder.name]


def test_a_folder_is_a_program_if_it_holds_run(program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "words").write_text("x")
    (folder / "lib" / "link").symlink_to("words")
    with pytest.raises(h.HarnessError, match="no executable file 'run'"):
        h.load_harness(f"command:{folder}")
    program.rename(folder / "run")
    harness = h.load_harness(f"command:{folder}")
    harness.make_ready()
    assert harness.launch(VALUES).argv[0] == "/opt/h/agent/run"
    assert (harness.folder / "agent" / "lib" / "link").readlink() == Path("words")
    digests = {harness.digest}
    for change in (
        lambda: (folder / "lib" / "words").write_text("y"),
        lambda: (folder / "lib" / "words").chmod(0o755),
        lambda: (folder / "lib" / "words").rename(folder / "lib" / "word"),
        lambda: (folder / "lib" / "empty").mkdir(),
    ):
        change()
        digests.add(h.load_harness(f"command:{folder}").digest)
    assert len(digests) == 5


def test_a_program_that_cannot_run_is_named_with_what_is_wrong(program: Path, tmp_path: Path) -> None:
    with pytest.raises(h.HarnessError, match=r"--harness command:\./agent\.sh"):
        h.load_harness("command").make_ready()
    with pytest.raises(h.HarnessError, match="nobody: no such file or folder"):
        h.load_harness(f"command:{tmp_path}/nobody")
    program.chmod(0o600)
    with pytest.raises(h.HarnessError, match=f"run: chmod \\+x {program}"):
        h.load_harness(f"command:{program}")
    odd = program.rename(tmp_path / "my agent.sh")
    odd.chmod(0o700)
    with pytest.raises(h.HarnessError, match="may hold only"):
        h.load_harness(f"command:{odd}")


@given(st.text())
def test_a_value_is_put_in_as_it_is(text: str) -> None:
    """A task may hold braces or field names: nothing in it is a template."""
    made = h.Harness("x", "1", "openai-chat", "", "", "", (), h.Install(), ("{task}", "a{key}b{{task}}"), {}, {})
    assert made.launch({**VALUES, "task": text}).argv == [text, "ak3yb{{task}}"]


def test_json_braces_around_a_field_stay() -> None:
    made = h.Harness("x", "1", "openai-chat", "", "", "", (), h.Install(), ('{"a":{"b":{context}}}',), {}, {})
    assert made.launch(VALUES).argv == ['{"a":{"b":2048}}']


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("[run]", "[runs]"), "no key 'run'"),
        (("argv", "args"), "unknown key 'args'"),
        (('name = "mine"', 'name = "a/b"'), "may hold only"),
        (("openai-chat", "smoke-signals"), "is none of"),
        (('version = "1"', 'version = "1"\nuser_agent = "("'), "not a regular expression"),
        (('version = "1"', "version = 1x"), "mine.toml"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(file: Path, change: tuple[str, str], complaint: str) -> None:
    file.write_text(MINIMAL.replace(*change))
    with pytest.raises(h.HarnessError, match=complaint):
        h.load_harness(str(file))


@pytest.mark.parametrize(
    ("spec", "complaint"), [("nobody", "known: .*mini-swe-agent, .*pi"), ("pi:huge", "known: default")]
)
def test_unknown_names_list_the_known(spec: str, complaint: str) -> None:
    with pytest.raises(h.HarnessError, match=complaint):
        h.load_harness(spec)


def test_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGORL_CACHE", str(tmp_path))
    with pytest.raises(h.HarnessError, match=r"run: python -m legorl.harness install pi .*make setup"):
        h.load_harness("pi").make_ready()


def wheel(folder: Path, name: str) -> None:
    """A minimal wheel, so that pip has something to install without an index."""
    import zipfile

    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "ANSWER = 42\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_install_is_whole_compiled_readable_and_done_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel(tmp_path, "lego_toy")
    file.write_text(MINIMAL.replace("[run]", '[install]\npip = ["lego_toy==1.0"]\n[run]'))
    toy = h.load_harness(str(file))
    assert not toy.installed
    assert install_all([toy]) == [True]
    toy.make_ready()
    assert install_all([toy, toy]) == [False, False]
    assert list((toy.folder / "site" / "lego_toy" / "__pycache__").glob("*.cpython-311.pyc"))
    assert all(p.stat().st_mode & 0o004 for p in toy.folder.rglob("*"))
    assert toy.mounts == ((toy.folder, "/opt/h"),)
    # Another list of packages under the same release is another installation.
    file.write_text(file.read_text().replace('"lego_toy==1.0"', '"lego_toy==1.0", "lego_gone==1.0"'))
    changed = h.load_harness(str(file))
    assert not changed.installed
    with pytest.raises(h.HarnessError, match="lego_gone"):
        install_all([changed])
    # What failed leaves nothing, and what was there stays.
    assert toy.installed and [p.name for p in toy.folder.parent.iterdir() if not p.name.endswith(".lock")] == ["mine-1"]


def test_only_what_a_harness_runs_with_is_kept(tmp_path: Path) -> None:
    for path in ("node_modules/@x/tool-linux-x64/tool", "node_modules/@x/tool/wrapper.js", "package.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    with pytest.raises(h.HarnessError, match="2 files fit"):
        keep_only({"bin/tool": "node_modules/@x/*"}, tmp_path)
    keep_only({"bin/tool": "node_modules/@x/tool-linux-*/tool"}, tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["bin", "bin/tool"]
    assert (tmp_path / "bin" / "tool").read_text() == "node_modules/@x/tool-linux-x64/tool"


def test_command_lists_and_refuses() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "legorl.harness", "list"], capture_output=True, text=True, check=True
    )
    assert [line.split("\t")[0] for line in listed.stdout.splitlines()] == h.built_in()
    refused = subprocess.run(
        [sys.executable, "-m", "legorl.harness", "install", "nobody"], capture_output=True, text=True
    )
    assert refused.returncode == 1 and "no harness 'nobody'" in refused.stderr and not refused.stdout
