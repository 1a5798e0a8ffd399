# The core: token ids in, token ids out. Build it from the repository's root:
#   docker build --file deploy/core.Dockerfile --tag headrace-core:0.1.0 .
# It holds the CPU build of torch. For CUDA (driver and GPU come from the host):
#   docker build --file deploy/core.Dockerfile --tag headrace-core:0.1.0-cuda --build-arg EXTRAS="core cuda" \
#     --build-arg TORCH=torch==2.13.0 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# The base is pinned by tag; pin it by digest with --build-arg BASE_IMAGE=docker.io/library/python@sha256:<digest>.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

# The C++ kernels, for every kind of CPU that the image may meet; the best one is picked at start. No compiler is left in
# the image.
FROM ${BASE_IMAGE} AS kernels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY kernels /kernels
RUN python3 /kernels/native_compiler.py /prebuilt

FROM ${BASE_IMAGE} AS build
# Where pip finds packages, if not on PyPI. They are known in this stage only.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=core
RUN useradd --system --uid 10001 --home-dir /var/cache/headrace --create-home headrace \
    && python3 -m venv /opt/headrace
WORKDIR /build
# torch first, then the other dependencies: these layers stay when only the source changes.
COPY constraints.txt ./
# The configured places may have the wanted build; where they do not, torch's own index has.
RUN /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt "${TORCH}" \
    || /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt \
         --index-url "${TORCH_INDEX}" --extra-index-url "${PIP_INDEX_URL:-https://pypi.org/simple}" "${TORCH}"
COPY pyproject.toml ./
COPY scripts/print_requirements.py scripts/
# hadolint ignore=SC2086
RUN python3 scripts/print_requirements.py ${EXTRAS} > requirements.txt \
    && /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
# The link of src/headrace to the gateway's folder, which is not here, is skipped.
COPY README.md LICENSE ./
COPY src src
COPY protos protos
COPY kernels kernels
COPY core_service core_service
COPY --from=kernels /prebuilt kernels/prebuilt
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="headrace-core" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="headrace core: token ids in, token ids out, over gRPC"
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build /opt/headrace /opt/headrace
COPY --from=build --chown=10001:10001 /var/cache/headrace /var/cache/headrace
ENV PATH=/opt/headrace/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/cache/headrace \
    HEADRACE_CACHE=/var/cache/headrace \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HOST=0.0.0.0
USER 10001:10001
EXPOSE 50052
VOLUME /var/cache/headrace
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 \
    CMD ["headrace", "health", "--server", "127.0.0.1:50052"]
CMD ["headrace", "core", "--model", "demo", "--port", "50052"]
