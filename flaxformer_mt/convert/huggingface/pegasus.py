"""Format hf-pre-norm: PegasusForConditionalGeneration of Hugging Face transformers; pre-norm.

The class has norms before the sublayers and after the last layer of each stack, and one embedding for both
languages; the output may have a matrix of its own. The folder has the layout of format marian, including its
tokenizer, and is loaded in the same way. Pegasus models with their own tokenizer (spiece.model) are not read.
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
