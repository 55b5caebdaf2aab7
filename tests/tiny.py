"""Tiny random targets with a real tokenizer and chat template: folders in Hugging Face layout, made in a second."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig

TEXT = [
    "The quick brown fox jumps over the lazy dog. What is rain? Explain in two sentences how a battery works.",
    "A battery is a device that stores electrical energy. Write a short story about a lost kitten.",
    "def add(a, b):\n    return a + b\n1 2 3 4 5 6 7 8 9 0 user assistant system You are a helpful assistant.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 384


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ChatML tokens; id 3 (`<|mask|>`) serves as mask token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>",
                                   unk_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(family: str):
    """The configuration of a tiny target: "llama" (dense, 6 layers) or "qwen3_5" (Gated DeltaNet hybrid, 8 layers)."""
    common = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.08,
              "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2}
    if family == "llama":
        return LlamaConfig(num_hidden_layers=6, tie_word_embeddings=True, **common)
    if family == "qwen3_5":
        return Qwen3_5TextConfig(
            num_hidden_layers=8, tie_word_embeddings=False, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, **common)
    raise ValueError(f"unknown family {family!r}")


def make_tiny_target(folder: Path | str, family: str = "llama", seed: int = 0) -> Path:
    """Writes a tiny random target with tokenizer to `folder` and returns it."""
    folder = Path(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family)).float()
    with torch.no_grad():  # random norms, so that a missing, doubled or wrong-typed norm shows
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
