"""MetricX-24 (hybrid) as a scorer, with or without references: metricx.py TOKENIZER MODEL.

Run it in a clone of Google's repository `metricx`. Its score is an error from 0 to 25, so the sign changes.
"""

import json
import sys

import torch
from metricx24 import models
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = models.MT5ForRegression.from_pretrained(sys.argv[2]).eval()
for row in map(json.loads, sys.stdin):
    names = {"source": "source", "hypothesis": "candidate", "reference": "reference"}
    text = " ".join(f"{theirs}: {row[ours]}" for ours, theirs in names.items() if ours in row)
    ids = tokenizer(text, truncation=True, max_length=1536, return_tensors="pt").input_ids[:, :-1]
    print(-float(model(input_ids=ids, attention_mask=torch.ones_like(ids)).predictions), flush=True)
