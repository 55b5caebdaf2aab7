"""Runs inside the real speculators package (tests/speculators_package.py): hands back what its classes make of files.

read NAME EXPORTED STORE OUT: every sample through ArrowDataset, check_hidden_states and CollateFn, to OUT;
quantize IN OUT: its fp8 form of bf16 files; refuse IN OUT: what it says to damaged files.
"""

import shutil
import sys
import warnings
from pathlib import Path

import torch
from hs_connectors import FP8Transfer
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file
from speculators.data_generation.offline import check_hidden_states
from speculators.train.data import ArrowDataset, CollateFn

from dflash_lib.hidden_states.formats.transfer import StoreTransfer


def read(name: str, exported: str, store: str, out: str) -> None:
    folder, transfer = Path(exported) / name, None
    if name == "fp8":
        transfer = FP8Transfer(folder / "hidden_states")
    elif name == "store":
        folder, transfer = Path(exported) / "rows", StoreTransfer(store)
        assert transfer.get_cached(24) is None
    data = ArrowDataset(max_len=2048, datapath=folder, transfer=transfer, on_missing="raise")
    for i in range(len(data)):
        check_hidden_states(data.transfer.get_cached(i), data.data[i]["input_ids"].tolist())
    samples = [data[i] for i in range(len(data))]
    collate = CollateFn(max_len=2048, hidden_size=64, num_target_layers=3)
    loader = torch.utils.data.DataLoader(data, batch_sampler=[list(range(len(data)))], num_workers=1,
                                         collate_fn=collate, multiprocessing_context="spawn")
    torch.save({"samples": samples, "packed": collate(samples), "from_worker": next(iter(loader))}, out)


def quantize(source: str, out: str) -> None:
    Path(out).mkdir()
    for path in sorted(Path(source).iterdir()):
        tensors = load_file(path)
        states, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
        save_file({**tensors, "hidden_states": states, SCALES_KEY: scales}, Path(out) / path.name)


def refuse(source: str, out: str) -> None:
    folder = Path(shutil.copytree(source, out)) / "hidden_states"
    tensors = load_file(folder / "hs_1.safetensors")
    tensors["hidden_states"][0, 0, 0] = float("nan")
    shutil.copy(folder / "hs_2.safetensors", folder / "hs_3.safetensors")
    warnings.simplefilter("ignore")
    data = ArrowDataset(max_len=2048, datapath=out, on_missing="raise")
    print("swapped:", type(data[3]).__name__)
    try:
        check_hidden_states(tensors, tensors["token_ids"].tolist())
    except ValueError as error:
        print("nan:", error)


if __name__ == "__main__":
    {"read": read, "quantize": quantize, "refuse": refuse}[sys.argv[1]](*sys.argv[2:])
