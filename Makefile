# make demo   an estimate of a real model, from a bare machine with Python 3.11; then a small one, planned, trained for a minute and measured
# make test   everything that must hold: linter, formatter, types, import contracts, tests
# make bench  how fast an estimate, a plan and an answer to why are on this machine
# make bench-trace   what a trace takes beside torch's FSDPMemTracker
# make bench-train   how fast a training is and what it holds, beside plain loops around FSDP2, DDP and DeepSpeed
# make bench-cpu     seconds of a step on this CPU, predicted from a calibration and measured: five minutes
# make residuals TRUTH=folder  how wide intervals are, from files of measured runs
# make accuracy TRUTH=folder   docs/accuracy.md, from files of measured runs

PYTHON ?= python3
BIN := .venv/bin
DEMO_BIN := .venv-demo/bin

.PHONY: venv test demo bench bench-trace bench-train bench-cpu residuals accuracy clean

venv: .venv/.stamp

.venv/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

test: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist loadgroup

# The core alone, built and installed as a user gets it: what the wheel forgets is missed here.
.venv-demo/.stamp: pyproject.toml $(shell find src -type f -not -path '*/__pycache__/*')
	$(PYTHON) -m venv .venv-demo
	$(DEMO_BIN)/pip install --quiet --disable-pip-version-check .
	touch $@

# torch's own pin, as in pyproject.toml: what is shown was tried with it.
.venv-demo/.train: .venv-demo/.stamp
	$(DEMO_BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(DEMO_BIN)/pip install --quiet --disable-pip-version-check '.[train]'
	touch $@

demo: .venv-demo/.train
	$(DEMO_BIN)/ullage estimate examples/llama-3.1-8b-fsdp2.yaml
	rm -rf build/demo && mkdir -p build
	$(DEMO_BIN)/python examples/bytes.py docs/*.md --out build/demo.npy
	$(DEMO_BIN)/ullage train examples/bytes-zero3.yaml --data build/demo.npy --out build/demo --steps 60 --lr 1e-3 --warmup-steps 10
	$(DEMO_BIN)/ullage measure examples/bytes-zero3.yaml --data build/demo.npy

bench: venv
	$(BIN)/python benchmarks/estimate_speed.py
	$(BIN)/python benchmarks/plan_speed.py
	$(BIN)/python benchmarks/why_speed.py

bench-trace: venv
	$(BIN)/python benchmarks/trace_speed.py

bench-train: venv
	$(BIN)/python -W ignore benchmarks/train_speed.py

bench-cpu: venv
	$(BIN)/python -W ignore benchmarks/step_time_cpu.py

TRUTH ?= tests/validation/data

RESIDUALS := src/ullage/engines/data/residuals.toml

residuals: venv
	$(BIN)/ullage validate $(TRUTH) --residuals > $(RESIDUALS).new
	mv $(RESIDUALS).new $(RESIDUALS)

# Held against measured runs, and against the real code: two hours of two cores at most, most of it tracing.
accuracy: venv
	$(BIN)/ullage validate $(TRUTH) --markdown --causes docs/misses.toml > docs/accuracy.md.new
	printf '\n## Every block against the trace of the real layer code\n\n' >> docs/accuracy.md.new
	printf 'Small models of each family, bytes: every block in the first mode, what differs in the others, and how many are equal.\n\n' >> docs/accuracy.md.new
	$(BIN)/python -W ignore -m ullage.trace.compare >> docs/accuracy.md.new
	printf '\n## Whole steps against the trace of the real code\n\n' >> docs/accuracy.md.new
	printf 'The highest bytes of one rank, library workspaces aside, and when: `python -m ullage.trace.whole`.\n\n' >> docs/accuracy.md.new
	$(BIN)/python -W ignore -m ullage.trace.whole >> docs/accuracy.md.new
	printf '\n## Modules that no one here wrote\n\n' >> docs/accuracy.md.new
	printf 'The highest bytes, batch and buffers aside: `python -m benchmarks.foreign`.\n\n' >> docs/accuracy.md.new
	$(BIN)/python -W ignore -m benchmarks.foreign >> docs/accuracy.md.new
	printf '\n## DeepSpeed, really run\n\n' >> docs/accuracy.md.new
	$(BIN)/python -W ignore -m tests.distributed.deepspeed_table >> docs/accuracy.md.new
	printf '\n## Techniques, really run\n\n' >> docs/accuracy.md.new
	printf 'Differences from one device over 20 steps, relative; CPU processes, `python -m tests.distributed.techniques_table`.\n\n' >> docs/accuracy.md.new
	$(BIN)/python -W ignore -m tests.distributed.techniques_table >> docs/accuracy.md.new
	mv docs/accuracy.md.new docs/accuracy.md

clean:
	rm -rf .venv .venv-demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +
