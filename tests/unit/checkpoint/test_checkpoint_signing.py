"""Signed checkpoints: whatever is changed, moved, cut or signed by another is found, by the command line too."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from checkpoint_saving import advance, identity_of, make_state, save, write_part
from everstep.base.config_keys import CheckpointConfig
from everstep.base.errors import CheckpointCorrupt, ConfigError, StoreError
from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.keys import make_keys, read_private_key, read_public_key
from everstep.checkpoint.manifest import decode
from everstep.checkpoint.manifest_writer import write_whole
from everstep.checkpoint.names import manifest_name
from everstep.checkpoint.part import decode_report, encode_report
from everstep.checkpoint.part_digest import digest_of
from everstep.checkpoint.pointers import attach, detach
from everstep.checkpoint.reader import open_checkpoint, verify_store
from everstep.checkpoint.signing import Signer, check_signature
from everstep.checkpoint.store import DirectoryStore, Draft
from everstep.checkpoint.transfer import transfer
from everstep.cli.main import run_command

Change = Callable[[Path], None]
SHAPES = {"weight": (50, 40), "bias": (9,)}
JOB = "ab12"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two private keys, their public ones beside."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "theirs"):
        make_keys(folder / name)
    return folder / "mine", folder / "theirs"


def write(folder: Path, key: Path | None, step: int = 1, job: str = JOB) -> DirectoryStore:
    """A checkpoint of one part, signed if there is a key."""
    store = DirectoryStore(folder)
    state = make_state(step, SHAPES)
    signer = None if key is None else Signer(key)
    write_whole(store, state, identity_of(state, job), step=step, signer=signer)
    return store


def manifest_at(folder: Path, step: int = 1) -> Path:
    return folder / manifest_name(step)


def test_a_signed_checkpoint_reads_as_any_other(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    signed, plain = write(tmp_path / "a", keys[0]), write(tmp_path / "b", None)
    text = manifest_at(tmp_path / "a").read_bytes()
    assert set(json.loads(text)) == {"everstep_checkpoint", "digest", "body", "signature"}
    assert open_checkpoint(signed, 1).signed_by == read_public_key(keys[0])
    assert open_checkpoint(plain, 1).signed_by is None
    assert not verify_store(signed)
    assert decode(text, "m") == decode(detach(text)[0], "m")
    check_signature(signed, 1, read_public_key(f"{keys[0]}.pub"), job=JOB)


def test_a_copy_keeps_the_signature(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    source = write(tmp_path / "a", keys[0])
    transfer(source, DirectoryStore(tmp_path / "b"), 1)
    check_signature(DirectoryStore(tmp_path / "b"), 1, read_public_key(keys[0]), job=JOB)


def test_a_saver_signs_what_refers_to_older_files_too(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    state = make_state(1, {"large": (600, 600), "small": (3,)})
    key, signer = read_public_key(keys[0]), Signer(keys[0])
    save(tmp_path, state, 1, signer=signer)
    advance(state, 2)
    manifest = save(tmp_path, state, 2, incremental=True, signer=signer)
    for step in (1, 2):
        check_signature(DirectoryStore(tmp_path), step, key)
    signature = detach(manifest_at(tmp_path, 2).read_bytes())[1]
    assert signature is not None and len(signature["files"]) == len(manifest.files)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def change_part(folder: Path) -> None:
    flip(next(folder.glob("*/part-*")), -5000)


def change_padding(folder: Path) -> None:
    flip(next(folder.glob("*/part-*")), 2000)


def lose_part(folder: Path) -> None:
    next(folder.glob("*/part-*")).unlink()


def strip(folder: Path) -> None:
    path = manifest_at(folder)
    path.write_bytes(detach(path.read_bytes())[0])


def signature_of(folder: Path) -> dict[str, Any]:
    found = detach(manifest_at(folder).read_bytes())[1]
    assert found is not None
    return found


def resign(folder: Path, **change: Any) -> None:
    path = manifest_at(folder)
    path.write_bytes(attach(detach(path.read_bytes())[0], {**signature_of(folder), **change}))


def other_value(folder: Path) -> None:
    resign(folder, value="0" * 128)


def other_file(folder: Path) -> None:
    resign(folder, files=["0" * 64])


def no_files(folder: Path) -> None:
    resign(folder, files=[])


def move(folder: Path) -> None:
    """Another signed state takes the place of this one, whose signature stays."""
    signature = signature_of(folder)
    shutil.rmtree(folder)
    write(folder, None)
    resign_text = detach(manifest_at(folder).read_bytes())[0]
    manifest_at(folder).write_bytes(attach(resign_text, signature))


CHANGES: list[Change] = [change_part, change_padding, lose_part, strip, other_value, other_file, no_files, move]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_found(
    tmp_path: Path, keys: tuple[Path, Path], change: Change, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write(tmp_path / "a", keys[0])
    change(tmp_path / "a")
    with pytest.raises(ConfigError, match="step 1"):
        check_signature(store, 1, read_public_key(keys[0]))
    argv = ["checkpoints", "verify", str(tmp_path / "a"), "--require-signature", f"{keys[0]}.pub"]
    assert run_command(argv) == 1
    assert "all whole" not in capsys.readouterr().out


def test_bytes_that_have_the_same_digest_are_found(
    tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can make a block with the digest of another one passes all that xxh3 says."""
    store = write(tmp_path, keys[0])
    change_part(tmp_path)
    monkeypatch.setattr("everstep.checkpoint.reader.tree_digest", lambda digests: store_tree)
    store_tree = open_checkpoint(store, 1).manifest.files[0].tree
    with pytest.raises(ConfigError, match="another SHA-256"):
        check_signature(store, 1, read_public_key(keys[0]))


