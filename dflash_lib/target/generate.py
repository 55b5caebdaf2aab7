"""Batched generation with the target: greedy with left padding and its mask, which matches unbatched greedy decoding;
and sampling from one prompt."""

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
    verifying drafts knows no such thing. Raises TargetError for an empty prompt, and for one that leaves no room for
    the answer within the target's positions.
    """
    if not prompts:
        return []
    if not all(prompts):
        raise TargetError(f"generate: prompt {prompts.index([])} is empty; at least one token is needed")
    stop = stop_token_ids(target)
    longest = max(map(len, prompts))
    most = getattr(target.config, "max_position_embeddings", None)
    if most is not None and longest + max_new_tokens > most:
        raise TargetError(f"generate: a prompt of {longest} tokens and {max_new_tokens} more are beyond the target's "
                          f"{most} positions (max_position_embeddings); take it out, or ask for fewer tokens")
    input_ids = torch.full((len(prompts), longest), stop[0], dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt):] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt):] = 1
    with _plain_generation(target.model):
        output = target.model.generate(
            input_ids=input_ids.to(target.device), attention_mask=attention_mask.to(target.device),
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop, pad_token_id=stop[0])
    return _generations(output[:, longest:], stop)


@torch.inference_mode()
def sample_continuations(target: Target, prompt: list[int], num: int, max_new_tokens: int, *, temperature: float,
                         top_k: int, seed: int) -> list[Generation]:
    """Continues one prompt (token ids) `num` times by sampling; the global random state is left as it was."""
    stop = stop_token_ids(target)
    input_ids = torch.tensor([prompt] * num, device=target.device)
    devices = [target.device] if target.device.type == "cuda" else []
    with _plain_generation(target.model), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        output = target.model.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens,
            do_sample=True, temperature=temperature, top_k=top_k, eos_token_id=stop, pad_token_id=stop[0])
    return _generations(output[:, len(prompt):], stop)


def _generations(new_tokens: torch.Tensor, stop: list[int]) -> list[Generation]:
    """Each row up to its first stop token."""
    generations = []
    for row in new_tokens.tolist():
        end = next((i for i, token in enumerate(row) if token in stop), None)
        generations.append(Generation(row, "length") if end is None else Generation(row[:end + 1], "stop"))
    return generations
