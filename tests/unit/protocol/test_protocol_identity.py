"""How what a worker computes with, and what it runs, is compared and told."""

from __future__ import annotations

import pytest

from everstep.base.errors import ProtocolError
from everstep.protocol import messages as m
from everstep.protocol.identity import MOST_FILES, Code, Kernels, read_code, read_kernels, told

WIDE = Kernels("a" * 32, "a CPU by AVX512", 1, {"torch": "2.13.0", "mkl": "2024.2"})
NARROW = Kernels("b" * 32, "a CPU by AVX2", 1, {"torch": "2.13.0"})


def test_the_digest_decides_and_the_words_explain() -> None:
    assert WIDE.unlike(Kernels("a" * 32, "called otherwise", 2)) == ""
    assert NARROW.unlike(WIDE) == (
        "other bits (fingerprint bbbbbbbb here, aaaaaaaa there): this host computes with a CPU by AVX2, the job with "
        "a CPU by AVX512; with mkl none, the job with mkl 2024.2"
    )
    twin = Kernels("b" * 32, WIDE.device, 1, WIDE.versions)
    assert "a device that computes wrongly" in twin.unlike(WIDE)


def test_only_what_both_have_imported_is_compared() -> None:
    old, new = Code({"helper.py": "1" * 16, "only.py": "2" * 16}), Code({"helper.py": "3" * 16}, {"torch": "2"})
    assert old.unlike(new, "here", "there") == "helper.py is 1111111111111111 here, 3333333333333333 there"
    assert not new.unlike(Code({"other.py": "1" * 16}, {"torch": "2"}), "here", "there")
    assert Code({}, {"torch": "1"}).unlike(new, "here", "there") == "torch is 1 here, 2 there"
    many = [Code({f"{i}.py": digit * 16 for i in range(5)}) for digit in "12"]
    assert many[0].unlike(many[1], "here", "there").endswith("there; and 2 more")


def test_what_is_new_is_joined_within_bounds() -> None:
    known, said = Code({"a.py": "1" * 16}), Code({"a.py": "1" * 16, "b.py": "2" * 16}, {"torch": "2"})
    assert said.beyond(known) == Code({"b.py": "2" * 16}, {"torch": "2"})
    assert known.joined(said.beyond(known)) == said
    full = Code({f"{i}.py": "1" * 16 for i in range(MOST_FILES)})
    assert len(full.joined(Code({"zz.py": "2" * 16})).files) == MOST_FILES


def test_what_a_file_says_is_believed_only_if_it_makes_sense() -> None:
    assert read_kernels(told(WIDE)) == WIDE and read_code(told(Code({"a.py": "1" * 16}))) == Code({"a.py": "1" * 16})
    for wrong in (None, 3, {}, {**told(WIDE), "fingerprint": "A" * 32}, {**told(WIDE), "more": 1}):
        assert read_kernels(wrong) is None
    assert read_code({"files": {"a.py": "short"}}) is None and read_code({"files": {"a" * 300: "1" * 16}}) is None
    many = m.Imported(worker_id=0, incarnation=0, code=Code({f"{i}.py": "1" * 16 for i in range(MOST_FILES + 1)}))
    with pytest.raises(ProtocolError):
        m.decode(m.encode(many))
