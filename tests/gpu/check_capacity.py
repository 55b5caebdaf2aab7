"""Predicted against measured peak memory of capture and training on a GPU: the 27B with random weights.

usage: python -m tests.gpu.check_capacity [DEVICE [NUM_LAYERS]]. Needs PyTorch, Transformers, h5py, hdf5plugin and
psutil; skips, and says so, where there is no CUDA device or too little memory for the weights (53.8 GB for all 64
layers; give fewer layers on a smaller card). Weights are created on the device, nothing is downloaded. About two
minutes.

Measured is what PyTorch's allocator handed out at most (`max_memory_allocated`), not what it keeps in reserve, which is
printed beside it. Prints a table; exits with 1 when a prediction is off by more than TOLERANCE.
"""

import copy
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

TOLERANCE = 0.10
CONFIG = Path(__file__).parents[1] / "data" / "qwen3.6-27b" / "config.json"
BATCHES = ((1, 3072), (8, 3072), (4, 1000))
TRAINING = {"block_size": 16, "mask_token_id": 248070, "num_layers": 5, "warm_start": False, "batch_samples": 1,
            "average": 0.0}
# The parameters of notebooks/params/qwen3_6_27b_8gpu.yaml, and the demo's loss with drawn slots and a reduced head.
TRAININGS = ({"anchors_per_sample": 96, "slots_per_anchor": 15, "kl_weight": 0.0, "draft_vocab_size": None},
             {"anchors_per_sample": 96, "slots_per_anchor": 2, "kl_weight": 0.7, "draft_vocab_size": None},
             {"anchors_per_sample": 64, "slots_per_anchor": 15, "kl_weight": 0.7, "draft_vocab_size": 32_768})
TRAINING_TOKENS = 1024


def write_config(folder: Path, num_layers: int) -> list[int]:
    """The real configuration cut to `num_layers` layers; returns the layer ids to tap."""
    from dflash_lib.target.capture import default_layer_ids

    config = json.loads(CONFIG.read_text())
    config["text_config"]["num_hidden_layers"] = num_layers
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:num_layers]
    (folder / "config.json").write_text(json.dumps(config))
    return default_layer_ids(num_layers)


