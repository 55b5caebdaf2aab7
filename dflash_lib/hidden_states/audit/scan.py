"""A look at every sample without the target: counts, ids, masks, values, duplicates."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.faults import SampleFault
from dflash_lib.hidden_states.formats.source import SourceSample, StateSource
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.target.loading import Target

MIN_DUPLICATE = 4  # shorter rows may well occur twice
GUESSES = 16  # samples whose length is read when not all are scanned, per sample to audit


@dataclass
class Scan:
    """lengths: tokens of each sample, -1 where they are not known; usable: whether it can be recomputed; num_scanned:
    samples whose values were looked at; num_tokens: their tokens; sizes: seen hidden sizes; num_slots: of each sample
    that can be read."""

    lengths: list[int]
    usable: list[bool]
    faults: list[SampleFault] = field(default_factory=list)
    num_scanned: int = 0
    num_tokens: int = 0
    sizes: set[int] = field(default_factory=set)
    num_slots: dict[int, int] = field(default_factory=dict)


def scan_source(source: StateSource, target: Target, everything: bool, num_samples: int, seed: int,
                layer_ids: Sequence[int] | None = None) -> Scan:
    """Scans all samples, or enough of them to choose from. layer_ids: stated by the user instead of the source."""
    num = len(source)
    scan = Scan([-1] * num, [False] * num)
    indices = range(num)
    if not everything and num > GUESSES * num_samples:
        drawn = np.random.default_rng(seed).choice(num, GUESSES * num_samples, replace=False).tolist()
        indices = sorted({0, num - 1, *drawn})
    embedding = target.embedding.weight
    zero_tokens = set(torch.nonzero((embedding == 0).all(-1))[:, 0].tolist())  # their states may be zeros, rightly
    by_ids: dict[bytes, list[int]] = {}
    by_states: dict[bytes, list[int]] = {}
    for i in indices:
        try:
            sample = source.read(i)
            bad = _malformed(sample, target, scan)
        except (StoreError, OSError) as error:
            missing = "no such file" in str(error) or isinstance(error, FileNotFoundError)
            code = faults.MISSING if missing else faults.UNREADABLE
            scan.faults.append(SampleFault(code, i, None, str(error), (code,)))
            continue
        if sample.note:
            scan.faults.append(SampleFault(faults.IDS_DIFFER, i, None, f"{sample.name}: {sample.note}",
                                           (faults.IDS_DIFFER, "note")))
        if bad:
            scan.faults.append(SampleFault(bad[0], i, None, f"{sample.name}: {bad[1]}", (bad[0], *bad[2:])))
        scan.num_scanned += 1
        if sample.input_ids is not None:
            scan.lengths[i] = len(sample.input_ids)
            scan.num_tokens += len(sample.input_ids)
        scan.usable[i] = (bad is None or bad[0] == faults.BAD_MASK) and len(sample.states) > 0
        if scan.usable[i]:
            scan.num_slots[i] = sample.states.shape[1]
        if bad is None or bad[0] == faults.BAD_MASK:
            _look(i, sample, zero_tokens, scan, by_ids, by_states)
    for same in by_ids.values():
        if len(same) > 1:
            scan.faults += [SampleFault(faults.DUPLICATED, i, None, f"{source.names[i]} has the tokens of "
                                        f"{source.names[same[0]]}", (faults.DUPLICATED,)) for i in same[1:]]
    duplicates = {i for same in by_ids.values() for i in same[1:]}
    for same in by_states.values():
        for i in same[1:]:
            if i not in duplicates:
                scan.faults.append(SampleFault(
                    faults.OTHER_SAMPLE, i, None, f"{source.names[i]} and {source.names[same[0]]} have the same last "
                    "row of states and other tokens", (faults.OTHER_SAMPLE,), evidence={"other": same[0]}))
    scan.faults += [*_slot_counts(source, scan, layer_ids), *_gaps(source)]
    return scan


def _slot_counts(source: StateSource, scan: Scan, layer_ids: Sequence[int] | None) -> list[SampleFault]:
    """Samples with another number of slots than is stated; where no sample has that many, than most samples have.
    They are not to be recomputed: which of their slots is missing, nothing says."""
    counts = Counter(scan.num_slots.values())
    if len(counts) < 2:
        return []
    ids = source.target_layer_ids if layer_ids is None else layer_ids
    stated = None if ids is None else len(ids) + (source.last is not None)
    right, why = (stated, "are stated") if stated in counts else (counts.most_common(1)[0][0], "most samples have")
    found = []
    for i, number in scan.num_slots.items():
        if number != right:
            scan.usable[i] = False
            found.append(SampleFault(faults.NUM_SLOTS, i, None, f"{source.names[i]}: {number} slots where {right} "
                                     f"{why}", (faults.NUM_SLOTS, number), evidence={"slots": number}))
    return found


def _malformed(sample: SourceSample, target: Target, scan: Scan) -> tuple | None:
    """(code, text, more of its key) for a sample that cannot be what it says, None for one that can."""
    if sample.states.ndim != 3:
        return faults.WRONG_SIZE, f"states of shape {list(sample.states.shape)}, not [rows, slots, hidden]"
    scan.sizes.add(sample.states.shape[-1])
    if sample.states.shape[-1] != target.hidden_size:
        return (faults.WRONG_SIZE, f"states are {sample.states.shape[-1]} wide, the target's hidden size is "
                f"{target.hidden_size}: they are of another model")
    if sample.scales is not None and not _fits(sample.scales, sample.states):
        return faults.UNREADABLE, f"scales {list(sample.scales.shape)} do not fit states {list(sample.states.shape)}"
    if sample.input_ids is None:
        return faults.BAD_IDS, "no token ids: nothing can be recomputed"
    ids, size = sample.input_ids, target.embedding.weight.shape[0]
    if len(ids) == 0:
        return faults.BAD_IDS, "no tokens at all"
    if ids.min() < 0 or ids.max() >= size:
        return faults.BAD_IDS, (f"token ids from {ids.min()} to {ids.max()} do not fit the target's vocabulary of "
                                f"{size}: another tokenizer's")
    if len(sample.states) == 0:
        return faults.FEWER, f"no states for {len(ids)} tokens"
    mask = sample.loss_mask
    if mask is not None and (len(mask) != len(ids) or not np.isin(mask, (0, 1)).all() or not mask.any()):
        what = (f"{len(mask)} entries for {len(ids)} tokens" if len(mask) != len(ids) else
                "nothing is supervised" if not mask.any() else f"values {sorted(set(mask.tolist()))[:5]}, not 0 and 1")
        return faults.BAD_MASK, f"loss mask: {what}", what if "supervised" in what else ""
    return None


def _fits(scales: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether the scales broadcast to the states, one for a token, or for a token and slot."""
    return scales.ndim == 3 and scales.shape[2] == 1 and all(
        n in (1, m) for n, m in zip(scales.shape[:2], states.shape[:2], strict=True))


