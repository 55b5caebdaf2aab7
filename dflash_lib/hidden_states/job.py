"""The job file of an extraction, and what a store holds and lacks when it begins.

The launcher of node 0 writes the job into the log folder before it starts torchrun, and removes it at the end. Its path
is all that a worker is told.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.files import read_json, write_json
from dflash_lib.hidden_states.plan import ExtractionPlan
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import read_shard_index
from dflash_lib.hidden_states.verify import max_quarantined

JOB_FILE = "extraction.job.json"
NUM_SHOWN = 3  # quarantined samples that an error names


@dataclass(frozen=True, kw_only=True)
class ExtractionJob:
    """store, model, prepared: absolute paths; dtype, device ("cpu", "cuda" or one that PyTorch knows); todo: shards to
    extract, the largest first; num_quarantined and quarantined: samples left out by the shards that are finished, and
    the first of them in words; threads of a worker."""

    store: str
    model: str
    prepared: str
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    todo: list[int]
    num_quarantined: int = 0
    quarantined: list[str] = field(default_factory=list)

    def save(self, log_dir: Path | str) -> Path:
        """Writes the job file into `log_dir` and returns its path."""
        path = Path(log_dir) / JOB_FILE
        write_json(path, asdict(self))
        return path

    @classmethod
    def load(cls, path: Path | str) -> "ExtractionJob":
        """Reads a job file. Raises StoreError when it is none of this version."""
        try:
            return cls(**read_json(path))
        except (TypeError, OSError, ValueError) as error:
            raise StoreError(f"{path}: no job of this version ({error})") from error

    def open(self) -> tuple[ExtractionPlan, PreparedRows]:
        """The store's plan and the rows. Raises StoreError when the rows are not those of the plan."""
        plan, prepared = ExtractionPlan.load(self.store), PreparedRows.load(self.prepared)
        if prepared.fingerprint != plan.data["fingerprint"]:
            raise StoreError(f"{self.prepared}: not the rows that {self.store} was planned for")
        return plan, prepared


@dataclass(frozen=True)
class StoreScan:
    """missing: shards that have to be extracted, the largest first; damaged: those of them that are there, and what is
    wrong; num_quarantined, quarantined: samples that finished shards left out, and the first of them in words."""

    missing: list[int]
    damaged: dict[int, str]
    num_quarantined: int
    quarantined: list[str]


def scan_store(store: Path | str, plan: ExtractionPlan, sample_ids: list[str]) -> StoreScan:
    """Looks into every shard's index. Largest first: a slow GPU then delays the end by a small shard."""
    missing, damaged, quarantined = [], {}, []
    for shard in range(len(plan.shards)):
        try:
            left_out = json.loads(read_shard_index(store, plan, shard).quarantined)
        except FileNotFoundError:
            missing.append(shard)
        except StoreError as error:
            missing.append(shard)
            damaged[shard] = str(error)
        else:
            quarantined += left_out
    missing.sort(key=lambda shard: (-plan.shard_tokens[shard], shard))
    return StoreScan(missing, damaged, len(quarantined), describe_quarantined(quarantined[:NUM_SHOWN], sample_ids))


def describe_quarantined(entries: list[dict], sample_ids: list[str]) -> list[str]:
    """Each entry of a shard's attribute `quarantined` in words: the sample's row and id, the reason."""
    return [f"sample {entry['sample_index']} ({sample_ids[entry['sample_index']]}): {entry['reason']}"
            for entry in entries]


def check_quarantined(num: int, shown: list[str], num_samples: int) -> None:
    """Raises StoreError when more than `max_quarantined` of a job's samples were left out. shown: the first of them."""
    limit = max_quarantined(num_samples)
    if num <= limit:
        return
    listed = "".join(f"\n  {text}" for text in shown[:NUM_SHOWN])
    raise StoreError(
        f"{num} of {num_samples} samples have unusable states; at most {limit} may be left out. The first:{listed}\n"
        "So many mean a fault of the target, not of the data: check its weights and dtype (float16 overflows where "
        "bfloat16 does not), what its kernels compute (03_normalization, audit), and, where memory was too small, "
        "max_length. Finished shards are kept; the shard with the last of these samples was not written.")
