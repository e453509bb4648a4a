"""The resolved settings of a training step: what stands in the checkpoint's record and decides its weights."""

from dataclasses import dataclass, field

from legorl.commands.train.loss import IsMode, LossName


@dataclass(frozen=True)
class Settings:
    """Every number that a step depends on, beside its shards and its model. Units: tokens, unless named otherwise."""

    loss: LossName = "grpo"
    lr: float = 1e-5
    clip_low: float = 0.2
    clip_high: float = 0.2
    is_cap: float = 2.0
    is_mode: IsMode = "truncate"
    minibatches: int = 1
    max_lag: int = 4  # steps
    tokens_per_batch: int = 2048
    dtype: str = "fp32"
    gate: dict[str, float] = field(default_factory=dict)
    gate_tokens: int = 4096
    grad_clip: float = 1.0
    weight_decay: float = 0.0
    gradient_checkpointing: bool = False
    seed: int = 0
