"""Writes states in memory, faults and all, as files of every layout, and opens them again."""

import gzip
import io
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_lib.hidden_states.encode import encode_sample
from dflash_lib.hidden_states.formats import open_states
from dflash_lib.hidden_states.formats.source import PRE_NORM, SourceSample
from dflash_lib.hidden_states.formats.speculators import write_rows
from dflash_lib.hidden_states.shards import ShardWriter
from dflash_lib.target.capture import CapturedSample
from dflash_lib.target.loading import Target
from tests.hidden_states.audit.memory import MemorySource
from tests.hidden_states.rows import make_options, make_prepared

LAYOUTS = ("store", "speculators", "specforge", "specforge.gz", "model-optimizer")


def number(sample: SourceSample) -> int:
    return int(sample.name.removeprefix("hs_"))


def write_and_open(source: MemorySource, layout: str, folder: Path, target: Target):
    """The source in a layout: SpecForge's without the last state, Model-Optimizer's with the final norm of it."""
    if layout == "store":
        return _store(source, folder, target)
    if layout == "speculators":
        return _speculators(source, folder)
    for sample in source.samples:
        states, last = sample.decoded(), None
        if source.last == PRE_NORM:
            with torch.no_grad():
                states, last = states[:, :-1], target.final_norm(states[:, -1])
        value = {"input_ids": torch.from_numpy(sample.input_ids), "loss_mask": torch.from_numpy(sample.loss_mask)}
        if layout == "model-optimizer":
            value |= {"aux_hidden_states": states.bfloat16().flatten(1), "hidden_states": last.bfloat16()}
            path = folder / f"talk-{number(sample):03d}.pt"
        else:
            value["hidden_states"] = states.bfloat16().flatten(1)
            path = folder / "rows_0-2000" / f"data_{number(sample)}.ckpt{'.gz' if layout.endswith('gz') else ''}"
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        path.write_bytes(gzip.compress(buffer.getvalue(), 1) if layout.endswith("gz") else buffer.getvalue())
    return open_states(folder, target_layer_ids=source.target_layer_ids, hidden_size=target.hidden_size)


def _speculators(source: MemorySource, folder: Path):
    (folder / "hidden_states").mkdir(parents=True)
    for sample in source.samples:
        tensors = {"hidden_states": sample.states.contiguous(), "token_ids": torch.from_numpy(sample.input_ids)}
        if sample.scales is not None:
            tensors["hidden_states_scales"] = sample.scales.float().contiguous()
        save_file(tensors, folder / "hidden_states" / f"hs_{number(sample)}.safetensors")
    by_number = {number(sample): sample for sample in source.samples}
    rows = [by_number.get(i, source.samples[0]) for i in range(max(by_number) + 1)]
    write_rows(folder, [(sample.input_ids, sample.loss_mask) for sample in rows])
    return open_states(folder, target_layer_ids=source.target_layer_ids)


def _store(source: MemorySource, folder: Path, target: Target):
    """A store whose plan is of these rows; states that its writer quarantines cannot be in one."""
    from dataclasses import replace

    from dflash_lib.hidden_states.plan import make_plan

    lengths = [len(sample.input_ids) for sample in source.samples]
    prepared = replace(
        make_prepared(target, len(lengths)), offsets=np.cumsum([0, *lengths]).astype(np.int64),
        input_ids=np.concatenate([sample.input_ids for sample in source.samples]).astype(np.int32),
        loss_mask=np.concatenate([sample.loss_mask for sample in source.samples]))
    plan = make_plan(target.identity, target.config, prepared,
                     make_options(target_layer_ids=source.target_layer_ids,
                                  last_state="none" if source.last is None else "all"))
    folder.mkdir(parents=True)
    plan.save(folder)
    for shard in range(len(plan.shards)):
        with ShardWriter(folder, plan, shard) as writer:
            for index in plan.samples_of(shard):
                states = source.samples[index].decoded()
                last = None if source.last is None else states[:, -1]
                sample = CapturedSample(states[:, :len(source.target_layer_ids)], last)
                writer.add(index, *prepared.row(index), encode_sample(None, plan, prepared.row(index)[1], sample))
    return open_states(folder)
