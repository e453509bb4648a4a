"""A Hugging Face folder as a policy: load it, and get the log-probabilities of given targets.

    model = load_model(folder, "fp32")
    logprobs = target_logprobs(model, input_ids, rows, positions, targets, temperatures)

`target_logprobs` runs the body once and the head only where a target is, a chunk of targets at a time (legorl.head).
So the logits of a batch never exist, forwards or backwards, and memory does not grow with the vocabulary times the
batch. Weights are read from safetensors only and no code from the folder is ever run.

    routers = find_routers(model)                               # None for a dense model
    with routers.watched(see): model(input_ids)                 # see(layer, logits, experts) in each sparse layer

    with routers.replaying(experts, valid): model(input_ids)    # recorded experts in place of its own choice

The experts that a mixture-of-experts model chooses are seen, and replaced by recorded ones, by hooks on its own
routers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legorl.attention import Forest
from legorl.checkpoint import ModelError
from legorl.routing import Shape

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
# What configurations call the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def load_model(folder: Path | str, dtype: str) -> Any:
    """Load the causal language model in `folder` with weights as `dtype` (fp32, bf16, fp64, or torch's own names).

    It has no dropout in any mode: a policy has one distribution. Raises ModelError if the folder lacks weights, needs
    code of its own, or has a head that is not its output embedding applied to the last hidden state.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a library does not print
    folder = Path(folder)
    wanted = getattr(torch, DTYPES.get(dtype, dtype), None)
    if not isinstance(wanted, torch.dtype):
        raise ModelError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no .safetensors file; only that weight format is read")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=wanted,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            # The fast kernels of mixtures of experts do not know float64.
            **({"experts_implementation": "eager"} if wanted == torch.float64 else {}),
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot be loaded as a causal language model ({_first_line(error)})") from error
    model, report = loaded
    if lost := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        raise ModelError(f"{folder}: {len(lost)} weights are missing or of another shape (first: {lost[0]})")
    for module in model.modules():
        for name in ("dropout", "attention_dropout", "p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.eval()
    _check_head(model, folder)
    return model


def target_logprobs(
    model: Any, input_ids: Any, rows: Any, positions: Any, targets: Any, temperatures: Any, *,
    forest: Forest | None = None,
) -> Any:  # fmt: skip
    """Log-probabilities of N targets, float32 (float64 for a float64 model), [N], differentiable.

    `input_ids`: int64 [rows, length], padded on the right with anything: attention is causal, so no real token sees
    the padding and no mask is needed. `rows`, `positions`: int64 [N], the place of the hidden state that predicts each
    target (one before the target itself). `targets`: int64 [N]. `temperatures`: float [N]; the logits are divided by
    them, because the recorded log-probabilities are those of the distribution after temperature. `forest`: the one row
    of `input_ids` is this forest; the model must have been enabled for it (legorl.attention).
    """
    from legorl.head import head_logprobs

    how = {} if forest is None else {"position_ids": forest.positions(input_ids.device), "forest": forest}
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False, **how).last_hidden_state[rows, positions]
    return head_logprobs(model.get_output_embeddings(), hidden, targets, temperatures)


@dataclass(frozen=True)
class Routers:
    """The routers of a sparse mixture-of-experts model, a sparse layer each, in order of depth."""

    modules: tuple[Any, ...]
    shape: Shape
    normalised: bool  # whether the weights of the chosen experts sum to 1

    @contextmanager
    def replaying(self, experts: Any, valid: Any) -> Iterator[None]:
        """Within, the experts of each token are the recorded ones, weighed by the model's own router.

        `experts` int64 [tokens, layers, topk] and `valid` bool [tokens], over the tokens of the flattened batch; a
        token that is not valid is routed by the model. Gradients reach the router through the weights. Must last until
        the backward pass is over where activations are recomputed in it.
        """
        import torch

        def replace(layer: int, output: Any) -> Any:
            logits, weights, chosen = output
            taken = torch.where(valid[:, None], experts[:, layer], chosen)
            shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).gather(1, taken)
            if self.normalised:
                shares = shares / shares.sum(-1, keepdim=True)
            return logits, shares.to(weights.dtype), taken

        with _hooked(self.modules, replace):
            yield

    def _repeats(self, model: Any, outputs: list[Any]) -> bool:
        """Whether replaying the model's own choice, `outputs` of the routers over `_some_ids`, changes nothing."""
        import torch

        experts = torch.stack([chosen for _, _, chosen in outputs], dim=1)
        weights: list[Any] = []
        with (
            torch.no_grad(),
            self.replaying(experts, torch.ones(len(experts), dtype=torch.bool, device=experts.device)),
            _hooked(self.modules, lambda _layer, output: weights.append(output[1])),
        ):
            model.get_decoder()(input_ids=_some_ids(model), use_cache=False)
        pairs = zip(weights, outputs, strict=True)
        return all(torch.allclose(one.float(), two.float(), rtol=1e-2, atol=1e-4) for one, (_, two, _) in pairs)

    def watched(self, see: Callable[[int, Any, Any], None]) -> AbstractContextManager[None]:
        """Within, `see(layer, logits, experts)` is called once a sparse layer in every forward pass.

        `layer` counts sparse layers from 0; `logits` [tokens, experts] of the router; `experts` int64 [tokens, topk]
        that it chose. Tokens are those of the flattened batch.
        """
        return _hooked(self.modules, lambda layer, output: see(layer, output[0], output[2]))


