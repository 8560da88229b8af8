"""Draws the pictures of the pages from the numbers that other pages have, and writes them to docs/images.

    python -m docs.pictures

Run it after a change of a number that a picture shows; a test compares pictures and pages. Pictures of
screens are made from runs: screens.py.
"""

from docs.pictures.charts import draw_gains, draw_speeds
from docs.pictures.diagrams import draw_decision_tree, draw_devices, draw_pipeline
from docs.pictures.pages import ROOT

PICTURES = {
    "docs/images/speeds.svg": draw_speeds,
    "docs/images/gains.svg": draw_gains,
    "docs/images/decision_tree.svg": draw_decision_tree,
    "docs/images/pipeline.svg": draw_pipeline,
    "docs/images/devices.svg": draw_devices,
}

if __name__ == "__main__":
    for path, draw in PICTURES.items():
        (ROOT / path).write_text(draw(), encoding="utf-8")
