"""Bodies of requests: JSON and both forms give the same fields, and all else is refused with a reason."""

import contextlib
import time

import pytest

from flaxformer_mt.commands.server.request_fields import Refusal, TextRequest, read_fields, read_request

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
MOST = 10


def test_json_and_forms_give_the_same_request():
    parts = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in {
            "q": "ä b",
            "source": "de",
            "target": "en",
            "alternatives": "2",
            "scores": "true",
        }.items()
    )
    bodies = {
        "application/json; charset=utf-8": '{"q": "ä b", "source": "de", "target": "en", "alternatives": 2, '
        '"scores": true, "unknown": {}}',
        FORM: "q=%C3%A4+b&source=de&target=en&alternatives=2&scores=1&alignments=",
        "multipart/form-data; boundary=x": f"{parts}--x--\r\n",
    }
    expected = TextRequest(("ä b",), False, "de", "en", "text", 2, None, True, None, False)
    for kind, body in bodies.items():
        assert read_request(read_fields(body.encode(), kind), MOST) == expected, kind
    with_mark = b'\xef\xbb\xbf{"q": ["a"]}'  # as editors and PowerShell write it
    assert read_fields(with_mark, JSON) == {"q": ["a"]}
    assert read_request(read_fields(b"q=a&q=b&source=de&target=en", FORM), MOST).texts == ("a", "b")
    many = read_request({"q": [], "source": "de", "target": "en", "format": "html"}, MOST)
    assert many.several and many.texts == () and many.format == "html" and not many.describes
    empty = {"q": "a", "source": "de", "target": "en", "format": "", "alternatives": None, "n_best": None}
    empty |= {"scores": "", "alignments": False, "attention": None}
    assert read_request(empty, MOST) == TextRequest(
        ("a",), False, "de", "en", "text", 0, None, False, None, False
    )


def test_the_query_of_the_address_has_fields_where_the_body_is_no_json():
    """As in LibreTranslate: they come before those of a form, and JSON has all."""
    query = "q=a%20b&source=de"
    assert read_fields(b"", "", query) == {"q": "a b", "source": "de"}
    assert read_fields(b"q=c&target=en", FORM, query) == {"q": "a b", "source": "de", "target": "en"}
    assert read_fields(b'{"q": "c"}', JSON, query) == {"q": "c"}
    for body, kind in ((b"q=c", ""), (b"", "text/plain")):
        with pytest.raises(Refusal, match="the content type is"):
            read_fields(body, kind, "" if not body else query)


def test_parts_of_forms_as_clients_write_them():
    """Names with or without quotation marks, other headers, line ends, and what is no part."""
    for head, expected in [
        (b'Content-Disposition: form-data; name="q"', "a\r\n--xx"),
        (b"content-disposition: form-data;name=q", "a\r\n--xx"),
        (
            b'A: b\r\nContent-Disposition: form-data; filename="\xc3\xa4.txt"; name="q"',
            "ä.txt",
        ),
        (b"Content-Disposition: form-data; name=\"q\"; filename*=utf-8''b.html", "utf-8''b.html"),
    ]:
        for end in (b"\r\n", b"\n"):
            body = b"before\r\n--x y\r\n%b\r\n\r\na\r\n--xx\r\n--x y--\r\nafter" % head
            fields = read_fields(
                body.replace(b"\r\n", end), 'multipart/form-data; charset=utf-8; boundary="x y"'
            )
            found = fields["q"] if isinstance(fields["q"], str) else fields["q"].name
            assert fields.keys() == {"q"} and found == expected.replace("\r\n", end.decode())


def test_a_form_is_read_in_linear_time():
    """A reader of mails took 9 s for 50,000 quotation marks, and 35 s for twice as many."""

    def measure(size: int) -> float:
        heads = [
            b'name="' + b'"' * size,
            b"name=" + b"(" * size,
            b'name="' + b"=?utf-8?q?a?= " * (size // 14),
        ]
        heads += [b"; ".join(b"name*%d=a" % number for number in range(size // 12)), b"; \t" * (size // 3)]
        head = b"--x\r\nContent-Disposition: form-data; "
        bodies = [head + one + b"\r\n\r\n\r\n--x--\r\n" for one in heads]
        bodies += [b"--x\r\n\r\n\r\n" * (size // 9), head + b"\r\n" * (size // 2), (head[5:] * (size // 36))]
        start = time.process_time()
        for body in bodies:
            with contextlib.suppress(Refusal):
                read_fields(body, "multipart/form-data; boundary=x")
        with contextlib.suppress(Refusal):
            read_fields(b"", f"multipart/form-data; boundary={'x' * size}")
        return time.process_time() - start

    small, large = (min(measure(size) for _ in range(3)) for size in (25_000, 200_000))
    assert large < 24 * small, "eight times as much takes eight times as long, and not 64 times"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", JSON),
        (b"[1]", JSON),
        (b"[" * 100_000, JSON),
        (b'{"q": "\xff"}', JSON),
        (b"q=%ff", FORM),
        (b"&a=1" * 20_000, FORM),
        (b"no parts", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nno name\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (b"q=a", "text/plain"),
        (b"q=a", ""),
        (b"--x\r\nContent-Disposition: form-data; name=q\r\n\r\ncut", "multipart/form-data; boundary=x"),
        (b"--x--", "multipart/form-data"),
    ],
)
def test_bodies_that_are_refused(body, kind):
    with pytest.raises(Refusal) as refused:
        read_fields(body, kind)
    assert refused.value.status == 400 and "\n" not in str(refused.value)


def test_a_body_in_another_charset_is_told_so():
    for kind in (JSON, FORM):
        text = '{"q": "ä"}' if kind == JSON else "q=ä"
        with pytest.raises(Refusal, match=f"not {kind} in UTF-8, but with charset=iso-8859-1: "):
            read_fields(text.encode("latin-1"), f"{kind}; charset=ISO-8859-1")
    assert read_fields(b'{"q": "a"}', f"{JSON}; charset=iso-8859-1") == {"q": "a"}


def test_fields_that_are_refused():
    good = {"q": "a", "source": "de", "target": "en"}
    for status, named, changes in [
        (400, "q is missing", {"q": ...}),
        (400, "null", {"q": None}),
        (400, "a number", {"q": ["a", 1]}),
        (400, "surrogate", {"q": "\ud800"}),
        (413, "11 characters", {"q": "a" * 11}),
        (413, "11 texts", {"q": [""] * 11}),
        (400, "source is missing", {"source": ...}),
        (400, "target is a list", {"target": ["en"]}),
        (400, "text or html", {"format": "pdf"}),
        (400, "whole number", {"alternatives": -1}),
        (400, "whole number", {"alternatives": True}),
        (400, "from 1", {"n_best": 0}),
        (400, "words or pieces", {"alignments": "letters"}),
        (400, "true or false", {"scores": 3}),
        (400, "alignments is pieces", {"format": "html", "alignments": "pieces"}),
    ]:
        fields = {name: value for name, value in {**good, **changes}.items() if value is not ...}
        with pytest.raises(Refusal, match=named) as refused:
            read_request(fields, MOST)
        assert refused.value.status == status
