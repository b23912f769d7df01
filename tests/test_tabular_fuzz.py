from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Run in a process of its own: pyarrow could crash. Prints how many of the files were refused, how
# many gave rows, which of these gave others than the first one, and the most memory taken.
SCRIPT = """
import json, resource, sys
from pathlib import Path
from destrier.errors import DestrierError
from destrier.files import Store
from destrier.formats import tabular

import pyarrow as pa

refused = read = 0
first = None
other = []
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
for path in sorted(Path(sys.argv[1]).iterdir(), key=lambda p: p.name):
    print(path.name, file=sys.stderr, flush=True)
    format = sys.argv[2]
    try:
        source = tabular.open_source(Store(path), format=format)
        batches = [batch for unit in source.units() for batch in source.read(unit, None)]
        for batch in batches:
            batch.validate(full=True)
        table = pa.Table.from_batches(batches, source.schema)
        if first is None:
            first = table
        elif not table.equals(first):
            other.append(path.name)
        read += 1
    except DestrierError as error:
        assert path.name in str(error), str(error)
        refused += 1
status = open("/proc/self/status").read()  # ru_maxrss would count what the parent has
memory = int(status.split("VmHWM:")[1].split()[0]) if "VmHWM:" in status else 0
print(json.dumps([refused, read, other, memory]))
"""


def small() -> pa.Table:
    ids = list(range(40))
    return pa.table(
        {
            "i": pa.array(ids),
            "t": pa.array([f"text {i}" if i % 3 else None for i in ids]),
            "k": pa.array([f"kind {i % 3}" for i in ids]).dictionary_encode(),
            "l": pa.array([[i] * (i % 4) for i in ids], pa.list_(pa.int32())),
            "s": pa.array([{"x": i / 2, "b": bytes([i])} for i in ids]),
            "w": pa.array([i * 10**6 for i in ids], pa.timestamp("us")),
        }
    )


def example(kind: str) -> bytes:
    file = io.BytesIO()
    if kind.startswith("parquet"):
        checked = kind == "parquet checked"
        pq.write_table(
            small(), file, row_group_size=15, compression="snappy", write_page_checksum=checked
        )
    elif kind == "arrow":
        with pa.ipc.new_file(
            file, small().schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
        ) as out:
            out.write_table(small(), max_chunksize=15)
    elif kind == "arrow stream":
        with pa.ipc.new_stream(file, small().schema) as out:
            out.write_table(small(), max_chunksize=15)
    elif kind == "csv":
        file.write(
            b"i,f,t,b\n"
            + b"".join(b'%d,%s,"x, %d",true\n' % (i, repr(i / 2).encode(), i) for i in range(60))
        )
    else:
        rows = [{"i": i, "f": i / 2, "t": f"é {i}", "s": {"x": [i, None]}} for i in range(60)]
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    return gzip.compress(file.getvalue()) if kind.endswith("gz") else file.getvalue()


SUFFIXES = {"csv": "csv", "jsonl": "jsonl", "jsonl gz": "jsonl.gz"}


@pytest.mark.parametrize(
    "kind", ["parquet", "parquet checked", "arrow", "arrow stream", "csv", "jsonl", "jsonl gz"]
)
def test_flipped_and_cut_files(kind: str, tmp_path: Path) -> None:
    data = example(kind)
    suffix = SUFFIXES.get(kind, "data")
    (tmp_path / f"000.{suffix}").write_bytes(data)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    intact = set()  # before the footer, or whole
    draw = random.Random(kind)
    for number in range(1, 301):
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            # half of the flips in the last part, where footers and their offsets lie
            low = draw.choice((0, len(data) * 3 // 4))
            changed[draw.randrange(low, len(data))] ^= 1 << draw.randrange(8)
        if number % 6 == 0:
            del changed[draw.randrange(len(data)) :]
        name = f"{number:03d}.{suffix}"
        if changed[footer:] == data[footer:]:
            intact.add(name)
        (tmp_path / name).write_bytes(changed)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), kind.split(maxsplit=1)[0]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused, read, other, memory = json.loads(done.stdout.splitlines()[-1])
    assert refused + read == 301
    assert refused > 30
    if kind == "jsonl gz":  # which has a checksum of it all
        assert other == []
    if kind == "parquet checked":  # only the footer, with the names and types, has none
        assert len(intact) > 30
        assert not intact & set(other)
    assert memory < 1 << 20, "kB"
