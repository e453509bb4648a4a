"""Log-probabilities through the head: against plain autograd, in float64 and under autocast, and never all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from legorl.head import head_logprobs

COUNT, WIDTH, WORDS = 50, 32, 300


def made(bias: bool, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)
    hidden = torch.randn(COUNT, WIDTH, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(0, WORDS, (COUNT,)), torch.linspace(0.5, 2, COUNT, dtype=dtype)


def plain(head, hidden, targets, temperatures):
    logits = head(hidden).to(temperatures.dtype) / temperatures[:, None]
    return logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)


def with_gradients(compute, head, hidden, *rest):
    for leaf in (hidden, *head.parameters()):
        leaf.grad = None
    values = compute(head, hidden, *rest)
    (values * torch.linspace(-1, 1, COUNT, dtype=values.dtype)).sum().backward()
    return [values.detach(), *(leaf.grad.clone() for leaf in (hidden, *head.parameters()))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7 * WORDS, 10**9])
def test_values_and_gradients_are_those_of_plain_autograd(bias, chunk):
    given = made(bias)
    wanted = with_gradients(plain, *given)
    got = with_gradients(lambda *a: head_logprobs(*a, chunk_logits=chunk), *given)
    assert len(got) == 3 + bias
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_autocast_multiplies_in_its_dtype_and_sums_in_float32():
    given = made(False, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = with_gradients(plain, *given)
        got = with_gradients(head_logprobs, *given)
    exact = with_gradients(head_logprobs, *given)
    for ours, theirs, best in zip(got, wanted, exact, strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours, best)
        assert torch.allclose(ours, theirs, rtol=0.02, atol=0.02)
        assert (ours - best).norm() <= 1.1 * (theirs - best).norm()  # no worse than autograd's own


def test_a_frozen_head_gets_no_gradient():
    head, *rest = made(True)
    head.requires_grad_(False)
    head_logprobs(head, *rest).sum().backward()
    assert head.weight.grad is None and head.bias.grad is None and rest[0].grad is not None


def test_nothing_to_score_is_nothing():
    head, hidden, targets, temperatures = made(False)
    values = head_logprobs(head, hidden[:0], targets[:0], temperatures[:0])
    values.sum().backward()
    assert values.shape == (0,) and not head.weight.grad.any()


def test_no_more_logits_than_a_chunk_ever_exist():
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            weights = (WIDTH, WORDS)  # the head's own, turned round
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (WORDS,) and out.shape != weights:
                sizes.append(out.numel())
            return out

    given = made(False)
    with Sizes():
        with_gradients(lambda *a: head_logprobs(*a, chunk_logits=1000), *given)
    assert 0 < max(sizes) <= 1000
