"""Lets the target write user turns, too: prompts as varied as its own training, when no file of them is at hand.

An aligned model that is given its chat template up to the beginning of the user's words goes on with what a user would
ask (Magpie, arXiv 2406.08464). The answers are then made by `regenerate`, like those to any other prompts.
"""

import datetime
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash_lib.conversations.templates import render
from dflash_lib.files import atomic_path, write_json
from dflash_lib.progress import Progress
from dflash_lib.target.generate import sample_continuations
from dflash_lib.target.loading import Target, TargetError
from dflash_lib.target.resume import PartialFile, refuse_existing

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
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature: a number above 0 is needed, got {self.temperature}")


def prompt_prefix(target: Target) -> str:
    """The chat template's text before the words of a first user turn. Raises TargetError when it cannot be told."""
    before, found, _ = render(target.tokenizer, [{"role": "user", "content": _MARK}]).partition(_MARK)
    if not found or not before:
        raise TargetError(f"{target.path}: the chat template puts nothing before a user's words, so nothing would make "
                          "the target write as a user")
    return before


def sample_prompts(target: Target, out: Path | str, options: PromptOptions) -> int:
    """Writes `out` (JSONL, one conversation of one user turn a line) and `out` + ".meta.json"; returns how many batches
    it took.

    A pure function of target and options on one machine. Each batch is appended to `out` + ".partial" as soon as it is
    drawn, and a second call goes on behind the last of them, to the very same file. Raises ValueError when `out` is
    there already or the partial file was begun with other settings, TargetError when hardly any draw ends within
    `max_new_tokens`.
    """
    out = Path(out)
    refuse_existing(out)
    prefix = target.tokenizer(prompt_prefix(target), add_special_tokens=False)["input_ids"]
    settings = {"model": target.identity, "device": target.device.type, **asdict(options)}
    with PartialFile(out, settings) as partial:
        prompts, batches = _sample(target, prefix, options, partial)
        with atomic_path(out) as path, open(path, "w", encoding="utf-8") as f:
            for number, text in enumerate(prompts[:options.num_prompts]):
                row = {"id": f"sampled-{options.seed}-{number:05d}", "kind": "sampled",
                       "messages": [{"role": "user", "content": text}]}
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
            meta = {**settings, "date": datetime.date.today().isoformat(), "batches": batches}
            write_json(f"{out}.meta.json", meta)  # before `out` appears: who finds `out` finds its meta
        partial.remove()
    return batches


def _sample(target: Target, prefix: list[int], options: PromptOptions, partial: PartialFile) -> tuple[list[str], int]:
    """Enough different prompts, in order, and how many batches they took; what the partial file has is not drawn again
    (a line of it is what a batch had that was new)."""
    prompts: dict[str, None] = {}  # ordered, each once
    batches = 0
    for _, new in partial.rows(list):
        prompts.update(dict.fromkeys(new))
        batches += 1
    start = min(len(prompts), options.num_prompts)
    with Progress(options.num_prompts, "prompts", "prompts", start=start) as progress:
        while len(prompts) < options.num_prompts:
            new = [text for text in dict.fromkeys(_draw(target, prefix, options, batches)) if text not in prompts]
            partial.append(json.dumps(new, ensure_ascii=False))
            partial.keep()
            prompts.update(dict.fromkeys(new))
            batches += 1
            if len(prompts) < batches * options.batch_size / 20:
                partial.remove()  # the next call will have other settings
                raise TargetError(f"{target.path}: of {batches * options.batch_size} sampled user turns only "
                                  f"{len(prompts)} were usable (ended within {options.max_new_tokens} tokens, new, "
                                  f"{options.min_words} words or more); raise max_new_tokens, or bring prompts of your "
                                  "own")
            progress.set(min(len(prompts), options.num_prompts))
    return list(prompts), batches


def _draw(target: Target, prefix: list[int], options: PromptOptions, batch: int) -> list[str]:
    """The usable prompts of a batch, in order; a pure function of its number."""
    seed = int.from_bytes(hashlib.sha256(f"{options.seed},{batch}".encode()).digest()[:7], "big")
    drawn = sample_continuations(target, prefix, options.batch_size, options.max_new_tokens,
                                 temperature=options.temperature, top_k=options.top_k, seed=seed)
    texts = [target.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip()
             for generation in drawn if generation.finish_reason == "stop"]
    return [text for text in texts if len(text.split()) >= options.min_words]
