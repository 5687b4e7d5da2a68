"""What is on the disk, and when: every line of a ledger, before the noise that it is about."""

import fcntl
import os
import stat

import numpy as np
import torch

from tacit.privacy import BoundedSum, Ledger, PrivacyPlan, read_ledger

PLAN = PrivacyPlan(sample_rate=0.1, steps=5, expected_batch_size=4, whole_releases=(8.0,))


def test_every_line_is_flushed_and_so_is_the_directory_of_a_new_ledger(tmp_path, monkeypatch):
    flushed = []

    def fsync(descriptor):
        found = os.fstat(descriptor)
        flushed.append("directory" if stat.S_ISDIR(found.st_mode) else found.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    path, sizes = tmp_path / "ledger.jsonl", []
    ledger = Ledger.create(path, PLAN, delta=1e-5)
    assert flushed == [path.stat().st_size, "directory"]
    for _ in range(3):
        ledger.record_release(noise_multiplier=1.5, sample_rate=0.1)
        sizes.append(path.stat().st_size)
    assert flushed[2:] == sizes == sorted(set(sizes))


class Watched:
    reproducible = False

    def __init__(self, path):
        self.path, self.seen = path, []

    def normal(self, shape):
        self.seen.append([entry["kind"] for entry in read_ledger(self.path)])
        return np.zeros(shape)


def test_statistics_are_in_the_ledger_before_their_noise_is_drawn(tmp_path):
    path = tmp_path / "ledger.jsonl"
    randomness = Watched(path)
    mechanism = PLAN.mechanism(randomness, Ledger.create(path, PLAN, delta=1e-5))
    mechanism.release_whole(BoundedSum.over([torch.ones(3, 1, 2)], (1.0,)), what="the sum")
    assert randomness.seen == [["open", "whole-release"]]
