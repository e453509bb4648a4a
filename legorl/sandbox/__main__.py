"""python -m legorl.sandbox setup|probe|reap: prepare this machine for sandboxes, try its limits, clean up."""

import asyncio
import json

from legorl.options import CHECK, CONTEXT, Command, Failure, command, emit, json_option, say


@command("python -m legorl.sandbox", group=True)
def main() -> None:
    """Prepare this machine for sandboxes, try its limits, remove leftovers.

    \b
    Examples:
      python -m legorl.sandbox setup     # service user (as root), Podman's configuration, base image; idempotent
      python -m legorl.sandbox probe     # try every limit in a container; exit 4 if one is not enforced
      python -m legorl.sandbox reap      # remove containers whose owner is dead
    """


@main.command("setup", cls=Command, context_settings=CONTEXT)
def setup() -> None:
    """Do what is missing, say what was done."""
    from legorl.sandbox.setup import setup

    asyncio.run(setup(say))


@main.command("probe", cls=Command, context_settings=CONTEXT)
@json_option
def probe(as_json: bool) -> None:
    """Try every wall and limit; one line each on stdout."""
    from legorl.sandbox.probe import probe

    checks = asyncio.run(probe())
    for name, check in checks.items():
        row = {"name": name, "ok": check.ok, "detail": check.detail}
        emit(json.dumps(row) if as_json else f"{name:12} {'ok' if check.ok else 'NOT ENFORCED':12}  {check.detail}")
    if failed := [name for name, check in checks.items() if not check.ok]:
        raise Failure(f"not enforced on this machine: {', '.join(failed)}", CHECK)


@main.command("reap", cls=Command, context_settings=CONTEXT)
def reap() -> None:
    """Remove containers, cgroups and pid files of dead owners; the containers' names on stdout."""
    from legorl.sandbox.leftovers import reap

    for name in asyncio.run(reap()):
        emit(name)


if __name__ == "__main__":
    main()
