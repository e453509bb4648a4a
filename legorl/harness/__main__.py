"""`python -m legorl.harness`: install harnesses, list them."""

import click

from legorl import options
from legorl.harness import built_in, load_harness
from legorl.harness.install import install_all


@options.command("legorl.harness", group=True)
def main() -> None:
    """Install the harnesses that lego-rollout runs.

    \b
    python -m legorl.harness install mini-swe-agent pi
    python -m legorl.harness list
    """


@main.command("install")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def install(names: tuple[str, ...]) -> None:
    """Install each NAME (a harness that comes with legorl, or a .toml file) and print its folder.

    What is there already stays as it is.
    """
    harnesses = [load_harness(name) for name in names]
    for harness, done in zip(harnesses, install_all(harnesses), strict=True):
        options.say(f"{harness.name} {harness.version}: {'installed' if done else 'already installed'}")
        options.emit(str(harness.folder))


@main.command("list")
def show() -> None:
    """Print every harness that comes with legorl: name, version, protocol, installed or not."""
    for name in built_in():
        harness = load_harness(name)
        options.emit(
            "\t".join([name, harness.version, harness.protocol, "installed" if harness.installed else "not installed"])
        )


if __name__ == "__main__":
    main(prog_name="python -m legorl.harness")
