"""What a training step costs, against speculators' DFlashDraftModel 0.9.0: the figures of BENCHMARKS.md.

    python benchmarks/training.py                        SmolLM2's shape with random weights, 1 and 5 drafter layers
    python benchmarks/training.py --model data/models/smollm2-135m-instruct        the real one, on real conversations
    python benchmarks/training.py --device cuda --hidden 5120 --layers 5 --block 16 --anchors 512 --tokens 4096 \
        --vocab 248320                                   a GPU, in bfloat16 with float32 weights

Both sides train on the same documents, states, first weights and anchors, every slot of each block, over the full head,
with cross-entropy and with KL; a step is forward, loss, backward, clipping and AdamW. Times: in turns in one process.
Memory: of each side in a fresh process, the peak over the steps minus what it held once model, optimizer and batch were
there (resident memory on a CPU, the allocator's on a GPU); the optimizer's state and the gradients count. That the two
do the same work is checked: the number of supervised slots, and with KL, whose targets are the same, the loss. With
cross-entropy ours learns the data's tokens, theirs the target's argmax, so that its step projects the target's states,
too. `--tiny`: to see that all of it runs.
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from benchmarks.common import in_turns, json_lines, note_machine, table  # noqa: E402
from benchmarks.training_sides import SHAPES, Ours, Theirs, make_world, step_flops  # noqa: E402

WANTED = {"ce": 0.7, "kl": 0.9, "memory": 0.5}  # ours over theirs, at most
NAMES = {"ce": "cross-entropy", "kl": "KL"}
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "RTX PRO 6000": 504, "L40S": 362}  # bfloat16, dense, as sold


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 5], help="of the drafter")
    parser.add_argument("--losses", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--hidden", type=int, choices=list(SHAPES), default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--aux-layers", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="of the packed row")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=64, help="of all documents together")
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--model", type=Path, help="a real target in the place of a random one")
    parser.add_argument("--conversations", type=Path, default=REPOSITORY / "data" / "demo_conversations.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=["time", "memory"], default=["time", "memory"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-steps", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="of the device in bfloat16; known for some GPUs")
    parser.add_argument("--no-speculators", action="store_true", help="ours alone")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", choices=["time", "Ours", "Theirs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.hidden, options.vocab, options.tokens, options.documents, options.anchors = 64, 512, 128, 2, 8
    if options.anchors % options.documents:
        parser.error(f"--anchors {options.anchors} must be a multiple of --documents {options.documents}: anchors are "
                     "drawn a document at a time")
    return options


def measure_times(options: argparse.Namespace, num_layers: int) -> None:
    """Prints a line of JSON a loss: seconds of every step of both, what they trained on, the needed work."""
    world, device = make_world(options, num_layers), torch.device(options.device)
    for kind in options.losses:
        sides = {"ours": Ours(world, kind, device)}
        if not options.no_speculators:
            sides["theirs"] = Theirs(world, kind, device)
        slots = check_same_work(sides, kind)
        for _ in range(1 if options.device == "cpu" else 4):  # allocators, compilers
            for side in sides.values():
                side.step()
        busy: dict[str, list[float]] = {name: [] for name in sides}

        def way(name, sides=sides, busy=busy):
            def step() -> None:
                start = time.process_time()
                sides[name].step()
                busy[name].append(time.process_time() - start)
            return step

        seconds = in_turns({name: way(name) for name in sides}, options.rounds)
        print(json.dumps({"layers": num_layers, "loss": kind, "seconds": seconds, "busy": busy, "slots": slots,
                          "anchors": len(world.packed_anchors()), "documents": len(world.samples),
                          "tokens": world.num_tokens, "flops": step_flops(world, slots, kind == "kl"),
                          "parameters": sum(p.numel() for p in sides["ours"].trained)}), flush=True)


def check_same_work(sides: dict, kind: str) -> int:
    """Supervised slots of a step. Raises SystemExit where the sides differ in them, or in the first loss with KL: the
    first weights are the same."""
    losses, slots = {}, {}
    for name, side in sides.items():
        total, _, counted = side.loss()
        slots[name] = int(counted)
        losses[name] = float(total.detach()) / (slots[name] if name == "ours" else 1)  # theirs divides by the slots
        del total
    tolerance = 1e-4 if sides["ours"].device.type == "cpu" else 2e-2
    if "theirs" in sides and (slots["ours"] != slots["theirs"] or (
            kind == "kl" and abs(losses["ours"] / losses["theirs"] - 1) > tolerance)):
        raise SystemExit(f"the two sides do not do the same: supervised slots {slots}, loss {losses} ({kind})")
    return slots["ours"]


def measure_memory(options: argparse.Namespace, num_layers: int, kind: str, side_class: type) -> None:
    """Prints a line of JSON: bytes that the steps added at their peak, of the one side in this process."""
    device = torch.device(options.device)
    side = side_class(make_world(options, num_layers), kind, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what construction freed shall not hide what the steps take
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = resident("VmHWM")
    for _ in range(options.memory_steps):
        side.step()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")
    state = sum(3 * p.numel() * p.element_size() for p in side.trained)
    print(json.dumps({"layers": num_layers, "loss": kind, "side": side_class.__name__, "before": before,
                      "added": peak - before, "state": state}), flush=True)


def resident(name: str) -> int:
    """VmRSS (resident memory now) or VmHWM (its peak) of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def run_worker(environment: dict[str, str], *more: str | int) -> list[dict]:
    """This script in a process of its own with the same arguments and `more` behind them."""
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, *sys.argv[1:], *map(str, more)], text=True,
                          env=environment, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, more))} failed:\n{done.stderr[-4000:]}")
    return json_lines(done.stdout)


