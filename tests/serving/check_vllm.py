"""The exported drafter in a real vLLM server: `python -m dflash_lib evaluate --server` against it.

usage: python -m tests.serving.check_vllm RUN SERVING_PYTHON [NUM_PROMPTS [DTYPE]]. RUN: a run folder with results of
07_evaluate; SERVING_PYTHON: the Python of an environment with vLLM; DTYPE: what vLLM computes in, by default float32,
and bfloat16 for targets with linear attention, whose kernel in vLLM's CPU build knows nothing else. Starts the server
on a free port with the run's target and export, waits for it, compares, and ends it whatever happens; its log stays in
RUN/served/server.log. Exits as that does. Outside CI.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from dflash_lib.__main__ import main as dflash
from dflash_lib.launch import die_with_parent
from dflash_lib.target.loading import read_config
from dflash_lib.workbench.runs import input_path, load_record

START_S = 1800.0  # on a busy machine vLLM's CPU build takes minutes
GRACE_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def vllm_server(python: str, target: Path, drafter: Path, num_drafts: int, dtype: str, log: Path) -> Iterator[str]:
    """The base URL of a vLLM server that drafts `num_drafts` tokens with the export `drafter`, and writes `log`. Raises
    RuntimeError with the end of its log when it does not come up."""
    url = f"http://127.0.0.1:{free_port()}"
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_drafts}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", url.split(":")[-1],
               "--model", str(target), "--served-model-name", "target", "--dtype", dtype, "--enforce-eager",
               "--max-model-len", "1024", "--max-num-seqs", "4", "--no-enable-prefix-caching",
               "--speculative-config", json.dumps(speculative)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    parent = os.getpid()
    with tempfile.TemporaryDirectory() as folder:  # vLLM must not import this checkout by its working directory
        with open(log, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=folder,
                                       start_new_session=True, preexec_fn=lambda: die_with_parent(parent))
        try:
            wait_for(url, process, log)
            yield url
        finally:
            end(process)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    """Returns once the server answers. Raises RuntimeError when it ended, or did not come up in START_S."""
    deadline = time.monotonic() + START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(f"{url}/health", timeout=10):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(1)
    raise RuntimeError(f"vLLM did not come up (exit code {process.poll()}):\n{log.read_text(errors='replace')[-3000:]}")


def end(process: subprocess.Popen) -> None:
    """Ends the server with its engine processes, which are of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def main(run: str, python: str, num_prompts: str = "", dtype: str = "") -> int:
    """Serves and compares; the exit code of `evaluate`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the server
    folder = Path(run).resolve()
    record = load_record(folder, "07_evaluate")
    if record is None:
        raise SystemExit(f"{folder}: no results of 07_evaluate; run `make demo` first")
    target = input_path("model", record["parameters"]["model"])
    export = folder / "drafter" / "export" / "zlab"
    log = folder / "served" / "server.log"
    log.parent.mkdir(exist_ok=True)
    for old in log.parent.glob("answers.jsonl.partial*"):  # of another server: each has a port of its own
        old.unlink()
    linear = "linear_attention" in (getattr(read_config(target).get_text_config(), "layer_types", None) or ())
    dtype = dtype or ("bfloat16" if linear else "float32")
    print(f"vLLM in {dtype}; its log: {log}", flush=True)
    with vllm_server(python, target, export, record["results"]["block_size"] - 1, dtype, log) as url:
        limit = ["--num-prompts", num_prompts] if num_prompts else []
        return dflash(["evaluate", "--drafter", str(folder), "--server", url, *limit])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
