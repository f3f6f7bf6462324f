"""Uploads: formats, what is found in them, and everything that can go wrong on the way without leaving anything."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import openpyxl
import pyarrow
import pytest
from pyarrow import parquet
from web_bench import CSV, send_pieces

from inlay.data import FileQuestion, describe_file, file_contents
from inlay.errors import BadData
from inlay.service.state import TenantLimits
from inlay.service.web import inspection

ROWS = [
    {"text": f"{word} number {number}", "label": label}
    for number in range(12)
    for word, label in (("win", "spam"), ("see", "ham"))
]


def as_csv(delimiter=","):
    return (
        "text,label\n".replace(",", delimiter) + "".join(f"{row['text']}{delimiter}{row['label']}\n" for row in ROWS)
    ).encode()


def as_xlsx():
    book = openpyxl.Workbook()
    book.active.append(["text", "label"])
    for row in ROWS:
        book.active.append([row["text"], row["label"]])
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def as_parquet():
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file.getvalue()


def as_jsonl():
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


FORMATS = {
    "csv": ("text/csv", as_csv),
    "tsv": ("text/tab-separated-values", lambda: as_csv("\t")),
    "jsonl": ("application/x-ndjson", as_jsonl),
    "parquet": ("application/vnd.apache.parquet", as_parquet),
    "xlsx": ("application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", as_xlsx),
}


def upload(client, content, path="/v1/datasets?name=rows.csv", **headers):
    return client.post(path, content=content, headers={"content-type": "application/octet-stream", **headers})


def files_of(bench, tenant="acme"):
    """What an upload has left in the tenant's folder."""
    folder = bench.db.paths.datasets(tenant)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_file_is_read_by_a_process_of_its_own(bench, acme, real_reader):
    about = upload(acme, CSV + b"only one cell\n").json()
    assert (about["num_rows"], about["reading"]["kind"]) == (41, "classify")
    refused = upload(acme, b"text,label\n")
    assert refused.json()["detail"] == "the file has no rows"
    assert len(files_of(bench)) == 1


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_from_its_type_and_from_its_name(shared, asker, name):
    kind, make = FORMATS[name]
    raw = asker.post("/v1/datasets", content=make(), headers={"content-type": kind})
    form = asker.post("/v1/datasets", files={"file": (f"rows.{name}", make(), "application/octet-stream")})
    for answer in (raw, form):
        assert answer.status_code == 201, answer.text
        about = answer.json()
        assert answer.headers["location"] == f"/v1/datasets/{about['id']}"
        assert (about["format"], about["num_rows"], about["problem"]) == (name, 24, None)
        reading = about["reading"]
        assert (reading["text"], reading["label"], reading["kind"]) == ("text", "label", "classify")
        assert {item["label"]: item["count"] for item in reading["labels"]} == {"spam": 12, "ham": 12}
        assert about["first_rows"][0] == ["win number 0", "spam"]
        assert about["columns"][1] == {"name": "label", "examples": ["spam", "ham"], "num_empty": 0}
    assert form.json()["name"] == f"rows.{name}"


