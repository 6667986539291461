# SPDX-License-Identifier: Apache-2.0
"""Bodies are inflated within limits, wholly or not at all."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from receiver_app import random_bytes

from webhooks import body
from webhooks.body import BodyRefusedError, inflate


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


COMPRESS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "raw deflate": raw_deflate}


def encoding(name: str) -> str:
    return name.removeprefix("raw ")


@given(data=st.binary(max_size=300_000), name=st.sampled_from(sorted(COMPRESS)))
def test_what_was_compressed_comes_back(data, name):
    assert inflate(COMPRESS[name](data), encoding(name), 300_000) == data


@given(parts=st.lists(st.binary(max_size=100), min_size=1, max_size=5))
def test_gzip_members_are_joined(parts):
    assert inflate(b"".join(map(gzip.compress, parts)), "gzip", 1_000) == b"".join(parts)


@given(data=st.binary(min_size=1, max_size=200_000), cut=st.floats(0, 1, exclude_max=True))
def test_a_body_that_is_cut_off_anywhere_is_refused(data, cut):
    whole = gzip.compress(data)
    with pytest.raises(BodyRefusedError) as refused:
        inflate(whole[: max(1, int(len(whole) * cut))], "gzip", 1_000_000)
    assert refused.value.status == 400


@given(noise=st.binary(min_size=1, max_size=5_000), name=st.sampled_from(["gzip", "deflate"]))
def test_noise_inflates_or_is_refused_and_raises_nothing_else(noise, name):
    try:
        inflated = inflate(noise, name, 10_000)
    except BodyRefusedError as refused:
        inflated = refused.reason.encode()
    assert len(inflated or b"") <= 10_000


@pytest.mark.parametrize("at", [0, 2, 200, -5, -1])
def test_a_damaged_byte_is_noticed(at):
    whole = bytearray(gzip.compress(random_bytes(1_000, "damage")))
    whole[at] ^= 0xFF
    with pytest.raises(BodyRefusedError):
        inflate(bytes(whole), "gzip", 10_000)


def test_the_limit_is_exact():
    whole = gzip.compress(bytes(100_000))
    assert inflate(whole, "gzip", 100_000) == bytes(100_000)
    assert inflate(whole, "gzip", 99_999) is None


def test_a_bomb_is_not_inflated_beyond_its_limit(monkeypatch):
    taken = 0
    real = zlib.decompressobj

    class Counting:
        def __init__(self, wbits: int) -> None:
            self.inner = real(wbits)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def decompress(self, data, most):
            nonlocal taken
            piece = self.inner.decompress(data, most)
            taken += len(piece)
            return piece

    monkeypatch.setattr(body.zlib, "decompressobj", Counting)
    assert inflate(gzip.compress(bytes(50_000_000)), "gzip", 200_000) is None
    assert 200_000 < taken <= 300_000


def test_many_tiny_members_are_refused_rather_than_copied_for_ever():
    with pytest.raises(BodyRefusedError) as refused:
        inflate(gzip.compress(b"") * 100_000, "gzip", 1_000_000)
    assert refused.value.status == 400


def test_a_large_body_that_hardly_compresses_is_inflated():
    whole = gzip.compress(random_bytes(8_000_000, "large"), 1)
    assert len(inflate(whole, "gzip", 10_000_000) or b"") == 8_000_000
