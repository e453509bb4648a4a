"""Fixtures that several test files share. Hand-made rows: `from builders import trajectory`, see builders.py."""

import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from legorl import paths

# The same examples on every run, and no limit on time: a busy machine is not a failure.
settings.register_profile("legorl", deadline=None, derandomize=True)
settings.load_profile("legorl")

# A shell without job control starts background jobs with SIGINT ignored, and commands under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MODEL = "SmolLM2-135M-Instruct"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct that `make setup` puts in the cache."""
    folder = paths.cache_dir() / "models" / MODEL
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        pytest.fail(f"{folder}: no model there; run `make setup` first", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def tiny_model(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random Llama (2 layers, 64 wide, 3 million weights) with SmolLM2's tokenizer.

    It says nothing sensible, but it loads in a moment and every stage takes it. Its weights are spread widely enough
    that its next-token distribution is not flat. Do not write to it: copy it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (real_model / name).exists():
            shutil.copyfile(real_model / name, folder / name)
    return folder
