"""Flags of noise and stages: wrong values end with status 2 and one line; right ones are in the config."""

import json

import pytest

from flaxformer_mt.commands.main import main

STAGES = "datasets: {toy_de_en: x}\nstages: [s]\ns: {mix: [toy_de_en 1], modifiers: [UpperCase: 0.1]}\n"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        *(
            (f"noise.{kind}=1.5", [f"data.noise.{kind} is 1.5", "from 0 to 1"])
            for kind in (
                "upper_case",
                "title_case",
                "lower_case",
                "end_punctuation",
                "punctuation",
                "whitespace",
            )
        ),
        ("noise.typos=often", ["data.noise.typos is 'often'", "which is not a number"]),
        ("noise.typo=0.1", ["unknown flag", "did you mean --config.data.noise.typos"]),
        ("noise.typo_kinds.unichar=-1", ["data.noise.typo_kinds.unichar is -1.0"]),
        ("stages=absent.yaml", ["data.stages: absent.yaml cannot be read"]),
        ("stages={folder}/wrong.yaml", ["has the modifier Merge; supported are UpperCase"]),
        ("stages={folder}/other.yaml", ["data.stages: stage s names other", "toy_de_en"]),
    ],
)
def test_a_wrong_value_gets_one_line(tmp_path, capfd, flag, words):
    (tmp_path / "wrong.yaml").write_text(STAGES.replace("UpperCase", "Merge"), encoding="utf-8")
    (tmp_path / "other.yaml").write_text(STAGES.replace("toy_de_en", "other"), encoding="utf-8")
    given = f"--config.data.{flag.format(folder=tmp_path)}"
    assert main(["prepare", f"--run={tmp_path / 'run'}", "--config=toy_de_en", given]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert not (tmp_path / "run").exists()


def test_a_file_of_stages_is_part_of_the_config(tmp_path, capsys):
    (tmp_path / "stages.yaml").write_text(f"{STAGES}seed: 7\n", encoding="utf-8")
    flags = [f"--config.data.stages={tmp_path / 'stages.yaml'}", "--config.data.noise.typo_kinds.unichar=0"]
    assert main(["show", f"--run={tmp_path / 'run'}", "--config=toy_de_en", *flags]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: ") and "no effect here: seed;" in err and err.count("\n") == 1
    data = json.loads(out)["config"]["data"]
    assert [(one["name"], one["mix"], one["noise"]["upper_case"]) for one in data["stages"]] == [
        ("s", ["toy_de_en 1"], 0.1)
    ]
    assert data["noise"]["typo_kinds"]["unichar"] == 0
    with pytest.raises(SystemExit):
        main(["prepare", f"--run={tmp_path / 'run'}", *flags, "--help=all"])
    text = capsys.readouterr().out
    assert (
        "--config.data.stages=FILE.yaml" in text and "--config.data.noise.typo_kinds.char_swap=FLOAT" in text
    )