def random_target(folder: Path, device: str):
    """The text tower in bf16 on the device, weights random but small enough for every state to be finite."""
    import torch
    from transformers import AutoModelForCausalLM

    from dflash_lib.target.configuration import read_config, text_tower
    from dflash_lib.target.loading import Target

    config = text_tower(read_config(folder), folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        parameter.data.zero_() if "norm" in name else parameter.data.normal_(std=0.02)
    rotary = type(model.get_decoder().rotary_emb)(config).to(device)  # its buffers are computed, not stored
    model.get_decoder().rotary_emb = rotary
    return Target(folder, model, None, None)


def measured(work, device: str) -> tuple[int, int]:
    """Bytes that PyTorch's allocator handed out, and kept in reserve, at most during `work()`."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def compare(name: str, predicted: int, found: tuple[int, int]) -> bool:
    """Prints a row; whether the prediction holds."""
    holds = abs(predicted / found[0] - 1) <= TOLERANCE
    print(f"{name:<52} {predicted / 1e9:>9.2f} {found[0] / 1e9:>9.2f} {found[1] / 1e9:>9.2f} "
          f"{predicted / found[0]:>7.3f}{'' if holds else '   FAILED'}", flush=True)
    return holds


def check_capture(target, folder: Path, ids: list[int], device: str) -> bool:
    """Batches of several shapes, the states cast to bf16 as extraction has them."""
    import torch

    from dflash_lib.target.capture import capture_batch
    from dflash_lib.workbench.peak_memory import capture_memory

    fast = importlib.util.find_spec("fla") is not None
    capture_batch(target, [[5] * 128], ids, True, torch.bfloat16)  # libraries' own workspaces, kernels
    good = True
    for rows, tokens in BATCHES:
        predicted = capture_memory(folder, ids, rows, tokens, fast_kernels=fast)
        batch = [[5] * tokens] * rows
        found = measured(lambda batch=batch: capture_batch(target, batch, ids, True, torch.bfloat16), device)
        path = "kernels" if fast else "PyTorch fallback"
        good &= compare(f"capture, {rows} x {tokens}, {path}", predicted.total, found)
    return good


def random_batch(options, num_tokens: int, hidden_size: int, num_layers: int, device: str):
    """A training batch of one document, every slot of which is supervised: what the data set would make of it."""
    import torch

    from dflash_lib.drafter.attention import Packing
    from dflash_lib.drafter.dataset import Batch

    num, slots = options.anchors_per_sample, options.slots_per_anchor
    with torch.device(device):
        last = torch.randn(num_tokens, hidden_size).bfloat16() if options.kl_weight > 0 else None
        return Batch((0,), Packing.single(num_tokens, num), torch.randn(num_tokens, num_layers, hidden_size).bfloat16(),
                     last, torch.arange(num_tokens), torch.arange(1, num + 1) * (num_tokens - slots - 1) // num,
                     torch.zeros(num, dtype=torch.int64),
                     torch.full((num, options.block_size), options.mask_token_id),
                     torch.arange(1, slots + 1).expand(num, -1).contiguous(), torch.full((num, slots), 7),
                     torch.ones(num, slots))


def check_training(target, folder: Path, ids: list[int], device: str, changes: dict) -> bool:
    """Two steps of a 5-layer drafter on one document of TRAINING_TOKENS, with AdamW's moments."""
    import torch

    from dflash_lib.drafter.inference import head_rows
    from dflash_lib.drafter.network import DFlashDrafter
    from dflash_lib.drafter.objective import TargetEnds, batch_loss
    from dflash_lib.drafter.recipe import TrainOptions, drafter_config
    from dflash_lib.workbench.training_memory import training_memory

    options = TrainOptions(**TRAINING, **changes)
    draft_vocab_size = options.draft_vocab_size
    predicted = training_memory(folder, ids, options, TRAINING_TOKENS, device=device)
    config = drafter_config(target, ids, options, draft_vocab_size)

    def work() -> None:
        with torch.device(device):
            network = DFlashDrafter(config)
        vocabulary = None if draft_vocab_size is None else torch.arange(draft_vocab_size)
        ends = TargetEnds(target.embedding, target.final_norm, head_rows(target.head.weight, vocabulary).float(),
                          None if vocabulary is None else vocabulary.to(device))
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        for _ in range(2):
            batch = random_batch(options, TRAINING_TOKENS, config.hidden_size, len(ids), device)
            batch_loss(network, ends, batch, options.kl_weight).loss_sum.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    static = sum(size for name, size in predicted.parts.items() if not name.startswith("working"))
    step = static + predicted.parts["working: a step"]  # validation is not run here
    name = ", ".join(f"{value} {key.split('_')[0]}" for key, value in changes.items() if value is not None)
    return compare(f"training: {name}", step, measured(work, device))


def large_target(folder: Path, device: str, num_layers: str, room: float):
    """(target, layer ids) of the 27B's kind with random weights; None, said why, without a GPU or where `room` times
    its weights do not fit."""
    import torch

    if not torch.cuda.is_available():
        print("skipped: PyTorch sees no CUDA device")
        return None
    from dflash_lib.target.ends import meta_target

    ids = write_config(folder, int(num_layers))
    needed = sum(p.nbytes for p in meta_target(folder, "bfloat16").model.parameters())
    free = torch.cuda.mem_get_info(device)[0]
    if needed * room > free:
        print(f"skipped: {needed / 1e9:.1f} GB of weights and a batch do not fit into {free / 1e9:.1f} GB free; "
              "give fewer layers")
        return None
    return random_target(folder, device), ids


def main(device: str = "cuda:0", num_layers: str = "64") -> int:
    """0 when everything holds or there is nothing to check here, else 1."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = large_target(folder, device, num_layers, room=1.2)
        if made is None:
            return 0
        target, ids = made
        print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}, {num_layers} layers\n"
              f"{'':<52} {'predicted':>9} {'measured':>9} {'reserved':>9}   ratio   (GB)")
        good = check_capture(target, folder, ids, device)
        for changes in TRAININGS:
            good &= check_training(target, folder, copy.copy(ids), device, changes)
    print("holds" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
