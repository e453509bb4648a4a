"""LoRA through peft: low-rank matrices beside frozen weights are trained in their place, and merged in a checkpoint.

    model, adapter = load_policy(checkpoint, settings)    # adapter: None where all weights are trained
    adapter.merged()                                       # plain weights by name: W + alpha / rank * B A
    adapter.write(folder / ADAPTER, state)                 # peft's own format; returns what the record says of it

A checkpoint holds the merged weights in `model/`, so that whoever reads it needs to know nothing of LoRA, and the
matrices in `adapter/`. The next step goes on with those over the same base, which the record names by path and digest:
W + BA is always made from the base, never from a merged copy, so that nothing is rounded twice.

`Linear` layers are adapted, and on demand fused parameters, as the experts and routers of sparse models are. Never the
head, which is run in chunks (legorl.model) and often shares its weights with the embedding.
"""

import copy
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from legorl.checkpoint import RECORD, Checkpoint, ModelError, open_checkpoint
from legorl.commands.train.ranks import whole
from legorl.commands.train.save import ADAPTER, weights_of
from legorl.commands.train.settings import ALL_LINEAR, Settings
from legorl.model import is_sparse, load_model

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
# In sparse models peft takes these names for the experts' (it reads adapters from before they were fused), so a dense
# layer that bears one cannot be told to it.
_EXPERT_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_NAME = "default"  # of the one adapter, in peft's terms
_MARKS = (".lora_A.", ".lora_B.")


def load_policy(
    checkpoint: Checkpoint, settings: Settings, tell: Callable[[str], object] = lambda words: None
) -> tuple[Any, "Adapter | None"]:
    """The model to train, in float32, and its adapter where `settings` want one.

    The adapter is that of the checkpoint, or a new one that changes nothing yet (B = 0) over its weights. Raises
    ModelError if the checkpoint's adapter is another than is asked for, or if its base is not where it was. `tell` gets
    words for the user.
    """
    record = adapter_record(checkpoint)
    if not settings.lora:
        if record:
            tell(f"{checkpoint.path}: its adapter ends here; all of the merged weights are trained, with a new AdamW")
        return load_model(checkpoint.folder, "fp32"), None
    assert settings.lora_alpha is not None and settings.lora_targets is not None
    asked = (settings.lora, settings.lora_alpha, settings.lora_targets)
    if record is None:
        if checkpoint.version:
            tell(f"{checkpoint.path}: all its weights were trained; an adapter begins over them, with a new AdamW")
        model = load_model(checkpoint.folder, "fp32")
        adapter = Adapter(model, checkpoint, *asked, seed=settings.seed)
        tell(adapter.words())
        return model, adapter
    had = (record["rank"], record["alpha"], record["targets"])
    if had != asked:
        raise ModelError(
            f"{checkpoint.path}: its adapter is one of {_words(*had)}, not of {_words(*asked)}; give {_options(*had)} "
            f"to go on with it, or --model {checkpoint.folder} to begin another over its merged weights"
        )
    folder = checkpoint.path / ADAPTER
    if _digest(folder) != record["digest"]:
        raise ModelError(
            f"{folder}: does not hold the adapter that was merged into the weights beside it; put it back, or give "
            f"--model {checkpoint.folder} to begin another over those"
        )
    base = _base(checkpoint, record["base"])
    model = load_model(base.folder, "fp32")
    adapter = Adapter(model, base, *asked, seed=settings.seed)
    adapter.read(folder)
    tell(adapter.words())
    return model, adapter


def same_kind(checkpoint: Checkpoint, settings: Settings) -> bool:
    """Whether what `settings` want trained is what was trained to make the checkpoint, so that AdamW's state fits."""
    return not checkpoint.version or bool(adapter_record(checkpoint)) == bool(settings.lora)


