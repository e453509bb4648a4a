"""Loss and gradient by TRL's own GRPO trainer, over given token rows.

step = TrlStep(folder, rows, "fp32"); step()
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_rows import Row


class TrlStep:
    """All of `rows` as one micro-batch, padded as TRL pads: prompts on the left, completions on the right.

    No reference model, no gradient checkpointing; the policy at the step's start is the one that is trained.
    `padding`: the part of what is read that is no token.
    """

    def __init__(self, folder: Path, rows: Sequence[Row], dtype: str):
        import torch
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        from legorl.model import load_model

        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=dtype == "bf16", gradient_checkpointing=False,
            per_device_train_batch_size=len(rows), num_generations=len(rows), report_to="none", beta=0.0,
        )  # fmt: skip
        self.trainer: Any = GRPOTrainer(
            model=load_model(folder, "fp32"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rows)),
            processing_class=_tokenizer(folder),
        )
        self.model = self.trainer.model.train()
        prompt, completion = max(len(row.prompt) for row in rows), max(len(row.completion) for row in rows)
        self.padding = 1 - sum(map(len, rows)) / (len(rows) * (prompt + completion))

        def pad(ids: list[int], size: int, left: bool) -> list[int]:
            return [0] * (size - len(ids)) + ids if left else ids + [0] * (size - len(ids))

        self.inputs = {
            "prompt_ids": torch.tensor([pad(row.prompt, prompt, True) for row in rows]),
            "prompt_mask": torch.tensor([pad([1] * len(row.prompt), prompt, True) for row in rows]),
            "completion_ids": torch.tensor([pad(row.completion, completion, False) for row in rows]),
            "completion_mask": torch.tensor([pad([1] * len(row.completion), completion, False) for row in rows]),
            "advantages": torch.tensor([1.0 if k % 2 else -1.0 for k in range(len(rows))]),
            "num_items_in_batch": torch.tensor(float(sum(len(row.completion) for row in rows))),
        }
        self.trainer.current_gradient_accumulation_steps = 1

    def __call__(self) -> None:
        loss = self.trainer._compute_loss(self.model, self.inputs)
        self.trainer.accelerator.backward(loss)
        self.model.zero_grad(set_to_none=False)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
