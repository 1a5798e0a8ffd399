# The gateway: text in, text out, no torch and nothing of the core. Build it from the repository's root:
#   docker build --file deploy/gateway.Dockerfile --tag headrace-gateway:0.1.0 .
# The base is pinned by tag; pin it by digest with --build-arg BASE_IMAGE=docker.io/library/python@sha256:<digest>.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Where pip finds packages, if not on PyPI. They are known in this stage only.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
RUN useradd --system --uid 10001 --home-dir /var/cache/headrace --create-home headrace \
    && python3 -m venv /opt/headrace
WORKDIR /build
# Dependencies first: this layer stays when only the source changes.
COPY pyproject.toml constraints.txt ./
COPY scripts/print_requirements.py scripts/
RUN python3 scripts/print_requirements.py gateway > requirements.txt \
    && /opt/headrace/bin/pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
# The links of src/headrace to folders that are not here are skipped, so the wheel holds the gateway only.
COPY README.md LICENSE ./
COPY src src
COPY protos protos
COPY gateway gateway
RUN /opt/headrace/bin/pip install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="headrace-gateway" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="headrace gateway: text in, text out, over gRPC"
COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build /opt/headrace /opt/headrace
COPY --from=build --chown=10001:10001 /var/cache/headrace /var/cache/headrace
ENV PATH=/opt/headrace/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/cache/headrace \
    HEADRACE_CACHE=/var/cache/headrace \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HOST=0.0.0.0
USER 10001:10001
EXPOSE 50051
VOLUME /var/cache/headrace
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["headrace", "health", "--server", "127.0.0.1:50051"]
CMD ["headrace", "gateway", "--core", "core:50052", "--port", "50051"]
