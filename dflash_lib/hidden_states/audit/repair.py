"""Repairs what can be repaired: a source that reads as the damaged one should have been, for `convert` to write.

Layer ids are stated anew, slots put in order or left out, rows moved back to their tokens, a factor taken out, the
final norm taken off the last state, and samples that nothing repairs left out.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_lib.hidden_states.audit import faults
from dflash_lib.hidden_states.audit.faults import Finding
from dflash_lib.hidden_states.audit.reference import LAYER, NORMED, OTHER_NORM, UNIT_LENGTH, Candidate, FinalNorm
from dflash_lib.hidden_states.formats.reading import Samples
from dflash_lib.hidden_states.formats.source import PRE_NORM, SourceSample
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.target.loading import Target


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What to do with every sample. slots: stored slots to keep, the layers' ascending, the last state's behind them;
    layer_ids: what they hold; last: whether the last of `slots` is the last state; unnorm: how the last state was
    normed ("" = not at all); shift: rows are moved this many tokens back (those stored early have
    lost their beginning, on which every later token depends: no repair); drop_first_id: the ids begin one too early;
    factors: slot -> what its states are divided by; drop: indices in the source to leave out."""

    slots: list[int]
    layer_ids: list[int]
    last: bool
    unnorm: str = ""
    shift: int = 0
    drop_first_id: bool = False
    factors: dict[int, float] = field(default_factory=dict)
    drop: list[int] = field(default_factory=list)

    def describe(self) -> list[str]:
        """What is done, as lines."""
        lines = [f"keeps slots {self.slots} as outputs of layers {self.layer_ids}"
                 f"{' and the last state' if self.last else ''}"]
        if self.unnorm:
            lines.append("divides the last state by the norm's weight, so that norm(it) is right (its length is lost)")
        if self.shift:
            lines.append(f"moves every row {self.shift} tokens back; tokens that lose their row are cut off")
        if self.drop_first_id:
            lines.append("drops each sample's first token id, which has no state, and the last row, which has no token")
        lines += [f"divides slot {slot} by {factor:.6g}" for slot, factor in self.factors.items()]
        if self.drop:
            shown = ", ".join(map(str, self.drop[:12])) + (", ..." if len(self.drop) > 12 else "")
            lines.append(f"leaves out {len(self.drop)} samples, to be extracted again: {shown}")
        return lines


def plan_repair(findings: Sequence[Finding], holds: Sequence[Candidate], has_last: bool,
                num_layers: int) -> tuple[Repair | None, str]:
    """The repair of an audited source, or None and why there is none.

    holds: what each slot holds; has_last: whether the last slot is the last state.
    """
    hopeless = [f for f in findings if f.repair is None]
    if hopeless:
        return None, f"nothing repairs this: {'; '.join(dict.fromkeys(f.fault for f in hopeless))}. Extract again."
    done = {f.repair[0]: f.repair for f in findings}
    factors = {slot: factor for f in findings if f.repair[0] == "scale" for slot, factor in f.repair[1].items()}
    shifts = {f.repair[1] for f in findings if f.repair[0] == "shift"}
    if len(shifts) > 1:
        return None, f"rows are shifted by {sorted(shifts)} tokens. Extract again."
    drop = sorted({i for f in findings if f.repair[0] == "drop samples" for i in f.repair[1]})
    tapped = range(len(holds) - has_last)
    layers = {}
    for slot in tapped:
        one = holds[slot]
        if one.kind == LAYER and one.layer not in layers:
            layers[one.layer] = slot
    last = has_last and "drop last" not in done
    unnorm = ""
    if last:
        final = holds[-1]
        unnorm = final.kind if final.kind in (NORMED, OTHER_NORM) else ""
        last = final.layer == num_layers - 1 and final.kind in (LAYER, NORMED, OTHER_NORM, UNIT_LENGTH)
    if not layers:
        return None, "no slot holds the plain output of a layer. Extract again."
    ids = sorted(layers)
    return Repair(slots=[layers[k] for k in ids] + ([len(holds) - 1] if last else []), layer_ids=ids, last=last,
                  unnorm=unnorm, shift=done.get("shift", ("", 0))[1], drop_first_id="drop first id" in done,
                  factors=factors, drop=drop), ""


class RepairedSource(Samples):
    """Another source with a Repair applied to every sample that it keeps; states are decoded, as bfloat16."""

    format = "repaired"
    encoding = "bf16"

    def __init__(self, source: Samples, repair: Repair, target: Target):
        self.source, self.repair = source, repair
        self.gain = FinalNorm(target).gain if repair.unnorm == NORMED else (
            FinalNorm(target).other_gain if repair.unnorm == OTHER_NORM else None)
        if repair.unnorm and self.gain is None:
            raise StoreError("the last state was normed in a way that cannot be taken off; extract it again")
        self.path = Path(getattr(source, "path", "states"))
        dropped = set(repair.drop)
        self.kept = [i for i in range(len(source)) if i not in dropped]
        if not self.kept:
            raise StoreError(f"{self.path}: every sample would have to be left out; extract again")
        self.names = [source.names[i] for i in self.kept]
        self.target_layer_ids = list(repair.layer_ids)
        self.last = PRE_NORM if repair.last else None
        self.missing, self.extra = [], []

    def read(self, i: int) -> SourceSample:
        repair, sample = self.repair, self.source.read(self.kept[i])
        if sample.input_ids is None or sample.loss_mask is None or len(sample.states) != len(sample.input_ids):
            raise StoreError(f"{self.path}, {sample.name}: rows, token ids and loss mask do not fit each other; an "
                             "audit with --scan all names every such sample")
        states, ids, mask = sample.decoded(), sample.input_ids, sample.loss_mask
        if states.shape[1] <= max(repair.slots):
            raise StoreError(f"{self.path}, {sample.name}: {states.shape[1]} slots where the repair keeps slots "
                             f"{repair.slots}; an audit with --scan all names every such sample")
        for slot, factor in repair.factors.items():
            states[:, slot] /= factor
        states = states[:, repair.slots]
        if repair.unnorm:
            states[:, -1] /= self.gain.cpu()
        if repair.shift > 0:
            states, ids, mask = states[repair.shift:], ids[:-repair.shift], mask[:-repair.shift]
        if repair.drop_first_id:
            states, ids, mask = states[:-1], ids[1:], mask[1:]
        return replace(sample, states=states.to(torch.bfloat16), scales=None, input_ids=np.ascontiguousarray(ids),
                       loss_mask=np.ascontiguousarray(mask))

    def identity(self) -> dict[str, Any]:
        own = self.source.identity() if hasattr(self.source, "identity") else {"format": self.source.format}
        repair = asdict(self.repair)
        repair["factors"] = {str(slot): factor for slot, factor in repair["factors"].items()}
        return {**own, "repair": repair}


def to_extract_again(findings: Sequence[Finding]) -> list[int]:
    """Indices of samples whose states nothing repairs."""
    again = {faults.DUPLICATED}
    return sorted({i for f in findings if f.fault not in again and (f.repair is None or f.repair[0] == "drop samples")
                   for i in f.samples})
