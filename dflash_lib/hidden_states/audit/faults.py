"""The names of what an audit can find, and how it is reported."""

from dataclasses import dataclass, field
from typing import Any

LAYER_SHIFTED = "layer ids shifted"
WRONG_LAYER = "another layer"
SLOT_ORDER = "slots in another order"
EMBEDDING = "the embedding"
POST_NORM = "post-norm instead of pre-norm"
PRE_NORM = "pre-norm instead of post-norm"
OTHER_NORM = "wrong kind of norm"
NORM_TWICE = "normed twice"
TOKENS_SHIFTED = "states shifted by tokens"
ZEROS = "zero states"
NOT_FINITE = "NaN or infinity"
FP16 = "fp16 overflow"
MISREAD = "bits read as another type"
SCALED = "scaled by one factor"
ROW_SCALES = "scales per row lost"
OTHER_SAMPLE = "rows of another sample"
ROWS_MOVED = "rows out of order"
BOS = "first token added"
IDS_SHIFTED = "token ids shifted"
IDS_DIFFER = "other token ids"
LEFT_PADDING = "left padding without a mask"
PACKING = "packed behind another sample"
FEWER = "fewer states than tokens"
MORE = "more states than tokens"
DUPLICATED = "duplicated samples"
MISSING = "missing samples"
UNREADABLE = "unreadable samples"
OTHER_MODEL = "another model or fine-tune"
UNRECOGNISED = "not recognised"
BAD_IDS = "token ids that cannot be"
BAD_MASK = "loss mask that cannot be"
WRONG_SIZE = "another model's size"
NUM_SLOTS = "another number of slots"
TOP_LOGITS = "top-k logits of something else"

# What a trainer reads wrongly when it is there: these are about tokens or files, the others about stored states.
ABOUT_DATA = frozenset({DUPLICATED, MISSING, BAD_IDS, BAD_MASK, UNREADABLE})


@dataclass(frozen=True)
class SampleFault:
    """One fault in one sample. slot: position in the stored K, None = all of them; text: what was seen, with numbers;
    key: what must be equal for faults to be one finding; num_tokens: affected; evidence: JSON values."""

    code: str
    sample: int
    slot: int | None
    text: str
    key: tuple = ()
    num_tokens: int = 0
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One fault over all slots and samples that it was seen in.

    fault: one of the names above; text: what is wrong, with the evidence; slots: positions in the stored K, empty = no
    slot in particular; samples: indices in the source where it was seen; repair: (verb, arguments...) that `repair`
    can carry out, None where only extracting again helps.
    """

    fault: str
    text: str
    slots: tuple[int, ...]
    samples: tuple[int, ...]
    evidence: dict[str, Any] = field(default_factory=dict)
    repair: tuple | None = None
