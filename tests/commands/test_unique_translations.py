"""`translate --unique`: of the hypotheses of one text, only the best is written."""

import json

from flaxformer_mt.commands.main import main
from flaxformer_mt.vocab import Vocab


def test_the_command_drops_hypotheses_of_one_text(tiny_run, tiny_text, tmp_path, capsys, monkeypatch):
    whole = Vocab.detokenize_all
    monkeypatch.setattr(Vocab, "detokenize_all", lambda self, ids: [text[:2] for text in whole(self, ids)])
    (tmp_path / "in").write_text("".join((tiny_text / "test.xx").read_text().splitlines(keepends=True)[:4]))
    flags = ["translate", f"--run={tiny_run}", f"--input={tmp_path / 'in'}", "--n_best=2"]
    assert main(flags) == 0
    every = [line.split(" ||| ") for line in capsys.readouterr().out.splitlines()]
    first = {(number, text): score for number, text, score in reversed(every)}
    assert len(every) == 8 > len(first)
    assert main([*flags, "--unique"]) == 0
    found = [line.split(" ||| ") for line in capsys.readouterr().out.splitlines()]
    assert sorted(found) == sorted([*key, score] for key, score in first.items())
    assert [number for number, _, _ in found] == sorted(number for number, _, _ in found)
    assert main([*flags, "--unique", "--json"]) == 0
    listed = [json.loads(line)["n_best"] for line in capsys.readouterr().out.splitlines()]
    assert [hypothesis["text"] for each in listed for hypothesis in each] == [text for _, text, _ in found]
