# Two images of each line: make image VARIANT=cuda|cpu BASE_IMAGE=name@sha256:...  (deploy/README.md)
#
# Every RUN is a script of deploy/; `make image-test` builds and runs the cpu image.

# No default: whoever builds says which base to trust, by digest.
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS base
ARG BASE_IMAGE VARIANT
COPY deploy/pinned-image.sh /opt/deploy/
COPY deploy/image /opt/deploy/image
RUN /opt/deploy/image/base.sh "${BASE_IMAGE}" "${VARIANT}" && /opt/deploy/image/packages.sh "${VARIANT}"

# The wheel: built here, or taken from build/*/wheels*; proved in both cases.
FROM base AS wheel
RUN /opt/deploy/image/packages.sh build
WORKDIR /src
COPY . .
ARG LINE VARIANT PIN SERIES_FINGERPRINT WHEEL_VERSION PURPOSE
RUN deploy/image/wheel.sh "${LINE}" "${VARIANT}" /out

FROM base AS server
ARG LINE VARIANT
COPY requirements/bootstrap.txt requirements/${LINE}/${VARIANT}.txt requirements/${LINE}/*.in /opt/requirements/
RUN --mount=type=bind,from=wheel,source=/out,target=/wheel \
    /opt/deploy/image/install.sh "${VARIANT}" /wheel /opt/requirements /opt/vllm
COPY --from=wheel /out/sbom.cdx.json /usr/share/vllm-routed-experts/
RUN /opt/deploy/image/user.sh

# What a server writes goes to /tmp and to the cache: the root may be read-only.
ENV HOME=/home/vllm \
    PATH=/opt/vllm/bin:/usr/local/cuda/bin:${PATH} \
    TRITON_HOME=/home/vllm/.cache \
    CUDA_CACHE_PATH=/home/vllm/.cache/nv \
    DO_NOT_TRACK=1 \
    PORT=8000
USER 10001:10001
WORKDIR /home/vllm
EXPOSE 8000

ARG BASE_IMAGE PIN SERIES_FINGERPRINT WHEEL_VERSION PURPOSE REVISION
LABEL org.opencontainers.image.title="vllm-routed-experts" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${WHEEL_VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      vllm-routed-experts.line="${LINE}" \
      vllm-routed-experts.variant="${VARIANT}" \
      vllm-routed-experts.purpose="${PURPOSE}" \
      vllm-routed-experts.pin="${PIN}" \
      vllm-routed-experts.series-fingerprint="${SERIES_FINGERPRINT}" \
      vllm-routed-experts.sbom="/usr/share/vllm-routed-experts/sbom.cdx.json"

# Until the server has answered once, an unanswered probe does not count: a large model takes its time.
HEALTHCHECK --interval=30s --timeout=10s --start-period=24h --retries=3 \
    CMD ["/opt/deploy/image/health.sh"]
ENTRYPOINT ["vllm", "serve"]
