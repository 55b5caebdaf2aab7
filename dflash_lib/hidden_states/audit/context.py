"""What the parts of an audit share while it runs."""

from dataclasses import dataclass, field

from torch import Tensor

from dflash_lib.hidden_states.audit.explain import AuditedSample
from dflash_lib.hidden_states.audit.reference import Candidate, FinalNorm, Reference, recompute
from dflash_lib.hidden_states.formats.source import StateSource
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.target.loading import Target


@dataclass
class Audited:
    """What the parts of an audit share. lengths: tokens of every sample, -1 where it cannot be read; ids: token ids of
    samples read so far; level: the type that the states were computed in, "float32" or "bfloat16"; claims: per slot
    the index of the candidate that the source states, None where it states nothing; slots: per slot the candidate that
    most samples hold; references: of the samples recomputed; remark: on rows
    beyond their limit that are no fault."""

    source: StateSource
    target: Target
    norm: FinalNorm
    candidates: list[Candidate]
    lengths: list[int]
    claims: list[int | None]
    level: str = "bfloat16"
    samples: list[AuditedSample] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    pooled: Tensor | None = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    references: dict[int, Reference] = field(default_factory=dict)
    hints: list[tuple] = field(default_factory=list)
    searched: int = 0
    remark: str = ""

    def read_ids(self, i: int) -> list[int] | None:
        """Token ids of a sample, None when it has none that the target could run."""
        if i not in self.ids:
            if not 0 <= i < len(self.source):
                return None
            try:
                ids = self.source.read(i).input_ids
            except (StoreError, OSError):
                return None  # the scan has said so
            if ids is None or not usable_ids(ids, self.target):
                return None
            self.ids[i] = [int(k) for k in ids]
        return self.ids[i]

    def reference(self, i: int) -> Reference | None:
        """The sample recomputed, kept."""
        ids = self.read_ids(i)
        if ids is not None and i not in self.references:
            self.references[i] = recompute(self.target, ids, self.norm)
        return self.references.get(i)


def usable_ids(ids, target: Target) -> bool:
    """Whether the target can run them."""
    return len(ids) > 0 and int(min(ids)) >= 0 and int(max(ids)) < target.embedding.weight.shape[0]
