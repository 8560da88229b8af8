"""Lines that arrive in their own time, and the windows that they are read in."""

import errno
import fcntl
import os
import resource

import pytest

from flaxformer_mt.atomic_file import write_atomically
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.text_io import lines as module
from flaxformer_mt.text_io.lines import (
    check_output,
    open_input,
    open_output,
    read_lines,
    take_windows,
    watch_arrival,
)


@pytest.fixture
def pipe():
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as stream, open(write_end, "wb", buffering=0) as writer:
        yield watch_arrival(stream), writer


def test_a_window_closes_when_lines_pause_and_at_its_size(pipe, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.05)
    arriving, writer = pipe
    lines = read_lines(arriving, name="pipe")
    writer.write(b"a\r\nb\xc3")
    windows = take_windows(lines, 3, arriving.is_ready)
    assert next(windows) == ["a"]
    writer.write(b"\xa4\n\n\xe2\x80\xa8\nd\n" + b"e" * 60_000 + b"\n")
    assert [next(windows), next(windows)] == [["b\u00e4", "", "\u2028"], ["d", "e" * 60_000]]
    monkeypatch.setattr(module, "_LONGEST_WAIT", 0.0)  # lines that keep coming do not keep it open
    writer.write(b"f\ng\nlast")
    assert next(windows) == ["f"]
    monkeypatch.undo()
    writer.close()
    assert list(windows) == [["g", "last"]] and arriving.is_ready()


def test_files_have_full_windows_and_what_goes_wrong_comes_after_the_lines_before(tmp_path):
    (tmp_path / "in").write_bytes(b"a\nb\nc\n\xff\nd")
    with (tmp_path / "in").open("rb") as stream:
        assert watch_arrival(stream) is None
        windows = take_windows(read_lines(stream, name="in"), 2, None)
        assert [next(windows), next(windows)] == [["a", "b"], ["c"]]
        with pytest.raises(UserError, match="line 4, is not UTF-8"):
            next(windows)


def test_a_pipe_in_the_place_of_a_file_is_told_from_one_that_is_absent(tmp_path):
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(UserError, match=r"lines is no regular file; give one, or - for"):
        with open_input(str(tmp_path / "lines")):
            pass


def test_one_output_file_has_one_writer(tmp_path):
    output = str(tmp_path / "out")
    with open_output(output) as write:
        write("a")
        with (
            pytest.raises(UserError, match=r"another process is writing .*out\.partial"),
            open_output(output),
        ):
            pass
        write("b")
    assert (tmp_path / "out").read_bytes() == b"a\nb\n"
    with open_output(output) as write:  # replaces it
        write("c")
    assert (tmp_path / "out").read_bytes() == b"c\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_on_a_file_system_without_locks_is_written_and_said(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.warns(FlaxformerWarning, match=f"file system of {tmp_path} has no locks"),
        open_output(str(tmp_path / "out")) as write,
    ):
        write("a")
    assert (tmp_path / "out").read_text() == "a\n"


def test_an_output_folder_that_cannot_be_written_to_is_told_before_work_begins(tmp_path, monkeypatch):
    """Whatever the user is: a file system that is read-only refuses root too."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match=f"^output folder {tmp_path} cannot be written to: it is read-only"):
        check_output(str(tmp_path / "out"))
    for folder in (tmp_path, tmp_path / "new" / "folder"):  # the second would be created
        with pytest.raises(
            UserError, match=f"^output folder {tmp_path} cannot be written to: .*; give another"
        ):
            module.check_writable(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"output folder .*/file/folder: .*/file is a file; give another path"
    ):
        module.check_writable(tmp_path / "file" / "folder")
    (tmp_path / "own").mkdir()
    assert check_output(str(tmp_path / "own" / "out")) == tmp_path / "own" / "out"
    assert not list((tmp_path / "own").iterdir())


def test_a_full_device_is_named():
    with pytest.raises(OSError) as full, open_output("/dev/full") as write:
        write("text")
    assert full.value.filename == "/dev/full"


def test_a_file_that_a_full_disk_cuts_is_named_also_when_it_is_closed(tmp_path):
    smallest, largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError) as full, open_output(str(tmp_path / "out")) as write:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, largest))
        try:
            write("text")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (smallest, largest))
    assert full.value.filename == str(tmp_path / "out.partial")
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


def test_an_error_of_an_atomic_write_names_the_file_and_not_its_temporary_name(tmp_path):
    file = tmp_path / "absent" / "file"
    with pytest.raises(FileNotFoundError) as missing:
        write_atomically(file, b"text")
    assert (missing.value.filename, missing.value.filename2) == (str(file), None)
