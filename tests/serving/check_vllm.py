"""The exported drafter in a real server: vLLM's greedy output with it equals that without it, and its accepted tokens
by slot stand beside those of 07_evaluate on the same prompts.

usage: python -m tests.serving.check_vllm RUN SERVING_PYTHON [DTYPE]. Exits 1 when the output differs or the acceptance
length is further from ours than MAX_GAP. Outside CI: SERVING_PYTHON is the Python of an environment with vLLM.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dflash_lib.workbench.runs import REPOSITORY, load_record

MAX_GAP = 0.1  # tokens a step; vLLM counts drafts accepted behind an answer's end, we do not


def serve(python: str, folder: Path, job: dict) -> dict:
    """Runs the worker in the serving environment and returns its result."""
    name = "with" if job["drafter"] else "without"
    (folder / f"{name}.json").write_text(json.dumps(job))
    out = folder / f"{name}.result.json"
    worker = Path(__file__).with_name("vllm_worker.py")
    subprocess.run([python, str(worker), str(folder / f"{name}.json"), str(out)], check=True, cwd=folder,
                   env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"})
    return json.loads(out.read_text())


def main(run: str, python: str, dtype: str = "float32") -> int:
    """Serves the prompts of the run's 07_evaluate twice and prints the comparison; 0 when it holds."""
    folder = Path(run).resolve()
    record = load_record(folder, "07_evaluate")
    if record is None:
        raise SystemExit(f"{folder}: no results of 07_evaluate; run `make demo` first")
    decoded, block_size = record["results"]["decoded"], record["results"]["block_size"]
    job = {"model": str(REPOSITORY / record["parameters"]["model"]), "dtype": dtype,
           "num_speculative_tokens": block_size - 1, "prompts": [one["prompt_ids"] for one in decoded],
           "max_new_tokens": record["parameters"]["eval_max_new_tokens"]}
    with tempfile.TemporaryDirectory() as temporary:
        plain = serve(python, Path(temporary), {**job, "drafter": None})
        served = serve(python, Path(temporary), {**job, "drafter": str(folder / "drafter" / "export" / "zlab")})

    same = sum(a == b for a, b in zip(plain["token_ids"], served["token_ids"], strict=True))
    ours_same = sum(a == one["token_ids"] for a, one in zip(plain["token_ids"], decoded, strict=True))
    accepted = [n for one in decoded for n in one["accepted"]]
    theirs = 1 + sum(served["num_accepted"]) / served["num_drafts"]
    ours = 1 + sum(accepted) / len(accepted)
    print(f"\nvLLM, {dtype}: output with the drafter equals that without for {same} of {len(decoded)} prompts")
    print(f"vLLM's plain output equals the workbench's for {ours_same} of {len(decoded)} prompts")
    print(f"{'slot':>6} {'vLLM':>8} {'workbench':>10}   share of verify steps in which the slot was accepted")
    for slot in range(1, block_size):
        share = sum(n >= slot for n in accepted) / len(accepted)
        print(f"{slot:>6} {served['num_accepted'][slot - 1] / served['num_drafts']:>8.3f} {share:>10.3f}")
    print(f"{'length':>6} {theirs:>8.3f} {ours:>10.3f}   1 + accepted, over {served['num_drafts']} and "
          f"{len(accepted)} steps")
    return 0 if same == len(decoded) and abs(theirs - ours) <= MAX_GAP else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