def _look(i: int, sample: SourceSample, zero_tokens: set[int], scan: Scan, by_ids: dict, by_states: dict) -> None:
    """Values, counts and fingerprints of one sample."""
    states = sample.states
    largest = states.float().abs().amax(-1)  # [rows, K]; NaN stays NaN
    lost = ~largest.isfinite()
    rows, tokens = len(states), len(sample.input_ids)
    if lost.any():
        code = faults.FP16 if states.dtype == torch.float16 and not largest.isnan().any() else faults.NOT_FINITE
        slots = torch.nonzero(lost.any(0))[:, 0].tolist()
        scan.faults += [SampleFault(code, i, slot, f"{sample.name}: {int(lost[:, slot].sum())} of {rows} rows are not "
                                    f"finite, the first at {int(torch.nonzero(lost[:, slot])[0])}", (code,),
                                    int(lost[:, slot].sum())) for slot in slots]
    rightly = torch.zeros(rows, dtype=torch.bool)
    rightly[:tokens] = torch.tensor([k in zero_tokens for k in sample.input_ids[:rows].tolist()], dtype=torch.bool)
    zero = (largest == 0) & ~rightly[:, None]
    for slot in torch.nonzero(zero.any(0))[:, 0].tolist():
        first = int(torch.nonzero(zero[:, slot])[0])
        count = int(zero[:, slot].sum())
        scan.faults.append(SampleFault(faults.ZEROS, i, slot, f"{sample.name}: {count} of {rows} rows are zero, the "
                                       f"first at {first}", (faults.ZEROS,), count))
    if rows != tokens:
        code = faults.FEWER if rows < tokens else faults.MORE
        scan.faults.append(SampleFault(code, i, None, f"{sample.name}: {rows} rows of states for {tokens} tokens",
                                       (code,), abs(rows - tokens)))
    if tokens >= MIN_DUPLICATE:
        by_ids.setdefault(hashlib.blake2b(sample.input_ids.tobytes()).digest(), []).append(i)
        last = states[-1].contiguous()
        if not lost[-1].any() and not zero[-1].any() and not rightly[-1]:
            raw = last.view(torch.uint8).numpy().tobytes()
            by_states.setdefault(hashlib.blake2b(raw).digest(), []).append(i)


def _gaps(source: StateSource) -> list[SampleFault]:
    """What the reader knows to be missing or too many, and numbered names that leave one out."""
    found = []
    read = set(source.names)
    unread = [name for name in getattr(source, "missing", []) if name not in read]  # the others failed to be read
    extra = list(getattr(source, "extra", []))
    for names, what in ((unread, "samples ought to be there and have no file"), (extra, "samples have no row in the "
                                                                                 "data set")):
        if names:
            found.append(SampleFault(faults.MISSING, -1, None, f"{len(names)} {what}: {_shown(names)}",
                                     (faults.MISSING, what), evidence={"missing": names[:100]}))
    numbers = ["".join(c if c.isdigit() else " " for c in name).split() for name in source.names]
    if found or not all(numbers) or len(source) < 2 or source.format == "store":  # a store knows what it left out
        return found
    values = sorted(int(parts[-1]) for parts in numbers)
    absent = sorted(set(range(values[0], values[-1] + 1)) - set(values))
    if len(set(values)) != len(values) or not absent or len(absent) > len(values):
        return found  # the numbers mean something else
    return [SampleFault(faults.MISSING, -1, None, f"{len(absent)} numbers are left out among the samples' names: "
                        f"{_shown(absent)}", (faults.MISSING, "gap"), evidence={"missing": absent[:100]})]


def _shown(names: list) -> str:
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
