# make demo         trains and feeds rollout workers: examples/rlhf_weight_sync (ARGS="--help" lists its options)
# make test         the unit tests (ARGS="tests/unit/checkpoint -k name" selects some)
# make test-install installs the fork in every way into new virtual environments
# make lint         the checks of .pre-commit-config.yaml
# make docs         docs/source as HTML in build/docs; a warning is an error
#
# Each makes .venv first when there is none, or when what it was made from has changed.

PYTHON ?= python3.11
BIN := .venv/bin

# A new module needs a new link (setup.py), so the name of the stamp holds a checksum of their list. The links live in
# build/: without them the installation is broken.
INSTALLED := .venv/installed-$(shell find deepspeed -name '*.py' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
LINKS := $(wildcard build/__editable__.deepspeed-*)

.PHONY: demo test test-install lint docs always

demo: $(INSTALLED)
	$(BIN)/python examples/rlhf_weight_sync/run.py $(ARGS)

test: $(INSTALLED)
	DS_ACCELERATOR=cpu $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-install: $(INSTALLED)
	DS_ACCELERATOR=cpu $(BIN)/python -m pytest tests/install $(ARGS)

lint: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" pre-commit run --all-files --show-diff-on-failure

docs: $(INSTALLED)
	DS_ACCELERATOR=cpu $(BIN)/python -m sphinx -q -W docs/source build/docs

$(INSTALLED): setup.py setup.cfg pyproject.toml $(wildcard requirements/*.txt) $(if $(LINKS),,always)
	$(PYTHON) -m venv .venv
	rm -f .venv/installed-*
	$(BIN)/python -m pip install -r requirements/requirements-dev.txt -e .
	touch $@
