"""Whether a planned repair makes right states of every sample that was recomputed: it is tried before it is offered."""

import torch
from torch import Tensor

from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.explain import AuditedSample, SlotReading
from dflash_lib.hidden_states.audit.matching import Rounding, compare
from dflash_lib.hidden_states.audit.reference import LAYER, NORMED, UNIT_LENGTH, Candidate, Reference, recompute
from dflash_lib.hidden_states.audit.repair import Repair, RepairedSource
from dflash_lib.hidden_states.schema import StoreError

WRITTEN = 2.0 ** -9  # the repaired states are rounded to bfloat16 once more


def check_repair(audited: Audited, repair: Repair) -> str:
    """"" when every audited sample that the repair keeps has the right states afterwards, else what has not."""
    dropped = set(repair.drop)
    kept = [sample for sample in audited.samples if sample.index not in dropped]
    if not kept:
        return "every sample that was recomputed would have to be left out"
    try:
        source = RepairedSource(audited.source, repair, audited.target)
        place = {i: at for at, i in enumerate(source.kept)}
        wrong = [text for sample in kept if (text := _wrong(audited, sample, source, place[sample.index]))]
    except StoreError as error:
        return str(error)
    return f"it leaves {wrong[0]}" + (f", and {len(wrong) - 1} samples more" if wrong[1:] else "") if wrong else ""


def _wrong(audited: Audited, sample: AuditedSample, source: RepairedSource, at: int) -> str:
    """Which rows of one repaired sample do not fit what the repair says they are."""
    repair, fixed = source.repair, source.read(at)
    ids = fixed.input_ids.tolist()
    if not ids:
        return f"no row of sample {sample.index}"
    prefix = ids == sample.ids[:len(ids)]  # a prefix's states are those of the whole row
    reference = sample.reference if prefix else recompute(audited.target, ids, audited.norm)
    states = fixed.states.float()
    absolute = _absolute(sample.rounding.absolute, repair, len(states))
    found = compare(states, Rounding(sample.rounding.relative + WRITTEN, absolute), reference, audited.level)
    for slot, layer in enumerate(repair.layer_ids):
        held = sample.readings[repair.slots[slot]]
        fits = found.fits[:, slot, audited.candidates.index(Candidate(LAYER, layer))]
        if not bool((fits | _excused(held, repair, fits, prefix)).all()):
            return _words(sample, repair.slots[slot], ~fits)
    if not repair.last:
        return ""
    last = audited.target.num_layers - 1
    held = sample.readings[repair.slots[-1]]
    fits = found.fits[:, -1, audited.candidates.index(Candidate(LAYER, last))]
    if repair.unnorm or audited.candidates[held.candidate].kind == UNIT_LENGTH:  # the norm of it is right, no more
        fits = _normed_fits(audited, states[:, -1:], absolute[:, -1:], sample, reference)
    return "" if bool((fits | _excused(held, repair, fits, prefix)).all()) else _words(sample, repair.slots[-1], ~fits)


def _excused(held: SlotReading, repair: Repair, fits: Tensor, prefix: bool) -> Tensor:
    """Rows that were a remark before the repair, bool [rows]."""
    return held.remarks[repair.shift:][:len(fits)] if prefix else torch.zeros_like(fits)


@torch.no_grad()
def _normed_fits(audited: Audited, states: Tensor, absolute: Tensor, sample: AuditedSample,
                 reference: Reference) -> Tensor:
    """For a last state whose length a norm took: whether the target's norm of it is right, bool [rows]."""
    normed = audited.norm(states.to(audited.target.device)).cpu()
    rounding = Rounding(sample.rounding.relative + 2 * WRITTEN, absolute)
    found = compare(normed, rounding, reference, audited.level)
    return found.fits[:, 0, audited.candidates.index(Candidate(NORMED, audited.target.num_layers - 1))]


def _absolute(absolute: Tensor, repair: Repair, rows: int) -> Tensor:
    """The stored type's smallest error, moved and scaled as the states are."""
    absolute = absolute.clone()
    for slot, factor in repair.factors.items():
        absolute[:, slot] /= abs(factor)
    return absolute[repair.shift:, repair.slots][:rows]


def _words(sample: AuditedSample, slot: int, wrong: Tensor) -> str:
    return f"{int(wrong.sum())} of {len(wrong)} rows of slot {slot} wrong in sample {sample.index}"
