"""Rows for the tests of lego-train: sampled tokens with the log-probabilities that a tiny model gives them.

folder = tiny_llama(tmp_path / "m"); world = World(folder)
row = world.row("task-a", 0, reward=1.0); rows = world.group([1.0, 0.0])
"""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest

from legorl import tree
from legorl.checkpoint import open_checkpoint

VOCABULARY = 300


def tiny_llama(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A Hugging Face folder of a random Llama: 2 layers, 32 wide, 300 tokens, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # beside other work, two threads on such small matrices wait for each other
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    LlamaForCausalLM(LlamaConfig(**settings | config)).save_pretrained(folder)
    return folder


class World:
    """Makes rows that the model in `folder` could have sampled. Only `plain_logprobs` of this file computes them."""

    def __init__(self, folder: Path):
        self.checkpoint = open_checkpoint(folder)
        self.rng = np.random.default_rng(0)

    @cached_property
    def model(self) -> Any:
        """The model in float64, independent of legorl.model."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.checkpoint.folder, dtype=torch.float64).eval()

    def ids(self, count: int) -> list[int]:
        return self.rng.integers(0, VOCABULARY, count).tolist()

    def turns(self, shape: Sequence[tuple[int, int | None, int, int]], **fields: Any) -> list[dict[str, Any]]:
        """Turns from (parent, prefix_len or None for all of it, context tokens, sampled tokens)."""
        turns: list[dict[str, Any]] = []
        for index, (parent, prefix_len, context, sampled) in enumerate(shape):
            nodes = tree.nodes_of(turns)
            if prefix_len is None:
                prefix_len = 0 if parent == tree.ROOT else nodes[parent].path_len
            # The first new token tells the turn from all others, so that no longer prefix is shared by chance.
            new = [10 + index, *self.ids(context - 1)] if context else []
            turns.append(
                builders.turn(
                    index, parent, prefix_len, new, self.ids(sampled), version=self.checkpoint.version, **fields
                )
            )
            turns[-1]["context_ids"] = new
        return turns

    def row(self, task: str, attempt: int, reward: float | None, shape: Any = None, **fields: Any) -> dict[str, Any]:
        turns = self.turns(shape or [(-1, None, 6, 4), (0, None, 3, 5)])
        weights = {
            "version": self.checkpoint.version,
            "digest": self.checkpoint.digest,
            "path": str(self.checkpoint.path),
        }
        row = builders.trajectory(task, attempt, reward=reward, turns=turns, weights=[weights], **fields)
        return self.score(row)

    def group(self, rewards: Sequence[float | None], task: str = "task-a", **fields: Any) -> list[dict[str, Any]]:
        return [self.row(task, n, reward, **fields) for n, reward in enumerate(rewards)]

    def score(self, row: dict[str, Any]) -> dict[str, Any]:
        """Set the log-probabilities of every turn to those of the model at the turn's temperature."""
        nodes = tree.nodes_of(row["turns"])
        for node, turn in zip(nodes, row["turns"], strict=True):
            values = plain_logprobs(self.model, tree.path_ids(nodes, node.index), node.prompt_len, turn["temperature"])
            turn["logprobs"] = values.detach().float().tolist()
        return row


def plain_logprobs(model: Any, ids: np.ndarray, start: int, temperature: float) -> Any:
    """log p of ids[start:] from the full logits of one sequence, the textbook way; a float64 tensor with its graph."""
    import torch

    tokens = torch.as_tensor(ids, dtype=torch.long)
    logits = model(tokens[None]).logits[0].double() / temperature
    return logits.log_softmax(-1)[torch.arange(start - 1, len(tokens) - 1), tokens[start:]]


@contextmanager
def train_in_process(capsys: Any, monkeypatch: Any) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A function that runs lego-train in this process: (exit code, stdout, stderr). Few tests start a real one."""
    from legorl.commands.train.cli import main

    handler = signal.getsignal(signal.SIGTERM)

    def run(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lego-train", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    yield run
    signal.signal(signal.SIGTERM, handler)
