"""The benchmarks' scripts run, on toy tables, and compute what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
ROWS = {"small": 16_000, "wide": 4_000, "tokens": 600, "jpeg": 300}


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """The scripts as modules, with data and results in a folder of their own."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import common
    import data
    import formats
    import images
    import throughput
    import workloads

    monkeypatch.setattr(formats, "DATA", tmp_path / "data")
    monkeypatch.setattr(throughput, "OUT", tmp_path / "out")
    monkeypatch.setattr(data, "encodings", lambda: images.encodings(8))
    monkeypatch.setattr(data, "fresh", written_here)
    for name, rows in ROWS.items():
        table = workloads.TABLES[name]
        monkeypatch.setitem(workloads.TABLES, name, replace(table, rows=rows, quick=rows))
    monkeypatch.setattr(throughput, "described", lambda: {**common.machine(), "peers": {}})
    return throughput


def written_here(_, __, table, kind, rows, folder, **___):
    """In this process, in which the images are few."""
    import data

    data.WRITERS[kind](table, int(rows), folder)


def test_a_workload_is_measured_plotted_and_described(scripts, monkeypatch, tmp_path):
    import comparison
    import plot

    arguments = ["--quick", "--seconds", "0.05", "--loader", "destrier", "--workload", "small"]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *arguments])
    scripts.main()
    path = tmp_path / "out" / "throughput-quick.json"
    found = json.loads(path.read_text())
    summary = found["workloads"]["small"]["summary"]
    case = summary["cases"]["destrier"]
    assert "failed" not in case, case
    assert case["samples_per_second"]["median"] > 0
    assert case["cpu_seconds_per_sample"]["median"] > 0
    assert all(ratio["median"] > 0 for ratio in summary["ratios"]["destrier"].values())
    assert "| destrier | " in "\n".join(comparison.section(found))
    monkeypatch.setattr(sys, "argv", ["plot.py", str(path), str(tmp_path)])
    plot.main()
    assert (tmp_path / "benchmarks.svg").stat().st_size
    assert (tmp_path / "benchmarks.png").stat().st_size


@pytest.mark.parametrize("loader", ["destrier", "torch-lance"])
@pytest.mark.parametrize(
    ("workload", "shape"),
    [
        ("wide", (1024,)),
        ("tokens", (128, 2_049)),
        ("jpeg-bytes", None),
        ("jpeg-decode", (128, 3, 256, 256)),
        ("jpeg-crop", (64, 3, 224, 224)),
        ("filter", (1024,)),
    ],
)
def test_loaders_deliver_what_a_workload_asks_for(scripts, workload, shape, loader):
    from data import dataset
    from loaders import Case, build, touch
    from workloads import WORKLOADS

    load = WORKLOADS[workload]
    path = str(dataset(load.table, "lance", ROWS[load.table]))
    batches = build(workload, Case(loader, 0), path, 0)()
    for _ in range(2):
        labels, payload = next(batches)
        assert touch(payload) > 0
        assert len(labels) == load.batch
        assert 0 <= labels.min() <= labels.max() < 100
        values = next(iter(payload.values())) if isinstance(payload, dict) else payload
        if shape is None:
            assert all(value[:2] == b"\xff\xd8" for value in values)
        else:
            assert tuple(values.shape) == shape
    batches.close()


@pytest.mark.parametrize("workload", ["small", "tokens", "jpeg-crop", "filter"])
def test_limits_are_rates(scripts, workload):
    from data import dataset
    from limits import limits
    from workloads import WORKLOADS

    load = WORKLOADS[workload]
    found = limits(str(dataset(load.table, "lance", ROWS[load.table])), load, 0.2, 0)
    assert {"lance_take", "lance_scan", "memcpy", "page_cache"} <= set(found["rates"])
    assert ("decode" in found["rates"]) == load.decodes
    assert all(rate > 0 for rate in found["rates"].values())


def test_quality_tells_a_uniform_order_from_a_sorted_one(scripts):
    from quality import counts, quality

    rows, batch = 100_000, 200
    labels = np.arange(rows) * 100 // rows
    uniform = quality([counts(np.random.default_rng(1).permutation(labels), batch, rows)])
    assert 0.7 < uniform["deff_1"] < 1.3
    assert 0.4 < uniform["deff_16"] < 1.8
    assert 46 < uniform["classes"] < 49
    ordered = quality([counts(labels, batch, rows)])
    assert ordered["deff_1"] > 0.9 * batch
    assert ordered["classes"] < 3
    assert quality([counts(labels[: 2 * batch], batch, rows)])["deff_1"] is None


def test_rounds_are_compared_with_themselves(scripts):
    def case(loader, *rates, deff=1.0):
        quality = {"deff_1_sum": 400 * deff, "deff_1_count": 400, "classes_sum": 1.0}
        quality |= {"classes_count": 1, "deff_16_sum": 0.0, "deff_16_count": 0}
        one = {"cpu_seconds_per_sample": 1.0, "first_batch": 1.0, "pss_mb": 1.0}
        runs = [
            {"round": i, "samples_per_second": rate, "quality": quality, **one}
            for i, rate in enumerate(rates)
        ]
        return {"loader": loader, "workers": 0, "runs": runs}

    result = {
        "limits": [{"rates": {"lance_scan": 100.0}}, {"rates": {"lance_scan": 10.0}}],
        "cases": {
            "destrier": case("destrier", 40.0, 8.0),
            "uneven": case("litdata", 10.0, 2.0, deff=50.0),
            "even": case("mosaic", 5.0, 1.0),
            "once": case("lancedb", 4.0),
        },
    }
    ratios = scripts.summary(result)["ratios"]["destrier"]
    assert ratios["the best peer"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert ratios["the best of LitData"] == {"median": 4.0, "min": 4.0, "max": 4.0}
    assert ratios["the best peer with deff up to 1.1"]["max"] == 8.0
    assert ratios["limit lance_scan"]["median"] == pytest.approx(0.6)


def test_the_peers_rows_are_the_tables(scripts):
    import data

    rows = list(data.samples("small", 300))
    assert [row["label"] for row in rows] == [i * 100 // 300 for i in range(300)]
    assert len({row["value"].tobytes() for row in rows}) == 300
    images = list(data.samples("jpeg", 40))
    assert len({row["value"] for row in images}) == 40


def test_the_script_says_what_it_does():
    text = subprocess.run(
        [sys.executable, str(FOLDER / "throughput.py"), "--help"], capture_output=True, check=True
    ).stdout.decode()
    assert "--workload" in text
