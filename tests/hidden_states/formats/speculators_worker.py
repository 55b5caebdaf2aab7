"""Runs inside the real speculators package (tests/speculators_package.py): hands back what its classes make of files.

EXPORTED STORE OUT: exported/{bf16,fp8,rows} of STORE -> OUT/{bf16,fp8,store}.pt: every sample through ArrowDataset,
check_hidden_states and CollateFn; OUT/theirs: exported/random in its own fp8 form; OUT/said.json: what it says to
damaged files.
"""

import json
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


def read(folder: Path, transfer, out: Path) -> None:
    data = ArrowDataset(max_len=2048, datapath=folder, transfer=transfer, on_missing="raise")
    for i in range(len(data)):
        check_hidden_states(data.transfer.get_cached(i), data.data[i]["input_ids"].tolist())
    samples = [data[i] for i in range(len(data))]
    collate = CollateFn(max_len=2048, hidden_size=64, num_target_layers=3)
    result = {"samples": samples, "packed": collate(samples)}
    if isinstance(transfer, StoreTransfer):
        assert transfer.get_cached(len(data)) is None
        loader = torch.utils.data.DataLoader(data, batch_sampler=[list(range(len(data)))], num_workers=1,
                                             collate_fn=collate, multiprocessing_context="spawn")
        result["from_worker"] = next(iter(loader))
    torch.save(result, out)


def quantize(source: Path, out: Path) -> None:
    out.mkdir()
    for path in sorted(source.iterdir()):
        tensors = load_file(path)
        states, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
        save_file({**tensors, "hidden_states": states, SCALES_KEY: scales}, out / path.name)


def refuse(source: Path, out: Path) -> dict[str, str]:
    folder = Path(shutil.copytree(source, out)) / "hidden_states"
    shutil.copy(folder / "hs_2.safetensors", folder / "hs_3.safetensors")
    warnings.simplefilter("ignore")
    said = {"swapped": type(ArrowDataset(max_len=2048, datapath=out, on_missing="raise")[3]).__name__}
    tensors = load_file(folder / "hs_1.safetensors")
    tensors["hidden_states"][0, 0, 0] = float("nan")
    try:
        check_hidden_states(tensors, tensors["token_ids"].tolist())
    except ValueError as error:
        said["nan"] = str(error)
    return said


def main(exported: Path, store: Path, out: Path) -> None:
    for name, folder, transfer in [("bf16", "bf16", None), ("fp8", "fp8", FP8Transfer(exported / "fp8/hidden_states")),
                                   ("store", "rows", StoreTransfer(store))]:
        read(exported / folder, transfer, out / f"{name}.pt")
    quantize(exported / "random" / "hidden_states", out / "theirs")
    (out / "said.json").write_text(json.dumps(refuse(exported / "bf16", out / "damaged")))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
