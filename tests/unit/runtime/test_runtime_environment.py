"""What of a host's environment would change how sums are cut does not reach its workers."""

from __future__ import annotations

from everstep.runtime.process import pinned_environment


def test_the_number_of_threads_is_the_job_s_whatever_a_host_says(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    monkeypatch.setenv("OMP_MAX_ACTIVE_LEVELS", "0")
    monkeypatch.setenv("OWN", "kept")
    found = pinned_environment(4)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"], found["OMP_DYNAMIC"]) == ("4", "4", "FALSE")
    assert "OMP_THREAD_LIMIT" not in found and "OMP_MAX_ACTIVE_LEVELS" not in found and found["OWN"] == "kept"
