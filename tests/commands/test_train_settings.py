"""Settings: defaults by loss, what contradicts, and what the user is told that they do not do."""

import pytest

from legorl.commands.train.loss import LOSSES
from legorl.commands.train.settings import SettingsError, cautions, resolve


def test_defaults_are_those_of_the_loss():
    for loss, facts in LOSSES.items():
        s = resolve(loss=loss)
        assert (s.clip_low, s.clip_high) == (facts.clip_low, facts.clip_high)
    s = resolve(loss="dapo", clip_low=0.1, minibatches=3, overlong=(100, 20))
    assert (s.clip_low, s.clip_high, s.minibatches, s.overlong) == (0.1, 0.28, 3, (100, 20))
    assert (s.off_policy, s.is_level, s.is_mode, s.is_cap) == ("decoupled", "token", "truncate", 2.0)  # on by default


def test_what_has_no_part_in_the_step_is_not_recorded():
    s = resolve(off_policy="bypass")
    assert (s.is_level, s.is_mode, s.is_cap, s.clip_low) == (None, None, None, 0.2)
    s = resolve(loss="sft")
    assert (s.off_policy, s.is_cap, s.clip_high, s.gate, s.kl_coef) == (None, None, None, {}, None)
    assert resolve(kl="k3").kl_coef == 1e-3 and resolve(loss="rloo", clip_low=0.1).clip_low is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"off_policy": "bypass", "is_cap": 3.0}, "--is-cap: --off-policy bypass has the weight 1"),
        ({"off_policy": "bypass", "is_mode": "mask", "is_level": "token"}, "--is-level, --is-mode: "),
        ({"loss": "sft", "is_mode": "mask"}, "--is-mode: sft learns"),
        ({"loss": "sft", "off_policy": "bypass"}, "--off-policy: sft"),
        ({"loss": "sft", "gate": {"max": 1.0}}, "--gate: sft"),
        ({"loss": "sft", "overlong": (10, 5)}, "--overlong: sft"),
        ({"loss": "sft", "kl": "k3"}, "--kl: sft's tokens"),
        ({"dr_constant": 5.0}, "--dr-constant: grpo divides by no constant"),
        ({"kl_coef": 0.1}, "--kl-coef: --kl is none"),
        ({"lora_alpha": 8.0}, "--lora-alpha: there is no adapter without --lora RANK"),
        ({"lora": 4, "lora_targets": " ,"}, "--lora-targets: names no layer"),
        ({"overlong": (10, 0)}, "0 < CACHE <= MAX"),
        ({"overlong": (10, 11)}, "0 < CACHE <= MAX"),
    ],
)
def test_contradictions_are_refused_by_name(given, words):
    with pytest.raises(SettingsError) as caught:
        resolve(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "low", "high", "words"),
    [
        ({}, False, False, None),
        ({}, True, False, "no clip can act"),
        ({"minibatches": 2}, True, True, None),
        ({"off_policy": "bypass"}, False, True, None),
        ({"loss": "dr_grpo"}, False, False, None),
        ({"loss": "dapo"}, False, False, "no clip can act"),  # known by its clip: who asks for one asks for the other
        ({"loss": "gspo"}, False, False, "no clip can act"),
        ({"loss": "cispo"}, False, False, "no clip can act"),
        ({"loss": "cispo", "minibatches": 2}, True, False, "--clip-low does nothing"),
        ({"loss": "rloo"}, False, True, "rloo has no clip"),
        ({"loss": "sft"}, True, False, "sft has no clip"),
        ({"loss": "reinforce", "off_policy": "bypass"}, False, False, "nothing corrects for the sampler"),
        ({"loss": "rloo", "minibatches": 2}, False, False, "slightly older weights"),
        ({"loss": "sft", "minibatches": 2}, False, False, None),
    ],
)
def test_what_cannot_act_is_said_once_with_what_would_change_it(given, low, high, words):
    told = cautions(resolve(**given), low, high)
    assert [words in line for line in told] == ([] if words is None else [True])
