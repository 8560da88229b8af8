"""Bodies of requests: JSON and both forms give the same fields, and all else is refused with a reason."""

import contextlib

import pytest
from growth import growth

pytest.importorskip("pydantic", reason="the server needs the extra serve")
from starlette.exceptions import HTTPException

from flaxformer_mt.commands.server.request_fields import TextRequest, read_fields

JSON, FORM, PARTS = (
    "application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)


def part(head: bytes, content: bytes) -> bytes:
    return b"--x\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + content + b"\r\n"


def test_json_and_forms_give_the_same_request():
    texts = {"q": "ä b", "source": "de", "target": "en", "alternatives": "2", "scores": "true"}
    parts = b"".join(part(b'name="%b"' % name.encode(), text.encode()) for name, text in texts.items())
    bodies = {
        f"{JSON}; charset=utf-8": '{"q": "ä b", "source": "de", "target": "en", "alternatives": 2, '
        '"scores": true, "unknown": {}}',
        FORM: "q=%C3%A4+b&source=de&target=en&alternatives=2&scores=1&alignments=",
        PARTS: parts.decode() + "--x--\r\n",
    }
    expected = TextRequest(q="ä b", source="de", target="en", alternatives=2, scores=True)
    for kind, body in bodies.items():
        assert TextRequest.read(read_fields(body.encode(), kind)) == expected, kind
    with_mark = b'\xef\xbb\xbf{"q": ["a"]}'  # as editors and PowerShell write it
    assert read_fields(with_mark, JSON) == {"q": ["a"]}
    assert read_fields(b"q=\xc3\xa4&q=b", FORM) == {"q": ["ä", "b"]}, "curl -d sends letters as they are"
    none = {"q": "", "source": "de", "target": "en", "format": "", "alternatives": None, "n_best": None}
    none |= {"scores": "", "alignments": False, "attention": None, "documents": None, "glossary": ""}
    assert TextRequest.read(none) == TextRequest(q="", source="de", target="en")


def test_the_query_of_the_address_has_fields_where_the_body_is_no_json():
    """As in LibreTranslate: they come before those of a form, and JSON has all."""
    query = "q=a%20b&source=de"
    assert read_fields(b"", "", query) == {"q": "a b", "source": "de"}
    assert read_fields(b"q=c&target=en", FORM, query) == {"q": "a b", "source": "de", "target": "en"}
    assert read_fields(b'{"q": "c"}', JSON, query) == {"q": "c"}
    for body, kind in ((b"q=c", ""), (b"", "text/plain")):
        with pytest.raises(HTTPException, match="the content type is"):
            read_fields(body, kind, "" if not body else query)


def test_parts_of_forms_as_clients_write_them():
    """Names with or without quotation marks, and what looks like a boundary; a file has a name."""
    for head in (b'name="q"', b"name=q", b'name="q"; filename="\xc3\xa4.txt"\r\nContent-Type: text/plain'):
        body = part(head, b"a\r\n--xx") + b"--x--\r\n"
        assert read_fields(body, "multipart/form-data; charset=utf-8; boundary=x") == {"q": "a\r\n--xx"}
    file = part(b'name="file"; filename="\xc3\xa4.txt"', b"\xef\xbb\xbfa") + b"--x--\r\n"
    assert read_fields(file, PARTS) == {"file": ("ä.txt", "a")}
    quoted = part(b'name="q"', b"a").replace(b"--x", b"--x y") + b"--x y--\r\n"
    assert read_fields(quoted, 'multipart/form-data; boundary="x y"') == {"q": "a"}


def test_a_form_is_read_in_linear_time():
    def read(body: bytes) -> None:
        with contextlib.suppress(HTTPException):
            read_fields(body, PARTS)

    for head, mark in ((b'name="', b'"'), (b"name=", b"("), (b"", b"; \t")):
        assert growth(read, lambda size, head=head, mark=mark: part(head + mark * size, b"")) < 1.6
    assert growth(read, lambda size: part(b"name=q", b"") * size) < 1.6
    for mark in (b"\r", b"\r\n--", b"-"):
        assert growth(read, lambda size, mark=mark: part(b"name=q", mark * size)) < 1.6


def test_bodies_that_are_refused():
    for body, kind, named in [
        (b"{", JSON, "the body is not application/json: "),
        (b"[1]", JSON, "the body is not a JSON object"),
        (b"[" * 100_000, JSON, "the body is not application/json: "),
        (b'{"q": "\xff"}', JSON, "the body is not application/json: "),
        (b'{"q": "\\ud800"}', JSON, "the body is not application/json: "),
        (b'{"q": "\xe4"}', f"{JSON}; charset=ISO-8859-1", "the body is not application/json: "),
        (b"q=%ff", FORM, "the body is not application/x-www-form-urlencoded: "),
        (b"&a=1" * 20_000, FORM, "the body is not application/x-www-form-urlencoded: "),
        (b"no parts", PARTS, "the body is not multipart/form-data: "),
        (b"--x\r\n\r\nno name\r\n--x--\r\n", PARTS, "the body is not multipart/form-data: "),
        (part(b"name=q", b"\xff") + b"--x--", PARTS, "the field q is not UTF-8 text: "),
        (b"q=a", "text/plain", "the content type is text/plain; send"),
        (b"q=a", "", "the content type is missing; send"),
        (b"--x--", "multipart/form-data", "the body is not multipart/form-data: "),
    ]:
        with pytest.raises(HTTPException, match=named) as refused:
            read_fields(body, kind)
        assert refused.value.status_code == 400 and "\n" not in str(refused.value)
    assert read_fields(b'{"q": "a"}', f"{JSON}; charset=iso-8859-1") == {"q": "a"}


def test_fields_that_are_refused():
    good = {"q": "a", "source": "de", "target": "en"}
    for status, named, changes in [
        (400, "q is missing: The text, or a list of texts.", {"q": ...}),
        (400, r"q is None: Input should be a valid string or Input should be a valid list", {"q": None}),
        (400, r"q is \['a', 1\]: Input should be a valid string", {"q": ["a", 1]}),
        (413, "11 characters", {"q": "a" * 11}),
        (413, "11 texts", {"q": [""] * 11}),
        (413, "11 characters in 1 texts and the glossary", {"glossary": "a\t" + "b" * 8}),
        (400, "source is missing", {"source": ...}),
        (400, r"target is \['en'\]", {"target": ["en"]}),
        (400, "'text' or 'html'", {"format": "pdf"}),
        (400, "greater than or equal to 0", {"alternatives": -1}),
        (400, "valid integer", {"n_best": "two"}),
        (400, "'words' or 'pieces'", {"alignments": "letters"}),
        (400, "scores is 3: Input should be a valid boolean", {"scores": 3}),
        (400, "glossary is 7: Input should be a valid string", {"glossary": 7}),
    ]:
        fields = {name: value for name, value in {**good, **changes}.items() if value is not ...}
        with pytest.raises(HTTPException, match=named) as refused:
            request = TextRequest.read(fields)
            request.check_size(10, request.glossary)
        assert refused.value.status_code == status
