"""Gated DeltaNet on a GPU: the kernels of flash-linear-attention against Transformers' PyTorch fallback.

usage: python -m tests.gpu.check_fast_gdn [DEVICE]. Needs PyTorch, Transformers and flash-linear-attention, nothing
else of the workbench's requirements; skips, and says so, where there is no CUDA device or no kernels. Weights are
random and created on the device, so nothing is downloaded.

Which path Transformers takes is decided when it is imported, so each side runs in a process of its own; the fallback's
has `fla` and `causal_conv1d` hidden. The truth is the fallback in float32: the kernels in bf16 may be as far from it as
the fallback in bf16 is, times MAX_RATIO. Prints a table; exits with 1 when a check fails.
"""

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN = ("fla", "causal_conv1d")
LENGTHS = (1, 2, 63, 64, 65, 130, 1000)  # one token, around the chunk of 64, and long
NUM_LAYERS, HIDDEN_SIZE, LONG, SEED = 8, 1024, 2048, 0
MAX_RATIO = 2.0  # of the fallback's own rounding, typical (median) token of the worst layer
MIN_SHIFTED = 0.1  # a shift by one layer must be further away than this, or the comparison would see nothing
MAX_BATCH = 1e-2  # batch against rows alone, bf16: kernels may choose other tilings


def make_target(dtype, device: str):
    """A random Qwen3.5 text tower with the head sizes of the 27B, on the device; the same weights in every process."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    from dflash_lib.target.loading import Target

    config = Qwen3_5TextConfig(
        num_hidden_layers=NUM_LAYERS, vocab_size=1024, hidden_size=HIDDEN_SIZE, intermediate_size=2 * HIDDEN_SIZE,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, linear_num_key_heads=4, linear_num_value_heads=12,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=4096)
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():  # not the buffers: inv_freq stays float32, as it does when loaded
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)  # one set of weights for every dtype
    return Target(Path("random"), model, None, None)


def worker(side: str, dtype_name: str, device: str, out: str) -> None:
    """Captures every layer of every row, in one batch and alone, and writes the states; "fallback" hides kernels."""
    if side == "fallback":
        for name in HIDDEN:
            sys.modules[name] = None  # importing it now raises ModuleNotFoundError
    import torch
    from safetensors.torch import save_file

    from dflash_lib.target.capture import capture_batch

    target = make_target(getattr(torch, dtype_name), device)
    uses_kernels = any(name.startswith("fla.") for name in sys.modules)
    if uses_kernels != (side == "kernels"):
        raise SystemExit(f"{side}: Transformers {'took' if uses_kernels else 'did not take'} the kernels of "
                         "flash-linear-attention")
    generator = torch.Generator().manual_seed(SEED)
    rows = [torch.randint(1024, (n,), generator=generator).tolist() for n in LENGTHS]
    alone = [capture_batch(target, [row], range(NUM_LAYERS), last=False)[0].aux_hidden_states for row in rows]
    together = capture_batch(target, rows, range(NUM_LAYERS), last=False)
    long = [torch.randint(1024, (LONG,), generator=generator).tolist() for _ in range(8)]
    capture_batch(target, long, [NUM_LAYERS - 1], last=False)[0].aux_hidden_states.cpu()  # compiles for this shape
    began = time.perf_counter()
    for _ in range(3):  # .cpu() waits for the device
        capture_batch(target, long, [NUM_LAYERS - 1], last=False)[0].aux_hidden_states.cpu()
    rate = 3 * 8 * LONG / (time.perf_counter() - began)
    states = {f"alone{i}": one for i, one in enumerate(alone)}
    states |= {f"batch{i}": one.aux_hidden_states for i, one in enumerate(together)}
    save_file({name: one.float().cpu().contiguous() for name, one in states.items()} | {"rate": torch.tensor(rate)},
              out)


def relative_error(a, b):
    """||a - b|| / ||b|| per token and layer, [T, layers]."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def compare(kernels: dict, fallback: dict, truth: dict) -> bool:
    """Prints the table of typical and worst tokens for each length; whether everything holds."""
    print(f"{'tokens':>7} {'kernels bf16':>22} {'fallback bf16':>22} {'shifted':>9} {'batch':>9}   "
          "error against float32: median of the worst layer, worst token")
    good = True
    for i, length in enumerate(LENGTHS):
        exact = truth[f"alone{i}"]
        ours, theirs = (relative_error(side[f"alone{i}"], exact) for side in (kernels, fallback))
        typical, rounding = (error.median(dim=0).values.max().item() for error in (ours, theirs))
        shifted = relative_error(kernels[f"alone{i}"][:, :-1], exact[:, 1:]).median(dim=0).values.min().item()
        batch = relative_error(kernels[f"batch{i}"], kernels[f"alone{i}"]).median(dim=0).values.max().item()
        holds = (typical <= MAX_RATIO * rounding and ours.max() <= 3 * MAX_RATIO * theirs.max()
                 and shifted >= MIN_SHIFTED and batch <= MAX_BATCH)
        good &= bool(holds)  # NaN fails every comparison
        print(f"{length:>7} {typical:>11.5f} {ours.max().item():>10.5f} {rounding:>11.5f} {theirs.max().item():>10.5f} "
              f"{shifted:>9.4f} {batch:>9.5f}   {'' if holds else 'FAILED'}")
    return good


def main(device: str = "cuda:0") -> int:
    """0 when everything holds or there is nothing to check here, else 1."""
    import torch
    import transformers

    if not torch.cuda.is_available():
        print("skipped: PyTorch sees no CUDA device")
        return 0
    absent = [name for name in HIDDEN[:1] if importlib.util.find_spec(name) is None]
    if absent:
        print("skipped: flash-linear-attention is not installed (pip install flash-linear-attention)")
        return 0
    print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}, Transformers "
          f"{transformers.__version__}, causal_conv1d "
          f"{'installed' if importlib.util.find_spec('causal_conv1d') else 'not installed'}")
    from safetensors.torch import load_file

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for side, dtype in (("kernels", "bfloat16"), ("fallback", "bfloat16"), ("fallback", "float32")):
            out = f"{folder}/{side}-{dtype}.safetensors"
            subprocess.run([sys.executable, "-m", "tests.gpu.check_fast_gdn", "--worker", side, dtype, device, out],
                           check=True)
            found.append(load_file(out))
    good = compare(*found)
    kernels, fallback = (side["rate"].item() for side in found[:2])
    print(f"8 rows of {LONG:,} tokens, bf16, {NUM_LAYERS} layers: {kernels:,.0f} tokens/s with the kernels, "
          f"{fallback:,.0f} without ({kernels / fallback:.1f}x)")
    print("holds" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