def zip_of(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize("name", ["rows.csv.gz", "Rows.JSONL.GZ", "rows.csv.zst", "rows.zip", "rows.json", "rows.txt"])
def test_packed_files_and_documents_are_read(asker, name):
    content = {
        "rows.csv.gz": lambda: gzip.compress(as_csv()),
        "Rows.JSONL.GZ": lambda: gzip.compress(as_jsonl()),
        "rows.csv.zst": lambda: pyarrow.compress(as_csv(), codec="zstd", asbytes=True),
        "rows.zip": lambda: zip_of("rows.csv", as_csv()),
        "rows.json": lambda: json.dumps(ROWS, indent=1).encode(),
        "rows.txt": lambda: as_csv("\t"),
    }[name]()
    answer = upload(asker, content, f"/v1/datasets?name={name}")
    assert answer.status_code == 201, answer.text
    about = answer.json()
    assert (about["format"], about["num_rows"]) == (name.lower().removeprefix("rows."), 24)
    assert {item["label"]: item["count"] for item in about["reading"]["labels"]} == {"spam": 12, "ham": 12}


@pytest.mark.parametrize("name", ["a.csv.gz", "a.zip"])
def test_the_limit_of_bytes_holds_for_what_a_file_unpacks_to(bench, name):
    client = bench.add_tenant("small", TenantLimits(dataset_bytes=50_000))
    content = b"text,label\n" + b"a text,x\nb text,y\n" * 10_000
    packed = gzip.compress(content) if name.endswith("gz") else zip_of("a.csv", content)
    assert len(packed) < 5_000
    refused = upload(client, packed, f"/v1/datasets?name={name}")
    assert refused.status_code == 400, refused.text
    assert "unpacks to more than 50,000 bytes" in refused.json()["detail"]
    assert files_of(bench, "small") == []


def test_notes_say_which_lines_are_odd(asker):
    content = CSV + b"only one cell\n" + b"win a prize now 0,spam\n"
    about = upload(asker, content).json()
    assert about["num_rows"] == 42
    assert {"message": "ragged row: 1 fields, but there are 2 columns", "line": 42} in about["notes"]
    assert any("repeat" in note["message"] for note in about["notes"])
    assert not [note for note in about["notes"] if "draft" in note["message"] or "--" in note["message"]]


def test_columns_may_be_chosen_at_once_or_later(asker):
    content = b"a,b,c\n" + b"".join(b"win %d,x,spam\nsee %d,y,ham\n" % (number, number) for number in range(12))
    about = upload(asker, content).json()
    assert about["problem"]["code"] == "bad-data"
    assert about["reading"] is None
    assert "`label`" in about["problem"]["hint"] or "`text`" in about["problem"]["hint"]
    chosen = upload(asker, content, "/v1/datasets?name=a.csv&text=a&label=b").json()
    assert [item["label"] for item in chosen["reading"]["labels"]] == ["x", "y"]
    again = asker.post(f"/v1/datasets/{about['id']}/reading", json={"text": "a", "label": "c"})
    assert again.status_code == 200
    assert {item["label"] for item in again.json()["reading"]["labels"]} == {"spam", "ham"}
    assert again.json()["problem"] is None
    guessed = asker.post(f"/v1/datasets/{about['id']}/reading", json={"text": "a", "kind": "auto", "label": "c"})
    assert guessed.json()["reading"] == again.json()["reading"]
    assert asker.get(f"/v1/datasets/{about['id']}").json() == again.json()


def test_rows_without_labels_are_kept_for_batches_and_say_why_they_cannot_train(asker):
    about = upload(asker, b"text\nsee you\nlater\n").json()
    assert about["reading"] == {"text": "text", "pair": None, "label": None, "kind": None, "labels": []}
    assert about["problem"]["status"] == 400
    assert "label" in about["problem"]["detail"]


def test_pairs_tags_and_numbers_are_recognised(asker):
    pairs = b"sentence1,sentence2,label\n" + b"".join(b"a %d,b %d,%d\n" % (n, n, n % 2) for n in range(20))
    reading = upload(asker, pairs).json()["reading"]
    assert (reading["text"], reading["pair"], reading["kind"]) == ("sentence1", "sentence2", "classify")
    numbers = b"text,score\n" + b"".join(b"a %d,%d.5\n" % (n, n) for n in range(30))
    assert upload(asker, numbers).json()["reading"]["kind"] == "regress"
    words = "".join(json.dumps({"tokens": ["In", f"Oslo{n}"], "tags": ["O", "B-LOC"]}) + "\n" for n in range(20))
    reading = upload(asker, words.encode(), "/v1/datasets?name=a.jsonl").json()["reading"]
    assert (reading["kind"], reading["text"], reading["label"]) == ("tag", "tokens", "tags")
    conll = b"".join(b"In O\nOslo%d B-LOC\n\n" % n for n in range(20))
    assert upload(asker, conll, "/v1/datasets?name=a.conll").json()["reading"]["kind"] == "tag"


def test_other_encodings_are_read_and_told(asker):
    content = b"text;label\n" + b"".join(f"größe {n};ä\nweiß {n};b\n".encode("latin-1") for n in range(12))
    about = upload(asker, content).json()
    assert about["first_rows"][0] == ["größe 0", "ä"]
    assert any("latin-1" in note["message"] for note in about["notes"])


@pytest.mark.parametrize(
    ("content", "path", "status", "words"),
    [
        (b"", "/v1/datasets?name=a.csv", 400, "empty"),
        (b"text,label\n", "/v1/datasets?name=a.csv", 400, "no rows"),
        (b'text,label\n"never closed', "/v1/datasets?name=a.csv", 400, "never ends"),
        (b"\x00\x01\x02\x03" * 50, "/v1/datasets?name=a.csv", 400, "binary"),
        (b"PAR1 not really", "/v1/datasets?name=a.parquet", 400, "not a readable Parquet"),
        (b"PK not really", "/v1/datasets?name=a.xlsx", 400, "not a readable workbook"),
        (b"text,label\nx,y\n", "/v1/datasets", 415, "format"),
        (b"text,label\nx,y\n", "/v1/datasets?name=a.exe", 415, "format"),
        (b"text,label\nx,y\n", "/v1/datasets?format=exe", 422, "format"),
        (b"text,label\nx,y\n", "/v1/datasets?name=a.csv&kind=guess", 422, "kind"),
        (b"text,label\nx,y\n", "/v1/datasets?name=a.csv&colour=red", 422, "colour"),
        (b",".join(b"c%d" % n for n in range(2000)) + b"\n", "/v1/datasets?name=a.csv", 400, "columns"),
    ],
)
def test_what_cannot_be_read_is_refused_and_leaves_nothing(shared, asker, content, path, status, words):
    before = files_of(shared)
    answer = upload(asker, content, path)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"]
    assert "/" not in answer.json()["detail"].replace("and/or", "")
    assert files_of(shared) == before


@pytest.mark.parametrize("says_length", [True, False])
@pytest.mark.parametrize("is_form", [True, False])
def test_a_file_above_the_limit_is_refused_while_it_comes(bench, says_length, is_form):
    client = bench.add_tenant("small", TenantLimits(dataset_bytes=10_000))
    content = b"text,label\n" + b"x" * 50_000
    headers = {"content-type": "text/csv"}
    if is_form:
        content = (
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\n'
            + content * 3
            + b"\r\n--B--\r\n"
        )
        headers = {"content-type": "multipart/form-data; boundary=B"}
    if says_length:
        headers["content-length"] = str(len(content))
    pieces = [content[start : start + 4096] for start in range(0, len(content), 4096)]
    answer = send_pieces(bench.app, "/v1/datasets", pieces, bench.secrets["small"], headers)
    problem = json.loads(answer.body)
    assert (answer.status, problem["code"]) == (413, "over-limit")
    assert "10,000 bytes" in problem["detail"]
    assert files_of(bench, "small") == []
    assert client.get("/v1/datasets").json()["items"] == []


def test_room_that_is_left_counts_too(bench):
    client = bench.add_tenant("small", TenantLimits(stored_bytes=1500))
    assert upload(client, CSV).status_code == 201
    refused = upload(client, CSV)
    assert refused.status_code == 413
    assert "stored bytes" in refused.json()["detail"]


def test_more_rows_or_labels_than_allowed_are_told(bench):
    client = bench.add_tenant("small", TenantLimits(dataset_rows=39, labels=2))
    assert upload(client, CSV).json()["code"] == "over-limit"
    assert files_of(bench, "small") == []
    content = b"text,label\n" + b"".join(b"a %d,l%d\n" % (n, n % 3) for n in range(30))
    assert upload(client, content).json()["problem"]["code"] == "over-limit"


def test_a_client_that_goes_half_way_leaves_nothing(bench, acme):
    answer = send_pieces(bench.app, "/v1/datasets?name=a.csv", [CSV[:100], CSV[100:200], None], bench.secrets["acme"])
    assert not answer.messages
    assert files_of(bench) == []


def test_a_form_that_ends_early_leaves_nothing(bench, acme):
    content = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.csv"\r\n\r\n' + CSV
    answer = acme.post("/v1/datasets", content=content, headers={"content-type": "multipart/form-data; boundary=B"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-form")
    assert files_of(bench) == []


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"nonsense", "multipart/form-data; boundary=B", 400),
        (b"nonsense", "multipart/form-data", 400),
        (b"--B--\r\n", "multipart/form-data; boundary=B", 422),
        (
            b'--B\r\nContent-Disposition: form-data; name="label"\r\n\r\nx\r\n--B--\r\n',
            "multipart/form-data; boundary=B",
            422,
        ),
        (
            b'--B\r\nContent-Disposition: form-data; name="odd"\r\n\r\nx\r\n--B--\r\n',
            "multipart/form-data; boundary=B",
            422,
        ),
        (
            b'--B\r\nContent-Disposition: form-data; name="label"\r\n\r\n' + b"x" * 5000,
            "multipart/form-data; boundary=B",
            422,
        ),
        (b"--B\r\n" + b"X: y\r\n" * 5000, "multipart/form-data; boundary=B", 400),
    ],
)
def test_bad_forms_are_refused(bench, acme, content, kind, status):
    answer = acme.post("/v1/datasets", content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert files_of(bench) == []


def test_fields_of_a_form_choose_columns_and_names(asker):
    form = {
        "files": {"file": ("C:\\mail\\old.csv", CSV, "text/csv")},
        "data": {"label": "text", "text": "label", "name": "new.csv"},
    }
    about = asker.post("/v1/datasets", **form).json()
    assert about["name"] == "new.csv"
    assert about["reading"]["text"] == "label"
    odd = asker.post("/v1/datasets?name=..%2F..%2Fetc%2Fpass%07wd.csv", files={"file": ("a.csv", CSV)}).json()
    assert odd["name"] == "passwd.csv"


def test_a_format_in_a_form_is_checked_like_one_in_the_query(bench, acme):
    for said in ("exe", "../../x", "x" * 500):
        answer = acme.post("/v1/datasets", files={"file": ("a.csv", CSV)}, data={"format": said})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "format")
    assert files_of(bench) == []


