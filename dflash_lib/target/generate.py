"""Batched greedy generation with the target: left padding with its mask, which matches unbatched greedy decoding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from dflash_lib.target.loading import Target, TargetError


@dataclass(frozen=True)
class Generation:
    """token_ids: what the target generated, its end-of-turn token included; finish_reason: "stop" or "length"."""

    token_ids: list[int]
    finish_reason: str


def stop_token_ids(target: Target) -> list[int]:
    """The ids that end a turn: the generation config's and the tokenizer's. Raises TargetError when there is none."""
    stop = target.model.generation_config.eos_token_id
    stop = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    stop = sorted({*stop, target.tokenizer.eos_token_id} - {None})
    if not stop:
        raise TargetError(f"{target.path}: neither generation_config.json nor the tokenizer names an eos_token, so no "
                          "answer would ever end")
    return stop


@contextmanager
def _plain_generation(model) -> Iterator[None]:
    """Puts the folder's generation settings aside: Transformers would mix them into those of the call."""
    folders_own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = folders_own


@torch.inference_mode()
def generate_batch(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[Generation]:
    """Continues each prompt (token ids) greedily by up to `max_new_tokens` tokens.

    The target's own choices: penalties and other habits in its generation_config.json do not apply here, since
    verifying drafts knows no such thing. Raises TargetError for an empty prompt.
    """
    if not prompts:
        return []
    if not all(prompts):
        raise TargetError(f"generate: prompt {prompts.index([])} is empty; at least one token is needed")
    stop = stop_token_ids(target)
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), stop[0], dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt):] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt):] = 1
    with _plain_generation(target.model):
        output = target.model.generate(
            input_ids=input_ids.to(target.device), attention_mask=attention_mask.to(target.device),
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=stop[0])
    generations = []
    for row in output[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), None)
        generations.append(Generation(row, "length") if end is None else Generation(row[:end + 1], "stop"))
    return generations
