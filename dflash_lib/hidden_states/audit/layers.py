"""What each slot holds over all samples, against what is stated: ids off by one, slots swapped, a norm too many."""

from collections import Counter
from dataclasses import dataclass

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.faults import Finding
from dflash_lib.hidden_states.audit.reference import (
    EMBEDDING,
    LAYER,
    NORM_TWICE,
    NORMED,
    OTHER_NORM,
    UNIT_LENGTH,
)

# Faults under which a slot's layer is not known: the rows are no states of the row, or too few of them.
HIDING = {faults.UNRECOGNISED, faults.ZEROS, faults.NOT_FINITE, faults.OTHER_MODEL, faults.IDS_DIFFER}


@dataclass(frozen=True)
class HoldsSlot:
    """candidate: what most samples hold in the slot; sure: whether any sample shows it; odd: samples that hold another
    candidate, by that candidate."""

    slot: int
    candidate: int
    sure: bool
    odd: dict[int, list[int]]


def slot_holds(audited: Audited, slot: int) -> HoldsSlot:
    """The most common candidate among samples in which the slot is recognised."""
    seen: dict[int, list[int]] = {}
    for sample in audited.samples:
        reading = sample.readings[slot]
        fit = float(reading.fits.float().mean())
        if fit >= 0.3 or reading.explained and reading.explained not in HIDING:
            seen.setdefault(reading.candidate, []).append(sample.index)
    if not seen:
        return HoldsSlot(slot, audited.slots[slot], False, {})
    count = Counter({candidate: len(samples) for candidate, samples in seen.items()})
    claim = audited.claims[slot]
    best = max(count, key=lambda c: (count[c], c == claim))
    return HoldsSlot(slot, best, True, {c: samples for c, samples in seen.items() if c != best})


def layer_findings(audited: Audited, holds: list[HoldsSlot]) -> list[Finding]:
    """Everything that the slots hold and should not."""
    candidates, num_slots = audited.candidates, len(holds)
    samples = tuple(s.index for s in audited.samples)
    wrong = [h for h in holds if h.sure and _differs(audited, h)]
    found: list[Finding] = []
    numbered = [h for h in holds if h.sure and audited.claims[h.slot] is not None
                and candidates[audited.claims[h.slot]].kind in (LAYER, EMBEDDING)]
    tapped = [h for h in numbered if not (audited.source.last is not None and h.slot == num_slots - 1)]
    steps = {candidates[h.candidate].layer - candidates[audited.claims[h.slot]].layer for h in tapped
             if candidates[h.candidate].kind in (LAYER, EMBEDDING)}
    shifted = [h for h in tapped if h in wrong and candidates[h.candidate].kind in (LAYER, EMBEDDING)]
    if len(steps) == 1 and abs(next(iter(steps))) == 1 and shifted and len(shifted) == len(tapped):
        step = next(iter(steps))
        shifted += [h for h in wrong if h not in shifted and h.slot == num_slots - 1
                    and candidates[h.candidate].kind == LAYER]
        pairs = ", ".join(f"{candidates[audited.claims[h.slot]].name} is {candidates[h.candidate].name}"
                          for h in shifted)
        found.append(Finding(faults.LAYER_SHIFTED, f"every tapped slot holds the layer "
                             f"{'after' if step > 0 else 'before'} the stated one ({pairs})",
                             tuple(h.slot for h in shifted), samples, {"step": step}, ("relabel",)))
        wrong = [h for h in wrong if h not in shifted]
    else:
        held = sorted(h.candidate for h in tapped)
        order = [h for h in wrong if h in tapped]
        if order and held == sorted(audited.claims[h.slot] for h in tapped) and len(set(held)) == len(held):
            found.append(Finding(faults.SLOT_ORDER, "the stated layers are there, in another order: " + ", ".join(
                f"slot {h.slot} holds {candidates[h.candidate].name}" for h in order), tuple(h.slot for h in order),
                samples, {}, ("relabel",)))
            wrong = [h for h in wrong if h not in order]
    found += [_one(audited, h) for h in wrong]
    for hold in holds:
        for candidate, odd in hold.odd.items():
            found.append(Finding(
                faults.WRONG_LAYER, f"slot {hold.slot} holds {candidates[candidate].name} in sample"
                f"{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}, and "
                f"{candidates[hold.candidate].name} in the others", (hold.slot,), tuple(odd),
                {"holds": candidates[candidate].name}, ("drop samples", odd)))
    return found


def _differs(audited: Audited, hold: HoldsSlot) -> bool:
    """Whether the slot holds something else than stated; without a statement, something that is no plain layer."""
    claim = audited.claims[hold.slot]
    if claim is not None:
        stated, holds = audited.candidates[claim], audited.candidates[hold.candidate]
        last = audited.source.last is not None and hold.slot == len(audited.claims) - 1
        if last and stated.kind == LAYER and holds.kind == UNIT_LENGTH and stated.layer == holds.layer:
            return False  # what a repair leaves: the norm of it is right, and nothing else is made of it
        return claim != hold.candidate
    kind = audited.candidates[hold.candidate].kind
    may_be_normed = audited.source.last is None and hold.slot == len(audited.claims) - 1
    return kind != LAYER and not (kind == NORMED and may_be_normed)


def _one(audited: Audited, hold: HoldsSlot) -> Finding:
    candidates = audited.candidates
    holds, claim = candidates[hold.candidate], audited.claims[hold.slot]
    stated = None if claim is None else candidates[claim]
    last = audited.source.last is not None and hold.slot == len(audited.claims) - 1
    code, repair = faults.WRONG_LAYER, ("relabel",)
    if holds.kind == EMBEDDING:
        code = faults.EMBEDDING
    elif holds.kind == NORMED and (stated is None or stated.kind != NORMED):
        code, repair = faults.POST_NORM, ("unnorm",) if last else ("relabel",)
    elif holds.kind == UNIT_LENGTH:
        code = faults.OTHER_NORM
    elif holds.kind == OTHER_NORM:
        code, repair = faults.OTHER_NORM, ("unnorm",) if last else ("relabel",)
    elif holds.kind == NORM_TWICE:
        code, repair = faults.NORM_TWICE, None if last else ("relabel",)
    elif stated is not None and stated.kind == NORMED:
        code, repair = faults.PRE_NORM, ("relabel",)
    if last and holds.layer != audited.target.num_layers - 1:
        repair = ("drop last",)
    scores = audited.pooled[hold.slot]
    text = f"slot {hold.slot} is stated to hold {stated.name}" if stated else f"slot {hold.slot} states no layer"
    text += f" and holds {holds.name}"
    if code == faults.OTHER_NORM:
        text += ": scaled by (1 + w) where the target scales by w, or the reverse"
    middle = [float(s.direct.medians()[hold.slot, hold.candidate]) for s in audited.samples]
    evidence = {"score": float(scores[hold.candidate]), "median": sorted(middle)[len(middle) // 2]}
    if claim is not None:
        other = sorted(float(s.direct.medians()[hold.slot, claim]) for s in audited.samples)
        evidence["median_of_stated"] = other[len(other) // 2]
        text += f" (median distance {evidence['median']:.2g}, to what is stated {evidence['median_of_stated']:.2g})"
    return Finding(code, text, (hold.slot,), tuple(s.index for s in audited.samples), evidence, repair)
