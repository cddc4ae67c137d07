# Every target sets up what it needs first; all it takes is make and python3 (3.10 or newer) with its venv module.
#   make demo        train the ResNet example on two processes and plot its curves
#   make demo-resizes  train it in one process and in a job whose nodes come and are killed, and compare all bits
#   make demo-ps     train the wide & deep example with a parameter server and two workers, and plot its curves
#   make demo-serve  serve predictions over HTTP while the wide & deep example trains, and watch them change
#   make demo-recommend  train two towers, serve and retrieve with them, drop a bad version and brake, with a page
#   make demo-gpt    train a small GPT on four processes, two stages of divided layers, and plot it beside plain torch
#   make test        the quick tests            make test-slow   the slow ones
#   make test-gpu    the tests that need a GPU
#   make lint        style and types            make docs        rewrite the generated parts of the documentation
#   make compat      the quick tests on another Python and torch: make compat PYTHON=python3.12 TORCH=2.14
#   make site        the documentation in site/
#   make bench       the benchmarks             make dist        source archive and wheel in dist/
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/ready
# Nothing that a caller exported may decide which modules or which worker identity a target sees.
unexport PYTHONPATH PYTHONHOME
# Nor keep Python from storing what it has compiled: each process of the tests would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --no-input

.PHONY: install demo demo-resizes demo-ps demo-serve demo-recommend demo-gpt test test-slow test-long test-gpu compat lint docs site bench dist clean
.DEFAULT_GOAL := install

install: $(READY)

# The stamp is written last: an installation that was interrupted, or that is older than what it was made from, is
# made again. torch goes in alone and first, from its own pinned line; once it is there, no later requirement can
# pull another build of it.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "make needs Python 3.10 or newer; $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.11" % sys.version_info[:2])'
	@rm -f $@
	@$(PY) -c '' 2>/dev/null || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } \
		|| { echo 'make: $(PYTHON) -m venv failed; on Debian and Ubuntu, install python3-venv.' >&2; exit 1; }
	@echo 'Installing into $(VENV) (the first time this takes a few minutes)'
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --constraint constraints.txt --editable '.[dev,examples,elastic]'
	@touch $@

demo: $(READY)
	@mkdir -p output/demo
	$(PY) -m fleet.launch --gpus=0,1 --log_dir output/demo/log \
		examples/resnet/train_fleet_dygraph.py --history output/demo/history.jsonl
	$(PY) examples/resnet/plot.py output/demo/history.jsonl output/demo/resnet.png

demo-resizes: $(READY)
	$(PY) examples/resnet/demo_resizes.py output/demo-resizes

demo-ps: $(READY)
	@mkdir -p output/demo-ps
	$(PY) -m fleet.launch --server_num=1 --worker_num=2 --log_dir output/demo-ps/log \
		examples/wide_and_deep/train_fleet_ps.py --layers 128 64 --history output/demo-ps/history.jsonl
	$(PY) examples/wide_and_deep/plot.py output/demo-ps/history.jsonl output/demo-ps/flights.png

demo-serve: $(READY)
	OMP_NUM_THREADS=1 $(PY) examples/wide_and_deep/demo_serve.py output/demo-serve

demo-recommend: $(READY)
	OMP_NUM_THREADS=1 $(PY) examples/recommenders/demo.py output/demo-recommend --kind ivf

demo-gpt: $(READY)
	@mkdir -p output/demo
	OMP_NUM_THREADS=1 $(PY) examples/gpt/train_torch.py --history output/demo/gpt_torch.jsonl
	$(PY) -m fleet.launch --gpus=0,1,2,3 --log_dir output/demo/gpt_log examples/gpt/train_fleet_hybrid.py \
		--strategy examples/gpt/configs/mp2_pp2.yaml --same-start --history output/demo/gpt_mp2_pp2.jsonl
	$(PY) examples/gpt/plot.py output/demo/gpt.png 'plain torch=output/demo/gpt_torch.jsonl' \
		'pp 2 x mp 2=output/demo/gpt_mp2_pp2.jsonl'

# A file of tests at a time. Quick tests wait for half of their time, so that four processes fill two processors.
# They train on the CPU, also on a machine with GPUs: fleet.init() would take those.
test: $(READY)
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses=4 --dist=loadfile

test-slow: $(READY)
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -m slow --numprocesses=3 --dist=loadfile

test-long: $(READY)
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest -m long

test-gpu: $(READY)
	$(PY) -m pytest -m gpu

# In an environment of its own, several GB large, which is removed when the tests are done; TESTS= names some of them.
# The pinned versions stay, but for torch: what was tested is in docs/reference/compatibility.md.
COMPAT := .venv-compat
TESTS ?=
compat:
	@test -n "$(TORCH)" || { echo 'make compat needs a torch: make compat PYTHON=python3.12 TORCH=2.14' >&2; exit 2; }
	@rm -rf $(COMPAT) && $(PYTHON) -m venv $(COMPAT)
	@grep -v '^torch==' constraints.txt > $(COMPAT)/constraints.txt
	@$(COMPAT)/bin/python -m pip --disable-pip-version-check install --quiet --no-input "torch==$(TORCH).*" \
		--constraint $(COMPAT)/constraints.txt --editable '.[dev,examples,elastic]'
	@$(COMPAT)/bin/python -c 'import sys, torch; print("Python %d.%d.%d," % sys.version_info[:3], "torch", torch.__version__)'
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(COMPAT)/bin/python -m pytest --numprocesses=2 --dist=loadfile $(TESTS); \
		status=$$?; rm -rf $(COMPAT); exit $$status

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(READY)
	$(PY) docs/generate.py

site: $(READY)
	@$(PIP) --constraint constraints.txt --editable '.[docs]'
	REPOSITORY="$(REPOSITORY)" NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(READY)
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(PY) "$$script"; done

# REPOSITORY=https://HOST/OWNER/NAME is where the links of the long description lead; without it they are plain text. The
# site links to it, too.
dist: $(READY)
	REPOSITORY=$(REPOSITORY) $(PY) -m build

clean:
	rm -rf build dist output site *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
