"""`new --for=GOAL`: the config of a student, the texts for its distillation, and the commands to run."""

from collections.abc import Sequence
from pathlib import Path

from flaxformer_mt.commands.new_sizing import Choice, choose_learning_rate
from flaxformer_mt.config import DataConfig

_FORMATS = {"browser": "bergamot", "cpu": "ctranslate2"}
_BERGAMOT = (
    Choice("model.decoder_self_attention", "ssru", "what Bergamot's engine computes, with Marian's formulas"),
    Choice("model.norm_position", "post", ""),
    Choice("model.norm_epsilon", 1e-6, ""),
    Choice("model.positions", "sinusoidal_halves", ""),
    Choice("model.target_start", "zeros", ""),
    Choice("search.method", "greedy", "as Firefox searches"),
)


def name_teacher(run: Path) -> Path:
    return run.with_name(f"{run.name}_teacher")


def choose_student(teacher: Sequence[Choice], run: Path, goal: str) -> list[Choice]:
    """Return the teacher's choices with changes for the student: text, vocabulary, network and search."""
    text, vocab = Path(f"{run}_distilled").absolute(), name_teacher(run).absolute() / "vocab"
    values = {choice.name: choice.value for choice in teacher}
    # The engines of browsers multiply matrices whose widths are multiples of 64.
    width = max(64, values["model.model_dim"] // 2)
    choices = [
        Choice("data.dataset", "parallel_text", "the teacher's translations, train.tsv, which distil writes"),
        Choice("data.text_dir", str(text), ""),
        Choice("data.source_language", values["data.source_language"], ""),
        Choice("vocab.source_model", str(vocab / "source.model"), "the teacher's vocabulary"),
        Choice("vocab.target_model", str(vocab / "target.model"), ""),
        Choice(
            "model.num_decoder_layers", 1 if width < 256 else 2, "translation mostly waits for the decoder"
        ),
        Choice("model.model_dim", width, "half the teacher's width, and a multiple of 64"),
        Choice("model.num_heads", width // 32, ""),
        Choice("model.ffn_dim", 4 * width, "four times the width, as usual"),
        Choice("model.dropout_rate", 0.1, "the teacher's translations are more regular than references"),
        Choice("optim.learning_rate", choose_learning_rate(width)[0], "for models of this size"),
        *(_BERGAMOT if goal == "browser" else ()),
    ]
    changes = {choice.name: choice for choice in choices}
    # Its text has files of all three splits.
    unused = ["data.train_split", "data.valid_pairs", "data.test_pairs"]
    unused += ["search.beam_size"] * ("search.method" in changes)
    same = [changes.pop(choice.name, choice) for choice in teacher if choice.name not in unused]
    return [*same, *changes.values()]


def list_commands(run: Path, goal: str, data: DataConfig) -> list[list[str]]:
    """Return the commands that train teacher and student, then export, evaluate and time the student."""
    teacher, text, shortlist = name_teacher(run), f"{run}_distilled", f"--shortlist={run}_shortlist.txt"
    source, target = data.source_language, data.target_language
    distil = [f"--run={teacher}", f"--input={text}/original.{source}", f"--output={text}", "--resume"]
    rounded = [f"--run={run}", "--quantization=int8", shortlist]
    engine = rounded if goal == "browser" else [f"--run={run}_cpu", "--backend=ctranslate2"]
    return [
        ["train", f"--config={teacher}.py", f"--run={teacher}"],
        ["distil", *distil, "--targets=nbest", f"--reference={text}/original.{target}"],
        ["train", f"--config={run}.py", f"--run={run}"],
        ["prepare", f"--run={run}", shortlist],
        ["export", *rounded, f"--format={_FORMATS[goal]}", f"--output={run}_{goal}"],
        ["evaluate", *rounded],
        ["translate", *engine, f"--input={text}/test.{source}", f"--output={run}_test.{target}"],
    ]


def write_text(data: DataConfig, run: Path) -> None:
    """Write the cleaned training pairs, for `distil`, and the held-out pairs, for the student."""
    from flaxformer_mt.corpus.reader import Split, read_pairs

    folder = Path(f"{run}_distilled")
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[Split, str] = {"train": "original", "valid": "valid", "test": "test"}
    for split, name in files.items():
        pairs = read_pairs(data, split)
        for side, language in enumerate((data.source_language, data.target_language)):
            with open(folder / f"{name}.{language}", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{pair[side]}\n" for pair in pairs)
