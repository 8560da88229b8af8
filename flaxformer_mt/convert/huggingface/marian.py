"""Format marian: MarianMTModel of Hugging Face transformers, the class of the OPUS-MT models; post-norm.

The folder is loaded by AutoModelForSeq2SeqLM and AutoTokenizer:

    tokenizer, model = AutoTokenizer.from_pretrained(DIR), AutoModelForSeq2SeqLM.from_pretrained(DIR)
    tokenizer.batch_decode(model.generate(**tokenizer(lines, return_tensors="pt", padding=True)),
                           skip_special_tokens=True)

Position tables have 512 rows, or more if the longest source or translation needs them. Models without a start
symbol begin translations with the padding symbol, in both systems. Two flags of config.json tie the
embeddings and the output of the class. With model.tying=embeddings the class stores two copies of the
embedding, which are equal until the model is trained further.
"""

from flaxformer_mt.convert.huggingface.bart_family import HuggingFaceFormat

HUGGING_FACE = HuggingFaceFormat(
    name="marian",
    model_type="marian",
    class_name="MarianMTModel",
    norm_position="post",
    final_norm=False,
    tyings=("all", "embeddings", "target_output", "none"),
)
FORMAT = HUGGING_FACE.make_format()
