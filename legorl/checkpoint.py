"""Model folders as the pipeline sees them: where the weights lie, which version they are, their digests.

Every command takes either a plain Hugging Face folder (version 0) or a checkpoint folder of lego-train (`model/` beside
`legorl.json`, whose `version` is the integer training step). Digests are over content, so that a loaded engine and a
trainer can prove that they hold the same weights. Reads files only: no torch.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

RECORD = "legorl.json"


class ModelError(Exception):
    """A folder is not a model that can be loaded; the message says what is missing."""


@dataclass(frozen=True)
class Checkpoint:
    """`path` as given, `folder` the Hugging Face folder in it, `version` the policy version of its weights."""

    path: Path
    folder: Path
    version: int

    @cached_property
    def digest(self) -> str:
        """Digest of the weights: sha256 over the safetensors files, first 32 hex digits."""
        return _digest(self.folder, sorted(p.name for p in self.folder.glob("*.safetensors")))

    @cached_property
    def tokenizer_digest(self) -> str:
        return _digest(
            self.folder, [n for n in ("tokenizer.json", "tokenizer_config.json") if (self.folder / n).exists()]
        )

    @property
    def name(self) -> str:
        return self.folder.parent.name if self.folder.name == "model" else self.folder.name


def open_checkpoint(path: Path | str, digest: str | None = None) -> Checkpoint:
    """Resolve `path` (a Hugging Face folder or a checkpoint folder); raise ModelError if it is neither.

    `digest`: of its weights, from whoever has just read or written them; otherwise they are read when it is asked for.
    """
    path = Path(path).resolve()
    if not path.is_dir():
        raise ModelError(f"{path}: no such model folder; give a Hugging Face folder or a checkpoint of lego-train")
    record = path / RECORD
    folder = path / "model" if record.exists() else path
    version = int(json.loads(record.read_text())["version"]) if record.exists() else 0
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: not a Hugging Face model folder (no config.json)")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no .safetensors file; only that weight format is read")
    found = Checkpoint(path, folder, version)
    if digest:
        vars(found)["digest"] = digest
    return found


def _digest(folder: Path, names: list[str]) -> str:
    total = hashlib.sha256()
    for name in names:
        total.update(name.encode() + b"\0")
        with (folder / name).open("rb") as handle:
            total.update(hashlib.file_digest(handle, "sha256").digest())
    return total.hexdigest()[:32]
