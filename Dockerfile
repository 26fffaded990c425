# One image for all: `python -m encoder_service …`, `python -m llm_service …`, `python -m gateway …`, and `twinlens`.
#
# What pip installs is decided by its own settings: build arguments for an index, or a pip.conf mounted at
# /etc/pip.conf. The default torch is whichever those settings offer for this platform.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG PIP_EXTRA_INDEX_URL=
ARG TORCH=torch
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/twinlens
WORKDIR /src
# The dependencies change more rarely than the sources, so they are a layer of their own.
COPY pyproject.toml constraints.txt ./
RUN /opt/twinlens/bin/pip install 'pip>=25.1' \
 && /opt/twinlens/bin/pip install --constraint constraints.txt "${TORCH}" --group services --group gateway --group tracing
COPY README.md LICENSE ./
COPY proto proto
COPY wheels wheels
COPY twinlens twinlens
COPY common common
COPY encoder_service encoder_service
COPY llm_service llm_service
COPY gateway gateway
RUN /opt/twinlens/bin/pip install --no-deps . ./wheels/services

FROM ${PYTHON_IMAGE}
# For GPUs `--build-arg PACKAGES="gcc libc6-dev"`: Triton builds its kernels with a C compiler when a service starts.
ARG PACKAGES=
RUN if [ -n "${PACKAGES}" ]; then apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
 && rm -rf /var/lib/apt/lists/*; fi
# The cache folder, that of local sockets and that of compiled kernels are there, and the user's, so that volumes over
# them can be written. What numba compiles for the processor at hand is kept in /tmp, which can be written even where
# nothing else can, unless NUMBA_CACHE_DIR names a volume.
RUN useradd --create-home --shell /usr/sbin/nologin --uid 10001 twinlens \
 && install -d -o twinlens /home/twinlens/.cache/huggingface /srv/local /srv/kernels
COPY --from=build /opt/twinlens /opt/twinlens
# The embedded checkpoint; another is mounted over it or named with --model.
COPY models /srv/models
ENV PATH=/opt/twinlens/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba
USER twinlens
WORKDIR /srv
EXPOSE 7001 7002 8000
CMD ["twinlens", "--help"]
