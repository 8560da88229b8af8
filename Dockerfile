# flaxformer_mt on CPUs with the server, all packages as in requirements.lock:
#
#   docker build --tag=flaxformer-mt .
#   docker run --rm --volume="$PWD/runs:/work/runs" flaxformer-mt train --config=toy_de_en
#   docker run --rm --volume="$PWD/runs:/work/runs" --publish=5000:5000 flaxformer-mt serve runs/toy_de_en
#
# /work/runs has the run directories, /work/cache prepared data and compiled programs.
FROM python:3.12-slim

WORKDIR /opt/flaxformer_mt
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes --requirement=requirements.lock
COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

# Files that a run writes belong to this user, or to that of `docker run --user`.
RUN useradd --create-home --uid=1000 flaxformer && mkdir -p /work && chmod 1777 /work
USER flaxformer
ENV FLAXFORMER_MT_CACHE=/work/cache FLAXFORMER_MT_HOST=0.0.0.0
WORKDIR /work
EXPOSE 5000
# Of a container that serves; others have nothing to ask.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
  CMD ! grep -qz '^serve$' /proc/1/cmdline || python -c \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/health', timeout=9)"
ENTRYPOINT ["flaxformer-mt"]
CMD ["--help"]
