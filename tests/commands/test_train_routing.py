"""Routing replay in the trainer: recorded experts forced, weights recomputed, the record checked and counted."""

from dataclasses import replace

import numpy as np
import pytest
from commands.test_verify_routing import sparse_world
from commands.train_rows import tiny_llama
from moe import KINDS, native_experts

from legorl import metrics, routing, tree
from legorl.commands.train.batch import make_batch
from legorl.commands.train.rows import BatchError, CheckError
from legorl.commands.train.settings import resolve
from legorl.commands.train.train import facts_of
from legorl.commands.train.updates import updates_table
from legorl.routing import Shape

SHAPE = [(-1, None, 6, 4), (0, None, 3, 5), (0, 8, 4, 3)]


@pytest.fixture(scope="module", params=KINDS)
def world(request, tmp_path_factory):
    return sparse_world(request.param, tmp_path_factory.mktemp("model") / "m")


def trainer(world, **given):
    from legorl.commands.train.step import Trainer
    from legorl.model import load_model

    return Trainer(resolve(loss="grpo", **given), load_model(world.checkpoint.folder, "fp32"))


def layers_of(world):
    return 3 if world.model.config.model_type == "mixtral" else 2


def recorded(world, seed=0, missing=(), shape=None):
    """A group of two attempts whose recorded experts are random ones: nothing that the model would choose.

    One record a path: what two turns store of one position is equal. `missing`: positions without a valid row.
    """
    world.rng = np.random.default_rng(0)
    rows = [world.row("task-a", n, float(n), SHAPE) for n in range(2)]
    shape = shape or Shape(layers_of(world), 2, 8)
    for n, row in enumerate(rows):
        rng = np.random.default_rng(seed + n)
        table = np.array(
            [[rng.permutation(shape.experts)[: shape.topk] for _ in range(shape.layers)] for _ in range(64)]
        )
        for node, turn in zip(tree.nodes_of(row["turns"]), row["turns"], strict=True):
            span = routing.positions(node.prefix_len, node.prompt_len, len(node.completion_ids))
            pieces = [(k, table[k : k + 1]) for k in span if k not in missing]
            turn["routing"] = routing.pack(shape, span, pieces)
    return rows


def by_hand(model, table, valid):
    """Put in place of each sparse block the sum over the wanted experts, written out token by token."""
    import torch

    blocks = [m for m in model.modules() if type(m).__name__.endswith("SparseMoeBlock")]
    for layer, block in enumerate(blocks):

        def forward(hidden, block=block, layer=layer):
            outputs = []
            for place, x in enumerate(hidden.reshape(-1, hidden.shape[-1])):
                probs = (block.gate.weight @ x).softmax(0)
                chosen = torch.as_tensor(table[place, layer].astype(int)) if valid[place] else probs.topk(2).indices
                weights = probs[chosen]
                if block.gate.__class__.__name__.startswith("Mixtral") or getattr(block.gate, "norm_topk_prob", False):
                    weights = weights / weights.sum()
                total = 0.0
                for weight, expert in zip(weights, chosen.tolist(), strict=True):
                    gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
                    total = total + weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
                outputs.append(total)
            return torch.stack(outputs).reshape(hidden.shape)

        block.forward = forward
    return model


@pytest.mark.parametrize("missing", [(), (0, 3, 7)])
def test_recorded_experts_are_forced_and_their_weights_recomputed(world, missing):
    import torch
    from transformers import AutoModelForCausalLM

    rows = recorded(world, missing=missing)
    batch = make_batch(rows, facts_of(world.checkpoint), max_lag=0, loss="grpo")
    grads, figures = {}, {}
    for packing in ("trees", "rows"):
        for recompute in (False, True):
            ours = trainer(world, packing=packing, gradient_checkpointing=recompute, is_cap=1e9, grad_clip=1e9)
            ours.optimizer.step = lambda: None
            moved: dict = {}
            ours.optimizer.zero_grad = lambda set_to_none, o=ours, m=moved: m.update(
                {name: p.grad.clone() for name, p in o.model.named_parameters() if p.grad is not None}
            )
            batch = make_batch(rows, facts_of(world.checkpoint), max_lag=0, loss="grpo")
            figures = ours.run(batch, lambda: None)
            grads[packing, recompute] = moved
    for other in grads.values():
        for name, gradient in grads["rows", False].items():
            assert torch.allclose(other[name], gradient, atol=1e-4 * float(gradient.abs().max()) + 1e-7), name
    assert any("gate.weight" in name and gradient.abs().max() > 0 for name, gradient in grads["trees", True].items())
    share = figures["routing/replayed"]
    assert share == 1.0 if not missing else 0.5 < share < 1.0

    for sample in batch.samples:  # the log-probabilities, beside the sum over experts written out
        model = AutoModelForCausalLM.from_pretrained(world.checkpoint.folder).eval()
        logits = by_hand(model, sample.experts, sample.valid)(torch.as_tensor(sample.ids).long()[None]).logits[0]
        wanted = logits.log_softmax(-1)[sample.positions, batch.tokens.token[sample.index]]
        np.testing.assert_allclose(batch.tokens.old[sample.index], wanted.detach().numpy(), atol=2e-4)


