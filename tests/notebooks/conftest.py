"""A job small enough for a test: every notebook on the tiny dense target and conversations that it wrote itself."""

import json

import pytest
import yaml

from dflash_lib.target.regenerate import RegenerateOptions, regenerate
from dflash_lib.workbench.pipeline import PipelineOptions, run_pipeline
from tests.conftest import DATA

TINY = {
    "dtype": "float32", "device": "cpu", "threads": 1, "max_samples": 20, "max_length": 96, "num_aux_layers": 3,
    "encoding": "bf16", "token_budget": 256, "samples_per_shard": 8, "num_workers": 2, "num_trial_samples": 5,
    "num_statistics_samples": 8, "block_size": 4, "mask_token_id": 3, "num_drafter_layers": 1, "warm_start": True,
    "drafter_intermediate_size": None, "draft_vocab_size": None, "steps": 6, "batch_samples": 2,
    "anchors_per_sample": 8, "warmup_steps": 2, "validation_samples": 4, "validation_interval": 3, "eval_prompts": 4,
    "eval_max_new_tokens": 12,
    # a random target and six steps: what is measured is that everything runs, not how well it drafts
    "min_validation_acceptance": 1.0, "min_acceptance_length": 1.0, "min_lead": -100.0,
    "min_validation_gain": -100.0,
}
KINDS = ("facts", "stories", "code")


def write_prompts(path, num, text):
    path.write_text("".join(json.dumps({"id": f"{path.stem}-{i}", "kind": KINDS[i % 3], "messages": [
        {"role": "user", "content": text.format(i)}]}) + "\n" for i in range(num)))
    return path


def make_job(target, folder) -> PipelineOptions:
    """A parameter file for a tiny target, with conversations that it wrote itself."""
    prompts = write_prompts(folder / "train.jsonl", 24, "What is rain? Explain it {} times.")
    regenerate(target, prompts, folder / "conversations.jsonl", RegenerateOptions(max_new_tokens=24))
    heldout = write_prompts(folder / "heldout.jsonl", 6, "Write a story about {} kittens.")
    reference = DATA / "vllm_reference"
    values = TINY | {"model": str(target.path), "conversations": str(folder / "conversations.jsonl"),
                     "heldout_prompts": str(heldout), "vllm_reference": str(reference) if reference.is_dir() else ""}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    return PipelineOptions(params_file=folder / "tiny.yaml", runs_dir=folder / "runs")


@pytest.fixture(scope="session")
def tiny_job(tiny_llama, tmp_path_factory) -> PipelineOptions:
    return make_job(tiny_llama, tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="session")
def tiny_run(tiny_job):
    return run_pipeline(tiny_job)
