"""Batched greedy generation with the target: left padding with its mask, which matches unbatched greedy decoding."""

from dataclasses import dataclass

import torch

from dflash_lib.target.loading import Target


@dataclass(frozen=True)
class Generation:
    """token_ids: what the target generated, its end-of-turn token included; finish_reason: "stop" or "length"."""

    token_ids: list[int]
    finish_reason: str


def stop_token_ids(target: Target) -> list[int]:
    """The ids that end a turn: the generation config's and the tokenizer's."""
    stop = target.model.generation_config.eos_token_id
    stop = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
    return sorted({*stop, target.tokenizer.eos_token_id} - {None})


@torch.inference_mode()
def generate_batch(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[Generation]:
    """Continues each prompt (token ids) greedily by up to `max_new_tokens` tokens."""
    stop = stop_token_ids(target)
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), stop[0], dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt):] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt):] = 1
    output = target.model.generate(
        input_ids=input_ids.to(target.device), attention_mask=attention_mask.to(target.device),
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=stop[0])
    generations = []
    for row in output[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), None)
        generations.append(Generation(row, "length") if end is None else Generation(row[:end + 1], "stop"))
    return generations
