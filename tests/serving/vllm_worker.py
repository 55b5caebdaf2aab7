"""Runs in a serving environment, by its own Python: greedy answers of vLLM with or without a DFlash drafter.

usage: PYTHON vllm_worker.py JOB.json RESULT.json. The job: model and drafter folders (drafter null = without), dtype,
num_speculative_tokens, prompts (lists of token ids), max_new_tokens. The result: token_ids of each answer, num_drafts
(verify steps) and num_accepted by slot, as vLLM's own counters give them.
"""

import json
import sys


def main(job_file: str, result_file: str) -> None:
    from vllm import LLM, SamplingParams

    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    speculative = None if job["drafter"] is None else {
        "method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["num_speculative_tokens"]}
    llm = LLM(model=job["model"], dtype=job["dtype"], enforce_eager=True, max_model_len=1024, max_num_seqs=8,
              enable_prefix_caching=False, disable_log_stats=False, speculative_config=speculative)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]],
                           SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"]))
    result = {"token_ids": [list(output.outputs[0].token_ids) for output in outputs], "num_drafts": 0,
              "num_accepted": []}
    for metric in llm.get_metrics() if speculative else []:
        if metric.name == "vllm:spec_decode_num_drafts":
            result["num_drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            result["num_accepted"] = list(metric.values)
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