def share(ours: list[float], theirs: list[float]) -> tuple[float, str]:
    """Ours over theirs: the median over the turns, and it in words with the least and the largest."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(each), f"**{median(each):.2f}** ({min(each):.2f} to {max(each):.2f})"


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.worker == "time":
        measure_times(options, *options.layers)
        return
    if options.worker:
        measure_memory(options, *options.layers, *options.losses, {"Ours": Ours, "Theirs": Theirs}[options.worker])
        return
    environment = dict(os.environ)
    if not options.no_speculators:
        from tests import speculators_package

        environment = speculators_package.environment()
    environment["OMP_NUM_THREADS"] = str(options.threads)
    note_machine("Before")
    print(f"{options.model.name if options.model else 'Random weights and documents'}: hidden size {options.hidden}, "
          f"vocabulary {options.vocab:,}, {options.aux_layers} aux layers, a row of {options.tokens:,} tokens, at most "
          f"{options.anchors} anchors of block {options.block}, {options.threads} threads on {options.device}")
    if "time" in options.parts:
        report_times(options, [line for layers in options.layers for line in run_worker(
            environment, "--worker", "time", "--layers", layers)])
    if "memory" in options.parts:
        sides = ["Ours"] if options.no_speculators else ["Ours", "Theirs"]
        found = [line for layers in options.layers for kind in options.losses for side in sides for line in run_worker(
            environment, "--worker", side, "--layers", layers, "--losses", kind)]
        report_memory(options, {(line["layers"], line["loss"], line["side"]): line for line in found})
    note_machine("After")
    print(f"Peak of the measuring processes: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6:.1f} GB")


def report_times(options: argparse.Namespace, found: list[dict]) -> None:
    peak = options.peak_tflops
    if options.device != "cpu" and peak is None:
        name = torch.cuda.get_device_name()
        peak = next((tflops for known, tflops in PEAK_TFLOPS.items() if known in name), None)
        print(f"{name}: {peak or 'an unknown number of'} TFLOP/s in bfloat16, as sold")
    rows = []
    for line in found:
        cells = [line["layers"], NAMES[line["loss"]], line["anchors"], line["slots"]]
        for side in ("ours", "theirs"):
            seconds = line["seconds"].get(side)
            if seconds is None:
                cells += ["", "", ""]
                continue
            rate = line["flops"] / median(seconds) / 1e12
            cells += [f"{1e3 * median(seconds):,.1f}", f"{line['tokens'] / median(seconds):,.0f}",
                      f"{rate:.3f}" if peak is None else f"{rate:,.1f} ({rate / peak:.1%})"]
        if "theirs" in line["seconds"]:
            value, text = share(line["seconds"]["ours"], line["seconds"]["theirs"])
            wanted = WANTED[line["loss"]]
            cells += [text, f"{wanted} {'met' if value <= wanted else 'MISSED'}",
                      share(line["busy"]["ours"], line["busy"]["theirs"])[1] if options.device == "cpu" else ""]
        else:
            cells += ["not measured", "", ""]
        rows.append(cells)
    print(f"\n## Time of a step\n\n{options.rounds} steps of each in turns, medians; ours over theirs, the least and "
          f"the largest of the turns beside it. TFLOP/s: of the work that a step needs, the same for both"
          f"{'' if peak is None else ', and as a share of the peak'}. In the last column CPU "
          "time, which other work on the machine hardly moves.")
    work = "TFLOP/s" if peak is None else "TFLOP/s (utilisation)"
    table(["drafter layers", "loss", "anchors", "supervised slots", "ours, ms", "tokens/s", work, "theirs, ms",
           "tokens/s", work, "ours/theirs", "wanted, at most", "ours/theirs, CPU time"], rows)


def report_memory(options: argparse.Namespace, memory: dict) -> None:
    rows = []
    for layers in options.layers:
        for kind in options.losses:
            ours, theirs = memory[layers, kind, "Ours"], memory.get((layers, kind, "Theirs"))
            cells = [layers, NAMES[kind], f"{ours['state'] / 1e6:,.0f}", f"{ours['added'] / 1e6:,.0f}"]
            if theirs is None:
                cells += ["", "not measured", ""]
            else:
                value = ours["added"] / theirs["added"]
                cells += [f"{theirs['added'] / 1e6:,.0f}", f"**{value:.2f}**",
                          f"{WANTED['memory']} {'met' if value <= WANTED['memory'] else 'MISSED'}"]
            rows.append(cells)
    print(f"## Memory of the steps\n\nPeak over {options.memory_steps} steps minus what was held after construction, "
          "MB, each in a fresh process. In both: gradients and the optimizer's state.")
    table(["drafter layers", "loss", "gradients and state", "ours", "theirs", "ours/theirs", "wanted, at most"], rows)


if __name__ == "__main__":
    main()
