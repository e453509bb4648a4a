"""What `image` in a task.toml can say, and so in a sandbox's Spec: the words only; legorl.sandbox.making acts on them.

    localhost/other:1                  a name in Podman's store; nothing is fetched
    environment/Dockerfile             built; the folder of the Dockerfile (or Containerfile) is the context
    oci-archive:images/py39.tar        loaded from an archive (docker-archive:, too)
    docker://registry.org/py39:1       pulled from a registry, unless it is in the store already

Paths are absolute, or relative to the task's folder; they may lead out of it, to what several tasks share.
"""

import re
from pathlib import Path

DOCKERFILES = ("Dockerfile", "Containerfile")
ARCHIVES = ("docker-archive", "oci-archive")
_PULL = "docker://"
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


def kind_of(image: str) -> str:
    """Return "name", "build", "archive" or "pull"."""
    if image.startswith(_PULL):
        return "pull"
    if image.partition(":")[0] in ARCHIVES:
        return "archive"
    return "build" if Path(image).name in DOCKERFILES else "name"


def name_to_pull(image: str) -> str:
    """Return the name in the store of an image that is pulled."""
    return image.removeprefix(_PULL)


def is_loopback(image: str) -> bool:
    """Does it come from a registry on this machine, which may speak plain HTTP?"""
    return bool(_LOOPBACK.fullmatch(name_to_pull(image).partition("/")[0]))


def archive_of(image: str) -> Path:
    """Return the file of an image that is loaded."""
    return Path(image.partition(":")[2])


def absolute(image: str, task: Path) -> str:
    """Return `image` with the path in it, if there is one, made absolute.

    Raises ValueError, saying how to mend it, for what cannot be meant.
    """
    kind = kind_of(image)
    if kind == "archive":
        transport, _, path = image.partition(":")
        return f"{transport}:{(task / path).resolve()}"
    if kind == "build":
        file = (task / image).resolve()
        if not file.is_file():
            raise ValueError(f"image {image!r}: there is no such file")
        if task.is_relative_to(file.parent) or file.is_relative_to(task / "tests"):
            raise ValueError(
                f"image {image!r}: its folder is sent to the build, which would see hidden tests; give it a folder of "
                "its own, such as environment/Dockerfile"
            )
        return str(file)
    if kind == "pull":
        registry, _, name = name_to_pull(image).partition("/")
        if not name or not re.search(r"[.:]|^localhost$", registry):
            raise ValueError(f"image {image!r}: name the registry, too, as in docker://docker.io/library/python:3.9")
    elif image and not re.fullmatch(r"[a-z0-9][\w./:@-]*", image):
        raise ValueError(f"image {image!r} is no name of an image; docs/tasks.md says what can stand there")
    return image
