# Two targets: `cpu` (smaller with torch's CPU wheels, see the build argument) and `cuda` (the default).
#   docker build --target cpu -t foredraft:cpu .
#   docker run --rm -p 8000:8000 -v foredraft:/home/foredraft/.cache foredraft:cpu
FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A volume here keeps compiled code and downloaded models; a new volume gets this owner.
RUN useradd --create-home --uid 10001 foredraft \
  && install --directory --owner=foredraft --group=foredraft /home/foredraft/.cache
WORKDIR /app
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY engine engine
COPY server server
COPY configs configs
EXPOSE 8000
# As long as server.start_timeout_seconds: the first start compiles, later ones may load for minutes.
HEALTHCHECK --start-period=600s --interval=10s CMD ["python", "-c", \
  "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"]
ENTRYPOINT ["foredraft", "serve", "--host", "0.0.0.0"]

FROM base AS cpu
# Pass torch's CPU wheel index to leave out CUDA: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
RUN pip install -c requirements.lock .
USER foredraft

FROM base AS cuda
# Triton, which compiles attention on GPUs, calls a C compiler to load its kernels.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/*
RUN pip install -c requirements.lock .
USER foredraft
