"""`--print-completion`: what shells offer after a line, with our script."""

import shutil
import subprocess

import pytest

from flaxformer_mt.commands.main import main


@pytest.fixture
def run_shell(capfd, tmp_path):
    """Run commands in a shell that has read our script; return the words that they print."""

    def run(shell: str, commands: str) -> list[str]:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        assert main(["--print-completion", shell]) == 0
        (tmp_path / "script").write_text(capfd.readouterr().out)
        (tmp_path / "input.de").touch()
        # zsh has `compdef` once its own completion is on.
        before = "compdef() { :; }; " if shell == "zsh" else ""
        line = f"{before}source {tmp_path / 'script'}; {commands}"
        done = subprocess.run([shell, "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("backtr", ["backtranslate"]),
        ("translate --split", ["--split_sentences"]),
        ("translate --method gr", ["greedy"]),
        ("translate --method = gr", ["greedy"]),
        ("translate --log_level =", ["info", "warning", "error"]),
        ("train --config.model.num_enc", ["--config.model.num_encoder_layers"]),
        ("train --config.model.norm = r", ["rms"]),
        ("train --config.train.log_accuracy = T", ["True"]),
        # No words of ours: bash completes names of files.
        ("translate in", []),
        ("translate --json in", []),
        ("translate --run = in", []),
    ],
)
def test_bash_completes_commands_flags_and_choices(run_shell, words, found):
    """Bash splits a line at `=`; the last word is completed."""
    setup = f"COMP_WORDS=(flaxformer-mt {words}); COMP_CWORD={len(words.split())}; COMPREPLY=(); "
    function = "read -ra completed <<<$(complete -p flaxformer-mt); "
    assert run_shell("bash", f"{setup}{function}${{completed[4]}}; echo ${{COMPREPLY[@]}}") == found
    assert "default" in run_shell("bash", "complete -p flaxformer-mt")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("backtr", "backtranslate"),
        ("translate --split", "--split_sentences"),
        ("translate --method gr", "greedy"),
        ("translate --method=gr", "--method=greedy"),
        ("translate in", "input.de"),
    ],
)
def test_fish_completes_commands_flags_choices_and_files(run_shell, line, found):
    assert run_shell("fish", f"complete -C 'flaxformer-mt {line}'") == [found]


def test_zsh_reads_the_script(run_shell):
    choices = run_shell("zsh", "_flaxformer_mt_words translate --method; whence -w _flaxformer_mt")
    assert "greedy" in choices and choices[-1] == "function"
