"""XML from outside: what would cost a parser GBs or minutes is refused before it is parsed."""

import io
import time
import tracemalloc

import pytest

from inlay.data.xml_parts import MOST_TOKEN_BYTES, PROLOG_BYTES, UnsafeXML, scan_xml

DTD = '<!DOCTYPE a [<!ENTITY x "yyy">]>'
BYTES = 3 * MOST_TOKEN_BYTES
HEAD = '<?xml version="1.0"?>'


def scan(content):
    return b"".join(scan_xml(io.BytesIO(content if isinstance(content, bytes) else content.encode())))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("before", ["", HEAD, "\n <!-- <a> " + "x" * 9000 + " --> \n<?b c?>"])
def test_a_document_type_is_refused_wherever_it_is(encoding, before):
    plain = before + "<a>text</a>"
    assert scan(plain.encode(encoding)).decode("utf-8-sig").removeprefix("\ufeff") == plain
    for dtd in (DTD, '<!DOCTYPE a SYSTEM "file:///etc/hostname">', "<!DOCTYPE a>", "<!DOCTYPE a [" + " " * 100_000):
        if dtd.endswith("  ") and before == "":
            continue
        with pytest.raises(UnsafeXML, match="document type"):
            scan((before + dtd + "<a>&x;</a>").encode(encoding))


@pytest.mark.parametrize("encoding", ["cp037", "cp500", "utf-7", "no-such", "cp1252"])
def test_an_encoding_in_which_tags_may_look_otherwise_is_refused(encoding):
    content = f'<?xml version="1.0" encoding="{encoding}"?>'.encode()
    rest = DTD + "<a>&x;</a>"
    with pytest.raises(UnsafeXML, match="not in UTF-8"):
        scan(content + (rest.encode(encoding) if encoding.startswith("cp") else rest.encode()))


@pytest.mark.parametrize("filler", [" ", "<!-- x -->", "<?a b?>"])
def test_a_beginning_without_an_end_is_refused(filler):
    with pytest.raises(UnsafeXML, match="no tag in its first"):
        scan(HEAD + filler * (PROLOG_BYTES // len(filler) + 1) + DTD + "<a/>")


LONG = {
    "attribute": "<row x='%s'/>" % ("y" * BYTES),
    "attribute with ends of tags": '<row x="%s"/>' % (">'" * (BYTES // 2)),
    "attribute in a quote of the other kind": """<row a="'" x="%s'"/>""" % (">" * BYTES),
    "many attributes": "<row " + " ".join(f'a{n}=""' for n in range(BYTES // 8)) + "/>",
    "name": "<%s/>" % ("y" * BYTES),
    "end": "<b></b%s>" % (" " * BYTES),
    "no end": "<b " + "y" * BYTES,
    "comment": "<!--%s-->" % ("x" * BYTES),
    "comment of tags": "<!--%s-->" % ("<b/>" * (BYTES // 4)),
    "comment that seems to end": "<!-->%s-->" % ("<b/>" * (BYTES // 4)),
    "instruction": "<?a %s?>" % ("<b/>" * (BYTES // 4)),
    "instruction that seems to end": "<?>%s?>" % ("<b/>" * (BYTES // 4)),
    "entity": "&%s;" % ("x" * BYTES),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("place", [0, MOST_TOKEN_BYTES - 2, PROLOG_BYTES - 5, PROLOG_BYTES - 4, PROLOG_BYTES - 3])
@pytest.mark.parametrize("what", LONG)
def test_a_long_piece_is_refused_wherever_it_begins(what, place, encoding):
    content = (HEAD + "<a>").ljust(place, "t") + LONG[what] + "</a>"
    with pytest.raises(UnsafeXML, match=r"longer than|has no end"):
        scan(content.encode(encoding))


PLAIN = {
    "long text": "<a>" + "x &amp; y " * (BYTES // 10) + "</a>",
    "text in CDATA": "<a><![CDATA[" + "x > y " * (BYTES // 6) + "]]></a>",
    "many tags": "<a>" + "<b c='>\"' d=\">'\">&lt;</b>" * (BYTES // 25) + "</a>",
    "comments": "<a>" + "<!-- & ' <b -->" * (BYTES // 10) + "<c/>" * BYTES + "</a>",
    "an & in a comment": "<!-- this & that --><a>" + "<c/>" * BYTES + "</a>",
    "wide letters": "<a b='㸾'>" + "㸾㰼" * BYTES + "</a>",
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-be"])
@pytest.mark.parametrize("what", PLAIN)
def test_what_is_not_unsafe_is_yielded(what, encoding):
    content = HEAD + PLAIN[what]
    assert scan(content.encode(encoding)).decode() == content


def test_a_picture_is_no_xml():
    for content in (b"", b"\x89PNG\r\n" + b"<\0" * BYTES, b"\0" * BYTES, b"\xff\xfe" + b"\x89<" * BYTES):
        assert scan(content) == content


def test_the_scan_is_linear_and_keeps_little():
    content = io.BytesIO((HEAD + "<a>" + "<c r='A2'><v>1</v></c>" * 2_000_000 + "t" * 20_000_000 + "</a>").encode())
    tracemalloc.start()
    began = time.process_time()
    num_bytes = sum(map(len, scan_xml(content)))
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes == len(content.getvalue())
    assert peak < 10 * MOST_TOKEN_BYTES
    assert seconds < 3
