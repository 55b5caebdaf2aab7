"""What extraction costs, against something real: the figures of BENCHMARKS.md, as Markdown tables.

    python benchmarks/extraction.py                                   SmolLM2 in float32, every part (6 minutes)
    python benchmarks/extraction.py --parts speed padding --repeats 5
    python benchmarks/extraction.py --parts speed --random-config data/configs/qwen3.6-27b --device cuda
                                                                      a GPU, the 27B with random weights in bfloat16

Parts: speed (extraction against the bare forward pass of the same batches, and against the usual script), padding,
reading (against speculators' ArrowDataset), memory (of a worker over many shards), scaling (the cost of every stage at
1x, 4x and 16x, and what breaks first at 800,000 samples of 3,072 tokens). Ratios are between ways that ran in turns in
one process, medians over the turns, the least and the largest beside them. --tiny: a tiny random target and few rows,
to see that all of it runs.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.common import (  # noqa: E402
    demo_parameters,
    in_turns,
    make_random_plan,
    make_rows,
    note_machine,
    ratio,
    table,
)
from benchmarks.prepare import write_rows  # noqa: E402

PARTS = ("speed", "padding", "reading", "memory", "scaling")
KERNELS = ("fla", "causal_conv1d")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", type=Path, default=REPOSITORY / "data" / "models" / "smollm2-135m-instruct")
    parser.add_argument("--conversations", type=Path, default=REPOSITORY / "data" / "demo_conversations.jsonl")
    parser.add_argument("--random-config", type=Path, help="folder of a config.json: a target with random weights in "
                                                           "bfloat16, fed random tokens, in the place of --model")
    parser.add_argument("--layers", type=int, help="of the random target (default: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of --model; random targets are bfloat16")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample of the random target")
    parser.add_argument("--samples", type=int, default=192, help="of the random target; a third of them one by one")
    parser.add_argument("--token-budget", type=int, default=32768, help="of a batch of the random target")
    parser.add_argument("--shards", type=int, default=3, help="of --model's data, spread over its lengths, for speed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reads", type=int, default=300)
    parser.add_argument("--no-speculators", action="store_true", help="read without comparing")
    parser.add_argument("--no-kernels", action="store_true", help="hide flash-linear-attention, as if not installed")
    parser.add_argument("--work-dir", type=Path, help="for stores; its disk is the one measured (default: temporary)")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


class Job:
    """What is extracted: a target, its rows and the plan. shards: those that are run; alone: the script's rows."""

    def __init__(self, options: argparse.Namespace):
        from dflash_lib.hidden_states.plan import ExtractionOptions, make_plan
        from dflash_lib.target.capture import default_layer_ids

        self.options = options
        if options.random_config is not None:
            self.target, self.name = random_target(options)
            lengths = np.full(options.samples, options.tokens)
            self.prepared = make_rows(lengths, self.target.embedding.weight.shape[0])
            budget, per_shard, num_ids = options.token_budget, 64, 5
            self.plan = make_random_plan(self.prepared, self.target.hidden_size, ExtractionOptions(
                target_layer_ids=default_layer_ids(self.target.num_layers, num_ids), token_budget=budget,
                samples_per_shard=per_shard, threads=options.threads), self.target.num_layers)
            self.shards = list(range(len(self.plan.shards)))
            self.alone = list(range(max(1, options.samples // 3)))
            return
        from dflash_lib.conversations.prepare import PrepareOptions, prepare
        from dflash_lib.target.loading import load_target

        demo = demo_parameters()
        self.target, self.name = load_target(options.model, options.dtype, options.device, audit="quick"), ""
        self.prepared = prepare(options.conversations, self.target.tokenizer, PrepareOptions(
            max_samples=48 if options.tiny else demo["max_samples"], max_length=demo["max_length"]))
        self.plan = make_plan(self.target.identity, self.target.config, self.prepared, ExtractionOptions(
            target_layer_ids=default_layer_ids(self.target.num_layers, 3 if options.tiny else demo["num_aux_layers"]),
            token_budget=demo["token_budget"], samples_per_shard=8 if options.tiny else demo["samples_per_shard"],
            threads=options.threads))
        num = min(options.shards, len(self.plan.shards))
        self.shards = [int((i + 0.5) * len(self.plan.shards) / num) for i in range(num)]
        self.alone = [index for shard in self.shards for index in self.plan.samples_of(shard)]

    @property
    def num_tokens(self) -> int:
        return sum(self.plan.shard_tokens[shard] for shard in self.shards)

    @property
    def num_tokens_alone(self) -> int:
        return int(self.prepared.lengths[self.alone].sum())

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.target.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.target.device)

    def extract(self, folder: Path) -> float:
        """Seconds of the worker's way through the shards, files on the disk and all."""
        from dflash_lib.hidden_states.claims import Claims
        from dflash_lib.hidden_states.extraction_worker import work
        from dflash_lib.hidden_states.job import ExtractionJob

        with tempfile.TemporaryDirectory(dir=folder) as store:
            job = ExtractionJob(store=store, model="", prepared="", todo=self.shards)
            start = time.perf_counter()
            work(job, self.target, Claims.alone(self.shards), opened=(self.plan, self.prepared))
            return time.perf_counter() - start

    def forward(self) -> None:
        """The bare forward pass of the same batches, without head: right-padded, no cache, nothing kept."""
        import torch

        with torch.no_grad():
            for shard in self.shards:
                for batch in self.plan.shards[shard]:
                    rows = [self.prepared.row(index)[0] for index in batch]
                    input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
                    for i, row in enumerate(rows):
                        input_ids[i, :len(row)] = torch.from_numpy(row)
                    self.target.decoder(input_ids=input_ids.to(self.target.device), use_cache=False)
        self.wait()

    def script(self, folder: Path) -> float:
        """Seconds of the usual script: a conversation at a time with all hidden states and the logits, chosen layers
        saved with torch.save, not even synced to the disk. Cast to bfloat16 as the store's are."""
        import torch

        with tempfile.TemporaryDirectory(dir=folder) as out, torch.no_grad():
            start = time.perf_counter()
            for index in self.alone:
                ids, mask = self.prepared.row(index)
                found = self.target.model(input_ids=torch.from_numpy(ids).long()[None].to(self.target.device),
                                          output_hidden_states=True, use_cache=False)
                states = torch.stack([found.hidden_states[k + 1][0] for k in self.plan.target_layer_ids], dim=1)
                torch.save({"input_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(mask),
                            "aux_hidden_states": states.bfloat16().cpu(),
                            "hidden_states": found.hidden_states[-1][0].bfloat16().cpu()}, f"{out}/{index}.pt")
            return time.perf_counter() - start


def random_target(options: argparse.Namespace):
    """A target of that configuration with random weights, made on the device: nothing is downloaded or loaded."""
    from tests.gpu import check_capacity

    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((options.random_config / "config.json").read_text())
        text = config.get("text_config", config)
        num_layers = options.layers or text["num_hidden_layers"]
        text["num_hidden_layers"] = num_layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:num_layers]
        (Path(folder) / "config.json").write_text(json.dumps(config))
        target = check_capacity.random_target(Path(folder), options.device)
    has_kernels = any(name.startswith("fla.") for name in sys.modules)
    return target, (f"{options.random_config.name}, {num_layers} layers, random weights in bfloat16, Gated DeltaNet "
                    f"{'by flash-linear-attention' if has_kernels else 'by the PyTorch fallback'}")


def matmul_rate(device: str, size: int) -> float:
    """FLOP/s of a bfloat16 matrix product of random numbers: the median of ten, after three."""
    import torch

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(13):
        start = time.perf_counter()
        c = a @ b
        c[0, 0].item()  # waits for it
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / median(seconds[3:])


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second of writing a file of random numbers and syncing it."""
    block = np.random.default_rng(0).bytes(min(num_bytes, 64 << 20))
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(max(1, num_bytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return max(1, num_bytes // len(block)) * len(block) / (time.perf_counter() - start)


def measure_speed(options: argparse.Namespace, folder: Path) -> None:
    """The tables of one process, with or without the kernels."""
    import torch

    torch.set_num_threads(options.threads)
    job = Job(options)
    on_gpu = job.target.device.type == "cuda"
    name = job.name or f"{options.model.name}, {options.dtype}, {options.threads} threads"
    device = torch.cuda.get_device_name(job.target.device) if on_gpu else "CPU"
    print(f"### {name}, on {device}\n\n{len(job.shards)} shards, {job.num_tokens:,} tokens, "
          f"{sum(len(job.plan.shards[s]) for s in job.shards)} batches of up to {job.plan.token_budget:,} tokens; the "
          f"script: {len(job.alone)} conversations, {job.num_tokens_alone:,} tokens")
    ways = {"extract": lambda: job.extract(folder), "forward": job.forward, "script": lambda: job.script(folder)}
    whole, alone = job.shards, job.alone
    if on_gpu or options.tiny:
        for way in ways.values():
            way()  # kernels are compiled, memory is taken
    else:
        job.shards = whole[-1:]  # the first calls take memory
        job.forward()
    # a GPU needs many batches to fill; on a CPU a turn is a shard: the shorter, the more alike is what else runs
    turns = [(whole, alone)] if on_gpu or options.random_config else [
        ([shard], job.plan.samples_of(shard)) for shard in whole]
    per_token: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    total = dict.fromkeys(ways, 0.0)
    for _ in range(options.repeats):
        for job.shards, job.alone in turns:
            for name, way in ways.items():
                num = job.num_tokens_alone if name == "script" else job.num_tokens
                began = time.process_time()
                (seconds,), = in_turns({name: way}, 1).values()
                per_token[name].append(seconds / num)
                cpu[name].append((time.process_time() - began) / num)
                total[name] += seconds
    job.shards, job.alone = whole, alone
    rate = {name: options.repeats * (job.num_tokens_alone if name == "script" else job.num_tokens) / seconds
            for name, seconds in total.items()}
    wanted = 4 if on_gpu else 1.5
    table(["way", "tokens/s", "extraction's tokens/s over it", "its tokens a CPU second over it", "wanted"], [
        ["extraction: batches, states encoded, shards on the disk", f"{rate['extract']:,.0f}", "", "", ""],
        ["bare forward pass of the same batches, no head", f"{rate['forward']:,.0f}",
         ratio(per_token["forward"], per_token["extract"]), ratio(cpu["forward"], cpu["extract"]), "at least 0.95"],
        ["usual script: one by one, all hidden states, logits, torch.save", f"{rate['script']:,.0f}",
         ratio(per_token["script"], per_token["extract"]), ratio(cpu["script"], cpu["extract"]),
         f"at least {wanted}"]])
    if job.options.random_config is None:
        return
    flops = 2 * sum(p.numel() for p in job.target.layers.parameters())
    dense = matmul_rate(options.device, 8192 if on_gpu else 1024)
    disk = disk_rate(folder, 2 << 30 if on_gpu else 64 << 20)
    needed = rate["extract"] * job.plan.bytes_per_token
    table(["", ""], [
        [f"samples/s at {options.tokens} tokens", f"{rate['extract'] / options.tokens:,.2f}"],
        ["FLOP a token, 2 a weight of the layers", f"{flops / 1e9:,.3g} G"],
        ["bfloat16 matrix product in this run", f"{dense / 1e12:,.3g} TFLOP/s"],
        ["FLOPs utilisation, extraction", f"{rate['extract'] * flops / dense:.1%}"],
        ["FLOPs utilisation, bare forward pass", f"{rate['forward'] * flops / dense:.1%}"],
        ["states written", f"{needed / 1e6:,.3g} MB/s ({job.plan.bytes_per_token:,.0f} bytes a token)"],
        ["this disk writes and syncs", f"{disk / 1e6:,.0f} MB/s: {disk / needed:.1f} times what is needed"]])
    if on_gpu:
        print(f"Peak GPU memory {torch.cuda.max_memory_allocated(job.target.device) / 1e9:.1f} GB\n")


def speed(options: argparse.Namespace, folder: Path) -> None:
    """`measure_speed`, of random targets in a process with and one without flash-linear-attention: Transformers decides
    when it is imported."""
    if options.no_kernels:
        for name in KERNELS:
            sys.modules[name] = None  # importing it now raises ModuleNotFoundError
    if options.random_config is None or options.no_kernels:
        measure_speed(options, folder)
        return
    if importlib.util.find_spec("fla") is not None:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--no-kernels", "--parts", "speed"], check=True)
    else:
        print("flash-linear-attention is not installed here: without it only\n")
    measure_speed(options, folder)


def padding(options: argparse.Namespace) -> None:
    """Computed tokens that are padding, of all the demo's rows by the demo's plan."""
    from dflash_lib.conversations.prepare import PrepareOptions, prepare
    from dflash_lib.hidden_states.plan import ExtractionOptions
    from dflash_lib.target.capture import padding_share
    from dflash_lib.target.loading import load_tokenizer

    demo = demo_parameters()
    rows = prepare(options.conversations, load_tokenizer(options.model), PrepareOptions(
        max_samples=demo["max_samples"], max_length=demo["max_length"]))
    budget, per_shard = demo["token_budget"], demo["samples_per_shard"]
    plan = make_random_plan(rows, 8, ExtractionOptions(
        target_layer_ids=[0], token_budget=budget, samples_per_shard=per_shard), 1)
    in_order = [list(range(i, min(i + 16, len(rows)))) for i in range(0, len(rows), 16)]
    table(["rows", "tokens", "token_budget", "samples_per_shard", "padding", "in the file's order, 16 a batch",
           "wanted"],
          [[f"{len(rows):,}", f"{rows.num_tokens:,}", budget, per_shard, f"**{plan.padding_share(rows.lengths):.1%}**",
            f"{padding_share(rows.lengths, in_order):.1%}", "under 5 %"]])


def reading(options: argparse.Namespace, folder: Path) -> None:
    import torch

    from benchmarks.reading import compare_readers
    from dflash_lib.conversations.prepare import PrepareOptions, prepare
    from dflash_lib.hidden_states.plan import ExtractionOptions
    from dflash_lib.target.capture import capture_batch, default_layer_ids, stack_states
    from dflash_lib.target.loading import load_target, load_tokenizer

    demo = demo_parameters()
    rows = prepare(options.conversations, load_tokenizer(options.model), PrepareOptions(
        max_samples=24 if options.tiny else demo["max_samples"], max_length=demo["max_length"]))
    target = load_target(options.model, options.dtype, audit="quick")
    layers = default_layer_ids(target.num_layers, 3 if options.tiny else demo["num_aux_layers"])
    states, wanted = [], int(rows.lengths.max()) + 1024
    for index in range(len(rows)):  # real states, which compress as such do; the same few again and again
        states.append(stack_states(capture_batch(target, [rows.row(index)[0]], layers, True, torch.bfloat16)[0]))
        if sum(map(len, states)) > wanted:
            break
    per_shard = 8 if options.tiny else demo["samples_per_shard"]
    chosen = ExtractionOptions(target_layer_ids=layers, samples_per_shard=per_shard)
    compare_readers(rows, target.hidden_size, chosen, target.num_layers, folder, min(options.reads, len(rows)),
                    options.repeats, not options.no_speculators, torch.cat(states))


def main() -> None:
    options = arguments()
    note_machine("Before")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.work_dir)))
        if options.tiny:
            from tests.tiny import make_tiny_target

            options.model = make_tiny_target(folder / "tiny")
            write_rows(options.conversations, folder / "rows.jsonl", 64, num_words=12)  # its own ids are SmolLM2's
            options.conversations = folder / "rows.jsonl"
        for part in options.parts:
            print(f"\n## {part}\n", flush=True)
            work_dir = folder / part
            work_dir.mkdir()
            if part == "speed":
                speed(options, work_dir)
            elif part == "padding":
                padding(options)
            elif part == "reading":
                reading(options, work_dir)
            elif part == "memory":
                from benchmarks.memory import report

                report(num_shards=30 if options.tiny else 600)
            else:
                from benchmarks.scaling import report

                report(work_dir, 4 if options.tiny else 60, options.conversations, options.model)
    note_machine("After")


if __name__ == "__main__":
    main()
