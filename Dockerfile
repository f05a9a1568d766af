# kvcar alone: no Envoy, no engines, no tests. Runs as a user without rights on a read-only root file system; what it writes
# goes to /var/cache/kvcar (downloaded tokenizers), which wants a volume. Mount the configuration at /etc/kvcar/kvcar.yaml.
#
#   docker build -t kvcar:0.1.0 .
#   docker run --read-only --tmpfs /tmp --tmpfs /var/cache/kvcar:uid=65532 -v ./kvcar.yaml:/etc/kvcar/kvcar.yaml:ro \
#     -p 9002:9002 kvcar:0.1.0
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/kvcar
COPY pyproject.toml README.md LICENSE ./
COPY kvindex kvindex
COPY extproc extproc
RUN /opt/kvcar/bin/pip install --no-cache-dir '.[kubernetes,dns,otel]' \
 && /opt/kvcar/bin/python -m compileall -q /opt/kvcar/lib

FROM python:3.12-slim
RUN groupadd --gid 65532 kvcar \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /var/cache/kvcar --shell /usr/sbin/nologin kvcar \
 && install -d -o 65532 -g 65532 /var/cache/kvcar
COPY --from=build /opt/kvcar /opt/kvcar
ENV PATH=/opt/kvcar/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/cache/kvcar
USER 65532:65532
EXPOSE 9002 9003
# For Docker alone; Kubernetes asks the gRPC health service. An admin port elsewhere, or over TLS: --no-healthcheck.
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9003/healthz', timeout=2)"]
ENTRYPOINT ["kvcar"]
CMD ["serve", "-c", "/etc/kvcar/kvcar.yaml"]
