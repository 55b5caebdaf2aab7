"""What a shard stores of a captured sample: bf16 or fp8 aux states, and the last state as far as a loss needs it.

Encoding runs on the model's device, so that only what is stored is copied to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import (
    AUX,
    AUX_SCALES,
    FP8,
    FP8_LARGEST,
    FP8_LARGEST_CODE,
    INFINITE,
    LAST,
    LAST_ROWS,
    TOPK_IDS,
    TOPK_LOGITS,
    TOPK_LOGSUMEXP,
    StoreError,
    get_encoding,
    row_magnitudes,
)
from dflash_lib.target.capture import CapturedSample
from dflash_lib.target.loading import Target

FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float()  # of each code
HEAD_TOKENS = 256  # rows whose logits over the whole vocabulary are in memory at a time


@dataclass(frozen=True)
class EncodedSample:
    """tensors: by dataset name, as stored (`plan.datasets` has dtypes and shapes); rows of the last state are numbered
    within the sample."""

    tensors: dict[str, Tensor]


def predicting_rows(loss_mask: np.ndarray) -> np.ndarray:
    """int64 [R]: the token rows that predict a supervised token, each the one before it. loss_mask [T]."""
    return np.flatnonzero(np.asarray(loss_mask)[1:]).astype(np.int64)


def num_last_rows(plan: ExtractionPlan, masks: Sequence[np.ndarray]) -> int:
    """Rows of the last state that samples with these loss masks store."""
    if plan.last_state == "none":
        return 0
    return sum(len(mask) if plan.last_state == "all" else len(predicting_rows(mask)) for mask in masks)


def quantize_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Float states [..., H] as float8_e4m3fn codes of the same shape and float32 scales [...]: value = code * scale.

    The largest magnitude of each row gets the largest code, 240. A row of zeros has scale 0, one with a value that is
    not finite a scale that is not.
    """
    states = states.float()
    scales = states.abs().amax(dim=-1) / FP8_LARGEST
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (states / divisor[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8), scales


def dequantize_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., H] of what `quantize_fp8` gave."""
    if codes.device.type == "cpu":  # PyTorch's own conversion takes there six times as long as a look-up of each code
        values = FP8_VALUES.index_select(0, codes.contiguous().view(torch.uint8).reshape(-1).int()).view(codes.shape)
    else:
        values = codes.float()
    return values * scales[..., None]


@torch.no_grad()
def target_topk(target: Target, last_prenorm: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The target's k largest logits at rows of its last state [R, H]: ids int32 [R, k], logits float32 [R, k] in
    descending order, logsumexp over the whole vocabulary float32 [R]."""
    ids, values, sums = [], [], []
    for part in last_prenorm.split(HEAD_TOKENS):
        logits = target.head(target.final_norm(part)).float()
        largest = logits.topk(k, dim=-1)
        ids.append(largest.indices.int())
        values.append(largest.values)
        sums.append(logits.logsumexp(dim=-1))
    if not ids:
        empty = last_prenorm.new_zeros((0, k), dtype=torch.float32)
        return empty.int(), empty, empty[:, 0]
    return torch.cat(ids), torch.cat(values), torch.cat(sums)


def encode_sample(target: Target | None, plan: ExtractionPlan, loss_mask: np.ndarray,
                  sample: CapturedSample) -> EncodedSample:
    """Encodes captured states of any float dtype as `plan` says, on their device. target: needed for the top-k logits
    only. Raises StoreError when the plan needs a last state that was not captured."""
    aux, last = sample.aux_hidden_states, sample.last_hidden_state_prenorm
    if get_encoding(plan.encoding).fp8:
        codes, scales = quantize_fp8(aux)
        tensors = {AUX: codes, AUX_SCALES: scales}
    else:
        tensors = {AUX: aux.to(torch.bfloat16)}
    if plan.last_state == "none":
        return EncodedSample(tensors)
    if last is None:
        raise StoreError(f"last_state {plan.last_state!r} needs the last state, which was not captured")
    if plan.last_state == "all":
        return EncodedSample({**tensors, LAST: last.to(torch.bfloat16)})
    rows = torch.from_numpy(predicting_rows(loss_mask))
    last = last[rows.to(last.device)]
    if plan.last_state == "supervised":
        return EncodedSample({**tensors, LAST: last.to(torch.bfloat16), LAST_ROWS: rows})
    ids, logits, logsumexp = target_topk(target, last, plan.topk)
    return EncodedSample({**tensors, LAST_ROWS: rows, TOPK_IDS: ids, TOPK_LOGITS: logits, TOPK_LOGSUMEXP: logsumexp})


def bad_rows(name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """bool [n, ...] of a dataset's raw rows: not finite, and all zero. None for a dataset of other things than values.

    fp8 codes count as zero where all are, and as not finite where one is beyond the largest code, which no row has.
    """
    if name in (AUX, LAST) and raw.dtype == np.uint16:
        magnitudes = row_magnitudes(raw)
        return magnitudes >= INFINITE, magnitudes == 0
    if name == AUX:
        largest = (raw & np.uint8(0x7F)).max(axis=-1)
        return largest > FP8_LARGEST_CODE, largest == 0
    if name == AUX_SCALES:
        return ~np.isfinite(raw), raw == 0
    if name == TOPK_LOGITS:
        finite = np.isfinite(raw).all(axis=-1)
        return ~finite, np.zeros_like(finite)
    return None


def find_bad(raws: dict[str, np.ndarray]) -> str:
    """What is wrong with a sample's states, "" when nothing: not finite, or all-zero rows. raws: `to_raw` of an encoded
    sample's tensors, by dataset."""
    for name, raw in raws.items():
        found = bad_rows(name, raw)
        if found is None:
            continue
        infinite, zero = int(found[0].sum()), int(found[1].sum())
        if infinite:
            return f"{infinite} of {found[0].size} rows not finite"
        if zero:
            return f"{zero} of {found[1].size} rows all zero"
    return ""
