# make demo        the whole job on SmolLM2-135M: environment, model, every notebook, report (10 to 20 minutes)
# make demo-hybrid the tiny hybrid of data/tiny_hybrid, a small Qwen3.5: every notebook (about 4 minutes)
# make test        the suite of every change
# make test-full   the slow proofs only
# make test-serving  a run's exported drafter in a real vLLM server (needs SERVING_PYTHON, see README.md)
# make clean       removes the environment; runs, models and states stay

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
PARAMS ?= notebooks/params/demo.yaml
RUN ?= runs/demo
# most tests use one core: two of them at a time
PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: venv demo demo-hybrid test test-full test-serving clean

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the pinned environment into .venv (2 GB; a minute or two without a word)"
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/python -m dflash_lib fetch-demo-model
	$(BIN)/python -m dflash_lib run $(PARAMS)

demo-hybrid: $(STAMP)
	$(BIN)/python -m dflash_lib run notebooks/params/demo_hybrid.yaml

test: $(STAMP)
	$(PYTEST) -m "not slow"

test-full: $(STAMP)
	$(PYTEST) -m slow

test-serving: $(STAMP)
	@test -x "$(SERVING_PYTHON)" || { echo "set SERVING_PYTHON to the Python of an environment with vLLM"; exit 2; }
	$(BIN)/python -m tests.serving.check_vllm $(RUN) $(SERVING_PYTHON) "$(NUM_PROMPTS)" $(DTYPE)

clean:
	rm -rf .venv
