"""Jobs that sign their checkpoints, and jobs that begin with none but these; every way in, and what is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from e2e_cli import TASK_FILE, digest_of, everstep, one_error, together


@pytest.mark.longer
def test_a_job_begins_with_what_was_signed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK_FILE)
    task = f"{tmp_path / 'small.py'}:Small"
    for name in ("mine", "theirs"):
        assert everstep("checkpoints", "keygen", name, cwd=tmp_path).returncode == 0
    signed = (
        "run",
        task,
        "--workers",
        "2",
        "--set",
        "checkpoint.sign_key=mine",
        "--set",
        "checkpoint.disk.every_steps=2",
    )
    first, plain = together(
        (*signed, "--steps", "6", "--run-dir", "run"), ("run", task, "--steps", "9", "--run-dir", "plain"), cwd=tmp_path
    )
    assert first.returncode == 0 and plain.returncode == 0, first.stderr + plain.stderr
    mine, theirs = (("--require-signature", name) for name in ("mine.pub", "theirs.pub"))
    onward = ("run", task, "--steps", "9", "--resume-from", "run", "--set", "checkpoint.allow_mismatch=true")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "forged")
    manifest = max((tmp_path / "forged").glob("*/manifest.json"))
    manifest.write_bytes(manifest.read_bytes().partition(b',"signature":\n')[0] + b"}\n")
    good, bad, forged, unsigned = together(
        (*onward, "--run-dir", "good", *mine),
        (*onward, "--run-dir", "bad", *theirs),
        ("run", task, "--steps", "9", "--resume-from", "forged", "--run-dir", "forged-run", *mine),
        ("checkpoints", "verify", "run", "plain", *mine),
        cwd=tmp_path,
    )
    assert good.returncode == 0, good.stderr
    key = everstep("checkpoints", "show", "run", "--json", cwd=tmp_path)
    assert f"says it is signed by {json.loads(key.stdout)['signed_by'][:16]}, which is valid" in good.stdout
    assert digest_of(tmp_path / "good") == digest_of(tmp_path / "plain")
    for refused, words in ((bad, "is signed by"), (forged, "is not signed")):
        assert refused.returncode == 2 and words in one_error(refused)
    assert not list(tmp_path.glob("bad/**/manifest.json")) + list(tmp_path.glob("forged-run/**/manifest.json"))
    assert unsigned.returncode == 1 and "is not signed" in unsigned.stdout
    assert everstep("checkpoints", "verify", "run", *mine, cwd=tmp_path).returncode == 0


@pytest.mark.longer
def test_weights_are_taken_from_what_was_signed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        assert everstep("checkpoints", "keygen", name, cwd=tmp_path).returncode == 0
    run = ("run", "mlp-digits", "--workers", "1", "--steps", "2", "--run-dir", "run")
    assert everstep(*run, "--set", "checkpoint.sign_key=mine", cwd=tmp_path).returncode == 0
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "forged")
    part = next((tmp_path / "forged").glob("*/*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    ways = {
        "eval": ("eval", "mlp-digits", "--from"),
        "export": ("checkpoints", "export", "--format", "safetensors", "--to", "{}.safetensors"),
        "copy": ("checkpoints", "copy"),
    }
    for source, key, ok in (("run", "mine", True), ("run", "theirs", False), ("forged", "mine", False)):
        commands = []
        for name, words in ways.items():
            target = f"{name}-{source}-{key}"
            given = [source, target] if name == "copy" else [source]
            commands.append((*(w.format(target) for w in words), *given, "--require-signature", f"{key}.pub"))
        for command, done in zip(commands, together(*commands, cwd=tmp_path), strict=True):
            assert done.stdout.splitlines()[0].endswith(f"says it is signed by {_signer(tmp_path)}"), command
            assert (done.returncode == 0) == ok, f"{command}: {done.stderr}"
            if not ok:
                assert "signed" in one_error(done) or "hash" in one_error(done), command
        made = [*tmp_path.glob(f"export-{source}-{key}*"), *tmp_path.glob(f"copy-{source}-{key}/*/manifest.json")]
        assert len(made) == (2 if ok else 0)
    assert not list(tmp_path.glob(".everstep-signed-*")), "nothing is left behind"
    plain = everstep("eval", "mlp-digits", "--from", "run", cwd=tmp_path)
    assert "has no signature" in plain.stdout.splitlines()[0]


def _signer(folder: Path) -> str:
    """How the owner of `mine` is shown."""
    from everstep.checkpoint.keys import read_public_key

    return read_public_key(folder / "mine.pub")[:16]
