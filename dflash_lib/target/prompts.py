"""Lets the target write user turns, too: prompts as varied as its own training, when no file of them is at hand.

An aligned model that is given its chat template up to the beginning of the user's words goes on with what a user would
ask (Magpie, arXiv 2406.08464). The answers are then made by `regenerate`, like those to any other prompts.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from dflash_lib.conversations.templates import render
from dflash_lib.files import atomic_path
from dflash_lib.progress import Progress
from dflash_lib.target.generate import sample_continuations
from dflash_lib.target.loading import Target, TargetError

_MARK = "PROMPT-GOES-HERE"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """num_prompts: how many different ones are wanted; max_new_tokens: a longer prompt is dropped, not cut;
    temperature and top_k: of the sampling; batch_size: drawn at once; min_words: shorter prompts are dropped. Raises
    ValueError for a value that can draw nothing."""

    num_prompts: int
    max_new_tokens: int = 48
    temperature: float = 1.0
    top_k: int = 50
    batch_size: int = 256
    min_words: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_new_tokens", "top_k", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1 is needed, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature: more than 0 is needed, got {self.temperature}")


def prompt_prefix(target: Target) -> str:
    """The chat template's text before the words of a first user turn. Raises TargetError when it cannot be told."""
    before, found, _ = render(target.tokenizer, [{"role": "user", "content": _MARK}]).partition(_MARK)
    if not found or not before:
        raise TargetError(f"{target.path}: the chat template puts nothing before a user's words, so nothing would make "
                          "the target write as a user")
    return before


def sample_prompts(target: Target, out: Path | str, options: PromptOptions) -> int:
    """Writes `out` (JSONL, one conversation of one user turn a line); returns how many batches it took.

    A pure function of target and options on one machine. Raises ValueError when `out` is there already, TargetError
    when hardly any draw ends within `max_new_tokens`.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out}: is there already. Move it away, or choose another name.")
    prefix = target.tokenizer(prompt_prefix(target), add_special_tokens=False)["input_ids"]
    prompts: dict[str, None] = {}  # ordered, each once
    batches = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with Progress(options.num_prompts, "prompts", "prompts") as progress:
        while len(prompts) < options.num_prompts:
            seed = int.from_bytes(hashlib.sha256(f"{options.seed},{batches}".encode()).digest()[:7], "big")
            for generation in sample_continuations(
                    target, prefix, options.batch_size, options.max_new_tokens, temperature=options.temperature,
                    top_k=options.top_k, seed=seed):
                text = target.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip()
                if generation.finish_reason == "stop" and len(text.split()) >= options.min_words:
                    prompts.setdefault(text)
            batches += 1
            if len(prompts) < batches * options.batch_size / 20:
                raise TargetError(f"{target.path}: of {batches * options.batch_size} sampled user turns only "
                                  f"{len(prompts)} were usable (ended within {options.max_new_tokens} tokens, new, "
                                  f"{options.min_words} words or more); raise max_new_tokens, or bring prompts of your "
                                  "own")
            progress.set(min(len(prompts), options.num_prompts))
    with atomic_path(out) as path, open(path, "w", encoding="utf-8") as f:
        for number, text in enumerate(list(prompts)[:options.num_prompts]):
            row = {"id": f"sampled-{options.seed}-{number:05d}", "kind": "sampled",
                   "messages": [{"role": "user", "content": text}]}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    return batches
