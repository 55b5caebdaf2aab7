"""Makes the tiny target of a forked child misbehave by forward hooks: unusable states of chosen samples, hunger."""

import torch

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.target.loading import Target
from tests.hidden_states.survival import limits

VALUES = {"nan": float("nan"), "infinite": float("inf"), "zero": 0.0}
LAYER = 3  # a tapped one


def spoil(target: Target, prepared: PreparedRows, samples: dict[str, str]) -> None:
    """From now on the target yields unusable states for chosen samples, whatever batch they are in.

    samples: sample index -> one of VALUES: what one token's output of a layer is then.
    """
    rows = {tuple(prepared.row(int(index))[0].tolist()): VALUES[kind] for index, kind in samples.items()}
    newest: list[torch.Tensor] = []

    def note(_module, _args, kwargs):
        newest[:] = [kwargs["input_ids"]]

    def change(_module, _args, output):
        states = output[0] if isinstance(output, tuple) else output
        for ids, value in rows.items():
            for row, wanted in enumerate(newest[0].tolist()):
                if tuple(wanted[:len(ids)]) == ids:
                    states[row, len(ids) // 2] = value
        return output

    target.decoder.register_forward_pre_hook(note, with_kwargs=True)
    target.layers[LAYER].register_forward_hook(change)


def make_hungry(target: Target, bytes_per_token: int, more_bytes: int) -> None:
    """From now on each pass takes `bytes_per_token` for every padded token for a moment, as a large target would, and
    this process may not have more than `more_bytes` beyond what it has when the first pass begins."""
    limited = []

    def limit(_module, _args, _kwargs):
        if not limited:
            limited.append(True)
            limits.more_memory(more_bytes)

    def eat(_module, _args, output):
        states = output[0] if isinstance(output, tuple) else output
        torch.empty(states.shape[0] * states.shape[1] * bytes_per_token, dtype=torch.uint8)
        return output

    target.decoder.register_forward_pre_hook(limit, with_kwargs=True)
    target.layers[LAYER].register_forward_hook(eat)
