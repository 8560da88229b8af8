"""PegasusForConditionalGeneration of Hugging Face transformers, for pre-norm models: export and import.

Owns which models the class is: norms before the sublayers and after the last layer, one embedding for both
sides; the output may have a matrix of its own. The folder is that of `marian`, its tokenizer included, and
loads in the same way. Models of Pegasus with its own tokenizer (spiece.model) are not read.
"""

from flaxformer_mt.convert.huggingface.bart_family import HuggingFaceFormat

HUGGING_FACE = HuggingFaceFormat(
    name="hf-pre-norm",
    model_type="pegasus",
    class_name="PegasusForConditionalGeneration",
    norm_position="pre",
    final_norm=True,
    tyings=("all", "embeddings"),
)
FORMAT = HUGGING_FACE.make_format()
