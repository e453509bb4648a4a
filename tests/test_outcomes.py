"""The table of outcomes: complete, and only what nobody inside the container can cause is not the model's."""

import pytest

from legorl import outcomes


def test_an_unknown_outcome_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"'lucky'.*finished"):
        outcomes.blame_of("lucky")


def test_what_the_container_can_cause_is_the_model_s():
    for outcome in ("finished", "harness_crash", "out_of_memory", "disk_full", "too_many_processes", "patch_unusable"):
        assert outcomes.blame_of(outcome) == "model"


def test_what_is_seen_from_outside_is_not():
    for outcome in ("sandbox_setup_failed", "engine_lost", "grader_crash", "interrupted"):
        assert outcomes.blame_of(outcome) == "infra"
    assert outcomes.blame_of("task_broken") == "task"


def test_every_reason_stands_for_one_thing():
    """A token has one reason, so a name must not mean one thing to lego-serve and another to lego-train."""
    assert not set(outcomes.DROP_REASONS) & set(outcomes.TRAIN_REASONS)
    assert "trained" in outcomes.TRAIN_REASONS