def adapter_record(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What the checkpoint's record says of its adapter; None if all its weights were trained, or it has no record."""
    record = checkpoint.path / RECORD
    return json.loads(record.read_text()).get("adapter") if record.is_file() else None


def adapter_digest(checkpoint: Checkpoint) -> str | None:
    """Digest of the checkpoint's adapter, None without one: equal merged weights may come of different ones."""
    return (adapter_record(checkpoint) or {}).get("digest")


class Adapter:
    """An adapter in `model`, whose layers it has changed and whose other weights it has frozen.

    `base`: what `model` was loaded from. `modules`, `parameters`: last names of the layers and of the fused parameters
    that are adapted.
    """

    def __init__(self, model: Any, base: Checkpoint, rank: int, alpha: float, targets: str, seed: int = 0):
        """Begin one with B = 0 and A drawn by `seed`; `targets`: ALL_LINEAR, or last names with commas between.

        Raises ModelError, naming what there is, if a target is not.
        """
        import torch
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import Linear

        self.model, self.base, self.rank, self.alpha, self.targets = model, base, rank, alpha, targets
        self.modules, self.parameters, self.left = _resolve(model, targets)
        wanted = _weights(model, self.modules, self.parameters)
        if rank > (largest := max(min(weight.shape[-2:]) for weight in wanted.values())):
            raise ModelError(
                f"{base.path}: --lora {rank}: none of the weights that {targets} means has a rank above {largest}; "
                "give a smaller one, or train the weights themselves (--lora 0)"
            )
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]  # peft only divides it
            target_modules=self.modules,
            target_parameters=self.parameters or None,
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library does not print
            self.peft = get_peft_model(model, config)
        if found := wanted.keys() ^ self._adapted().keys():
            raise ModelError(
                f"peft adapts other weights of {type(model).__name__} than {targets} (first: {min(found)}); leave that "
                "name out of --lora-targets"
            )
        for _, layer in self._adapted().values():
            if isinstance(layer, Linear):
                layer.forward = partial(_forward, layer)  # type: ignore[method-assign]

    def words(self) -> str:
        """What is trained, and what is not although it could be."""
        every = list(self.model.parameters())
        trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
        size = sum(parameter.numel() for parameter in every) - trained
        words = f"an adapter of rank {self.rank} is trained in {', '.join(self.modules + self.parameters)}: "
        words += f"{trained:,} numbers beside {size:,} weights"
        return words + (f"; not in {', '.join(self.left)}" if self.left else "")

    def halve(self) -> None:
        """Hold the frozen `Linear` weights in bfloat16 where that rounds nothing, as it does for most published ones.

        Within autocast to bfloat16 nothing changes by it: every forward pass makes just these of them. Sharded ones are
        left as they are.
        """
        import torch

        head = self.model.get_output_embeddings()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head and not module.weight.requires_grad:
                half = module.weight.data.bfloat16()
                if whole(half) is half and torch.equal(half.float(), module.weight.data):
                    module.weight.data = half

    def merged(self) -> dict[str, Any]:
        """The plain model's weights by name, whole, the adapter's product added. All processes must ask for them."""
        import torch

        tensors = weights_of(self.model)
        plain = {
            _plain(name): tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            for name, tensor in tensors.items()
            if not any(mark in name for mark in _MARKS)
        }
        for name, (prefix, layer) in self._adapted().items():
            a, b = (tensors[f"{prefix}.{matrix}.{_NAME}.weight"] for matrix in ("lora_A", "lora_B"))
            plain[name] = plain[name] + layer.scaling[_NAME] * _product(a, b, plain[name].shape, layer)
        return plain

    def state(self) -> dict[str, Any]:
        """The matrices by peft's names, whole. All processes must ask for them."""
        from peft import get_peft_model_state_dict

        tensors = {n: whole(p.detach()) for n, p in self.peft.named_parameters() if p.requires_grad}
        return get_peft_model_state_dict(self.peft, state_dict=tensors, save_embedding_layers=False)

    def write(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Write `state` and peft's configuration into `folder`; return what the checkpoint's record says of them."""
        from safetensors.torch import save_file

        folder.mkdir()
        config: Any = copy.deepcopy(self.peft.peft_config[_NAME])
        config.inference_mode = True
        config.target_modules, config.target_parameters = self.modules, self.parameters or None  # peft has sets there
        config.base_model_name_or_path = str(self.base.folder)
        config.save_pretrained(folder)
        save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, folder / _WEIGHTS)
        base = {"version": self.base.version, "digest": self.base.digest, "path": str(self.base.path)}
        return {
            "rank": self.rank, "alpha": self.alpha, "targets": self.targets, "modules": self.modules,
            "parameters": self.parameters, "digest": _digest(folder), "base": base,
        }  # fmt: skip

    def read(self, folder: Path) -> None:
        """Take the matrices from `folder`. Raises ModelError if they are of another adapter."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        state = load_file(folder / _WEIGHTS)
        if {name: t.shape for name, t in self.state().items()} != {name: t.shape for name, t in state.items()}:
            raise ModelError(f"{folder}: is an adapter of other layers or another rank than its record says")
        set_peft_model_state_dict(self.peft, state)

    def _adapted(self) -> dict[str, tuple[str, Any]]:
        """Plain name of each adapted weight: the name of the layer of peft that holds its matrices, and that layer."""
        from peft.tuners.lora import LoraLayer

        return {
            f"{_plain(name)}.{getattr(layer, 'parameter_name', 'weight')}": (name, layer)
            for name, layer in self.model.named_modules()
            if isinstance(layer, LoraLayer)
        }


def _forward(layer: Any, hidden: Any) -> Any:
    """W x + alpha / RANK B A x in peft's layer `layer`, added in place.

    peft's own adds out of place: on a CPU its three more tensors a layer leave holes between those that the backward
    pass keeps, and a step took more memory than one that trains all weights.
    """
    output = layer.base_layer(hidden)
    low = layer.lora_A[_NAME](hidden).flatten(0, -2)
    matrix = layer.lora_B[_NAME].weight.to(low.dtype)
    return output.flatten(0, -2).addmm_(low, matrix.T, alpha=layer.scaling[_NAME]).view(output.shape)


def _resolve(model: Any, targets: str) -> tuple[list[str], list[str], list[str]]:
    """Last names of `Linear` layers, and of fused parameters, that `targets` mean, and of those that they leave out.

    Raises ModelError for a name that is none of either.
    """
    import torch

    head, sparse = model.get_output_embeddings(), is_sparse(model.config)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    linear = {name.rpartition(".")[2] for name, module in layers if module is not head}
    dense = linear - set(_EXPERT_NAMES) if sparse else linear
    fused = _fused(model)
    known = sorted({ALL_LINEAR, *dense, *fused})
    names = targets.split(",")
    for name in names:
        if name not in known:
            raise ModelError(
                f"{model.name_or_path}: --lora-targets {name}: {type(model).__name__} has no such layer that can be "
                f"adapted; there are {', '.join(known)}"
            )
    wanted = {*names} | (dense if ALL_LINEAR in names else set())
    return sorted(wanted & dense), sorted(wanted & fused), sorted((linear | fused) - wanted)


def _fused(model: Any) -> set[str]:
    """Names of matrices, or of stacks of them, that are no layer of their own: those of experts and routers."""
    import torch

    found = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim in (2, 3):
                found.add(f"{name.rpartition('.')[2]}.{key}")
    return found


def _weights(model: Any, modules: list[str], parameters: list[str]) -> dict[str, Any]:
    """The weights of `model` that those last names mean, by name."""
    suffixes = tuple([f".{name}.weight" for name in modules] + [f".{name}" for name in parameters])
    return {name: weight for name, weight in model.named_parameters() if name.endswith(suffixes)}


def _plain(name: str) -> str:
    return name.replace(".base_layer", "")


def _product(a: Any, b: Any, shape: Any, layer: Any) -> Any:
    """B A for a weight of `shape`; of a stack of experts, theirs one by one, in peft's order of ranks and experts."""
    import torch

    if len(shape) == 2:
        return b @ a
    a, b = a.reshape(shape[0], -1, a.shape[1]), b.reshape(b.shape[0], -1, shape[0])
    transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", b, a)


def _base(checkpoint: Checkpoint, wanted: dict[str, Any]) -> Checkpoint:
    """The base of the checkpoint's adapter, proven by digest. Raises ModelError if it is not at its path."""
    path = wanted["path"]
    try:
        base = open_checkpoint(path)
        found = None if base.digest == wanted["digest"] else f"has weights {base.digest} now"
    except ModelError:
        found = "is not there"
    if found:
        raise ModelError(
            f"{checkpoint.path}: its adapter goes with the weights {wanted['digest']} of {path}, which {found}; put "
            f"them, or a link to them, there, or give --model {checkpoint.folder} to begin another over its merged ones"
        )
    return base


def _digest(folder: Path) -> str:
    return Checkpoint(folder, folder, 0).digest


def _words(rank: int, alpha: float, targets: str) -> str:
    return f"rank {rank}, alpha {alpha:g} over {targets}"


def _options(rank: int, alpha: float, targets: str) -> str:
    return f"--lora {rank} --lora-alpha {alpha:g} --lora-targets {targets}"
