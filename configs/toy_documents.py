"""German-English documents of two lines, whose pronouns only the line before decides (data.context).

python train.py --config=toy_documents
"""

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """The network and training of toy_de_en; each source is read with the line before it."""
    changes = {"data.dataset": "toy_documents", "data.context": 1, "data.max_source_length": 64}
    return load_config("toy_de_en").replace(changes | {"vocab.size": 800, "train.steps": 600})