def test_a_damaged_signature_is_damage(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    store = write(tmp_path, keys[0])
    path = manifest_at(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"value":"', b'"value":"g'))
    with pytest.raises(CheckpointCorrupt, match="does not match its digest"):
        open_checkpoint(store, 1)


class Altering(DirectoryStore):
    """Keeps other bytes than those that are written into it, and makes what names their xxh3 fit them."""

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        with super().draft(name) as draft:
            publish = draft.publish

            def altered(to: str, **how: Any) -> None:
                publish(to, **how)
                flip(self.path / to, -5000)

            draft.publish = altered if "part-" in name else publish  # type: ignore[method-assign]
            yield draft


@pytest.mark.parametrize("workers", [1, 3])
def test_a_store_that_keeps_other_bytes_has_none_of_them_signed(
    tmp_path: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Whoever reads them back finds them as the manifest says, as far as xxh3 goes."""
    key = read_public_key(keys[0])
    state = make_state(1, {"large": (600, 600), "more": (600, 600)})
    good = save(tmp_path / "good", state, 1, signer=Signer(keys[0]), workers=workers)
    check_signature(DirectoryStore(tmp_path / "good"), 1, key)
    trees = {file.name: file.tree for file in good.files}
    asked = iter([*trees.values()] * 9)
    monkeypatch.setattr("everstep.checkpoint.reader.tree_digest", lambda digests: next(asked))
    save(Altering(tmp_path / "bad"), state, 1, signer=Signer(keys[0]), workers=workers)
    asked = iter([*trees.values()] * 9)
    with pytest.raises(ConfigError, match="another SHA-256"):
        check_signature(DirectoryStore(tmp_path / "bad"), 1, key)


def test_nobody_signs_a_file_whose_writer_said_no_digest(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    write(tmp_path, None)
    text = manifest_at(tmp_path).read_bytes()
    with pytest.raises(StoreError, match=r"part-.* cannot be signed: expected its SHA-256 from its writer, got none"):
        Signer(keys[0]).sign(decode(text, "m"), text, {})


def signed_before(folder: Path, key: Path) -> None:
    """As an older version signs it: the SHA-256 of each file's bytes in order."""
    text = manifest_at(folder).read_bytes()
    files = [hashlib.sha256((folder / file.name).read_bytes()).hexdigest() for file in decode(text, "m").files]
    said = "\n".join(["everstep checkpoint signature 1", hashlib.sha256(text).hexdigest(), *files, ""])
    value = read_private_key(key).sign(said.encode())
    signature = {"key": read_public_key(key), "files": files, "value": value.hex()}
    manifest_at(folder).write_bytes(attach(text, signature))


def test_what_an_older_version_signed_is_verified(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    store, key = write(tmp_path, None), read_public_key(keys[0])
    signed_before(tmp_path, keys[0])
    check_signature(store, 1, key, job=JOB)
    for change in (change_padding, change_part):
        change(tmp_path)
        with pytest.raises(ConfigError, match="is not what was signed"):
            check_signature(store, 1, key)
        change(tmp_path)
    other_file(tmp_path)
    with pytest.raises(ConfigError, match="does not match its signature"):
        check_signature(store, 1, key)


@pytest.mark.parametrize("before", ["nobody", "another key", "an older version", "this key"])
def test_files_of_a_checkpoint_that_this_key_has_not_signed_are_not_taken_on(
    tmp_path: Path, keys: tuple[Path, Path], before: str
) -> None:
    """They are signed with the next one: the store would say what is in them."""
    state = make_state(1, {"large": (600, 600), "small": (3,)})
    signer = {"another key": Signer(keys[1]), "this key": Signer(keys[0])}.get(before)
    save(tmp_path, state, 1, signer=signer, job=JOB)
    if before == "an older version":
        signed_before(tmp_path, keys[0])
    config = CheckpointConfig(sign_key=str(keys[0]))
    checkpointer = Checkpointer(tmp_path, config, identity_of(state, JOB), 0, send=lambda data: None)
    assert bool(checkpointer._find_base().digests) == (before == "this key")
    checkpointer.close()
    if before == "this key":
        manifest = save(tmp_path, state, 2, incremental=True, signer=Signer(keys[0]), job=JOB)
        assert {file.name[:15] for file in manifest.files} == {"step-0000000001"}
        check_signature(DirectoryStore(tmp_path), 2, read_public_key(keys[0]))
    else:
        with pytest.raises(StoreError, match="taken from an older checkpoint, which was deleted"):
            save(tmp_path, state, 2, incremental=True, signer=Signer(keys[0]), job=JOB)


def test_each_worker_says_the_digest_of_its_part_and_other_jobs_none(tmp_path: Path) -> None:
    state = make_state(1, {"large": (600, 600)})
    store = DirectoryStore(tmp_path)
    for worker_id in range(2):
        report = write_part(store, state, 1, workers=2, worker_id=worker_id, signed=True)
        assert report.file is not None
        data, at = (tmp_path / report.file.name).read_bytes(), report.file.data_at
        assert report.sha256 == digest_of(hashlib.sha256(data[:at]).digest(), hashlib.sha256(data[at:]).digest())
        assert decode_report(encode_report(report)) == report
    assert write_part(store, state, 2).sha256 == ""


def test_another_step_or_job_is_not_taken_for_it(
    tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"task": "t", "argv": [], "config": {}, "created_unix_ns": int(JOB, 16)}
    for name, of_job in (("run", JOB), ("moved", "ff")):
        write(tmp_path / name / "checkpoints", keys[0], job=of_job)
        (tmp_path / name / "job.json").write_text(json.dumps(job))
    words = ["--require-signature", str(keys[0])]
    assert run_command(["checkpoints", "verify", str(tmp_path / "run"), *words]) == 0
    for place in ("moved", "moved/checkpoints", "moved/checkpoints/step-0000000001"):
        capsys.readouterr()
        assert run_command(["checkpoints", "verify", str(tmp_path / place), *words]) == 1
        assert "signed for job ff" in capsys.readouterr().out
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-0000000001").rename(folder / "step-0000000007")
    with pytest.raises(CheckpointCorrupt, match="the manifest of step 1"):
        check_signature(DirectoryStore(folder), 7, read_public_key(keys[0]))


def test_the_commands_say_who_signed(
    tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    key = read_public_key(keys[0])
    write(tmp_path / "a", keys[0])
    place = str(tmp_path / "a")
    for words in (["ls"], ["show"], ["copy", str(tmp_path / "b")]):
        assert run_command(["checkpoints", words[0], place, *words[1:], "--json"]) == 0
        assert key in capsys.readouterr().out
        assert run_command(["checkpoints", words[0], place, *words[1:]]) == 0
    assert run_command(["checkpoints", "verify", place, "--require-signature", str(keys[1]), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
    assert f"is signed by {key[:16]}: expected {read_public_key(keys[1])[:16]}" in problem["what"]


def test_keys_are_made_once_and_for_their_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoints", "keygen", str(tmp_path / "k"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["key"] == read_public_key(tmp_path / "k") == read_public_key(tmp_path / "k.pub")
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    before = (tmp_path / "k").read_bytes()
    assert run_command(["checkpoints", "keygen", str(tmp_path / "k")]) == 2
    assert (tmp_path / "k").read_bytes() == before


def test_a_file_that_is_too_long_for_a_key_is_not_read(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    pem = keys[0].read_bytes()
    for size, fits in ((1 << 16, True), ((1 << 16) + 1, False)):
        path = tmp_path / str(size)
        path.write_bytes(b"#" * (size - len(pem) - 1) + b"\n" + pem)
        with nullcontext() if fits else pytest.raises(ConfigError, match="cannot read the key"):
            assert read_public_key(path) == read_public_key(keys[0])


def test_what_is_no_key_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    none, locked = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"x")
    other = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    (tmp_path / "rsa").write_bytes(other.private_bytes(pem, pkcs8, none))
    (tmp_path / "locked").write_bytes(ed25519.Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, locked))
    (tmp_path / "text").write_text("-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n")
    (tmp_path / "other").write_text("nothing")
    (tmp_path / "folder").mkdir()
    for name in ("rsa", "locked", "text", "other", "folder", "absent", "/dev/zero"):
        for read in (read_private_key, read_public_key):
            with pytest.raises(ConfigError):
                read(tmp_path / name)
        path, run_dir = str(tmp_path / name), str(tmp_path / "run")
        for option in (["--set", f"checkpoint.sign_key={path}"], ["--require-signature", path]):
            assert run_command(["run", "mlp-digits", "--dry-run", "--run-dir", run_dir, *option]) == 2
            told = capsys.readouterr().err
            assert told.startswith("error: ") and told.count("\n") == 1, told
    assert not (tmp_path / "run").exists()
