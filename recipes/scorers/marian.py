"""Metrics of `pymarian-eval`, such as COMETKiwi or COMETOID, as a scorer: marian.py MODEL VOCABULARY."""

import json
import sys

from pymarian import Evaluator

metric = Evaluator(f"-m {sys.argv[1]} -v {sys.argv[2]} {sys.argv[2]} --like comet-qe --cpu-threads 4 --quiet")
rows = []
for row in map(json.loads, sys.stdin):
    rows.append([row["source"], row["hypothesis"]])
    if row["left"] == 0:
        scores = metric.run(rows)
        print(*(one[0] if isinstance(one, list) else one for one in scores), sep="\n", flush=True)
        rows = []
