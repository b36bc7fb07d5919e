"""That records are read from every kind of file, and that errors show no content."""

import json
import mailbox
import tarfile

import pytest
import records

MAIL = """From: someone@example.com
To: another@example.com
Subject: A meeting
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary=b

--b
Content-Type: text/plain; charset=utf-8
Content-Transfer-Encoding: quoted-printable

At three o=27clock in the caf=C3=A9.
--b
Content-Type: application/octet-stream
Content-Disposition: attachment; filename=secret.bin

AAAA
--b--
"""
TEXT = "A meeting\n\nAt three o'clock in the café."


def test_lines_files_and_mails_are_records(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "deep" / "b.eml").write_text(MAIL)
    assert records.read_records(tmp_path) == ["one", TEXT]
    lines, mails = tmp_path / "records.jsonl", tmp_path / "mails.mbox"
    lines.write_text(json.dumps("one\ntwo") + "\n\n" + json.dumps({"text": "three"}))
    assert records.read_records(lines) == ["one\ntwo", "three"]
    box = mailbox.mbox(mails)
    box.add(MAIL)
    box.add("Subject: Empty\n\n")
    box.close()
    assert records.read_records(mails) == [TEXT, "Empty"]


def test_an_unknown_character_set_stops_nothing(tmp_path):
    head = b"Subject: Hi\nContent-Type: text/plain; charset=nonsense\n\n"
    (tmp_path / "a.eml").write_bytes(head + b"caf\xe9 au lait")
    assert records.read_records(tmp_path) == ["Hi\n\ncaf\ufffd au lait"]


def test_mails_of_an_archive_are_read_by_kind(tmp_path):
    files = {
        "package/data/easy-ham-1/00001.a.json": {"text": "Subject: One\n\nham"},
        "package/data/spam-2/00001.c.json": {"text": "Subject: Three\n\nspam"},
        "package/data/spam-2/00001.c.txt": "not a file of JSON",
        "package/data/file_list.json": ["spam-2"],
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    with tarfile.open(tmp_path / "mails.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    found = records.read_emails(tmp_path / "mails.tgz")
    assert found == {"ham": ["One\n\nham"], "spam": ["Three\n\nspam"]}


SECRET = "the patient is ill"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", f'"good"\n"{SECRET}', r"r\.jsonl:2: must be one JSON value"),
        ("r.jsonl", json.dumps({"body": SECRET}), r"r\.jsonl:1: must be a string"),
        ("r.jsonl", f'"{SECRET} \\ud800"', r"r\.jsonl:1:.* of valid characters"),
        ("r.jsonl", SECRET.encode("utf-16"), "must be readable UTF-8"),
        ("r.csv", SECRET, r"must be a \.jsonl or \.mbox file, or a directory"),
        (
            "r.mbox",
            "From x\nContent-Type: text/plain; charset=undefined\n\n" + SECRET,
            "e-mail 1: must be an e-mail; got UnicodeError",
        ),
    ],
)
def test_errors_name_the_place_and_show_nothing(tmp_path, name, content, message):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit, match=message) as error:
        records.read_records(tmp_path / name)
    assert "patient" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_errors_of_other_forms_name_the_place(tmp_path):
    def parse(value):
        if value != "good":
            raise ValueError("must be good.")
        return len(value)

    file = tmp_path / "r.jsonl"
    file.write_text('"good"\n"good"')
    assert records.read_records(file, parse) == [4, 4]
    file.write_text(f'"good"\n"{SECRET}"')
    with pytest.raises(SystemExit, match=r"r\.jsonl:2: must be good\.$"):
        records.read_records(file, parse)
