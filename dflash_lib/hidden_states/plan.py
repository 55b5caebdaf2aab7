"""The plan of a store: everything that decides its bytes, written once as plan.json and never changed.

Which samples form which batch of which shard is a pure function of the prepared rows and the options, so a store
comes out the same however often its extraction was interrupted. Samples are ordered by length over the whole store,
longest first: neighbours are of like length, so little is computed on padding.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_lib.files import canonical_json, hash_value, read_json, write_text
from dflash_lib.hidden_states.schema import SCHEMA, StateDataset, StoreError, state_datasets
from dflash_lib.target.capture import check_layer_ids, padding_share, plan_batches

PLAN_FILE = "plan.json"
ONLY_RECORDED = {"target.name", "target.transformers", "data.source_sha256"}  # said, and never a reason to refuse


class PlannedRows(Protocol):
    """What a plan needs to know of token rows: `PreparedRows`, or what a conversion read from another tool's files."""

    tokenizer_hash: str
    source_sha256: str
    fingerprint: str
    lengths: np.ndarray
    num_tokens: int
    num_supervised: int

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class ExtractionOptions:
    """What a user chooses. target_layer_ids: id k = output of layer k. encoding: one of schema.ENCODINGS. last_state:
    where the target's last state is stored, before its final norm: at "all" tokens, at the rows that predict
    "supervised" ones, which are all that a KL loss reads, there as the target's `topk` largest logits with their
    logsumexp ("topk"), or nowhere ("none"), enough for cross-entropy. The defaults lose nothing that training reads.
    token_budget: padded tokens of a batch. threads: of a worker, part of the plan since with another number sums are
    formed in another order."""

    target_layer_ids: Sequence[int]
    encoding: str = "bf16+zstd"
    last_state: str = "supervised"
    topk: int = 0
    token_budget: int = 2048
    samples_per_shard: int = 64
    threads: int = 2

    def __post_init__(self) -> None:
        state_datasets(1, 1, self.encoding, self.last_state, self.topk)
        for name in ("token_budget", "samples_per_shard", "threads"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise StoreError(f"{name}: a whole number of at least 1 is needed, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class ExtractionPlan:
    """target: the target's identity; data: fingerprint and counts of the prepared rows; shards: per shard its batches,
    each a list of sample indices; shard_tokens: tokens of each shard. A shard stores its samples in this order."""

    schema: int
    target: dict[str, str]
    num_hidden_layers: int
    hidden_size: int
    target_layer_ids: list[int]
    encoding: str
    last_state: str
    topk: int
    data: dict[str, Any]
    token_budget: int
    samples_per_shard: int
    threads: int
    shards: list[list[list[int]]]
    shard_tokens: list[int]

    @cached_property
    def hash(self) -> str:
        """sha256 of the plan; every shard carries it."""
        return hash_value(asdict(self))

    @property
    def num_samples(self) -> int:
        return self.data["num_samples"]

    @property
    def num_tokens(self) -> int:
        return self.data["num_tokens"]

    @property
    def last(self) -> bool:
        """Whether every token's last state is stored."""
        return self.last_state == "all"

    @cached_property
    def datasets(self) -> list[StateDataset]:
        """The datasets of each shard that hold states."""
        return state_datasets(len(self.target_layer_ids), self.hidden_size, self.encoding, self.last_state, self.topk)

    @property
    def num_bytes(self) -> int:
        """Raw bytes of all stored states: of those that stand at supervised rows only, one row too many for each answer
        that begins its conversation."""
        return sum(stored.row_bytes * (self.num_tokens if stored.per_token else self.data["num_supervised"])
                   for stored in self.datasets)

    @property
    def bytes_per_token(self) -> float:
        """Raw bytes of stored states, for each token."""
        return self.num_bytes / self.num_tokens

    def samples_of(self, shard: int) -> list[int]:
        """Sample indices of a shard, in its order."""
        return [index for batch in self.shards[shard] for index in batch]

    def padding_share(self, lengths: Sequence[int]) -> float:
        """The share of computed tokens that is padding, 0 to 1; `lengths` of all samples."""
        return padding_share(lengths, [batch for shard in self.shards for batch in shard])

    def differences(self, other: "ExtractionPlan") -> dict[str, tuple[Any, Any]]:
        """What differs, as {name: (here, there)}. What is ONLY_RECORDED does not count: a moved folder,
        an update of Transformers, lines appended to the conversation file that change no row."""
        here, there = asdict(self), asdict(other)
        flat = {}
        for name in here:
            if name in ("target", "data"):
                keys = sorted({*here[name], *there[name]})
                flat |= {f"{name}.{key}": (here[name].get(key), there[name].get(key)) for key in keys}
            elif name not in ("shards", "shard_tokens"):
                flat[name] = (here[name], there[name])
        found = {name: pair for name, pair in flat.items() if pair[0] != pair[1] and name not in ONLY_RECORDED}
        if not found and (self.shards, self.shard_tokens) != (other.shards, other.shard_tokens):
            found["shards"] = ("one way to form batches", "another")
        return found

    def save(self, store: Path | str) -> None:
        """Writes plan.json into the store's folder."""
        write_text(Path(store) / PLAN_FILE, canonical_json(asdict(self)) + "\n")

    @classmethod
    def load(cls, store: Path | str) -> "ExtractionPlan":
        """Reads plan.json. Raises StoreError when it is absent, damaged or of another schema."""
        path = Path(store) / PLAN_FILE
        if not path.is_file():
            raise StoreError(f"{path}: no such file, so {store} is no hidden-state store. Extract it first "
                             "(04_extract), or, in a notebook, set run_dir to a run that has it, such as runs/demo.")
        try:
            value = read_json(path)
            if value.get("schema") != SCHEMA:
                raise StoreError(f"{path}: schema {value.get('schema')!r}; this version reads schema {SCHEMA}")
            plan = cls.from_dict(value)
        except StoreError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"{path}: damaged ({error}). Extract the store again.") from error
        return plan

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "ExtractionPlan":
        """A plan as `save` wrote it; plans of before said `last`, true or false, and keep their hash. Raises TypeError
        for other fields and StoreError for unknown settings."""
        before = "last" in value
        now = {**value, "last_state": "all" if value["last"] else "none", "topk": 0} if before else value
        plan = cls(**{name: part for name, part in now.items() if name != "last"})
        if before:
            plan.__dict__["hash"] = hash_value(value)  # where the cached property keeps it
        plan.datasets  # noqa: B018  raises for what is not known here
        return plan


def make_plan(target: dict[str, str], config, prepared: PlannedRows, options: ExtractionOptions) -> ExtractionPlan:
    """The plan for extracting `prepared` with a target.

    target: its identity (`target_identity`); config: its text configuration. Raises StoreError when the rows were
    tokenised with another tokenizer than the target's, TargetError for layer ids that it lacks.
    """
    if prepared.tokenizer_hash != target["tokenizer"]:
        raise StoreError(f"the rows were prepared with another tokenizer ({prepared.tokenizer_hash[:12]}) than the "
                         f"target's ({target['tokenizer'][:12]}). Prepare the conversations again.")
    if options.topk > config.vocab_size:
        raise StoreError(f"topk: {options.topk} of a vocabulary of {config.vocab_size}")
    lengths = prepared.lengths.tolist()
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shards, shard_tokens = [], []
    for start in range(0, len(order), options.samples_per_shard):
        samples = order[start:start + options.samples_per_shard]
        batches = plan_batches([lengths[i] for i in samples], options.token_budget)
        shards.append([[samples[i] for i in batch] for batch in batches])
        shard_tokens.append(sum(lengths[i] for i in samples))
    return ExtractionPlan(
        schema=SCHEMA, target=dict(target), num_hidden_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        target_layer_ids=list(check_layer_ids(options.target_layer_ids, config.num_hidden_layers)),
        encoding=options.encoding,
        last_state=options.last_state, topk=options.topk, token_budget=options.token_budget,
        samples_per_shard=options.samples_per_shard,
        threads=options.threads, shards=shards, shard_tokens=shard_tokens,
        data={"fingerprint": prepared.fingerprint, "num_samples": len(prepared), "num_tokens": prepared.num_tokens,
              "num_supervised": prepared.num_supervised, "source_sha256": prepared.source_sha256})


def describe_differences(found: dict[str, tuple[Any, Any]], here: str, there: str) -> str:
    """One line per difference: `name: <here> VALUE, <there> VALUE`."""
    return "\n".join(f"  {name}: {here} {json.dumps(a)}, {there} {json.dumps(b)}" for name, (a, b) in found.items())
