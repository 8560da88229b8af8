"""COMET, or COMETKiwi, which ignores references, as a scorer: comet.py MODEL.ckpt, with unbabel-comet."""

import json
import sys

from comet import load_from_checkpoint

model, rows = load_from_checkpoint(sys.argv[1]), []
for row in map(json.loads, sys.stdin):
    rows.append({"src": row["source"], "mt": row["hypothesis"], "ref": row.get("reference", "")})
    if row["left"] == 0:
        print(*model.predict(rows, batch_size=32, gpus=0, progress_bar=False).scores, sep="\n", flush=True)
        rows = []
