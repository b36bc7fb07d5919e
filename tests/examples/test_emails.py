"""That e-mails are told apart by kind, and that other files are left out."""

import io
import json
import tarfile

from examples import records


def test_mails_are_read_by_kind(tmp_path):
    files = {
        "package/data/easy-ham-1/00001.a.json": {"text": "Subject: One\n\nham"},
        "package/data/hard-ham-1/00001.b.json": {"text": "Subject: Two\n\nham"},
        "package/data/spam-2/00001.c.json": {"text": "Subject: Three\n\nspam"},
        "package/data/spam-2/00001.c.txt": "not a file of JSON",
        "package/data/file_list.json": ["spam-2"],
    }
    with tarfile.open(tmp_path / "mails.tgz", "w:gz") as archive:
        for name, content in files.items():
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert records.read_emails(tmp_path / "mails.tgz") == {
        "ham": ["One\n\nham", "Two\n\nham"],
        "spam": ["Three\n\nspam"],
    }