@contextmanager
def _hooked(modules: Iterable[Any], see: Callable[[int, Any], Any]) -> Iterator[None]:
    """Within, `see(n, output)` is called after each forward pass of the n-th module; what it returns replaces it."""
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, n=n: see(n, output))
        for n, module in enumerate(modules)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_sparse(config: Any) -> bool:
    """Whether a transformers configuration is one of a mixture of experts."""
    return any(getattr(config.get_text_config(), name, None) for name in EXPERT_COUNTS)


def find_routers(model: Any) -> Routers | None:
    """Return the routers of `model`, None if it is dense.

    Their class is the one whose logits transformers itself records; a forward pass over a few tokens shows that each
    gives (logits, weights, experts) and chooses the experts with the highest logits, as Qwen-MoE, Mixtral and OLMoE do.
    Raises ModelError for a sparse model of another kind: its choices cannot be seen here.
    """
    import torch

    if not is_sparse(model.config):
        return None
    kind = type(model).__name__
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    target = getattr(recorder, "target_class", None)
    modules = tuple(m for m in model.modules() if target and isinstance(m, target))
    if not modules:
        raise ModelError(f"the routers of {kind} are not known")
    outputs: list[Any] = []
    with torch.no_grad(), _hooked(modules, lambda _layer, output: outputs.append(output)):
        model.get_decoder()(input_ids=_some_ids(model), use_cache=False)
    if len(outputs) != len(modules) or not all(map(_chooses_highest, outputs)):
        raise ModelError(f"the routers of {kind} do not simply choose the experts with the highest logits")
    shapes = {Shape(len(modules), experts.shape[1], logits.shape[1]) for logits, _, experts in outputs}
    if len(shapes) != 1:
        raise ModelError(f"the layers of {kind} differ in their numbers of experts")
    for normalised in (True, False):
        routers = Routers(modules, next(iter(shapes)), normalised)
        if routers._repeats(model, outputs):
            return routers
    raise ModelError(f"the routers of {kind} weigh the chosen experts in a way that is not known")


def _chooses_highest(output: Any) -> bool:
    """Whether a router's output is (logits, weights, ids of the experts with the highest logits)."""
    import torch

    if not isinstance(output, tuple) or len(output) != 3 or output[2].dtype != torch.int64:
        return False
    logits, _, experts = output
    if not logits.ndim == experts.ndim == 2 or len(logits) != len(experts) or int(experts.max()) >= logits.shape[1]:
        return False
    chosen = logits.gather(1, experts).sort(dim=1, descending=True).values
    return bool(chosen.equal(logits.topk(experts.shape[1], dim=1).values))


def _some_ids(model: Any) -> Any:
    import torch

    return torch.linspace(0, model.config.vocab_size - 1, 8, device=model.device).long()[None]


def _check_head(model: Any, folder: Path) -> None:
    """Some families scale or cap their logits after the head; `target_logprobs` would silently leave that out."""
    import torch

    with torch.no_grad():
        ids = _some_ids(model)
        ours = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
        theirs = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3, equal_nan=True):
        kind = type(model).__name__
        raise ModelError(
            f"{folder}: {kind} changes its logits after the output embedding; such models are not supported"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
