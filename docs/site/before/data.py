import io
import tarfile
from pathlib import Path

import datasets
import numpy
from PIL import Image

import everstep.data.folder  # noqa: F401

numpy.arange(4096, dtype="uint16").tofile("train.bin")
picture = io.BytesIO()
Image.new("RGB", (8, 8)).save(picture, "jpeg")
Path("shards").mkdir()
with tarfile.open("shards/train-0.tar", "w") as tar:
    for name, content in (("1.jpg", picture.getvalue()), ("1.cls", b"3")):
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
datasets.Dataset.from_dict({"x": [1.0, 2.0]}).to_parquet("d/all.parquet")
for kind in ("cat", "dog"):
    Path("pictures/train", kind).mkdir(parents=True)
    Path("pictures/train", kind, "1.jpg").write_bytes(picture.getvalue())
