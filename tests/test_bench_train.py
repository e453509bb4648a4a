"""The training benchmark measures what it says: its rows are of the shapes named, its parts run on a small model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCH)
    import train_rows

    return train_rows


def test_ragged_rows_leave_the_padding_asked_for(rows) -> None:
    made = rows.ragged(8, 256, 0.4)
    assert max(map(len, made)) == 256
    assert 1 - sum(map(len, made)) / (8 * 256) == pytest.approx(0.4, abs=0.01)


def test_rows_that_share_are_one_tree_and_turns_of_an_attempt_another(rows) -> None:
    from legorl.commands.train.pack import forests
    from legorl.commands.train.pack import rows as linear

    sharing = rows.batch_of(rows.sharing(8, 256, 0.75), 1000)
    read = [sum(micro.tokens for micro in pack(sharing.samples, 10**6)) for pack in (linear, forests)]
    assert read[0] / read[1] == pytest.approx(8 / 2.75, rel=0.02)
    turns = rows.compacted(turns=50, every=17, system=200, observed=16, sampled=8)
    apart, together = rows.batch_of(turns, 1000), rows.batch_of(turns, 1000, one=True)
    assert apart.counts() == {"trained": 400} and together.counts() == {"trained": 401}
    assert len(apart.samples) == 50 and len(together.samples) == 4  # three stretches, and the other attempt


@pytest.mark.slow
def test_every_part_gives_its_figures(tiny_model: Path) -> None:
    environment = {**os.environ, "MODEL": str(tiny_model), "ROUNDS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, BENCH / "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 4), done.stderr
    found = json.loads(done.stdout)
    assert found["trl"]["tiny-moe_ragged"]["padding_of_trl"] > 0.35
    assert {"trl", "memory", "trees", "length"} <= set(found)
    assert found["trees"]["sharing_75"]["ideal"] == pytest.approx(8 / 2.75, rel=0.02)
