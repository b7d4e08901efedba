"""Digits, text and picture folders: fixed splits, sorted listings, errors that name what is wrong."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import re
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from everstep.base.errors import ConfigError, TaskError
from everstep.data.batch import pack, to_device, unpack
from everstep.data.digit_images import DEVIATION, MEAN, Digits
from everstep.data.folder import PictureFolder
from everstep.data.loader import Recipe, fetch
from everstep.data.token_stream import (
    BytePairs,
    ByteTokenizer,
    Chosen,
    Windows,
    byte_pairs,
    read_text,
    standard_library,
)
from everstep.exact.seeding import seed_all
from everstep.order.cursor import SampleOrder

Image = pytest.importorskip("PIL.Image")


def test_digits_are_those_of_scikit_learn_split_once_and_for_all() -> None:
    train, test = Digits("train"), Digits("test")
    assert (len(train), len(test)) == (1437, 360)
    from sklearn.datasets import load_digits  # takes seconds

    images, labels = load_digits(return_X_y=True)
    ours = torch.cat([train.images, test.images]).mul(DEVIATION).add(MEAN).mul(16).round().flatten(1).int().tolist()
    theirs = images.astype(int).tolist()
    assert sorted(zip(ours, train.labels + test.labels, strict=True)) == sorted(
        zip(theirs, labels.tolist(), strict=True)
    )
    assert set(Counter(test.labels).values()) <= {35, 36, 37}
    assert abs(float(train.images.mean())) < 0.001
    assert abs(float(train.images.std()) - 1) < 0.001


def test_digits_shift_only_in_training_and_by_the_generators() -> None:
    train, test = Digits("train", shift=1.0), Digits("test", shift=1.0)
    assert torch.equal(test[3][0], test.images[3])
    seed_all(5)
    once = [train[3][0] for _ in range(20)]
    seed_all(5)
    assert all(torch.equal(a, train[3][0]) for a in once)
    assert len({tuple(a.flatten().tolist()) for a in once}) > 3
    seed_all(0)
    light = Digits("train", shift=0.2)
    moved = sum(not torch.equal(light[i][0], light.images[i]) for i in range(1000))
    assert 100 < moved < 250


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="validation"):
        Digits("validation")


def test_windows_overlap_by_one_token() -> None:
    windows = Windows(torch.arange(21), 5)
    assert [w.tolist() for w in (windows[0], windows[3])] == [[0, 1, 2, 3, 4, 5], [15, 16, 17, 18, 19, 20]]
    assert len(windows) == 4
    with pytest.raises(IndexError):
        windows[4]
    assert len(Windows(torch.arange(6), 5)) == 1
    with pytest.raises(ConfigError, match=r"at least 6 tokens .* got 5"):
        Windows(torch.arange(5), 5)


def test_every_window_is_in_one_split() -> None:
    windows = Windows(torch.arange(101), 2)
    splits = [Chosen(windows, 20, kept) for kept in (True, False)]
    starts = [int(split[i][0]) for split in splits for i in range(len(split))]
    assert [len(s) for s in splits] == [3, 47]
    assert sorted(starts) == list(range(0, 100, 2))


def test_the_standard_library_reads_the_same_twice() -> None:
    text = standard_library(300_000)
    assert len(text) == 300_000
    assert text == standard_library(300_000)
    assert b"import" in text


def test_text_of_a_folder_with_a_link_to_itself_counts_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"a")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)
    (tmp_path / "other" / "b").symlink_to(tmp_path / "deep")
    assert read_text(str(tmp_path)) == b"aa"


def test_text_of_a_folder_comes_in_the_order_of_names(tmp_path: Path) -> None:
    for name, content in (("b.txt", "two "), ("a/z.txt", "one "), (".hidden", "no"), ("c", "three")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_text(str(tmp_path)) == b"one two three"
    assert read_text(str(tmp_path), 5) == b"one t"
    assert read_text(str(tmp_path / "c")) == b"three"


def test_a_text_stays_as_it_was_read_when_its_file_changes(tmp_path: Path) -> None:
    """Else its tokens would be kept under the hash of another text."""
    (tmp_path / "text").write_bytes(b"text")
    data = read_text(str(tmp_path / "text"))
    with open(tmp_path / "text", "r+b") as file:
        file.write(b"next")
    assert data == b"text"


def test_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_text(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nothing in"):
        read_text(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("train.bin", r"task\.data=.*/deep/train\.bin"), ("a.npy", "task.data=.*a.npy"), ("x.parquet", "save_to_disk")],
)
def test_a_folder_with_data_that_are_no_text_is_refused(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / name).write_bytes(struct.pack("<4H", 5, 6, 700, 8))
    (tmp_path / "deep" / "prepare.py").write_text("import numpy")
    with pytest.raises(
        ConfigError, match=rf"a folder of text files, got .*deep with {name}, .* only the task hf:DIR .*{remedy}"
    ):
        read_text(str(tmp_path))
    (tmp_path / "deep" / "a").write_text("text before")
    assert read_text(str(tmp_path), 5) == b"text "
    (tmp_path / "deep" / "a").unlink()
    (tmp_path / "deep" / name).rename(tmp_path / "deep" / f".{name}")
    assert read_text(str(tmp_path)) == b"import numpy"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            pickle.dumps({"vocab_size": 65, "stoi": {chr(k): k for k in range(128, 999)}}),
            "binary or in another encoding",
        ),
        ("text of another system\n".encode("utf-16") * 50, "binary or in another encoding"),
        ("обычный русский текст\n".encode("cp1251") * 50, "binary or in another encoding"),
        ("обычный русский текст\n".encode("utf-16") * 50, "binary or in another encoding"),
        (gzip.compress(b"text" * 50), "compressed (gzip)"),
        (bz2.compress(b"text" * 50), "compressed (bzip2)"),
        (lzma.compress(b"text" * 50), "compressed (xz)"),
    ],
    ids=["pickle", "utf-16", "cp1251", "utf-16, no latin", "gzip", "bzip2", "xz"],
)
def test_what_is_no_text_is_refused_by_its_name(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "some").write_bytes(content)
    for path in (tmp_path, tmp_path / "some"):
        with pytest.raises(ConfigError, match=re.escape(f"some, which is {said}")):
            read_text(str(path))


def test_text_with_some_characters_of_another_encoding_is_text(tmp_path: Path) -> None:
    content = "Texte français, très long".encode("latin-1") * 100 + b"\0" * 20
    (tmp_path / "some").write_bytes(content)
    assert read_text(str(tmp_path)) == content


def test_a_folder_of_sources_is_text(tmp_path: Path) -> None:
    """Compiled files are passed over, and a few letters of another encoding are no reason to refuse all."""
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(bytes(2000))
    (tmp_path / "a.py").write_bytes(b"import os ")
    (tmp_path / "name").write_bytes("éé".encode("latin-1"))
    assert read_text(str(tmp_path)) == b"import os \xe9\xe9"


def test_bytes_come_back() -> None:
    text = "Füße, 時間"
    tokens = ByteTokenizer().encode(text.encode())
    assert tokens.dtype == torch.int64
    assert ByteTokenizer().decode(tokens.tolist()) == text
    assert ByteTokenizer().encode(b"").tolist() == []


def test_byte_pairs_are_the_same_each_time_and_come_back(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = standard_library(60_000)
    first, again = (BytePairs.trained(text, 400) for _ in range(2))
    tokens = first.encode(text)
    assert torch.equal(tokens, again.encode(text))
    assert first.vocabulary == 400
    assert len(tokens) < 0.75 * len(text)
    assert first.decode(tokens.tolist()) == text.decode()
    assert BytePairs.trained(text, 256).vocabulary == 256
    with pytest.raises(ConfigError, match="at least 256"):
        BytePairs.trained(text, 100)


def test_cached_tokens_are_the_same_and_damage_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = standard_library(30_000)
    made, _ = byte_pairs(text, 300, tmp_path)
    (file,) = tmp_path.iterdir()
    stored = file.read_bytes()
    read, tokenizer = byte_pairs(text, 300, tmp_path)
    assert read.dtype == made.dtype == torch.int64
    assert torch.equal(read, made)
    assert torch.equal(tokenizer.encode(text), made)
    assert file.read_bytes() == stored
    file.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    assert torch.equal(byte_pairs(text, 300, tmp_path)[0], made)
    kept, again = load(stored), load(file.read_bytes())  # tensors, since the file's metadata has no fixed order
    assert kept.keys() == again.keys(), "made anew"
    assert all(torch.equal(kept[name], again[name]) for name in kept), "made anew"
    other, _ = byte_pairs(text, 301, tmp_path)
    assert not torch.equal(other, made)
    (tmp_path / "file").write_text("")
    assert torch.equal(byte_pairs(text, 300, tmp_path / "file" / "below")[0], made), "without a cache"


def pictures(root: Path, names: dict[str, int]) -> Path:
    for label, (name, count) in enumerate(names.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20 + i, 30), (40 * label, 10 * i, 0)).save(root / name / f"{i:02}.png")
    return root


def test_a_folder_per_class_is_listed_in_order_and_split(tmp_path: Path) -> None:
    root = pictures(tmp_path, {"dog": 10, "cat": 7})
    (root / "cat" / "notes.txt").write_text("no picture")
    train, test = (PictureFolder(str(root), split, size=16) for split in ("train", "test"))
    assert train.classes == ["cat", "dog"]
    assert [(f.parent.name, f.name, label) for f, label in test.files] == [
        ("cat", "04.png", 0),
        ("dog", "04.png", 1),
        ("dog", "09.png", 1),
    ]
    assert len(train) == 14
    assert not set(train.files) & set(test.files)
    pixels, label = train[0]
    assert (pixels.shape, pixels.dtype, label) == ((3, 16, 16), torch.float32, 0)
    assert pixels.is_contiguous()


def test_folders_of_splits_are_used_where_they_are(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 3, "b": 3})
    pictures(tmp_path / "val", {"a": 1, "b": 2})
    assert len(PictureFolder(str(tmp_path), "train")) == 6
    assert [label for _, label in PictureFolder(str(tmp_path), "test").files] == [0, 1, 1]


def test_pictures_are_cut_by_the_generators_in_training_only(tmp_path: Path) -> None:
    root = pictures(tmp_path, {"a": 5})
    Image.effect_noise((40, 30), 80).save(root / "a" / "00.png")
    Image.effect_noise((40, 30), 80).save(root / "a" / "04.png")
    train, test = (PictureFolder(str(root), split, size=12) for split in ("train", "test"))
    assert torch.equal(test[0][0], test[0][0])
    seed_all(1)
    first = [train[0][0] for _ in range(4)]
    seed_all(1)
    assert all(torch.equal(a, train[0][0]) for a in first)
    assert not torch.equal(first[0], first[1])


def test_a_picture_that_cannot_be_read_is_named_with_its_index(tmp_path: Path) -> None:
    root = pictures(tmp_path, {"a": 6})
    (root / "a" / "03.png").write_bytes(b"no picture at all")
    data = PictureFolder(str(root), "train", size=8)
    recipe = Recipe(data, SampleOrder(0, 5, 1, 5, steps=1), torch.utils.data.default_collate, 0)
    with pytest.raises(TaskError, match=r"sample 3 of the dataset .*03\.png is not a readable picture"):
        fetch(recipe, 1, 0)


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        PictureFolder(str(tmp_path / "nowhere"), "train")
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="got none"):
        PictureFolder(str(tmp_path), "train")


def test_packed_batches_come_back_bit_for_bit() -> None:
    nan = torch.tensor([float("nan"), -0.0, 0.0])
    tree = {"a": (nan, [torch.arange(3, dtype=torch.int8)]), "b": torch.ones(2, 3).bfloat16(), "c": b"bytes"}
    back = unpack(*pack(tree))
    assert back["a"][0].view(torch.int32).tolist() == nan.view(torch.int32).tolist()
    assert back["a"][1][0].tolist() == [0, 1, 2]
    assert torch.equal(back["b"], tree["b"])
    assert back["c"] == b"bytes"


def test_to_device_goes_into_containers() -> None:
    moved = to_device({"a": [torch.ones(2)], "b": ("text", torch.ones(1))}, "meta")
    assert moved["a"][0].device.type == "meta"
    assert moved["b"][1].device.type == "meta"
    assert moved["b"][0] == "text"
