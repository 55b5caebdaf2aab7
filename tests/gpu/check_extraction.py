"""The extraction's worker on a GPU: against the bare forward pass, against the serial way, and out of memory.

usage: python -m tests.gpu.check_extraction [DEVICE [NUM_LAYERS]]. Needs PyTorch, Transformers, h5py, hdf5plugin and
psutil; skips, and says so, where there is no CUDA device or too little memory for the weights. The model is the text
tower of Qwen3.6-27B cut to NUM_LAYERS layers (16 unless said), with random weights made on the device; nothing is
downloaded. About three minutes.

Prints tokens/s of each encoding over those of the same batches without head and without storing; exits with 1 when
the ratio of bf16 is below LEAST_RATIO, when stored values are not those of the serial way, or when a batch that does
not fit is not run in parts that agree with the whole.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEAST_RATIO = 0.95
LARGEST_ERROR = 0.02  # of a token's norm: the company that a sample keeps in a batch changes roundings
NUM_SAMPLES, LENGTHS, TOKEN_BUDGET = 512, (300, 512), 16_384
ENCODINGS = ("bf16", "bf16+zstd", "fp8")


def make_rows(num_samples: int, lengths: tuple[int, int], vocab_size: int):
    """Random token rows of lengths between two; the second half of each is supervised."""
    import numpy as np

    from dflash_lib.conversations.prepare import PreparedRows, PrepareOptions

    generator = np.random.default_rng(0)
    sizes = generator.integers(lengths[0], lengths[1] + 1, num_samples)
    return PreparedRows(
        input_ids=generator.integers(4, vocab_size, sizes.sum()).astype(np.int32),
        loss_mask=np.concatenate([np.arange(n) >= n // 2 for n in sizes]).astype(np.uint8),
        offsets=np.cumsum([0, *sizes]).astype(np.int64), sample_ids=[f"row-{i}" for i in range(num_samples)],
        kinds=["random"] * num_samples, options=PrepareOptions(), tokenizer_hash="0" * 64, source_sha256="0" * 64)


def make_job(folder: Path, target, prepared, ids: list[int], token_budget: int, encoding: str = "bf16"):
    """A new store's plan and the job that fills it."""
    from dflash_lib.hidden_states.job import ExtractionJob
    from dflash_lib.hidden_states.plan import ExtractionOptions, make_plan

    identity = {"name": "random", "weights": "0" * 64, "config": "0" * 64, "tokenizer": "0" * 64, "dtype": "bfloat16"}
    options = ExtractionOptions(target_layer_ids=ids, encoding=encoding, token_budget=token_budget,
                                samples_per_shard=64, threads=1)
    plan = make_plan(identity, target.config, prepared, options)
    (folder / "store").mkdir(parents=True)
    plan.save(folder / "store")
    if not (folder.parent / "rows").exists():
        prepared.save(folder.parent / "rows")
    return plan, ExtractionJob(store=str(folder / "store"), model="", prepared=str(folder.parent / "rows"),
                               todo=list(range(len(plan.shards))))


def synchronize(device: str) -> None:
    """Waits for the device."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def bare_seconds(target, prepared, plan, device: str) -> float:
    """The same batches through the decoder, without head, nothing kept."""
    import torch

    synchronize(device)
    began = time.perf_counter()
    with torch.no_grad():
        for batch in (batch for shard in plan.shards for batch in shard):
            rows = [prepared.row(index)[0] for index in batch]
            input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
            for i, row in enumerate(rows):
                input_ids[i, :len(row)] = torch.tensor(row)
            target.decoder(input_ids=input_ids.to(device), use_cache=False)
    synchronize(device)
    return time.perf_counter() - began


def extract(target, job, device: str) -> tuple[float, dict]:
    """Seconds of one worker's whole loop, the last file's fsync included, and its last report."""
    from dflash_lib.hidden_states.claims import Claims
    from dflash_lib.hidden_states.extraction_worker import work

    seen = {}
    synchronize(device)
    began = time.perf_counter()
    work(job, target, Claims.alone(job.todo), lambda **fields: seen.update(fields))
    return time.perf_counter() - began, seen


def say(name: str, holds: bool, words: str) -> bool:
    """Prints a finding."""
    print(f"{name:<34} {words}{'' if holds else '   FAILED'}", flush=True)
    return holds


def check_speed(target, prepared, ids: list[int], folder: Path, device: str, token_budget: int,
                least_ratio: float = LEAST_RATIO) -> bool:
    """Tokens/s of each encoding over the bare forward pass, which is timed before and after."""
    good, num_tokens = True, prepared.num_tokens
    for encoding in ENCODINGS:
        plan, job = make_job(folder / encoding, target, prepared, ids, token_budget, encoding)
        if encoding == ENCODINGS[0]:
            bare_seconds(target, prepared, plan, device)  # kernels are chosen, memory is taken
        before = bare_seconds(target, prepared, plan, device)
        seconds, seen = extract(target, job, device)
        bare = min(before, bare_seconds(target, prepared, plan, device))
        holds = encoding != ENCODINGS[0] or bare / seconds >= least_ratio
        good &= say(f"{encoding}: extraction / bare forward", holds,
                    f"{num_tokens / seconds:>9,.0f} / {num_tokens / bare:>9,.0f} tokens/s = {bare / seconds:.3f}, "
                    f"{seen['bytes_written'] / num_tokens:,.0f} bytes a token, "
                    f"{seen['bytes_written'] / seconds / 1e6:,.0f} MB/s")
    return good


def largest_error(store, wanted: Iterator[tuple[int, dict]]) -> tuple[float, float]:
    """Largest error of a token's stored state in its norm, and the share of values that differ at all."""
    worst, num_different, num = 0.0, 0, 0
    for index, tensors in wanted:
        found = store.read_encoded(index).tensors
        assert set(found) == set(tensors), (set(found), set(tensors))
        for name, values in tensors.items():
            a, b = found[name].float(), values.float()
            norm = b.norm(dim=-1).clamp_min(1e-9)
            worst = max(worst, float(((a - b).norm(dim=-1) / norm).max()))
            num_different, num = num_different + int((a != b).sum()), num + a.numel()
    return worst, num_different / num


