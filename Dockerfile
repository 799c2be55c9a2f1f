# Serves the page of histocoder serve for the model in the volume /data: see docs/installation.md.
#   docker build -t histocoder .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/out:/data" -e TOKEN="$(openssl rand -hex 16)" histocoder
# For NVIDIA GPUs: docker build --build-arg TORCH_INDEX=https://pypi.org/simple …, and docker run --gpus all …
# No Docker daemon has built it yet. Its parts were checked: pip's commands and useradd by hand, without download.pytorch.org,
# and the server as user 1000; tests/scripts/test_wheel.py builds the wheel of what is copied here, and runs CMD and
# HEALTHCHECK.

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY histocoder histocoder
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# a build for CPUs; the default of pypi.org is one for CUDA, several times as large
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /tmp/wheels/*.whl)[serve]"
RUN useradd --uid 1000 --user-group --create-home histocoder && mkdir /data && chown histocoder:histocoder /data
USER histocoder
WORKDIR /data
VOLUME /data
ENV MODEL=/data/best
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import os; from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/?token=' + os.environ['TOKEN'], timeout=5)"]
CMD ["sh", "-c", "exec histocoder serve --model \"$MODEL\" --workspace /data/desk --host 0.0.0.0 --port 8000 --token \"$TOKEN\" --no-browser"]
