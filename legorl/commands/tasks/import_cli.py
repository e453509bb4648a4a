"""lego-tasks import: tasks from elsewhere."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from legorl.options import OK, Failure, command, emit, explain, explain_option, option, out_option, say
from legorl.task import SEMANTICS, SPLITS

if TYPE_CHECKING:
    from legorl.commands.tasks.git_trees import Trees

Make = Callable[[Path], list[str] | None]  # fills a new folder with a task and returns notes; raises Skip

limit_option = click.option("--limit", type=click.IntRange(1), help="Stop after this many tasks.")
ids_option = click.option("--ids", metavar="ID", multiple=True, help="Only this id; may be given more than once.")
split_option = option("--split", type=click.Choice(SPLITS), default="heldout", help="Label of the tasks.")
image_option = option(
    "--image", default="", help="Podman image of the sandboxes ('row': the one a row names).  [default: base image]"
)
memory_option = option("--memory-mb", type=click.IntRange(16), default=1024, help="Memory of a sandbox.")
timeout_option = option("--timeout", type=click.FloatRange(1), default=300.0, help="Seconds the tests may take.")


@command("import", group=True)
def import_group() -> None:
    """Make tasks of SWE-bench rows, Harbor folders or a repository's commits.

    \b
    Examples:
      lego-tasks import swe-bench dev.parquet --repos clones --out tasks/dev
      lego-tasks import harbor terminal-tasks --out tasks/terminal
      lego-tasks import git clones/click --out tasks/click --limit 50
    """


@command("swe-bench")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@option("--repos", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Git clones.")
@out_option
@ids_option
@limit_option
@split_option
@option("--semantics", type=click.Choice(SEMANTICS), default="swe-bench", help="What counts as kept (docs/grading.md).")
@image_option
@option("--python", default="", help="Python of the tests in the image.  [default: python3, or conda's for 'row']")
@memory_option
@timeout_option
@explain_option
def swe_bench(
    file: Path,
    repos: Path,
    out: Path,
    ids: tuple[str, ...],
    limit: int | None,
    split: str,
    semantics: str,
    image: str,
    python: str,
    memory_mb: int,
    timeout: float,
    explain: bool,
) -> int:
    """Make tasks of rows as published for SWE-bench and its kin, in Parquet or JSON lines.

    \b
    Examples:
      lego-tasks import swe-bench dev.parquet --repos clones --out tasks/dev
      lego-tasks import swe-bench verified.parquet --repos clones --out tasks/one --ids sympy__sympy-13091
      lego-tasks import swe-bench gym.jsonl --repos clones --out tasks/gym --split train --limit 100

    Reads SWE-bench (full, Lite, Verified, Multimodal, Multilingual), SWE-Gym, SWE-rebench and SWE-smith. The clone of
    owner/name is looked for in --repos as owner__name, owner/name, owner-name or name, with a work tree or bare. Prints
    the path of each task; what cannot be imported gets a line with the reason on stderr. The default split is
    `heldout`, because Verified, Lite and Multilingual are evaluation sets.
    """
    from legorl.commands.tasks import import_rows
    from legorl.commands.tasks.folders import Skip, task_id
    from legorl.commands.tasks.import_trees import Options

    options = Options("swe-bench", split, semantics, image, memory_mb, timeout, python)
    settings = {"importer": "swe-bench", "file": file.resolve(), **vars(options)}
    if explain:
        return _explain(settings, repos=repos, ids=ids, limit=limit, out=out)

    def make(row: import_rows.Row, folder: Path) -> None:
        import_rows.write_row(row, clones.trees(row.repo), options, folder)

    def makes() -> Iterator[tuple[str, Make | Exception]]:
        for raw in import_rows.read_rows(file):
            name = str(raw.get("instance_id"))
            if ids and name not in ids:
                continue
            try:
                yield task_id(name), partial(make, import_rows.parse_row(raw))
            except Skip as skip:
                yield task_id(name), skip

    with _Clones(repos) as clones:
        return _import(makes(), out, settings, limit)


@command("harbor")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@out_option
@ids_option
@limit_option
@split_option
@image_option
@memory_option
@explain_option
def harbor(
    folder: Path,
    out: Path,
    ids: tuple[str, ...],
    limit: int | None,
    split: str,
    image: str,
    memory_mb: int,
    explain: bool,
) -> int:
    """Make tasks of Harbor task folders: one, or a folder with tasks at any depth.

    \b
    Examples:
      lego-tasks import harbor hello-world --out tasks/hello
      lego-tasks import harbor dataset --out tasks/harbor --image localhost/with-tools:1 --limit 20

    What a Dockerfile copies into its working folder becomes the repository. Where it also runs commands, --image names
    an image that has what they install. Every task runs without a network, whatever it asks for. solution/solve.sh is
    run once, in a sandbox, and becomes the solution. Prints the path of each task; what cannot be imported gets a line
    with the reason on stderr.
    """
    from legorl.commands.tasks.folders import task_id
    from legorl.commands.tasks.import_harbor import write_harbor
    from legorl.commands.tasks.import_trees import Options

    options = Options("harbor", split, "strict", image, memory_mb)
    settings = {"importer": "harbor", "folder": folder.resolve(), **vars(options)}
    if explain:
        return _explain(settings, ids=ids, limit=limit, out=out)

    def make(source: Path, target: Path) -> list[str]:
        return asyncio.run(write_harbor(source, options, target))

    def makes() -> Iterator[tuple[str, Make | Exception]]:
        folders = [file.parent for file in sorted(folder.rglob("task.toml"))]
        names = Counter(each.name for each in folders)
        for each in folders:
            # Folders of the same name are told apart by where they lie.
            name = each.name if names[each.name] == 1 else str(each.relative_to(folder))
            if not ids or {each.name, name} & set(ids):
                yield task_id(name), partial(make, each)

    return _import(makes(), out, settings, limit)


@command("git")
@click.argument("repo", type=click.Path(path_type=Path, exists=True, file_okay=False))
@out_option
@ids_option
@limit_option
@click.option("--since", default="", help="Only commits since this date, as git takes it (2021-01-01).")
@split_option
@image_option
@memory_option
@timeout_option
@explain_option
def git(
    repo: Path,
    out: Path,
    ids: tuple[str, ...],
    limit: int | None,
    since: str,
    split: str,
    image: str,
    memory_mb: int,
    timeout: float,
    explain: bool,
) -> int:
    """Make tasks of a repository's commits that touch Python source and tests, newest first.

    \b
    Examples:
      lego-tasks import git clones/click --out tasks/click --limit 50 --split train
      lego-tasks import git clones/click --out tasks/one --ids 1e26d14facab

    The repository of a task is the commit's parent, the solution what the commit changes outside of tests, the hidden
    tests what it changes in them, the instruction its message. The changed test files run in a sandbox before and after
    to find out which tests the commit mends. Prints the path of each task; what cannot be imported gets a line with the
    reason on stderr.
    """
    from legorl.commands.tasks import import_git
    from legorl.commands.tasks.folders import task_id
    from legorl.commands.tasks.git_trees import Trees, git_dir_of
    from legorl.commands.tasks.import_trees import Options

    git_dir = git_dir_of(repo)
    if git_dir is None:
        raise Failure(f"{repo}: not a git repository")
    name = repo.absolute().name.removesuffix(".git")
    options = Options("git", split, "strict", image, memory_mb, timeout)
    settings = {"importer": "git", "repo": repo.resolve(), **vars(options)}
    if explain:
        return _explain(settings, ids=ids, limit=limit, since=since, out=out)
    with _Clones(repo.resolve().parent) as clones, Trees(git_dir, clones.submodule) as trees:

        def make(commit: import_git.Commit, folder: Path) -> None:
            asyncio.run(import_git.write_commit(commit, trees, name, options, folder))

        def makes() -> Iterator[tuple[str, Make | Exception]]:
            for commit in import_git.commits(trees, import_git.head_of(git_dir), since):
                if not ids or commit.id.startswith(ids):
                    yield task_id(f"{name}-{commit.id[:12]}"), partial(make, commit)

        return _import(makes(), out, settings, limit)


def _explain(settings: dict[str, Any], **more: Any) -> int:
    explain({**settings, **more})
    return OK


class _Clones:
    """The clones in a folder, each opened once."""

    def __init__(self, repos: Path) -> None:
        self._repos = repos
        self._open: dict[str, Trees] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Clones":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def trees(self, name: str) -> "Trees":
        """Return the trees of the clone of `owner/name`. Raises Skip if there is none."""
        from legorl.commands.tasks.folders import Skip
        from legorl.commands.tasks.git_trees import Trees, find_clone

        if name not in self._open:
            git_dir = find_clone(self._repos, name)
            if git_dir is None:
                folder = self._repos / name.replace("/", "__")
                raise Skip("no clone", f"none of {name} in {self._repos}; git clone it to {folder}")
            self._open[name] = self._stack.enter_context(Trees(git_dir, self.submodule))
        return self._open[name]

    def submodule(self, url: str, _commit: str) -> Path | None:
        """Return the git directory of a submodule's clone, None if there is none at hand."""
        from legorl.commands.tasks.git_trees import find_clone

        parts = url.removesuffix(".git").rstrip("/").replace(":", "/").split("/")
        return find_clone(self._repos, "/".join(parts[-2:]))


