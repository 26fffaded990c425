# One image for all programs: `python -m encoder_service …`, `python -m llm_service …`, `python -m gateway …`, and `twinlens`.
#
# pip's own settings decide what it installs: build arguments for an index, or a pip.conf mounted at /etc/pip.conf. The
# default torch is the one that they offer for this platform.
ARG PYTHON_IMAGE=python:3.11-slim
# For GPUs `gcc libc6-dev`: Triton builds its kernels with a C compiler when a service starts.
ARG PACKAGES=

# Dependencies change more rarely than sources, so they are a separate layer, for builds and pulls.
FROM ${PYTHON_IMAGE} AS dependencies
ARG PIP_EXTRA_INDEX_URL=
ARG TORCH=torch
# Requirements of the extra `gpu`, for example "flash-linear-attention" and the address of a wheel of flash-attn.
ARG GPU_REQUIREMENTS=
# For models without a family: transformers, and for a few of them timm or torchaudio.
ARG TRANSFORMERS_REQUIREMENTS=
ARG PACKAGES
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/twinlens
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN /opt/twinlens/bin/pip install 'pip>=25.1' \
 && /opt/twinlens/bin/pip install --no-compile --constraint constraints.txt "${TORCH}" \
    --group services --group gateway --group tracing --group kv-events \
 && if [ -n "${GPU_REQUIREMENTS}" ]; then \
      /opt/twinlens/bin/pip install --no-compile --constraint constraints.txt --no-build-isolation ${GPU_REQUIREMENTS}; fi \
 && if [ -n "${TRANSFORMERS_REQUIREMENTS}" ]; then \
      /opt/twinlens/bin/pip install --no-compile --constraint constraints.txt ${TRANSFORMERS_REQUIREMENTS}; fi
# Removes what services never open: tests, and headers if there is no compiler.
RUN cd /opt/twinlens/lib/python3*/site-packages \
 && rm -rf torch/test torch/bin/protoc* torch/bin/test_* torch/bin/*_test numba/tests networkx/*/tests networkx/*/*/tests \
 && find sympy numpy -type d -name tests -prune -exec rm -rf {} + \
 && if [ -z "${PACKAGES}" ]; then rm -rf torch/include; fi \
 && find . -name __pycache__ -type d -prune -exec rm -rf {} +
# Bytecode of the modules that services load, and no others: without it, each process in a read-only image would compile
# them again.
COPY deploy/image/loaded.py ./
RUN /opt/twinlens/bin/python loaded.py && /opt/twinlens/bin/pip uninstall --yes pip

FROM dependencies AS build
COPY README.md LICENSE ./
COPY proto proto
COPY wheels wheels
COPY twinlens twinlens
COPY common common
COPY encoder_service encoder_service
COPY llm_service llm_service
COPY gateway gateway
# Uses another environment's pip, since the image has none. Writes a CycloneDX list of the image's packages; Debian's have
# their own list.
RUN python3 -m venv /opt/tools && /opt/tools/bin/pip install 'pip>=25.1' cyclonedx-bom \
 && /opt/tools/bin/pip --python /opt/twinlens/bin/python install --no-deps --prefix /opt/own . ./wheels/services \
 && cp -r /opt/own/. /opt/twinlens \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/own/sbom.cdx.json /opt/twinlens/bin/python

FROM ${PYTHON_IMAGE}
ARG PACKAGES
RUN if [ -n "${PACKAGES}" ]; then apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} \
 && rm -rf /var/lib/apt/lists/*; fi
# The folders of caches, local sockets and compiled kernels exist and belong to the user, so that volumes over them are
# writable. numba keeps compiled kernels in /tmp, which is writable even in a read-only image, unless NUMBA_CACHE_DIR
# names a volume.
RUN useradd --create-home --shell /usr/sbin/nologin --uid 10001 twinlens \
 && install -d -o twinlens /home/twinlens/.cache/huggingface /srv/local /srv/kernels
COPY --from=dependencies /opt/twinlens /opt/twinlens
# The embedded checkpoint; mount another over it, or name one with --model.
COPY models /srv/models
COPY --from=build /opt/own /opt/twinlens
ENV PATH=/opt/twinlens/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR=/tmp/numba
USER 10001
WORKDIR /srv
EXPOSE 7001 7002 8000
CMD ["twinlens", "--help"]
# Last, since they change with every commit; `make dist` sets the first two.
ARG VERSION=
ARG REVISION=
ARG SOURCE=
LABEL org.opencontainers.image.title="Twinlens" \
      org.opencontainers.image.description="Serves vision-language models as two gRPC services and an HTTP gateway" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}"
