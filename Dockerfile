# SPDX-License-Identifier: Apache-2.0
# The image that production runs: the program with what requirements.lock names, each file by its hash, and no database.
# Built again from one commit on one base image it holds the same files. A release pins the base, too:
# --build-arg PYTHON=python:3.11-slim-bookworm@sha256:...
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore SOURCE_DATE_EPOCH=315532800
WORKDIR /src
COPY requirements.lock ./
RUN pip download --require-hashes --only-binary :all: --no-deps -d /wheels -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY migrations ./migrations
COPY webhooks ./webhooks
COPY reconciler ./reconciler
# From those files alone, and of them only what the program needs without the embedded database. Byte code that is not
# held against the time of a file is the same each time. (The versions are those of the files.)
# hadolint ignore=DL3013
RUN python -m venv --without-pip /opt/esp-reconciler \
 && pip --python /opt/esp-reconciler install --no-index --find-links /wheels --no-compile '.[aws,otel]' \
 && pip --python /opt/esp-reconciler check \
 && PYTHONHASHSEED=0 python -m compileall -q -f --invalidation-mode unchecked-hash /opt/esp-reconciler/lib

FROM ${PYTHON}
LABEL org.opencontainers.image.title="esp-reconciler" \
      org.opencontainers.image.description="Turns ambiguous e-mail sends into verdicts" \
      org.opencontainers.image.licenses="Apache-2.0"
# database.data_dir, and settings that only say where to listen, for a file of yours to lie over.
RUN mkdir -p /etc/esp-reconciler /var/lib/esp-reconciler \
 && chown 10001:10001 /var/lib/esp-reconciler \
 && printf '[receiver]\nhost = "0.0.0.0"\n' > /etc/esp-reconciler/reconciler.toml
COPY --from=build /opt/esp-reconciler /opt/esp-reconciler
ENV PATH=/opt/esp-reconciler/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/esp-reconciler \
    XDG_DATA_HOME=/var/lib \
    RECONCILER_CONFIG=/etc/esp-reconciler/reconciler.toml \
    HEALTH_URL=http://127.0.0.1:8080/healthz
WORKDIR /var/lib/esp-reconciler
USER 10001:10001
EXPOSE 8080
# Kubernetes looks by itself; this is for Docker. With another receiver.port set HEALTH_URL.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(os.environ['HEALTH_URL'], timeout=4)"]
ENTRYPOINT ["reconciler"]
CMD ["serve"]