def test_two_files_in_a_form_are_refused(bench, acme):
    answer = acme.post("/v1/datasets", files=[("file", ("a.csv", CSV)), ("file", ("b.csv", CSV))])
    assert answer.json()["errors"][0]["field"] == "file"
    assert files_of(bench) == []


def test_an_upload_that_is_sent_again_is_kept_once(bench, acme):
    first = upload(acme, CSV, **{"idempotency-key": "one"})
    again = upload(acme, CSV, **{"idempotency-key": "one"})
    assert first.json() == again.json()
    assert again.status_code == 201
    assert again.headers["idempotent-replayed"] == "true"
    other = upload(acme, CSV + b"x,ham\n", **{"idempotency-key": "one"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")
    assert len(files_of(bench)) == 1


def test_datasets_are_listed_page_by_page_and_deleted(bench, acme):
    ids = [upload(acme, CSV).json()["id"] for _ in range(3)]
    page = acme.get("/v1/datasets?limit=2").json()
    rest = acme.get("/v1/datasets", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert [item["id"] for item in page["items"] + rest["items"]] == ids[::-1]
    assert rest["next_cursor"] is None
    assert acme.get("/v1/datasets?cursor=nonsense").status_code == 400
    assert acme.get("/v1/datasets?limit=0").json()["errors"][0]["field"] == "limit"
    assert acme.delete(f"/v1/datasets/{ids[0]}").status_code == 204
    assert acme.get(f"/v1/datasets/{ids[0]}").status_code == 404
    assert len(files_of(bench)) == 2


# Files made to hurt


def test_a_workbook_that_unpacks_to_gigabytes_is_refused(asker):
    file = io.BytesIO(as_xlsx())
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as book, book.open("xl/media/bomb", "w") as part:
        for _ in range(300):
            part.write(b"\0" * 1_000_000)
    answer = upload(asker, file.getvalue(), "/v1/datasets?name=a.xlsx")
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-data")
    assert "unpacks" in answer.json()["detail"]


def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused(asker):
    column = pyarrow.array(["x" * 1_000_000]).dictionary_encode()
    table = pyarrow.table({"text": pyarrow.concat_arrays([column] * 3000), "label": ["a", "b"] * 1500})
    file = io.BytesIO()
    parquet.write_table(table, file)
    answer = upload(asker, file.getvalue(), "/v1/datasets?name=a.parquet")
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-data")


@pytest.mark.parametrize(
    ("program", "status", "code"),
    [
        ("import os; os.kill(os.getpid(), 11)", 507, "out-of-memory"),
        ("raise SystemExit(1)", 507, "out-of-memory"),
        ("print('no json')", 500, "unanswered"),
        ("import time; time.sleep(60)", 413, "too-slow"),
    ],
)
def test_a_reader_that_dies_or_hangs_takes_only_its_upload_with_it(
    bench, acme, monkeypatch, real_reader, program, status, code
):
    monkeypatch.setattr(inspection, "READER", ("-c", program))
    monkeypatch.setattr(inspection, "PATIENCE_S", 0.5)
    answer = upload(acme, CSV)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert files_of(bench) == []


def test_a_reader_has_bounds(tmp_path):
    """What eats memory is stopped by the kernel, and is an error of its file."""
    program = """
from inlay.service.web.inspect_file import bound_process
bound_process()
try:
    b"x" * (4 << 30)
except MemoryError:
    print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "stopped", done.stderr


def test_labels_of_a_long_file_are_counted_in_all_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(file_contents, "HEAD_ROWS", 50)
    path = Path(tmp_path / "long.csv")
    path.write_bytes(b"text,label\n" + b"".join(b"row %d,%s\n" % (n, b"ab"[n % 2 : n % 2 + 1]) for n in range(200)))
    found = describe_file(FileQuestion(str(path), "csv"))
    assert found["num_rows"] == 200
    assert {item["label"]: item["count"] for item in found["reading"]["labels"]} == {"a": 100, "b": 100}
    assert "first 50 rows of 200" in found["notes"][-1]["message"]
    assert [item.name for item in tmp_path.iterdir()] == ["long.csv"]


def test_a_column_whose_name_no_json_can_hold_is_refused(tmp_path):
    path = Path(tmp_path / "half.jsonl")
    path.write_bytes(b'{"text": "a", "label": "x", "\\ud800": 1}\n{"text": "b", "label": "y", "\\ud800": 2}\n')
    with pytest.raises(BadData, match="is not text"):
        describe_file(FileQuestion(str(path), "jsonl"))
