"""Format torch: a safetensors file and one Python file that only needs PyTorch.

The network is in modeling.py, which is copied into each exported folder and lists the tensor names.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import to_dict
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.foreign_files import check_equal, check_network
from flaxformer_mt.convert.formats import Format, ImportOverrides, Outputs, Weights
from flaxformer_mt.convert.name_table import Table, read_names
from flaxformer_mt.convert.network_fields import EVERY_FIELD, Field, find_problems
from flaxformer_mt.convert.stored_tensors import open_safetensors, save_safetensors, unwrap
from flaxformer_mt.convert.torch import modeling
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import Vocabs

TENSORS_NAME = "model.safetensors"
MODELING_NAME = "modeling.py"

_NAMES = """
target_embedding                                            target_embedding
source_embedding                                            source_embedding
output                                                      output
output_bias                                                 output.bias
(encoder|decoder)/(positions|embedding_norm|final_norm)     (encoder|decoder).(positions|embedding_norm|final_norm)
(encoder|decoder)/layers_{n}/(self|cross)_attention/(query|key|value|output)  (encoder|decoder).layers.{n}.(self|cross)_attention.(query|key|value|output)
(encoder|decoder)/layers_{n}/feedforward/(input|gate|output)                  (encoder|decoder).layers.{n}.feedforward.(input|gate|output)
decoder/layers_{n}/recurrence/(input|forget)                decoder.layers.{n}.recurrence.(input|forget)
(encoder|decoder)/layers_{n}/(self_attention|recurrence|cross_attention|feedforward)_residual/norm  (encoder|decoder).layers.{n}.(self_attention|recurrence|cross_attention|feedforward)_norm
"""  # noqa: E501


def make_table(config: Config, vocabs: Vocabs) -> Table:
    return formats.make_table(config.model, vocabs, read_names(_NAMES), what=FORMAT.name)


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    vocabs = weights.vocabs
    table = make_table(weights.config, vocabs)
    save_safetensors(table.to_foreign(weights.leaves, tied=False), folder / TENSORS_NAME)
    vocabs.save(folder / formats.VOCAB_NAME)
    formats.write_config_json(weights, folder, FORMAT.name, _class_arguments(vocabs))
    (folder / MODELING_NAME).write_bytes(Path(modeling.__file__).read_bytes())


def _class_arguments(vocabs: Vocabs) -> dict[str, Any]:
    return {
        "sizes": {"source": vocabs.source.size, "target": vocabs.target.size},
        "special_ids": {
            "pad": vocabs.target.pad_id,
            "bos": vocabs.target.bos_id,
            "eos": vocabs.target.eos_id,
        },
    }


def _open(path: Path, overrides: ImportOverrides | None = None) -> Outputs:
    overrides, folder = overrides or ImportOverrides(), path if path.is_dir() else path.parent
    config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
    if path.is_dir() and overrides == ImportOverrides():
        check_equal(formats.read_config_json(path), _class_arguments(vocabs), path / formats.CONFIG_NAME)
        module = modeling.Transformer.load(path)
    else:
        module = modeling.Transformer(to_dict(config)["model"], **_class_arguments(vocabs)).eval()
        tensors = unwrap(modeling.read_safetensors(folder / TENSORS_NAME if path.is_dir() else path))
        tensors |= {name: tensors[stored] for name, stored in module.ties.items() if stored in tensors}
        module.load_state_dict(tensors, strict=True)

    def outputs(batch: Batch) -> np.ndarray:
        arrays = [batch.source, batch.target_in, batch.source_mask, batch.target_mask]
        with torch.no_grad():
            return module(*(torch.from_numpy(np.array(array)) for array in arrays)).numpy()

    return outputs


def _read(path: Path, overrides: ImportOverrides) -> Weights:
    folder = path if path.is_dir() else path.parent
    config, vocabs = formats.find_config(folder, overrides), formats.find_vocabs(folder, overrides)
    check_network(config, folder)
    tensors = open_safetensors([folder / TENSORS_NAME if path.is_dir() else path])
    return formats.read_weights(make_table(config, vocabs), tensors, config, vocabs, path, may_omit_tied=True)


# modeling.py supports all values of all fields except values that only imported models have.
_FIELDS = (
    *(field for field in EVERY_FIELD if field.ours != "attention_scale"),
    Field("positions", values=("sinusoidal", "learned", "rotary", "one_vector")),
    Field("activation", values=("relu", "gelu", "gelu_tanh", "silu", "swiglu")),
)
FORMAT = Format("torch", functools.partial(find_problems, _FIELDS), _write, _open, _read)
