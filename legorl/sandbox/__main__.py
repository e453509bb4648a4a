"""python -m legorl.sandbox setup|probe|reap|pull|prune: prepare this machine for sandboxes, try it, clean up."""

import asyncio
import json
from pathlib import Path

import click

from legorl.options import CHECK, CONTEXT, Command, Failure, command, emit, json_option, podman_option, say


@command("python -m legorl.sandbox", group=True)
def main() -> None:
    """Prepare this machine for sandboxes, try its limits, remove leftovers.

    \b
    Examples:
      python -m legorl.sandbox setup     # service user (as root), Podman's configuration, base image; idempotent
      python -m legorl.sandbox probe     # try every limit in a container; exit 4 if one is not enforced
      python -m legorl.sandbox reap      # remove containers whose owner is dead
      python -m legorl.sandbox pull docker.io/library/python:3.9-bookworm
      python -m legorl.sandbox prune --days 30       # remove images that no task has used for so long
    """


@main.command("setup", cls=Command, context_settings=CONTEXT)
def setup() -> None:
    """Do what is missing, say what was done."""
    from legorl.sandbox.setup import setup

    asyncio.run(setup(say))


@main.command("probe", cls=Command, context_settings=CONTEXT)
@podman_option
@json_option
def probe(podman: tuple[str, ...], as_json: bool) -> None:
    """Try every wall and limit; one line each on stdout."""
    from legorl.sandbox.hosts import probe_hosts

    seen = asyncio.run(probe_hosts(podman))
    for host, checks in seen.items():
        for name, check in checks.items():
            row = {"name": name, "ok": check.ok, "detail": check.detail, **({"host": host} if podman else {})}
            line = f"{name:12} {'ok' if check.ok else 'NOT ENFORCED':12}  {check.detail}"
            emit(json.dumps(row) if as_json else line + (f"  ({host})" if len(podman) > 1 else ""))
    for host, checks in seen.items():
        if failed := [name for name, check in checks.items() if not check.ok]:
            where = host if podman else "this machine"
            raise Failure(f"not enforced on {where}: {', '.join(failed)}", CHECK)


@main.command("reap", cls=Command, context_settings=CONTEXT)
def reap() -> None:
    """Remove containers, cgroups and pid files of dead owners; the containers' names on stdout."""
    from legorl.sandbox.leftovers import reap

    for name in asyncio.run(reap()):
        emit(name)


@main.command("pull", cls=Command, context_settings=CONTEXT)
@click.argument("image")
def pull(image: str) -> None:
    """Pull IMAGE (REGISTRY/NAME:TAG) into the store that sandboxes use; its name there on stdout."""
    from legorl import image_reference
    from legorl.sandbox.making import ready_image

    try:
        wanted = image_reference.absolute(f"docker://{image.removeprefix('docker://')}", Path("/"))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    emit(asyncio.run(ready_image(wanted, say)))


@main.command("prune", cls=Command, context_settings=CONTEXT)
@click.option("--days", type=click.FloatRange(0), help="Those that no task has used for so many days.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
def prune(days: float | None, everything: bool) -> None:
    """Remove images that were built, loaded or linked for tasks; their names on stdout. The next use makes them again.

    Images that legorl did not make, such as pulled ones, and those of open sandboxes stay.
    """
    from legorl.sandbox.pruning import prune

    if (days is None) == (not everything):
        raise click.UsageError("give --days N or --all")
    gone, kept = asyncio.run(prune(0.0 if days is None else 86400 * days))
    for name in gone:
        emit(name)
    if kept:
        say(f"still in use: {' '.join(kept)}")


if __name__ == "__main__":
    main()
