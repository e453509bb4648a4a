"""Rows of other systems, by the code of docs/training.md: sequences with a mask, as verl, TRL and others keep them."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands.inspecting import good
from commands.train_rows import plain_logprobs

DOC = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.fixture(scope="module")
def shard_of():
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names["shard_of"]


def conversations(world):
    """Two groups of three; one, two and three answers, the last of which may end the sequence or not."""
    rng, made = np.random.default_rng(0), []
    for task in ("a", "b"):
        prompt = rng.integers(3, 300, 9).tolist()
        for n, spans in enumerate(([5], [4, 3, 6], [2, 4, 3, 5, 4, 2])):  # sampled, then observed, and so on
            ids, sampled = [*prompt], [False] * len(prompt)
            for k, length in enumerate(spans):
                ids += rng.integers(3, 300, length).tolist()
                sampled += [k % 2 == 0] * length
            values = plain_logprobs(world.model, np.array(ids, np.int32), 1, 1.0).tolist()
            logprobs = [value for value, mine in zip(values, sampled[1:], strict=True) if mine]
            made.append((task, ids, sampled, logprobs, float(n == 1)))
    return made


def test_sequences_with_a_mask_are_trained_where_the_mask_says(world, shard_of, tmp_path, cli):
    made = conversations(world)
    path = shard_of(made, world.checkpoint.path, tmp_path / "other.parquet")
    code, _, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c", "--lr", "1e-3")
    assert code == 0, err
    assert f"{sum(sum(one[2]) for one in made)} tokens = {sum(sum(one[2]) for one in made)} trained" in err
    told = pq.read_table(tmp_path / "c/updates.parquet").to_pylist()
    for number, (task, ids, sampled, logprobs, _) in enumerate(made):
        mine = [u for u in told if u["attempt_id"] == f"elsewhere.0.other.{task}.{number % 3}"]
        mine.sort(key=lambda u: (u["turn"], u["position"]))
        assert [u["token"] for u in mine] == [token for token, flag in zip(ids, sampled, strict=True) if flag]
        np.testing.assert_allclose([u["train_logprob"] for u in mine], logprobs, atol=1e-4)
    (line,) = [line.split() for line in good("summary", path).splitlines() if line.startswith("elsewhere     ")]
    assert line[:5] == ["elsewhere", "0", "6", "0", "0.333"] and line[8] == "-"  # what no grader wrote is not made up
    assert "reward 1, resolved -, grader -" in good("show", "--best", path)


def test_numbers_of_another_temperature_are_not_believed(world, shard_of, tmp_path, cli):
    made = [
        (task, ids, sampled, [value / 0.7 for value in logprobs], reward)
        for task, ids, sampled, logprobs, reward in conversations(world)
    ]
    path = shard_of(made, world.checkpoint.path, tmp_path / "other.parquet")
    code, _, err = cli(path, "--model", world.checkpoint.path, "--out", tmp_path / "c")
    assert code == 4 and "disagree" in err and not (tmp_path / "c").exists()
