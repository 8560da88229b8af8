# flaxformer_mt on CPUs, with the pinned versions of requirements.txt:
#
#   docker build --tag=flaxformer-mt .
#   docker run --rm --volume="$PWD/runs:/work/runs" flaxformer-mt train --config=toy_de_en
#
# /work/runs has the run directories, /work/cache prepared data and compiled programs.
FROM python:3.12-slim

WORKDIR /opt/flaxformer_mt
COPY requirements.txt ./
RUN pip install --no-cache-dir --requirement=requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps .

ENV FLAXFORMER_MT_CACHE=/work/cache
WORKDIR /work
ENTRYPOINT ["flaxformer-mt"]
CMD ["--help"]