def serial_states(target, prepared, plan) -> Iterator[tuple[int, dict]]:
    """Each sample's encoded states: batch after batch, copied at once, on no other stream."""
    from dflash_lib.hidden_states.encode import encode_sample
    from dflash_lib.target.capture import capture_batch

    for batch in (batch for shard in plan.shards for batch in shard):
        rows = [prepared.row(index) for index in batch]
        samples = capture_batch(target, [ids for ids, _ in rows], plan.target_layer_ids)
        for index, (_, mask), sample in zip(batch, rows, samples, strict=True):
            encoded = encode_sample(target, plan, mask, sample)
            yield index, {name: values.cpu() for name, values in encoded.tensors.items()}


def check_values(target, prepared, plan, folder: Path, device: str) -> bool:
    """What `check_speed` stored in bf16 against the serial way: the same batches, so the same values."""
    from dflash_lib.hidden_states.store import HiddenStateStore

    with HiddenStateStore.open(folder / ENCODINGS[0] / "store") as store:
        worst, share = largest_error(store, serial_states(target, prepared, plan))
    limit = 0.0 if device == "cpu" else LARGEST_ERROR
    return say("stored against the serial way", worst <= limit,
               f"largest error {worst:.2e} of a token's norm, {share:.2%} of the values differ")


@contextmanager
def scarce_memory(target, prepared, plan, device: str) -> Iterator[None]:
    """Inside, about two thirds of what the plan's largest batch takes can be had: really on CUDA, planted on a CPU."""
    import torch

    from dflash_lib.target.capture import capture_batch

    batches = [batch for shard in plan.shards for batch in shard]
    largest = max(batches, key=lambda batch: len(batch) * max(prepared.lengths[i] for i in batch))
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        capture_batch(target, [prepared.row(index)[0] for index in largest], plan.target_layer_ids)
        batch = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + batch * 2 / 3) / total, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    limit = len(largest) * max(prepared.lengths[i] for i in largest) * 2 / 3

    def refuse(_module, args) -> None:
        if args[0].numel() > limit:
            raise torch.OutOfMemoryError("out of memory (planted)")

    handle = target.embedding.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def check_split(target, prepared, ids: list[int], folder: Path, device: str, token_budget: int) -> bool:
    """A store made with too little memory holds every sample, says what was split, and agrees with the serial way."""
    import h5py

    from dflash_lib.hidden_states.schema import get_attribute, shard_name
    from dflash_lib.hidden_states.store import HiddenStateStore

    plan, job = make_job(folder / "scarce", target, prepared, ids, token_budget)
    with scarce_memory(target, prepared, plan, device):
        _, seen = extract(target, job, device)
    noted = 0
    for shard in range(len(plan.shards)):
        with h5py.File(Path(job.store) / shard_name(shard), "r", locking=False) as file:
            noted += len(json.loads(get_attribute(file, "splits"))) if "splits" in file.attrs else 0
    with HiddenStateStore.open(job.store) as store:
        num_samples = store.num_samples
        worst, share = largest_error(store, serial_states(target, prepared, plan))
    good = say("out of memory: batches split", seen["num_splits"] == noted > 0,
               f"{seen['num_splits']} of {sum(map(len, plan.shards))}, {noted} noted in the shards")
    good &= say("out of memory: samples stored", num_samples == len(prepared), f"{num_samples} of {len(prepared)}")
    return good & say("out of memory: against the whole", worst <= LARGEST_ERROR,
                      f"largest error {worst:.2e} of a token's norm, {share:.2%} of the values differ")


def check_all(target, ids: list[int], prepared, folder: Path, device: str, token_budget: int,
              least_ratio: float = LEAST_RATIO) -> bool:
    """All three checks; `folder` must have room for four stores."""
    from dflash_lib.hidden_states.plan import ExtractionPlan

    good = check_speed(target, prepared, ids, folder, device, token_budget, least_ratio)
    plan = ExtractionPlan.load(folder / ENCODINGS[0] / "store")
    good &= check_values(target, prepared, plan, folder, device)
    return good & check_split(target, prepared, ids, folder, device, token_budget)


def main(device: str = "cuda:0", num_layers: str = "16") -> int:
    """0 when everything holds or there is nothing to check here, else 1."""
    import torch

    from tests.gpu.check_capacity import large_target

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = large_target(folder, device, num_layers, room=1.5)
        if made is None:
            return 0
        target, ids = made
        torch.cuda.set_device(device)
        prepared = make_rows(NUM_SAMPLES, LENGTHS, target.embedding.weight.shape[0])
        print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}, {num_layers} layers, "
              f"{len(prepared)} samples of {LENGTHS[0]} to {LENGTHS[1]} tokens in batches of {TOKEN_BUDGET:,}")
        return 0 if check_all(target, ids, prepared, folder, device, TOKEN_BUDGET) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
