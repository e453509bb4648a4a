"""What synth made of each library: tasks by kind and level, and why the other mutants make none.

for made in report([Path("tasks/synth")]): made.to_json()
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from legorl.commands.tasks.listing import task_folders
from legorl.commands.tasks.synth import NOTES, read_notes
from legorl.task import load_task


@dataclass(frozen=True)
class Made:
    """Of one library: tasks by kind and by level, mutants left out by reason, CPU seconds of its tests' runs."""

    library: str
    split: str
    tasks: int
    kinds: dict[str, int]
    levels: dict[int, int]
    tried: int
    left_out: dict[str, int]
    cpu_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def report(folders: Iterable[Path]) -> Iterator[Made]:
    """Yield what lies in `folders`, at any depth, by library. Raises TaskError for what is no task."""
    tasks, notes = [], {}
    for folder in folders:
        tasks += [task for task in map(load_task, task_folders(folder)) if task.family == "synth"]
        for path in folder.rglob(f"{NOTES}/*.jsonl"):
            notes[path.resolve()] = dict(read_notes(path))
    libraries = {f"{task.labels['library']}-{task.labels['version']}" for task in tasks}
    for library in sorted(libraries | {path.name.rsplit("-", 2)[0] for path in notes}):
        own = [task for task in tasks if f"{task.labels['library']}-{task.labels['version']}" == library]
        known = [lines for path, lines in notes.items() if path.name.rsplit("-", 2)[0] == library]
        tried = [note for lines in known for name, note in lines.items() if name != "clean"]
        yield Made(
            library=library,
            split="+".join(sorted({task.split for task in own})),
            tasks=len(own),
            kinds=dict(sorted(Counter(task.kind for task in own).items())),
            levels=dict(sorted(Counter(task.level for task in own).items())),
            tried=len(tried),
            left_out=dict(Counter(note["fault"] for note in tried if note["fault"]).most_common()),
            cpu_s=round(sum(note["cpu_s"] for lines in known for note in lines.values()), 1),
        )


def table(made: Iterable[Made]) -> Iterator[str]:
    """Yield lines: the libraries, the kinds, the reasons."""
    listed = list(made)
    width = max([len(each.library) for each in listed] + [20])
    yield f"{'library':{width}}  {'split':8} tasks  tried  cpu s  levels"
    for each in listed:
        levels = " ".join(f"{level}:{count}" for level, count in each.levels.items())
        yield f"{each.library:{width}}  {each.split:8} {each.tasks:5}  {each.tried:5}  {each.cpu_s:5.0f}  {levels}"
    total = [sum(column) for column in zip(*((e.tasks, e.tried, e.cpu_s) for e in listed), strict=True)] or [0, 0, 0]
    yield f"{'all':{width}}  {'':8} {total[0]:5}  {total[1]:5}  {total[2]:5.0f}"
    for title, column in (("kind", "kinds"), ("left out", "left_out")):
        counts: Counter[str] = Counter()
        for each in listed:
            counts.update(getattr(each, column))
        yield ""
        yield f"{title:{width}}  {'mutants' if column == 'left_out' else 'tasks'}"
        yield from (f"{name:{width}}  {count:5}" for name, count in counts.most_common())
