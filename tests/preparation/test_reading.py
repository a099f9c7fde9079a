"""What people really have: their names, formats, encodings and conversations, in tables."""

import bz2
import codecs
import gzip
import json
import lzma
import os
import re
import shlex
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_lines
from data_helpers import documents_of, prepare, prepare_tiny, write_jsonl, write_texts
from table import read_table

from config import UsageError
from machinery.errors import DataError
from machinery.shards import Manifest
from preparation import chat, reading, sources


def refuses(spec: str, words: str, kind=DataError):
    with pytest.raises(kind, match=words):
        documents_of(spec)


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


# ----------------------------------------------------------------------------------------- names
NAMES = ["C#", "a[1-3]", "ação", "x=y", "b#c#d", "st*r", "hf:x", " ", "stdlib"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_read_as_it_is_named(name, tmp_path, monkeypatch):
    """Beside what it would be without its # and with its brackets as a pattern."""
    for other in ("C", "a1", "x", "y", "b", "b#c", "star", name):
        (tmp_path / other).mkdir(exist_ok=True)
        (tmp_path / other / "a.txt").write_text(f"text of {other}")
        write_lines(tmp_path / f"{other}.jsonl", [{"body": f"record of {other}", "text": "no"}])
    monkeypatch.chdir(tmp_path)
    for place in (name, f"{tmp_path}/{name}"):
        for spec in (f"files:{place}", f"n=files:{place}", f"files:{place}/*.txt"):
            assert documents_of(spec)[0] == [f"text of {name}"], spec
        assert documents_of(f"files:{place}.jsonl#body")[0] == [f"record of {name}"]
    assert sources.parse(f"n=files:{name}").name == "n"
    if name == "stdlib":  # not the folder
        assert sources.parse(name).kind == sources.parse("n=stdlib").kind == name
    else:
        assert documents_of(name)[0] == [f"text of {name}"]


# ---------------------------------------------------------------------------------------- fields
ROWS = [{"id": i, "text": f"text {i}", "body": f"body {i}", "of": [i]} for i in range(30)]
CSV = b"text,body,n\n" + b"".join(b'text %d,"body %d",%d\n' % (i, i, i) for i in range(30))
FORMATS = {
    "a.jsonl": codecs.BOM_UTF8 + lines(*ROWS),
    "b.json": codecs.BOM_UTF8 + b"\n " + json.dumps(ROWS).encode(),
    "lines.json": lines(*ROWS).replace(b"\n", b"\r\n"),
    "c4.00000-of-01024.json.gz": gzip.compress(lines(*ROWS)),
    "array.json.xz": lzma.compress(json.dumps(ROWS).encode()),
    "A.JSONL.BZ2": bz2.compress(lines(*ROWS)),
    "a.jsonl.zst": zstandard.compress(lines(*ROWS)),
    "a.csv": CSV,
    "a.tsv.gz": gzip.compress(CSV.replace(b",", b"\t")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_field_is_used_in_every_format_of_records(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FORMATS[name])
    for place in (path, tmp_path, tmp_path / "*"):
        assert documents_of(f"files:{place}#body")[0] == sorted(row["body"] for row in ROWS), place
    assert documents_of(f"files:{path}")[0] == sorted(row["text"] for row in ROWS)
    refuses(f"files:{path}#txt", "no field 'txt'.*which have .*text, body", UsageError)


def test_a_field_of_plain_text_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("text")
    refuses(
        f"files:{tmp_path}/a.md#body", "a.md is plain text, which has no field 'body'", UsageError
    )
    write_lines(tmp_path / "b.jsonl", [{"body": "record"}])
    assert documents_of(f"files:{tmp_path}#body")[0] == ["record"]  # a folder's texts are left out


TABLES = {  # what a table holds -> its documents
    'text,n\n"a, b\nc",1\n"say ""hi""",2\nshort\n,4\n': ["a, b\nc", 'say "hi"', "short"],
    "\ufeff\r\n\r\ntext;title\r\num, dois, três;x\r\n": ["um, dois, três"],
    "text\none, two\tthree; four\n": ["one, two\tthree; four"],
    "id,text\n1,whole\n0,hello there, tail\n": ["whole"],
    'id,text\n1," a"\n0, "a\n, b"\n': [" a", "a\n, b"],
    'a,"b; c; d\n (e | f)",text\n1,"2; 3",one\n': ["one"],
    "\ufeffsep=;\na;text, or more;text\n1;2;one\n": ["one"],
    '"SEP=;"\r\ntext;a, b\r\none;2\r\n': ["one"],
    "sep=\\t\na\ttext\n1\tone\n": ["one"],
    ',text,,\r1,one,,,\r2,"two\n"\r': ["one", "two\n"],
    "id;Was, wo, wann?; text\n1;a, b;one\n2;;two\n": ["one", "two"],
    'a\ttext\n1\t"one\n2\ttwo"\n': ['"one', 'two"'],  # tabs: a quote is text
}
TSV = {  # a quote is text, but for those around a cell
    'a\t"what", why\ttext\n1\t\t"one\n2\t\ttwo"\n': ['"one', 'two"'],
    'text\ta\n"one"\t"\n"Hi," he said\t2\n"""a"" b"\t3\n': ['"Hi," he said', '"a" b', "one"],
}
DAMAGED_TABLES = {  # and the line that the error names
    'id,text\n0,a\n1,"open\n2,b\n': "line 3",
    'id,text\n0,"t \\"hi, there\\" end"\n': "line 2",
    "text,text\na,b\n": "two of its columns",
    "id,text\n0,hello there, tail\n1,whole\n2,and, one\n": "line 2: no record",
}


def test_cells_hold_what_they_hold(tmp_path):
    path = tmp_path / "a.csv"
    tsv = tmp_path / "a.tsv"
    for text, expected in (TABLES | TSV).items():
        place = tsv if text in TSV else path
        place.write_text(text)
        documents, notes = documents_of(f"files:{place}")
        assert documents == expected, text
        assert ("more cells" in str(notes)) == ("tail" in text)
    for text, where in DAMAGED_TABLES.items():
        path.write_text(text)
        refuses(f"files:{path}", f"a.csv.*{where}")
    for text in ('a\ttext\n1\tone\n2\t"a\nb"\n', 'text\none\n\n"a\nb"\n'):
        tsv.write_text(text)
        refuses(f"files:{tsv}", r"line \d: a quotation .* with commas, not tabs")
        path.write_text(text.replace("\t", ","))
        assert documents_of(f"files:{path}")[0] == ["a\nb", "one"]
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    refuses(f"files:{tmp_path}/a.parquet", "two of its columns")


def test_a_record_is_on_one_side(tmp_path):
    """With all its copies, however few files there are, and however small they are on the disk."""
    row = "2024-01-01 INFO user logged in from the usual place and went away\n"
    raw = lines(*({"text": f"LOG {i}\n" + row * 40} for i in range(200)))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw * 2))
    said = prepare_tiny(tmp_path / "d", "--source", f"files:{tmp_path}/a.jsonl.gz")
    train, val = (int(n) for n in re.findall(r"(?:train|val  ) (\d+) texts", said))
    assert train + val == 400 and val > 20 and val % 2 == 0, said


def test_what_is_no_text_is_named_among_records(tmp_path):
    for name, content, words in (
        ("a.csv", b"%PDF-1", "a.csv: PDF; .*pdftotext"),
        ("a.rtf", rb"{\rtf1\ansi text}", "RTF; .*pandoc -t plain"),
        ("a.docx", b"PK\3\4", "document .*pandoc -t plain .* CSV; unzip any other"),
        ("a.tar.gz", gzip.compress(b"a.txt" + bytes(500) + b"text" * 999), "binary.*tar xf"),
        ("a.txt.gz", b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 99, "a.txt.gz: cannot be read"),
        ("a.jsonl", b'[{"text": "a"}]', "in a .json one of an array"),
        ("b.jsonl", b'{"text": ' + 100_000 * b"[", "b.jsonl, line 1: no record"),
        ("a.json", b'{\n "data": [{"text": "a"}]\n}', "line 1: no record, .*on a line of its own"),
        ("b.json", b"[1, 2]", "b.json, item 0"),
        ("b.json", b'[{"text": "a"}', "b.json: cannot be read"),
        ("b.json", b"", "b.json has no text"),
        (os.fsdecode(b"caf\xe9"), b"text", r"caf\\udce9' is not UTF-8; rename"),
    ):
        (tmp_path / name).write_bytes(content)
        refuses(f"files:{tmp_path}/{name}", words, (DataError, UsageError))
    far = pa.table({"text": pa.array([2**62] * 3, pa.timestamp("us"))})
    pq.write_table(far, tmp_path / "a.parquet")
    refuses(f"files:{tmp_path}/a.parquet", "a.parquet: cannot be read")


# one of many => the note, and the document it gives
ODD_RECORDS = r"""
7 => records left out that are not JSON objects of up to 32 MB
{"n": 1} => records without the field 'text'
{"text": null} => empty documents
{"text": NaN} => empty documents
{"text": {"en": "a"}} => records left out, whose field 'text' holds a dict, not text
{"n": LONG, "text": "long"} => no note | long
{"text": LONG} => no note | LONG
{"text": 0} => no note | 0
{"n": 1e999999, "m": NaN, "text": "inf"} => no note | inf
"""


@pytest.mark.parametrize("record, found", read_table(ODD_RECORDS))
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_an_odd_record_costs_itself_alone_and_is_counted(record, found, ending, tmp_path):
    record, note, *found = (text.replace("LONG", "7" * 5000) for text in (record, *found))
    records = ['{"text": "good"}', record, '{"text": "good"}']
    text = "\n".join(records) if ending == "jsonl" else f"[{','.join(records)}]"
    (tmp_path / f"a.{ending}").write_text(text)
    documents, notes = documents_of(f"files:{tmp_path}/a.{ending}")
    assert documents == sorted(["good", "good", *found])
    assert notes == ({} if note == "no note" else {note: 1})
    assert "left out" not in note or notes.examples[note]


def test_an_optional_field_is_joined_where_it_is(tmp_path):
    """In a few records of many, or in one of two files of a table."""
    few = {"q": "q", "a": "a"}
    write_lines(tmp_path / "a.jsonl", [few] * 700 + [few | {"more": "m"}] + [few] * 199)
    documents, notes = documents_of(f"files:{tmp_path}/a.jsonl#q+more+a")
    assert documents == ["q\n\na"] * 899 + ["q\n\nm\n\na"]
    assert notes == {"records without the field 'more'": 899}
    for i, columns in enumerate(({"q": ["q0"]}, {"q": ["q1"], "more": ["m"]}, {"id": [3, 4]})):
        pq.write_table(pa.table(columns), tmp_path / f"{i}.parquet")
    documents, notes = documents_of(f"files:{tmp_path}/*.parquet#q+more")
    assert documents == ["q0", "q1\n\nm"]
    assert notes == {"records without the field 'more'": 3, "records without the field 'q'": 2}


def test_a_field_that_no_record_has_is_refused_before_all_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FIRST_RECORDS", 50)
    write_jsonl(tmp_path / "a.jsonl", 500)
    refuses(
        f"files:{tmp_path}/a.jsonl#text+titel",
        "no field 'titel' in the first 50 records, .*id, text",
        UsageError,
    )


BAD = [
    "{'text': 'python'}",
    "[1, 2]",
    '{"text": "the rest of the file was not fetc',
    '{"text": "' + "long " * 6000 + '"}',
]


def test_a_bad_line_is_left_out_unless_a_file_begins_with_many(tmp_path, monkeypatch):
    """It is counted, with the place of the first, and what remains is what it was."""
    monkeypatch.setattr(reading, "LARGEST_LINE", 5_000)
    monkeypatch.setattr(sources, "SMALLEST_UNIT", 5_000)  # in several pieces
    path = write_jsonl(tmp_path / "a.jsonl", 300)
    whole = documents_of(f"files:{path}")[0]
    good = path.read_text().splitlines()
    for at in (0, 1):  # 80 of the first 100
        path.write_text("\n".join([*good[:at], *BAD * 20, *good[at:]]))
        refuses(f"files:{path}", f"a.jsonl, line {at + 1}: no record, but .*")
    path.write_text("\n".join([*BAD[:3], *good, *BAD * 4]))
    documents, notes = documents_of(f"files:{path}")
    assert documents == whole and notes == {reading.NO_OBJECT: 19}
    line, start = re.search(r", line (\d+)(?: after byte (\S+))?:", [*notes.lines()][0]).groups()
    rest = path.read_bytes()[int((start or "0").replace(",", "")) :]
    assert rest.splitlines()[int(line) - 1].decode() in BAD
    note = f"19 {reading.NO_OBJECT} (6.0% of all), for example {path}, line"
    assert f"note  {note}" in prepare_tiny(tmp_path / "d", "--source", f"files:{path}")


def test_an_array_that_is_too_large_is_to_become_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST_ARRAY", 10)
    (tmp_path / "b.json").write_text('[{"text": "a"}]')
    refuses(f"files:{tmp_path}/b.json", r"jq -c '.\[\]' b.json > b.jsonl")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ANNEX = b"/annex/objects/SHA256E-s5--abc.txt\n"


def test_all_files_that_cannot_be_read_are_said_at_once_with_what_mends_them(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text("ação", "utf-16")
    others = {"p.txt": b"%PDF", "p.py": bytes(99), "p.parquet": b"PAR1", "a.parquet": ANNEX}
    others |= dict.fromkeys("g.txt g.parquet g.jsonl.zst g.md.xz".split(), POINTER)
    for name, content in others.items():
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="09.txt and 2 others: UTF-16") as error:
        documents_of(f"files:{folder}")
    shell = re.search("^for f in .*", str(error.value), re.MULTILINE)[0]
    subprocess.run(["sh", "-c", shell], check=True)
    assert "git lfs pull" in str(error.value)
    for name in others:
        assert f"{folder}/{name}" in str(error.value)
        (folder / name).unlink()
    assert documents_of(f"files:{folder}")[0] == ["ação"] * 12


# ----------------------------------------------------------------------------- folders and files
def test_what_a_folder_has_beside_its_text_and_windows_line_ends_are_said(tmp_path):
    """With the pattern that reads it, which a folder without text is refused with as well."""
    folder = tmp_path / "it's {c,h} [1]"
    folder.mkdir()
    for name in "a.c b.c a.h a.R".split():
        (folder / name).write_text(name)
    for name in "d.csv.gz LICENSE .hidden".split():
        (folder / name).touch()
    (folder / "gone.txt").symlink_to(folder / "nothing")
    with pytest.raises(UsageError, match=r"2 \.c, .* names them") as error:
        documents_of(f"files:{folder}")
    for path in sorted(write_texts(folder / "texts").iterdir())[:10]:
        path.write_bytes(path.read_bytes().replace(b" ", b"\r\n"))
    note = prepare_tiny(tmp_path / "d", "--source", f"x=files:{folder}")
    for said in (str(error.value), note):
        (spec,) = shlex.split(re.search("names them: (.*)", said)[1])
        assert documents_of(spec)[0] == ["a.R", "a.c", "a.h", "b.c"], said
    assert documents_of(f"files:{folder}/{{.,no}}/*.{{h,md}}")[0] == ["a.h"]
    assert "note  10 documents with Windows line ends" in note and "16.7% of all" in note
    facts = Manifest.load(tmp_path / "d").facts.sources[0]
    kinds = {".c": 2, ".h": 1, ".r": 1, ".csv": 1, "without an ending": 1, "no regular file": 1}
    assert facts.not_read == kinds and facts.files == facts.documents == 60


def test_zstd_of_any_window_and_of_several_frames(tmp_path):
    how = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    engine = zstandard.ZstdCompressor(compression_params=how)
    frames = b""
    for word in (b"first ", b"second"):
        frame = engine.compressobj()
        frames += frame.compress(word) + frame.flush()
    path = tmp_path / "a.txt.zst"
    path.write_bytes(frames)
    assert documents_of(f"files:{path}")[0] == ["first second"]
    path.write_bytes(frames[:-3])
    refuses(f"files:{path}", "a.txt.zst: cannot be read")


# ------------------------------------------------------------------------------------- encodings
ENCODED = {
    "gbk": "今天天气很好，我们去公园散步。",
    "cp1251": "Сегодня хорошая погода.",
    "cp1252": "The word “quoted” — in English.",
    "iso2022_jp": "From a\tb\n今日はいい天気ですね。\n川の石",
    "hz": "今天天气很好，我们去公园散步。",
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("ending", "txt jsonl csv json txt.gz".split())
def test_text_of_another_encoding_is_refused_unless_it_is_named(encoding, ending, tmp_path):
    text = ENCODED[encoding]
    record = json.dumps({"text": text}, ensure_ascii=False)
    content = {"txt": text, "jsonl": record, "csv": f'text\n"{text}"', "json": f"[{record}]"}
    path = tmp_path / f"a.{ending}"
    with reading.COMPRESSIONS.get(path.suffix, open)(path, "wb") as file:
        file.write(content[ending.removesuffix(".gz")].encode(encoding))
    refuses(f"files:{path}", "--encoding", (DataError, UsageError))
    assert documents_of(f"files:{path}", sources.encoding_of(encoding.upper()))[0] == [text]


def test_one_byte_of_another_encoding_is_read_and_noted(tmp_path):
    """As an empty file is."""
    (tmp_path / "empty.txt").touch()
    zeros = "ação \0 of them \0\0 in a text é"
    colors = "\x1b[31mred\x1b(B\x1b[m (format t ~{~a~^, ~} ~{(~a)~}) "
    for text in ("coração " * 9 + "é", "plain English " * 999 + "é", colors + "ééé", zeros):
        (tmp_path / "b.txt").write_bytes(text[:-1].encode() + b"\xe9")
        documents, notes = documents_of(f"files:{tmp_path}")
        assert documents == [text] and [*notes.values()] == [1, 1]


def test_a_byte_order_mark_is_no_text(tmp_path):
    """But in code it stays, so that the text of stdlib is what it was."""
    for name in ("a.txt", "a.py"):
        (tmp_path / name).write_text(f"{name}\ufeff", "utf-8-sig")
    assert documents_of(f"files:{tmp_path}")[0] == ["a.txt\ufeff", "\ufeffa.py\ufeff"]


def test_one_text_many_times_cannot_be_held_out(tmp_path):
    """And that says what else was left out."""
    texts = ["The only story that there is. " * 9] * 3000 + [""]
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    done = prepare(tmp_path / "d", "--source", f"files:{tmp_path}/a.jsonl")
    assert done.returncode == 2
    assert re.search(r"there is only one text.*\(1 empty documents\)", done.stderr)


# --------------------------------------------------------------------------------- conversations
def said(*turns: tuple[str, object]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


ASKED = [("user", "q"), ("assistant", "a")]
READ_ALIKE = """
[{"role": " User ", "content": "q"}, {"role": "bot", "content": [{"type": "text", "text": "a"}]}]
[{"role": "prompter", "content": ["q"]}, {"role": "ai", "content": ["a", ""]}]
[{"role": null, "from": "human", "value": "q"}, {"from": "gpt", "value": "a", "content": null}]
[{"from": "human", "content": "q", "id": 7}, {"role": "chatgpt", "value": "a", "content": ""}]
"""
LEFT_OUT = """
[] => roles out of turn
[{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}] => roles out of turn
[{"from": "human", "value": "q"}, {"from": "human", "value": "q"}] => roles out of turn
[{"role": "tool", "content": "q"}] => a role other than
[{"role": 7, "content": "q"}] => a role other than
[{"role": "user", "content": null}] => a part that is not text
[{"role": "user", "content": [{"type": "image"}]}] => a part that is not text
"text" => something else than turns
[1] => something else than turns
[{"speaker": "user", "text": "q"}] => something else than turns
"""


def test_roles_are_read_as_people_write_them():
    for text in READ_ALIKE.strip().splitlines():
        assert chat.read_turns(json.loads(text)) == ASKED, text
    silent = [("user", "q"), ("assistant", "")]
    assert chat.read_turns(said(*silent)) == silent
    for system in said(("developer", "s"), ("system", "s")):
        assert chat.read_turns([system, *said(*ASKED)]) == [("system", "s"), *ASKED]
    for turns, (reason,) in read_table(LEFT_OUT):
        with pytest.raises(chat.TurnsError, match=reason):
            chat.read_turns(json.loads(turns))


def test_if_conversations_are_left_out_it_is_said_why(tmp_path):
    odd = {"messages": said(("tool", "q"))}
    path = tmp_path / "a.jsonl"
    why = "left out, with a role other.*, for example ."
    write_lines(path, [odd] * 300)
    refuses(f"files:{path}#messages", f"300 conversations {why}", UsageError)
    asked = ("system", "s"), ("user", "Who? " * 9)
    good = [said(*asked, ("assistant", f"it is {i} " * 9)) for i in range(400)]
    write_lines(path, [*({"messages": turns} for turns in good), *[odd] * 3])
    text = prepare_tiny(tmp_path / "e", "--source", f"files:{path}#messages")
    assert re.search(f"note  3 conversations {why}", text)
    assert Manifest.load(tmp_path / "e").facts.made["beginnings"].startswith("Who? " * 8)
