"""Rows beyond their limit that are no fault: what 16 bit arithmetic does to a few rows of the right states.

Rounding moves most rows a little and some far: a router that rounding tips over sends a token to other experts (and
every later token sees it), a recurrent state or a norm of nearly nothing magnifies. Such a row is still nearest to the
layer and the token that it is said to be. Measured on randomly initialised targets of 4 layers (3 seeds, computed in
bfloat16 and under autocast): dense hybrids have up to 3 % of rows out, the mixtures up to 15 %, and one of them
(GPT-OSS's kind) up to 29 %. Running with `reference.perturbed` under other seeds foretells that: 2 %, 13 % and 28 %.

States that were computed in float32 get no remarks.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.explain import RELATED, AuditedSample, SlotReading
from dflash_lib.hidden_states.audit.matching import nearest_rows, unrelated_distance
from dflash_lib.hidden_states.audit.reference import ROUNDING, perturbed, run_row

DENSE_SHARE = 0.03  # of a slot's recomputed rows
DENSE_ROWS, DENSE_PART = 2, 0.1  # in one sample at most so many rows, or so large a part
MIXTURE_TIMES, MIXTURE_MOST = 2.0, 0.4  # of what perturbed runs show; and never more than this
SEEDS = range(1, 9)
FLIPPED = 0.5  # a perturbed run moves the row by this part of what is seen at least
LENGTH_ALONE = 0.7  # direction over distance: below it the length is what is wrong, which rounding never does


@dataclass
class Remarks:
    """text: what was left out of the faults, and on what basis, "" when nothing was; num_rows: by slot."""

    text: str = ""
    num_rows: dict[int, int] = field(default_factory=dict)


def is_mixture(config) -> bool:
    """Whether the target routes tokens to experts."""
    return any((getattr(config, name, None) or 0) > 1 for name in
               ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))


def find_remarks(audited: Audited) -> Remarks:
    """Takes rows that are no fault off what is to be explained: `bad` to `remarks` in every reading."""
    found = Remarks()
    if audited.level == "float32" or not any(r.bad.any() for s in audited.samples for r in s.readings):
        return found
    mixture = is_mixture(audited.target.config)
    moved = {s.index: _moved(audited, s) for s in audited.samples} if mixture else {}
    shares = []
    for slot in range(len(audited.claims)):
        readings = [(s, s.readings[slot]) for s in audited.samples]
        rows = {s.index: _no_better(audited, s, r, moved.get(s.index)) for s, r in readings}
        number, total = sum(int(bad.sum()) for bad in rows.values()), sum(s.num_rows for s, _ in readings)
        share = DENSE_SHARE
        if mixture:
            out = torch.stack([(moved[s.index][:, :, slot] > r.limit.cpu()).sum(1) for s, r in readings]).sum(0)
            shares.append(float(out.max()) / total)
            share = min(MIXTURE_MOST, DENSE_SHARE + MIXTURE_TIMES * shares[-1])
        if not number or number > max(1, share * total):
            continue
        for sample, reading in readings:
            own = rows[sample.index]
            most = sample.num_rows if mixture else max(DENSE_ROWS, DENSE_PART * sample.num_rows)
            if not own.any() or own.sum() > most or own.sum() == sample.num_rows:
                continue
            reading.remarks, reading.bad = own, reading.bad & ~own
            found.num_rows[slot] = found.num_rows.get(slot, 0) + int(own.sum())
    if found.num_rows:
        found.text = _text(found.num_rows, shares)
    return found


def _text(num_rows: dict[int, int], shares: list[float]) -> str:
    where = ", ".join(f"{number} of slot {slot}" for slot, number in num_rows.items())
    basis = (f"the target is a mixture of experts: with arithmetic perturbed as bfloat16 does it, other experts are "
             f"chosen and up to {100 * max(shares):.2g} % of a slot's rows leave their limits; up to "
             f"{MIXTURE_TIMES:g} times that and {100 * DENSE_SHARE:g} % are allowed" if shares else
             f"up to {100 * DENSE_SHARE:g} % of a slot's rows are allowed, {DENSE_ROWS} rows or "
             f"{100 * DENSE_PART:g} % of one sample")
    return (f"Remark: rows beyond their limit ({where}) are taken for what 16 bit arithmetic does: no other layer, "
            f"token or sample explains them better, and they are few ({basis}).")


@torch.no_grad()
def _moved(audited: Audited, sample: AuditedSample) -> Tensor:
    """[seeds, rows, K] relative distances by which perturbed runs move each slot's candidate."""
    found = []
    for seed in SEEDS:
        with perturbed(audited.target, ROUNDING["bfloat16"], seed):
            noisy = run_row(audited.target, sample.ids)[:sample.num_rows]
        columns = []
        for reading in sample.readings:
            truth = sample.reference.of(reading.candidate)[:sample.num_rows]
            other = type(sample.reference)(noisy, sample.reference.noise, sample.reference.candidates,
                                           sample.reference.norm).of(reading.candidate)
            columns.append(((other - truth).norm(dim=-1) / truth.norm(dim=-1)).nan_to_num(nan=0.0, posinf=0.0))
        found.append(torch.stack(columns, dim=1).cpu())
    return torch.stack(found)


def _no_better(audited: Audited, sample: AuditedSample, reading: SlotReading, moved: Tensor | None) -> Tensor:
    """bool [rows]: bad rows that nothing explains better than the slot's own candidate and the row's own token."""
    slot, candidate = reading.slot, reading.candidate
    kept = torch.zeros_like(reading.bad)
    if candidate != audited.slots[slot] or audited.claims[slot] not in (None, candidate):
        return kept  # not what the slot is said to hold, or what other samples hold
    stored = sample.states[:sample.num_rows, slot].to(kept.device)
    where = torch.nonzero(reading.bad & stored.isfinite().all(-1) & (stored != 0).any(-1))[:, 0]
    if not len(where):
        return kept
    distance = reading.distance[where]
    direction = sample.direct.direction[where, slot, candidate]
    others = sample.direct.distance[where, slot].clone()
    others[:, candidate] = torch.inf
    best = others.min(-1).values
    for other in audited.samples:
        index, near = nearest_rows(stored[where], other.reference.of(candidate))
        best = torch.minimum(best, torch.where(index == where, torch.inf, near) if other is sample else near)
    near = distance < best
    if moved is None:
        near &= distance <= RELATED * unrelated_distance(sample.reference, candidate)
    else:  # other experts make an unlike state, nearer to tokens that were sent to them: where perturbed runs do so too
        flips = (moved[:, where.cpu(), slot].amax(0) >= FLIPPED * distance.cpu()).to(kept.device)
        near |= flips & (best > 2 * reading.limit.median())
    kept[where[near & (direction >= LENGTH_ALONE * distance)]] = True
    return kept
