"""MarianMTModel of Hugging Face transformers, the class of the OPUS-MT models: post-norm, export and import.

Owns which models the class is. A folder that AutoModelForSeq2SeqLM and AutoTokenizer load:

    tokenizer, model = AutoTokenizer.from_pretrained(DIR), AutoModelForSeq2SeqLM.from_pretrained(DIR)
    tokenizer.batch_decode(model.generate(**tokenizer(lines, return_tensors="pt", padding=True)),
                           skip_special_tokens=True)

translates. Position tables have 512 rows, or as many as our own search may reach. Models without a start
symbol begin translations with padding, here as there. The class shares embeddings and output by two flags of
config.json; one embedding for both sides without the output is copies there, equal until someone trains them.
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
