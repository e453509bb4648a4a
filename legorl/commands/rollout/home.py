"""The agent's home folder: the harness's files, and what lets it import the task's repository.

await box.put(pack_home({**import_files(task, harness), **launch.files}), HOME)
"""

import io
import tarfile

from legorl.harness import Harness, HarnessError
from legorl.task import REPO, Task

HOME = "/home/agent"
PYTHONS = range(6, 16)  # minor versions of Python 3 that images may have


def import_files(task: Task, harness: Harness) -> dict[str, str]:
    """Files of the home folder that let the sandbox's Pythons import what the task's tests can (grade.python_path).

    Each is a .pth file in the user site of a Python, behind the standard library, as in grading. PYTHONPATH would come
    before that and before what the harness itself imports; so a Python that the harness brings has no file either.
    """
    if task.grade.runner not in ("pytest", "unittest"):
        return {}
    folders = "".join(f"{REPO}/{name}\n" if name != "." else f"{REPO}\n" for name in task.grade.python_path)
    own = harness.install.python.split(".")[:2]
    versions = [["3", str(minor)] for minor in PYTHONS]
    return {
        f"{HOME}/.local/lib/python{'.'.join(version)}/site-packages/task.pth": folders
        for version in versions
        if version != own
    }


def pack_home(files: dict[str, str]) -> bytes:
    """Return the harness's files as a tar of the home folder. Raises HarnessError for a path outside it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, text in files.items():
            if not path.startswith(HOME + "/") or ".." in path.split("/"):
                raise HarnessError(f"a harness file can write only below {{home}}, not {path}")
            body = text.encode()
            info = tarfile.TarInfo(path[len(HOME) + 1 :])
            info.size, info.mode = len(body), 0o600
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()
