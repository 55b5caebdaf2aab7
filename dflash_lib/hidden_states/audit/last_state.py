"""The last state of a store that does not keep it as a slot of every token: beside fp8, at supervised rows only, or as
the target's top-k logits. It is recomputed and compared like a slot, at the rows that are stored."""

import torch
from torch import Tensor

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.context import Audited
from dflash_lib.hidden_states.audit.explain import AuditedSample
from dflash_lib.hidden_states.audit.faults import SampleFault
from dflash_lib.hidden_states.audit.matching import (
    ARITHMETIC,
    LARGEST_LIMIT,
    WORST_TOKEN,
    compare,
    stored_rounding,
)
from dflash_lib.hidden_states.audit.reference import LAYER, NORMED, ROUNDING, Candidate
from dflash_lib.hidden_states.formats.source import SourceSample
from dflash_lib.hidden_states.store import StoredSample
from dflash_lib.target.loading import Target

# A state that is off by a share of its length moves the logits by about that share of their deviation over the
# vocabulary; not all directions count alike, hence the margin. Logits of another row differ by 1 to 2.
LOGIT_MARGIN = 4.0


def last_state_faults(audited: Audited, target: Target) -> list[SampleFault]:
    """What is wrong with the stored last states of the audited samples; nothing where they are slots, or not stored."""
    if not getattr(audited.source, "last_elsewhere", ""):
        return []
    found = []
    for sample in audited.samples:
        stored = audited.source.read_whole(sample.index)
        last = audited.candidates.index(Candidate(LAYER, target.num_layers - 1))
        rows = torch.arange(len(stored.input_ids)) if stored.last_rows is None else stored.last_rows
        if not len(rows):
            continue
        wrong = _states(audited, sample, stored, rows, last) if stored.top_logits is None else (
            _logits(audited, sample, stored, rows, last, target))
        found += [wrong] if wrong is not None else []
    return found


def _states(audited: Audited, sample: AuditedSample, stored: StoredSample, rows: Tensor, last: int
            ) -> SampleFault | None:
    states = torch.zeros(len(stored.input_ids), 1, stored.aux_hidden_states.shape[-1], dtype=torch.bfloat16)
    states[rows, 0] = stored.last_hidden_state_prenorm
    whole = SourceSample(name=sample.name, sample_id="", input_ids=None, loss_mask=None, states=states)
    found = compare(whole.decoded(), stored_rounding(whole), sample.reference, audited.level)
    distance, limit = found.distance[rows, 0], found.limit[rows, 0]  # [R, C]
    num_wrong = int((distance[:, last] > limit[:, last]).sum())
    if not num_wrong:
        return None
    nearest = int(distance.median(dim=0).values.argmin())
    holds = audited.candidates[nearest]
    code, text = faults.UNRECOGNISED, "nothing that was recomputed is near"
    if nearest == last:
        text = "the others are"
    elif (distance[:, nearest] <= limit[:, nearest]).float().mean() > 0.5:
        code = faults.POST_NORM if holds == Candidate(NORMED, holds.layer) else faults.WRONG_LAYER
        text = f"they hold {holds.name} (median distance {float(distance[:, nearest].median()):.2g})"
    return SampleFault(code, sample.index, None,
                       f"{sample.name}: last_hidden_state_prenorm: {num_wrong} of {len(rows)} stored rows are not "
                       f"{audited.candidates[last].name} (median distance {float(distance[:, last].median()):.2g}); "
                       f"{text}", (code, "last state"), num_wrong)


@torch.no_grad()
def _logits(audited: Audited, sample: AuditedSample, stored: StoredSample, rows: Tensor, last: int, target: Target
            ) -> SampleFault | None:
    top = stored.top_logits
    states = sample.reference.of(last)[rows.to(sample.reference.residual.device)]
    dtype = next(target.final_norm.parameters()).dtype
    num_wrong, distances = 0, []
    noise = sample.reference.noise[:, last].cpu()
    noise = torch.maximum(noise, noise.median())[rows] * ROUNDING[audited.level] / ROUNDING["bfloat16"]
    limit = LOGIT_MARGIN * (WORST_TOKEN * noise + ARITHMETIC)
    for start in range(0, len(rows), 128):
        part = slice(start, start + 128)
        own = target.head(target.final_norm(states[part].to(dtype))).float().cpu()  # [r, V]
        spread = own.std(dim=-1)
        ids = top.ids[part].long()
        off = (top.logits[part] - own.gather(1, ids)).abs().amax(dim=-1)
        off = torch.maximum(off, (top.logsumexp[part] - own.logsumexp(dim=-1)).abs()) / spread
        # the k largest: no stored one may be below what is left out by more than that
        left_out = own.scatter(1, ids, -torch.inf).amax(dim=-1)
        off = torch.maximum(off, ((left_out - top.logits[part].amin(dim=-1)) / spread).clamp(min=0))
        distances.append(off)
        head = ROUNDING[audited.level] * own.abs().amax(dim=-1) / spread  # the logits' own rounding
        num_wrong += int((~(off <= (limit[part] + head).clamp(max=LARGEST_LIMIT))).sum())
    if not num_wrong:
        return None
    return SampleFault(faults.TOP_LOGITS, sample.index, None,
                       f"{sample.name}: {num_wrong} of {len(rows)} rows of top-k logits are not the target's: off by "
                       f"{float(torch.cat(distances).median()):.2g} of the logits' deviation in the median row",
                       (faults.TOP_LOGITS,), num_wrong)
