"""The shell family: every kind at every level holds both ways; splits share nothing; a seed gives the same bytes."""

import random
import re
from itertools import islice
from pathlib import Path

import pytest
from commands.task_runs import complaints, outcomes_of, ways_of
from hypothesis import given
from hypothesis import strategies as st

from legorl.commands.tasks import shell, shell_follow
from legorl.commands.tasks.build import write_tasks
from legorl.commands.tasks.shell_job import Job
from legorl.commands.tasks.shell_words import POOLS, pool
from legorl.task import SPLITS, load_task

SEEN = sorted(set(shell.KINDS) - shell.UNSEEN)
TRAINED_SPLITS = ("train", "dev", "heldout")


def splits_of(kind: str) -> tuple[str, ...]:
    return ("unseen",) if kind in shell.UNSEEN else TRAINED_SPLITS


@pytest.mark.parametrize("kind", sorted(shell.KINDS))
def test_every_kind_holds_both_ways_at_every_level(kind: str, tmp_path: Path) -> None:
    """Level 3 has the most variants, so it is drawn three times."""
    cells = [(level, splits_of(kind)[level % len(splits_of(kind))], 0) for level in (0, 1, 2)]
    cells += [(3, split, number) for split in splits_of(kind) for number in range(3 // len(splits_of(kind)))]
    drafts = [shell.make(kind, level, split, number, seed=5) for level, split, number in cells]
    tasks = [load_task(path) for path in write_tasks(drafts, tmp_path / "set")]
    jobs = [job for task in tasks for job in ways_of(task, tmp_path / "ways")]
    results = outcomes_of(jobs)
    assert len(results) == 3 * len(tasks)
    for number, task in enumerate(tasks):
        assert complaints(task, results[3 * number : 3 * number + 3]) == [], task.instruction
        assert task.grade.pass_to_pass or not task.labels["solution_command"].startswith("rm"), (
            "nothing guards the rest"
        )


def test_there_are_enough_kinds_and_every_split_has_its_own() -> None:
    assert len(SEEN) >= 24
    assert len(shell.UNSEEN) >= 4
    for split in SPLITS:
        made = {draft.kind for draft in islice(shell.drafts(1, (), (0,), (split,)), 2 * len(shell.KINDS))}
        assert made == (set(shell.UNSEEN) if split == "unseen" else set(SEEN))


def test_splits_share_no_word() -> None:
    owners: dict[str, set[str]] = {}
    for name in POOLS:
        for split in TRAINED_SPLITS:
            for word in pool(name, split):
                owners.setdefault(word, set()).add(split)
    assert [word for word, splits in owners.items() if len(splits) > 1] == []


def test_no_word_hides_in_another() -> None:
    """`grep ines` would find "shines": a task that searches for a word must have one answer."""
    for split in TRAINED_SPLITS:
        text = [
            word
            for name in ("noun", "adjective", "verb", "place", "person", "city", "item")
            for word in pool(name, split)
        ]
        for name in ("person", "city", "item"):
            for word in pool(name, split):
                assert [other for other in text if word in other] == [word]


def test_splits_share_no_phrasing() -> None:
    texts = ("one", "two", "three", "four", "five")
    said = {split: {Job("x", 0, split, random.Random(n)).phrase(*texts) for n in range(50)} for split in SPLITS}
    assert said == {"train": {"one", "two", "three"}, "dev": {"four"}, "heldout": {"five"}, "unseen": {"five"}}


@pytest.mark.parametrize("kind", SEEN)
def test_splits_share_no_composition(kind: str) -> None:
    cut = [set(shell_follow.steps_for(kind, split)) for split in TRAINED_SPLITS]
    assert all(cut)
    assert len(set.union(*cut)) == sum(map(len, cut))


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    """Archives too: pack and unpack are among the kinds."""

    def digests(folder: str, seed: int) -> dict[str, str]:
        drafts = [shell.make(kind, 3, splits_of(kind)[0], 0, seed) for kind in shell.KINDS]
        return {path.name: load_task(path).digest for path in write_tasks(drafts, tmp_path / folder)}

    assert digests("a", 1) == digests("b", 1)
    for kind in shell.KINDS:
        one, other = (shell.make(kind, 3, splits_of(kind)[0], 0, seed) for seed in (1, 2))
        assert one.id == other.id
        assert one.instruction != other.instruction


def test_a_longer_set_begins_with_the_shorter() -> None:
    short, long = ([draft.id for draft in islice(shell.drafts(1, (), (0, 1), ("train",)), n)] for n in (50, 90))
    assert long[:50] == short
    assert len({*long}) == 90


def test_tasks_are_spread_evenly() -> None:
    shares = {"train": 3, "dev": 1, "heldout": 1}
    made = list(islice(shell.drafts(1, (), shell.LEVELS, TRAINED_SPLITS), 5 * len(SEEN) * 4))
    assert {draft.id for draft in made} == {
        f"shell-{kind}-{level}-{split}-{number:04d}"
        for kind in SEEN
        for level in shell.LEVELS
        for split, share in shares.items()
        for number in range(share)
    }


def test_easy_tasks_are_one_plain_request() -> None:
    """What a model of 135M parameters may do at times: short, every name bare, no second paragraph."""
    for draft in islice(shell.drafts(3, (), (0,), ("train",)), len(SEEN)):
        assert len(draft.instruction) < 200, draft.instruction
        assert "\n" not in draft.instruction, draft.instruction
        assert not re.search(r"`", draft.instruction), draft.instruction


def test_hard_tasks_have_spaces_accents_and_windows_lines() -> None:
    made = [shell.make(kind, 3, splits_of(kind)[0], number, 1) for kind in shell.KINDS for number in range(3)]
    names = [name for draft in made for name in draft.repo]
    assert any(" " in name for name in names)
    assert any(not name.isascii() for name in names)
    assert any(b"\r\n" in node.body for draft in made for node in draft.repo.values())


@given(st.sampled_from(sorted(shell.KINDS)), st.sampled_from(shell.LEVELS), st.integers(0, 10**9), st.data())
def test_any_seed_draws_a_task(kind: str, level: int, seed: int, data: st.DataObject) -> None:
    draft = shell.make(kind, level, data.draw(st.sampled_from(splits_of(kind))), 0, seed)
    compile(draft.test_source, "test_task.py", "exec")
    assert draft.fail_to_pass
    assert draft.repo
    assert not set(draft.fail_to_pass) & set(draft.pass_to_pass)
    assert not re.search(r"[{}]", draft.instruction.replace("{{", "").replace("}}", "")), "a field was not filled in"
    for name in draft.repo:
        assert not name.startswith(("/", "tests/")) and ".." not in name.split("/")


def test_few_tasks_repeat() -> None:
    """Of 40 tasks of one cell, nearly all must ask something new."""
    for kind in SEEN:
        asked = {shell.make(kind, 0, "train", number, 1).instruction for number in range(40)}
        assert len(asked) >= 36, kind