def _import(
    makes: "Iterable[tuple[str, Make | Exception]]",
    out: Path,
    settings: dict[str, Any],
    limit: int | None,
) -> int:
    """Make the tasks, print their paths, say what was skipped and why. Raises Failure if nothing came of it."""
    from legorl.commands.tasks.folders import Skip, new_folder
    from legorl.shards import OutDir
    from legorl.task import TaskError, load_task

    made: set[str] = set()
    skipped: Counter[str] = Counter()
    with OutDir(out, settings):
        for name, make in makes:
            try:
                if isinstance(make, Exception):
                    raise make
                if name in made:
                    raise Skip("a second one of this id")
                if not (out / name / "task.toml").exists():
                    with new_folder(out, name) as folder:
                        notes = make(folder)
                        load_task(folder)
                    for note in notes or ():
                        say(f"{name}: {note}")
            except (Skip, TaskError) as error:
                skip = error if isinstance(error, Skip) else Skip("not a usable task", str(error))
                skipped[skip.reason] += 1
                say(f"skipped {name}: {skip}")
                continue
            made.add(name)
            emit(str(out / name))
            if limit is not None and len(made) == limit:
                break
    reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    say(f"{len(made)} tasks, {sum(skipped.values())} skipped{f' ({reasons})' if reasons else ''}")
    if not made:
        raise Failure(f"{out}: nothing could be imported" + (f" ({reasons})" if reasons else "; no row was chosen"))
    return OK


for each in (swe_bench, harbor, git):
    import_group.add_command(each)
