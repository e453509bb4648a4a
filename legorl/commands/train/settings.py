"""The resolved settings of a training step: what stands in the checkpoint's record and decides its weights.

settings = resolve(loss="gspo", clip_high=None, minibatches=4)      # None: the default of the loss
for words in cautions(settings, clip_given=False): ...
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from legorl.commands.train.loss import LOSSES, IsLevel, IsMode, Kl, LossName, OffPolicy

IS_CAP = 2.0
KL_COEF = 1e-3
ALL_LINEAR = "all-linear"

Groups = Literal["valid", "whole"]
ScheduleName = Literal["constant", "linear", "cosine"]


class SettingsError(ValueError):
    """Settings that contradict each other; the message names the options."""


@dataclass(frozen=True)
class Settings:
    """Every number that a step depends on, beside its shards and its models. Units: tokens, unless named otherwise.

    None: has no part in this step.
    """

    loss: LossName = "grpo"
    lr: float = 1e-5
    schedule: ScheduleName = "constant"  # of the learning rate, over steps that move weights
    warmup: int = 0  # steps
    total: int | None = None  # steps, those of the warm-up among them
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dr_constant: float | None = None
    overlong_max: int | None = None
    overlong_cache: int | None = None
    off_policy: OffPolicy | None = "decoupled"
    is_level: IsLevel | None = "token"
    is_mode: IsMode | None = "truncate"
    is_cap: float | None = IS_CAP
    kl: Kl = "none"
    kl_coef: float | None = None
    minibatches: int = 1
    groups: Groups = "valid"  # of groups with lost attempts: train the valid ones, or only groups that are whole
    max_lag: int = 4  # steps
    tokens_per_batch: int = 2048
    replay: bool = True  # recorded experts in place of the trainer's own choice
    packing: str = "auto"  # trees where the model can, rows, or trees only
    dtype: str = "fp32"
    gate: dict[str, float] = field(default_factory=dict)
    gate_tokens: int = 4096
    grad_clip: float = 1.0
    weight_decay: float = 0.0
    gradient_checkpointing: bool = False
    lora: int = 0  # rank of the adapter that is trained in place of the weights; 0: none
    lora_alpha: float | None = None
    lora_targets: str | None = None  # ALL_LINEAR, or last names of layers, sorted, with commas between
    seed: int = 0

    @property
    def overlong(self) -> tuple[int, int] | None:
        """Maximum and cache of the overlong punishment."""
        if self.overlong_max is None or self.overlong_cache is None:
            return None
        return self.overlong_max, self.overlong_cache


def resolve(
    loss: LossName = "grpo", clip_low: float | None = None, clip_high: float | None = None,
    dr_constant: float | None = None, overlong: tuple[int, int] | None = None, off_policy: OffPolicy | None = None,
    is_level: IsLevel | None = None, is_mode: IsMode | None = None, is_cap: float | None = None, kl: Kl = "none",
    kl_coef: float | None = None, gate: dict[str, float] | None = None, lora: int = 0, lora_alpha: float | None = None,
    lora_targets: str | None = None, schedule: ScheduleName = "constant", warmup: int = 0, total: int | None = None,
    **rest: Any,
) -> Settings:  # fmt: skip
    """Settings from what was given, None where nothing was; `rest` as in Settings. Raises SettingsError."""
    facts, expert = LOSSES[loss], loss == "sft"
    bounds = {"--is-level": is_level, "--is-mode": is_mode, "--is-cap": is_cap}
    if expert:
        weighed = {"--off-policy": off_policy, **bounds, "--overlong": overlong, "--gate": gate or None}
        _refuse(weighed, "sft learns from given tokens, whoever wrote them: no weight, shaping or gate belongs to it")
        _refuse({"--kl": None if kl == "none" else kl}, "sft's tokens are not the policy's own, so no KL can be told")
    elif off_policy == "bypass":
        _refuse(bounds, "--off-policy bypass has the weight 1, and the ratio to the sampler in the loss")
    if loss != "dr_grpo":
        _refuse({"--dr-constant": dr_constant}, f"{loss} divides by no constant")
    if kl == "none":
        _refuse({"--kl-coef": kl_coef}, "--kl is none")
    if not lora:
        _refuse({"--lora-alpha": lora_alpha, "--lora-targets": lora_targets}, "there is no adapter without --lora RANK")
    if overlong and not 0 < overlong[1] <= overlong[0]:
        raise SettingsError(f"--overlong {overlong[0]},{overlong[1]}: needs MAX,CACHE with 0 < CACHE <= MAX")
    if schedule == "constant":
        _refuse({"--total": total}, "a constant learning rate has no end")
    elif total is None or total <= warmup:
        raise SettingsError(f"--schedule {schedule} ends after --total STEPS: give more than --warmup {warmup}")
    weighed_step = not expert and off_policy != "bypass"
    return Settings(
        loss=loss,
        clip_low=None if facts.clip_low is None else facts.clip_low if clip_low is None else clip_low,
        clip_high=None if facts.clip_high is None else facts.clip_high if clip_high is None else clip_high,
        dr_constant=dr_constant,
        overlong_max=overlong[0] if overlong else None,
        overlong_cache=overlong[1] if overlong else None,
        off_policy=None if expert else off_policy or "decoupled",
        is_level=(is_level or "token") if weighed_step else None,
        is_mode=(is_mode or "truncate") if weighed_step else None,
        is_cap=(is_cap or IS_CAP) if weighed_step else None,
        kl=kl,
        kl_coef=None if kl == "none" else KL_COEF if kl_coef is None else kl_coef,
        gate={} if expert else gate or {},
        lora=lora,
        lora_alpha=(2.0 * lora if lora_alpha is None else lora_alpha) if lora else None,
        lora_targets=_names(ALL_LINEAR if lora_targets is None else lora_targets) if lora else None,
        schedule=schedule,
        warmup=warmup,
        total=total,
        **rest,
    )


def _names(text: str) -> str:
    names = sorted({name.strip() for name in text.split(",")} - {""})
    if not names:
        raise SettingsError("--lora-targets: names no layer; give some, as in q_proj,v_proj, or leave it out")
    return ",".join(names)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise SettingsError(f"{', '.join(given)}: {why}; leave it out")


def cautions(settings: Settings, clip_low_given: bool, clip_high_given: bool) -> list[str]:
    """What a user might expect of these settings that they do not do, each with what would change it."""
    loss, facts = settings.loss, LOSSES[settings.loss]
    given, words = clip_low_given or clip_high_given, []
    if given and facts.clip_high is None:
        words.append(f"{loss} has no clip, so --clip-low and --clip-high do nothing; grpo, dapo or gspo have one")
    elif clip_low_given and facts.clip_low is None:
        words.append(f"{loss} holds ratios from above only, so --clip-low does nothing; --clip-high is its bound")
    # dapo, gspo and cispo are known by their clip: who asks for one of them asks for it.
    asked = given or loss in ("dapo", "gspo", "cispo")
    if asked and facts.clip_high is not None and settings.off_policy == "decoupled" and settings.minibatches == 1:
        words.append(
            "with --minibatches 1 the ratio to the policy at the step's start is 1, so no clip can act; "
            "--minibatches 2 or more lets it, or --off-policy bypass, whose ratio is to the sampler"
        )
    if facts.average == "sum":
        if settings.off_policy == "bypass":
            words.append(f"{loss} has no ratio, so with bypass nothing corrects for the sampler; decoupled weighs it")
        if settings.minibatches > 1:
            words.append(
                f"{loss} has no ratio, so minibatches after the first take tokens of slightly older weights as their "
                "own; --minibatches 1 is exact"
            )
    return words
