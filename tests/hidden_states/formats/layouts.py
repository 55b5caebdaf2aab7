"""Other tools' files, written as these tools write them, and stores to compare with."""

import gzip
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_lib.conversations.prepare import PreparedRows
from dflash_lib.hidden_states.encode import EncodedSample, encode_sample
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.convert import ConvertOptions, convert
from dflash_lib.hidden_states.plan import ExtractionPlan, make_plan
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample
from dflash_lib.target.capture import CapturedSample
from dflash_lib.target.loading import Target
from tests.hidden_states.rows import make_options, make_prepared

IDS = [1, 3, 4]


def make_random_store(folder: Path, target: Target, num_samples: int = 12, bad: Sequence[int] = (), longest: int = 40,
                      **changes) -> ExtractionPlan:
    """A store of random states, scales differing by layer, as an extraction under its plan would leave it. `bad`:
    samples with an infinite value, which are quarantined."""
    prepared = make_prepared(target, num_samples, longest=longest)
    folder.mkdir(parents=True)
    make_plan(target.identity, target.config, prepared, make_options(**changes)).save(folder)
    plan = ExtractionPlan.load(folder)
    for shard in range(len(plan.shards)):
        with ShardWriter(folder, plan, shard) as writer:
            for index in plan.samples_of(shard):
                writer.add(index, *prepared.row(index), random_states(prepared, index, plan, index in bad))
    return plan


def random_states(prepared: PreparedRows, index: int, plan: ExtractionPlan, bad: bool) -> EncodedSample:
    generator = torch.Generator().manual_seed(index)
    num_tokens, num_layers = len(prepared.row(index)[0]), len(plan.target_layer_ids)
    states = torch.randn((num_tokens, num_layers + 1, plan.hidden_size), generator=generator)
    states *= torch.tensor([0.1, 1.0, 30.0, 300.0])[:num_layers + 1, None]
    states[0] *= 100  # as position 0 has it
    if bad:
        states[-1, 0, 0] = float("inf")
    return encode_sample(None, plan, prepared.row(index)[1],
                         CapturedSample(states[:, :num_layers], states[:, -1] if plan.last else None))


def read_all(folder: Path) -> list[StoredSample]:
    with HiddenStateStore.open(folder) as store:
        return [store.read(index) for index in store.sample_indices]


def save(value, path: Path, gz: bool = False) -> None:
    """torch.save, gzipped if asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not gz:
        torch.save(value, path)
        return
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue(), 1))


def specforge_sample(sample: StoredSample, last: Tensor | None = None, batched: bool = False) -> dict[str, Tensor]:
    states = sample.aux_hidden_states.flatten(1)
    value = {"input_ids": torch.from_numpy(sample.input_ids.astype(np.int64)),
             "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.int64)),
             "hidden_states": states[None] if batched else states}
    return value if last is None else value | {"target_last_hidden_states": last[None] if batched else last}


def write_specforge(folder: Path, samples: Sequence[StoredSample], *, with_last: bool = False, batched: bool = False,
                    gz: bool = False, direct: bool = False, per_folder: int = 5) -> None:
    """rows_{a}-{b}/data_{i}.ckpt of the samples, numbered from 0."""
    for i, sample in enumerate(samples):
        start = i // per_folder * per_folder
        parent = folder if direct else folder / f"rows_{start}-{start + per_folder}"
        last = sample.last_hidden_state_prenorm / 2 if with_last else None
        save(specforge_sample(sample, last, batched), parent / f"data_{i}.ckpt{'.gz' if gz else ''}", gz)


def model_optimizer_sample(sample: StoredSample, name: str) -> dict:
    return {"input_ids": torch.from_numpy(sample.input_ids.astype(np.int64)), "conversation_id": name,
            "loss_mask": torch.from_numpy(sample.loss_mask).float(),
            "hidden_states": sample.last_hidden_state_prenorm / 2,
            "aux_hidden_states": sample.aux_hidden_states.flatten(1)}


def write_model_optimizer(folder: Path, samples: Sequence[StoredSample]) -> None:
    """{conversation_id}.pt of the samples, named so that alphabetical order is theirs."""
    for i, sample in enumerate(samples):
        save(model_optimizer_sample(sample, f"talk-{i:03d}"), folder / f"talk-{i:03d}.pt")


class Mark:
    """A pickled object: loading it writes a file, as a hostile one could do worse."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "code ran"))


def export_both(store: Path, folder: Path) -> Path:
    """A store in speculators' layout, below `folder` in bf16 and fp8. Shared: copy one before changing anything."""
    for encoding in ("bf16", "fp8"):
        convert(open_states(store), folder / encoding, ConvertOptions(to="speculators", encoding=encoding), show=False)
    return folder
