"""Tests of the measurements and output files of `benchmarks.decoding`."""

import json

import pytest

from benchmarks import decoding

pytestmark = pytest.mark.robust


def test_the_plot(tmp_path):
    rows = [
        {"preset": preset, "length": length, "seconds": 1e-4 * length, "state_bytes": 10 * length}
        for preset in decoding.MODELS["quickstart"].presets
        for length in (64, 128)
    ]
    decoding.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_only_the_state_of_softmax_grows(tmp_path, monkeypatch):
    lengths, sizes = (64, 256, 1024), {"vocab_size": 64, "layers": 1, "width": 32, "heads": 2}
    sizes |= {"dtype": "float32"}
    small = decoding.Comparison(sizes, ("conformal", "softmax"), lengths, prefilled=(1024,))
    monkeypatch.setitem(decoding.MODELS, "quickstart", small)
    monkeypatch.setattr(decoding, "ROUNDS", 3)
    decoding.main([f"--out={tmp_path}"])
    content = json.loads((tmp_path / "decoding.json").read_text())
    rows = {(row["preset"], row["length"]): row for row in content["rows"]}
    (prefill,) = content["prefills"]
    assert (prefill["preset"], prefill["length"]) == ("conformal", 1024)
    assert prefill["seconds"] > 0
    assert prefill["training_seconds"] > 0
    assert len(rows) == 2 * len(lengths)
    assert all(row["seconds"] > 0 for row in rows.values())
    sizes = {key: row["state_bytes"] for key, row in rows.items()}
    assert sizes["conformal", 1024] == sizes["conformal", 256]
    assert sizes["softmax", 1024] > 3 * sizes["softmax", 256]
    # The KV cache is used as long as it takes no more memory.
    assert rows["conformal", 64]["kept"]
    assert not rows["conformal", 256]["kept"]
    assert sizes["conformal", 64] < 1.1 * sizes["conformal", 256]
    assert (tmp_path / "decoding.png").exists()
