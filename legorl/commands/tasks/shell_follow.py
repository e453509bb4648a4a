"""Second steps for shell tasks of level 3: each goes with any kind; which kind meets which step depends on the split.

For every kind the steps are shuffled and cut: some for training, one for dev, the rest for held-out and unseen tasks.
So a held-out composition of kind and step never occurred in training.
"""

import random
from collections.abc import Callable
from shlex import quote

from legorl.commands.tasks.shell_job import Job


def _log(job: Job) -> None:
    lines, line = job.sentences(2), f"- {job.sentence()}"
    name = job.put("CHANGELOG", lines)
    job.ask(f"Then append the line '{line}' to `{name}`.")
    job.solve(f"echo {quote(line)} >> {name}")
    job.want_text(name, [*lines, line])


def _stamp(job: Job) -> None:
    name, word = f"{job.folder()}/{job.name('md')}", job.word("city")
    job.ask(f"When that is done, create the file `{name}` with the single word {word}.")
    job.solve(f"mkdir -p {quote(name.rpartition('/')[0])} && echo {word} > {quote(name)}")
    job.want_text(name, word)


def _duplicate(job: Job) -> None:
    lines = job.sentences(3)
    old, new = job.put(job.name("md"), lines), job.name("bak")
    job.ask(f"Also copy `{old}` to `{new}`.")
    job.solve(f"cp {quote(old)} {quote(new)}")
    job.want_text(new, lines)


def _sweep(job: Job) -> None:
    name = job.put(job.name("tmp"), job.sentences(1))
    job.ask(f"Finally delete `{name}`.")
    job.solve(f"rm {quote(name)}")
    job.want_gone(name)


def _relabel(job: Job) -> None:
    lines = job.sentences(2)
    old, new = job.put(job.name("txt"), lines), job.name("txt")
    job.ask(f"After that, rename `{old}` to `{new}`.")
    job.solve(f"mv {quote(old)} {quote(new)}")
    job.want_gone(old)
    job.want_text(new, lines)


def _finished(job: Job) -> tuple[str, str]:
    """Return path and text of the task's main file, or of one more file if the task has none."""
    if job.result:
        return job.result
    lines = job.sentences(3)
    return job.put(job.name("txt"), lines), "\n".join(lines)


def _words(job: Job) -> None:
    path, content = _finished(job)
    out = job.name("count")
    job.ask(f"At the end, write the number of words in `{path}` to `{out}`, only the number.")
    job.solve(f"wc -w < {quote(path)} > {quote(out)}")
    job.want_number(out, len(content.split()))


def _first(job: Job) -> None:
    path, content = _finished(job)
    out = job.name("txt")
    job.ask(f"At the end, also write the first line of `{path}` to `{out}`.")
    job.solve(f"head -n 1 {quote(path)} > {quote(out)}")
    job.want_text(out, content.split("\n")[0])


STEPS = (_log, _stamp, _duplicate, _sweep, _relabel, _words, _first)


def steps_for(kind: str, split: str) -> tuple[Callable[[Job], None], ...]:
    """Return the steps that tasks of `kind` may take in `split`; `heldout` and `unseen` share theirs."""
    steps = tuple(random.Random(kind).sample(STEPS, len(STEPS)))
    return {"train": steps[:4], "dev": steps[4:5]}.get(split, steps[5:])


def follow(job: Job) -> None:
    """Add a second step to the task."""
    job.rng.choice(steps_for(job.kind, job.split))(job)
