"""Whatever tree an agent leaves is collected byte by byte, or refused with a reason; so is any patch applied."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox.boxes import Tree, listing, place, sh, start, tar

from legorl.sandbox import PatchUnusable, Sandbox, SandboxError

pytestmark = pytest.mark.podman

BASE: Tree = {
    "README.md": b"one\ntwo\nthree\n",
    "src/a.py": b"print(1)\n",
    "src/run.sh": (b"#!/bin/sh\necho hi\n", 0o755),
    "data.bin": bytes(range(256)) * 40,
    "link": "-> src/a.py",
    "crlf.txt": b"a\r\nb\r\n",
    "ignored.log": b"tracked, although ignored\n",
    ".gitignore": b"*.log\nbuild/\n",
}

HOSTILE = {
    "nothing": "",
    "edit": "echo four >>README.md; rm src/a.py; echo new >src/b.py",
    "binary": "head -c 3000 /dev/urandom >data.bin; printf 'a\\0b' >new.bin",
    "modes": "chmod +x README.md; chmod -x src/run.sh",
    "unreadable": "echo x >>README.md; chmod 000 README.md; mkdir locked; echo y >locked/y; chmod 000 locked src",
    "fifo, socket": """
        mkfifo pipe; rm README.md; mkfifo README.md
        python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
    """,
    "nested repositories": """
        git init -q sub; echo x >sub/x; git -C sub add -A
        mkdir -p deep/.GIT; echo y >deep/.GIT/y; echo z >deep/z
    """,
    "locked nested repository": "git init -q sub; echo x >sub/x; chmod 000 sub/.git",
    "no .git": "rm -rf .git; echo x >x",
    ".git a file": "rm -rf .git; echo 'gitdir: /tmp' >.git; echo x >x",
    "own commits": "git checkout -q -b other; echo x >x; git add -A; git commit -qm x",
    "lying index": "git update-index --assume-unchanged README.md; echo x >>README.md",
    "links": "ln -s /etc/passwd passwd; ln -sfn ../../.. up; rm -rf src; ln -s /usr src; ln -sf /nowhere link",
    "file becomes folder": "rm README.md; mkdir README.md; echo x >README.md/x",
    "folder becomes file": "rm -r src; echo x >src",
    "crlf": "printf 'x\\r\\ny\\n' >>crlf.txt; printf 'no newline' >bare.txt",
    "names": """
        echo x >$'tab\\there'; echo x >$'new\\nline'; echo x >$'\\xff\\xfe'; echo x >é
        echo x >'q"uote'; echo x >'-n'; echo x >' '
    """,
    "odd names": """
        echo x >'git~1'; echo x >'a\\b'; echo x >CON; echo x >.gitmodules
        mkdir -p .github; echo x >.github/w
    """,
    "empty and no newline": ": >empty; printf x >README.md",
    "tracked ignored file": "echo changed >>ignored.log; mkdir build",
    "attributes": """
        echo '* text eol=crlf ident filter=evil diff=evil working-tree-encoding=UTF-16' >.gitattributes
        git config filter.evil.clean 'touch /tmp/pwned; cat'
        git config diff.evil.textconv 'touch /tmp/pwned'
        git config core.autocrlf true
        echo '$Id$' >README.md; printf 'a\\nb\\r\\n' >x.txt
    """,
    "configuration": """
        mkdir -p .git/hooks /ws/hooks
        printf '[core]\\n fsmonitor = touch /tmp/pwned\\n hooksPath = /ws/hooks\\n' >~/.gitconfig
        printf '#!/bin/sh\\ntouch /tmp/pwned\\n' | tee .git/hooks/post-index-change >/ws/hooks/post-index-change
        chmod +x .git/hooks/* /ws/hooks/*; echo x >x
    """,
    "info/exclude": "mkdir -p .git/info; echo x >>.git/info/exclude; echo x >x",
    "long line": "head -c 300000 /dev/zero | tr '\\0' a >long; echo >>long",
    "deep": "for i in $(seq 60); do mkdir -p dddddddddddddddddddddddddddddddddd; cd ddd*; echo $i >f; done",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_agent_left_arrives_in_a_fresh_tree(name: str, box: Sandbox, fresh: Sandbox, do):
    do(start(box, "/ws/repo", BASE))
    result = do(sh(box, HOSTILE[name], cwd="/ws/repo"))
    assert result.exit_code == 0, result.log
    patch = do(box.diff("/ws/repo"))
    do(place(fresh, "/ws/repo", BASE))
    do(fresh.apply(patch, "/ws/repo"))
    # After diff, so that what could not be read can be: fifos and nested .git are gone by then.
    wanted = do(listing(box, "/ws/repo"))
    assert do(listing(fresh, "/ws/repo")) == wanted
    assert (patch == b"") == (name == "nothing")
    assert (
        do(sh(box, "ls /tmp/pwned ~/.gitconfig /ws/hooks; rm -rf ~/.gitconfig /ws/hooks")).log.count(b"/tmp/pwned") == 1
    )


def test_caches_are_not_work_and_ignored_files_stay_out(box: Sandbox, do):
    do(start(box, "/ws/repo", BASE))
    do(
        sh(
            box,
            "mkdir -p src/__pycache__ .pytest_cache build; touch src/__pycache__/a.pyc .pytest_cache/x build/x new.log",
            cwd="/ws/repo",
        )
    )
    assert do(box.diff("/ws/repo")) == b""


def test_the_agent_sees_one_root_commit_always_the_same(box: Sandbox, do):
    heads = []
    for _ in range(2):
        do(start(box, "/ws/repo", BASE))
        script = "git log --format='%H %an %ad %s %D' --date=iso; git status --porcelain; git ls-files | wc -l"
        heads.append(do(sh(box, script, cwd="/ws/repo")).log.decode().splitlines())
    assert heads[0] == heads[1]
    assert len(heads[0]) == 2 and heads[0][1] == str(len(BASE))
    assert "legorl 2000-01-01 00:00:00 +0000 Initial commit HEAD -> main" in heads[0][0]


def test_the_base_is_out_of_reach_and_diff_can_be_asked_again(box: Sandbox, do):
    do(start(box, "/ws/repo", BASE))
    assert b"Permission denied" in do(sh(box, "ls /run/keep; mv /run/keep /run/k; echo x >x", cwd="/ws/repo")).log
    first = do(box.diff("/ws/repo"))
    assert b"+x\n" in first and do(box.diff("/ws/repo")) == first
    assert do(sh(box, "ls /run/keep")).exit_code == 2


def test_a_tree_that_cannot_be_collected_is_refused(box: Sandbox, do):
    do(start(box, "/ws/repo", BASE))
    do(sh(box, "head -c 3000000 /dev/urandom >big", cwd="/ws/repo"))
    with pytest.raises(PatchUnusable, match="more than 1000000 bytes"):
        do(box.diff("/ws/repo", limit=1_000_000))
    assert len(do(box.diff("/ws/repo"))) > 3_000_000
    do(sh(box, "rm -rf repo; ln -s /usr/share repo"))
    with pytest.raises(PatchUnusable, match="no longer a folder"):
        do(box.diff("/ws/repo"))
    do(sh(box, "rm repo"))
    with pytest.raises(PatchUnusable, match="no longer a folder"):
        do(box.diff("/ws/repo"))


def test_commit_of_a_missing_folder_is_our_failure(box: Sandbox, do):
    with pytest.raises(SandboxError, match="commit"):
        do(box.commit("/ws/nowhere"))


def _patch(path: str, mode: str = "100644", body: str = "evil") -> bytes:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..1111111\n"
        f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{body}\n\\ No newline at end of file\n"
    ).encode()


BAD = {
    "outside": _patch("../../tmp/evil"),
    "absolute": _patch("/tmp/evil"),
    ".git": _patch(".git/hooks/pre-commit"),
    ".GIT": _patch("x/.GIT/config"),
    "through a new link": _patch("out", "120000", "/tmp") + _patch("out/evil"),
    "through a link of the tree": _patch("up/evil"),
    "other base": b"diff --git a/README.md b/README.md\n--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-nine\n+ten\n",
    "no patch": b"once upon a time\n",
    "cut": _patch("x")[:-40],
    "existing file": _patch("README.md"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_patch_is_refused_and_changes_nothing(name: str, fresh: Sandbox, do):
    tree = {**BASE, "up": "-> /tmp"}
    do(place(fresh, "/ws/repo", tree))
    before = do(listing(fresh, "/ws/repo"))
    with pytest.raises(PatchUnusable) as refused:
        do(fresh.apply(BAD[name], "/ws/repo"))
    assert len(str(refused.value)) > 10
    assert do(listing(fresh, "/ws/repo")) == before
    assert do(sh(fresh, "ls /tmp; find / -xdev -name evil 2>/dev/null")).log == b""


def test_an_empty_patch_applies(fresh: Sandbox, do):
    do(place(fresh, "/ws/repo", BASE))
    do(fresh.apply(b"", "/ws/repo"))


_names = st.sampled_from(["a", "b", "a b", "é", "x.bin", "-q", 'q"', "\udcff", ".gitattributes", ".gitignore", "t\tb"])
_contents = st.one_of(
    st.binary(max_size=60),
    st.lists(st.sampled_from([b"a\n", b"b\r\n", b"* text eol=crlf\n", b"c", b"\0"]), max_size=12).map(b"".join),
    st.sampled_from(["-> a", "-> ../b", "-> /etc"]),
)


@st.composite
def trees(draw: Any) -> Tree:
    """Folders two deep; no path is both a file and a folder."""
    tree: Tree = {}
    for path in draw(st.lists(st.lists(_names, min_size=1, max_size=3).map("/".join), max_size=7, unique=True)):
        parts = path.split("/")
        taken = any("/".join(parts[:n]) in tree for n in range(1, len(parts)))
        if taken or any(other.startswith(path + "/") for other in tree):
            continue
        content = draw(_contents)
        tree[path] = content if isinstance(content, str) else (content, draw(st.sampled_from([0o644, 0o755])))
    return {path: value for path, value in tree.items() if not path.endswith(".gitignore")}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(before=trees(), after=trees())
def test_any_change_goes_through(before: Tree, after: Tree, box: Sandbox, fresh: Sandbox, do):
    do(start(box, "/ws/any", before))
    do(sh(box, "find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} +", cwd="/ws/any"))
    do(box.put(tar(after), "/ws/any"))
    patch = do(box.diff("/ws/any"))
    do(place(fresh, "/ws/any", before))
    do(fresh.apply(patch, "/ws/any"))
    assert do(listing(fresh, "/ws/any")) == do(listing(box, "/ws/any"))