def test_without_replay_the_model_routes_by_itself(world):
    rows = recorded(world)
    for row in rows:
        world.score(row)
    batch = make_batch(rows, facts_of(world.checkpoint), max_lag=0, loss="grpo")
    figures = trainer(world, replay=False).run(batch, lambda: None)
    np.testing.assert_allclose(batch.tokens.old, batch.tokens.sampler, atol=2e-4)
    assert figures["routing/replayed"] == 0.0
    batch = make_batch(rows, facts_of(world.checkpoint), max_lag=0, loss="grpo")
    trainer(world).run(batch, lambda: None)
    assert np.abs(batch.tokens.old - batch.tokens.sampler).max() > 0.1


def test_a_record_of_another_depth_or_model_is_refused_before_anything_moves(world, tmp_path):
    layers = layers_of(world)
    facts = facts_of(world.checkpoint)
    for shape in (Shape(layers + 1, 2, 8), Shape(layers, 3, 8), Shape(layers, 2, 16)):
        batch = make_batch(recorded(world, shape=shape), facts, max_lag=0, loss="grpo")
        with pytest.raises(CheckError, match=f"experts are recorded, but the model to train has {layers} x 2 out of 8"):
            trainer(world).run(batch, lambda: None)
    from legorl.checkpoint import open_checkpoint

    dense = open_checkpoint(tiny_llama(tmp_path / "m"))
    other = replace(facts_of(dense), digest=facts.digest)
    batch = make_batch(recorded(world), other, max_lag=0, loss="grpo")
    sparse, world.checkpoint = world.checkpoint, dense
    try:
        with pytest.raises(CheckError, match="the model to train has no experts"):
            trainer(world).run(batch, lambda: None)
    finally:
        world.checkpoint = sparse


def test_a_record_that_does_not_fit_its_turn_is_named(world):
    rows = recorded(world)
    record = rows[1]["turns"][1]["routing"]
    record["rows"] -= 1
    record["valid"] = record["valid"][:-1]
    record["data"] = record["data"][: -2 * layers_of(world)]
    with pytest.raises(BatchError, match=r"\.1: turn 1: \d+ routing rows for \d+ input positions"):
        make_batch(rows, facts_of(world.checkpoint), max_lag=0, loss="grpo")


# -- flipped routes ----------------------------------------------------------------------------------------------------


def as_chosen(world, change=None, missing=()):
    """A row of a branched tree, SHAPE, with the experts that transformers itself chooses.

    `change`: (turn, position of its path) of one row in which the last layer has another expert. `missing`: as there.
    """
    world.rng = np.random.default_rng(0)
    row = world.row("task-a", 0, 1.0, SHAPE)
    nodes = tree.nodes_of(row["turns"])
    for node, turn in zip(nodes, row["turns"], strict=True):
        experts = native_experts(world.model, tree.path_ids(nodes, node.index)).copy()
        if change and change[0] == node.index:
            free = set(range(8)) - set(experts[change[1], -1].tolist())
            experts[change[1], -1, 0] = min(free)
        span = routing.positions(node.prefix_len, node.prompt_len, len(node.completion_ids))
        pieces = [(k, experts[k : k + 1]) for k in span if k not in missing]
        turn["routing"] = routing.pack(Shape(layers_of(world), 2, 8), span, pieces)
    return row


@pytest.mark.parametrize("packing", ["trees", "rows"])
@pytest.mark.parametrize("replay", [True, False])
def test_a_token_is_flipped_from_the_row_on_that_the_trainer_would_not_choose(world, packing, replay):
    """SHAPE: turn 0 has positions 6 to 9 of every path, turn 1 13 to 17 of the first, turn 2 12 to 14 of the second,
    which shares 8 tokens with it. A token is predicted one position before it stands."""
    wanted = {
        None: "0000 00000 000",
        (0, 3): "1111 11111 111",
        (0, 6): "0111 11111 111",
        (0, 7): "0011 11111 000",  # turn 2 has a record of its own of the last token that it shares
        (0, 8): "0001 11111 000",
        (1, 11): "0000 11111 000",
        (1, 14): "0000 00111 000",
        (2, 11): "0000 00000 111",
        (2, 13): "0000 00000 001",
    }
    ours = trainer(world, packing=packing, replay=replay)
    for change, flips in wanted.items():
        batch = make_batch([as_chosen(world, change)], facts_of(world.checkpoint), max_lag=0, loss="reinforce")
        ours.compared = ours.flipped = 0
        ours.score(batch, batch.samples)
        assert batch.tokens.flipped.tolist() == [int(flip) for flip in flips.replace(" ", "")], change
        assert (ours.flipped > 0) == (change is not None) and ours.compared > 20


def test_rows_that_were_not_recorded_flip_nothing(world):
    def flips(row):
        batch = make_batch([row], facts_of(world.checkpoint), max_lag=0, loss="reinforce")
        trainer(world).run(batch, lambda: None)
        told = updates_table(batch, 1, "in", "out").column("flipped").to_pylist()
        return told, dict(metrics.run("align", updates=updates_table(batch, 1, "in", "out")))

    told, figures = flips(as_chosen(world, (0, 7), missing=(7,)))
    assert told == [False] * 12 and "align/flipped=true/tokens" not in figures
    told, figures = flips(as_chosen(world, (1, 14), missing=range(8)))
    assert told == [None] * 3 + [False] * 3 + [True] * 3 + [False] * 3  # nothing is known of the first paths
    assert (figures["align/flipped=true/tokens"], figures["align/flipped=false/tokens"]) == (3, 6)
    told, figures = flips(as_chosen(world) | {"turns": world.turns(SHAPE)})
    assert told == [None] * 12 and not any("flipped" in name for name in figures)
