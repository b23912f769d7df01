from __future__ import annotations

import datetime as dt
import os
import pickle
import shutil
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import lance
import lancedb
import pyarrow as pa
import pytest

import tables
from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    ReadError,
    TableError,
    VersionError,
)
from destrier.lancecalls import lance_call, redact
from destrier.table import Table, open_table

ROWS = pa.table({"id": range(10), "label": [i % 3 for i in range(10)]})
MORE = pa.table({"id": range(10, 15), "label": [0] * 5})


@pytest.fixture
def path(tmp_path):
    """A table of three versions: 10 rows, 15 rows, 14 rows; version 2 is tagged."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(ROWS, uri)
    dataset = lance.write_dataset(MORE, uri, mode="append")
    dataset.tags.create("fifteen", 2)
    dataset.delete("id = 3")
    return uri


@pytest.fixture
def database(tmp_path):
    return lancedb.connect(str(tmp_path / "db"))


def ids(table):
    return table.dataset.to_table(columns=["id"])["id"].to_pylist()


# ---- every kind of source --------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        str,
        Path,
        lambda path: "file://" + path,
        lance.dataset,
        open_table,
    ],
    ids=["str", "path", "uri", "LanceDataset", "Table"],
)
def test_sources(path, source):
    table = open_table(source(path))
    assert (table.version, table.num_rows) == (3, 14)
    assert table.schema.names == ["id", "label"]


def test_relative_paths_and_home(path, monkeypatch):
    folder, name = os.path.split(path)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", folder)
    for source in (name, f"~/{name}", lance.dataset(name)):
        assert open_table(source).uri == path


def test_an_open_dataset_keeps_its_version(path):
    table = open_table(lance.dataset(path, version=1))
    assert (table.version, table.num_rows) == (1, 10)
    assert open_table(lance.dataset(path, version=1), version=2).num_rows == 15


def test_an_open_dataset_keeps_its_storage_options(path):
    dataset = lance.dataset(path, storage_options={"client_max_retries": "2"})
    assert open_table(dataset).storage_options["client_max_retries"] == "2"
    assert open_table(dataset, storage_options={}).storage_options == {}


@pytest.mark.parametrize("source", [None, 3, b"t.lance", {"a": 1}, pa.table({"a": [1]})])
def test_other_things_are_refused(source):
    with pytest.raises(ArgumentError, match=f"a URI, a path, .* got {type(source).__name__}"):
        open_table(source)


# ---- LanceDB ---------------------------------------------------------------------------------


def test_written_by_lancedb_and_read_by_pylance(database):
    source = database.create_table("t", ROWS)
    source.add(MORE)
    source.delete("id = 3")
    table = open_table(source)
    assert ids(table) == [i for i in range(15) if i != 3]
    assert ids(open_table(source.uri)) == ids(table)
    assert table.version == source.version


def test_written_by_pylance_and_read_by_lancedb(database, tmp_path):
    lance.write_dataset(ROWS, str(tmp_path / "db" / "t.lance"))
    source = database.open_table("t")
    assert source.to_arrow()["id"].to_pylist() == list(range(10))
    assert ids(open_table(source)) == list(range(10))


def test_storage_options_given_with_a_table(path):
    table = open_table(path, version=1, storage_options={"client_max_retries": "2"})
    for same in (None, {"client_max_retries": "2"}):
        assert open_table(table, storage_options=same) is table
    other = open_table(table, storage_options={"client_max_retries": "3"})
    assert other.storage_options == {"client_max_retries": "3"}
    assert other.dataset.initial_storage_options["client_max_retries"] == "3"
    assert (other.uri, other.version) == (table.uri, 1)
    later = open_table(table, version=2, storage_options={})
    assert (later.version, later.storage_options) == (2, {})


def test_lancedb_table_at_a_version(database):
    source = database.create_table("t", ROWS)
    first = source.version
    source.add(MORE)
    assert open_table(source, version=first).num_rows == 10
    source.checkout(first)
    assert open_table(source).num_rows == 10


def test_lancedb_storage_options_are_kept(tmp_path):
    connection = lancedb.connect(str(tmp_path), storage_options={"client_max_retries": "2"})
    assert open_table(connection.create_table("t", ROWS)).storage_options == {
        "client_max_retries": "2"
    }
    source = connection.open_table("t", storage_options={"download_retry_count": "4"})
    assert open_table(source).storage_options == {
        "client_max_retries": "2",
        "download_retry_count": "4",
    }
    assert open_table(source, storage_options={}).storage_options == {}


def test_branches(database, path):
    source = database.create_table("t", ROWS)
    branch = source.branches.create("try")
    branch.add(MORE)
    source.add(pa.table({"id": [99], "label": [9]}))
    assert branch.version == source.version
    for table in (open_table(branch), open_table(branch.to_lance())):
        assert table.num_rows == 15
        assert pickle.loads(pickle.dumps(table)).num_rows == 15
    for table in (open_table(source), open_table(source.to_lance())):
        assert table.num_rows == 11
        assert pickle.loads(pickle.dumps(table)).num_rows == 11


def test_memory_tables_are_refused():
    source = lancedb.connect("memory://").create_table("t", ROWS)
    for what in (source, source.uri, "memory://t.lance"):
        with pytest.raises(ArgumentError, match=r"one process only.*create it on disk"):
            open_table(what)


def test_remote_tables_are_refused():
    fake = type("RemoteTable", (), {"__module__": "lancedb.remote.table"})
    derived = type("Mine", (fake,), {"__module__": "mine"})
    for what in (fake(), derived(), "db://my-database/t"):
        with pytest.raises(ArgumentError, match=r"no access to its files; open the Lance dataset"):
            open_table(what)


def test_connections_and_async_tables_are_refused(database):
    with pytest.raises(ArgumentError, match="got LanceDBConnection"):
        open_table(database)
    fake = type("AsyncTable", (), {"__module__": "lancedb.table"})
    with pytest.raises(ArgumentError, match=r"await table\.to_lance\(\)"):
        open_table(fake())


# ---- versions, tags, pins --------------------------------------------------------------------


@pytest.mark.parametrize(("version", "rows"), [(1, 10), (2, 15), (3, 14), ("fifteen", 15)])
def test_versions_and_tags(path, version, rows):
    table = open_table(path, version=version)
    assert table.num_rows == rows
    assert open_table(open_table(path), version=version).num_rows == rows
    assert open_table(lance.dataset(path), version=version).num_rows == rows
    assert isinstance(table.version, int)


@pytest.mark.parametrize("version", [4, "nobody"])
def test_version_that_was_never_there(path, version):
    for source in (path, lance.dataset(path), open_table(path)):
        with pytest.raises(VersionError, match=rf"version {version!r} of .*t\.lance is gone.*pin="):
            open_table(source, version=version)


def test_version_that_is_gone(path):
    table = pickle.loads(pickle.dumps(open_table(path, version=1)))
    lance.dataset(path).cleanup_old_versions(
        older_than=dt.timedelta(0), error_if_tagged_old_versions=False
    )
    with pytest.raises(VersionError, match=r"version 1 of .*gone"):
        _ = table.num_rows
    assert open_table(path, version="fifteen").num_rows == 15


@pytest.mark.parametrize("version", [True, 1.0, b"fifteen"])
def test_version_of_another_type(path, version):
    with pytest.raises(ArgumentError, match="version must be a number or a tag"):
        open_table(path, version=version)


def test_pin(path):
    open_table(path, version=1, pin="run-7")
    assert lance.dataset(path).tags.list()["run-7"]["version"] == 1
    open_table(path, version=1, pin="run-7")  # an equal tag is fine
    assert open_table(path, version="run-7").num_rows == 10
    with pytest.raises(
        VersionError, match=r"pin='run-7' .* version 1 .* not of version 3.*another"
    ):
        open_table(path, pin="run-7")
    assert lance.dataset(path).tags.list()["run-7"]["version"] == 1


def test_pin_with_a_name_that_lance_refuses(path):
    with pytest.raises(TableError, match=r"cannot tag .*t\.lance \(version 3\) as 'a b'"):
        open_table(path, pin="a b")


def test_reading_writes_nothing(path):
    def listing():
        return sorted(os.path.join(where, f) for where, _, files in os.walk(path) for f in files)

    before = listing()
    table = open_table(path)
    _ = table.identity, table.num_rows, table.row_bytes
    table.dataset.to_table()
    assert listing() == before


# ---- where there is no table -----------------------------------------------------------------


def test_no_such_path(tmp_path):
    with pytest.raises(TableError, match="no such file or directory"):
        open_table(tmp_path / "nothing")
    with pytest.raises(TableError, match="cannot open file:///no/such/place"):
        open_table("file:///no/such/place")


def test_folder_of_tables(database, tmp_path):
    database.create_table("first", ROWS)
    with pytest.raises(TableError, match=r"folder of tables.*db/first\.lance"):
        open_table(tmp_path / "db")


def test_things_that_are_no_tables(tmp_path):
    file = tmp_path / "file.lance"
    file.write_bytes(b"x")
    folder = tmp_path / "folder"
    folder.mkdir()
    for what in (file, folder, "nonsense://somewhere/x"):
        with pytest.raises(TableError, match="as a Lance table"):
            open_table(what)
    with pytest.raises(TableError, match=f"cannot open {folder} as a Lance table: .* is empty"):
        open_table(folder)
    (folder / "notes.txt").touch()
    with pytest.raises(TableError, match=f"cannot open {folder} as .* holds no table"):
        open_table(folder)


def test_damaged_manifest(path):
    folder = os.path.join(path, "_versions")
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "r+b") as file:
            file.truncate(20)
    with pytest.raises(TableError, match=r"cannot open .*t\.lance"):
        open_table(path)


# ---- identity --------------------------------------------------------------------------------


def test_identity_survives_copying_and_moving(path, tmp_path):
    table = open_table(path)
    identity = table.identity
    copy = shutil.copytree(path, tmp_path / "copy.lance")
    assert open_table(copy).identity == identity
    moved = shutil.move(path, tmp_path / "moved.lance")
    assert open_table(moved).identity == identity
    assert open_table("file://" + str(moved)).identity == identity


def test_identity_does_not_survive_rewriting(path, tmp_path):
    dataset = lance.dataset(path)
    rewritten = lance.write_dataset(dataset.to_table(), str(tmp_path / "again.lance"))
    identities = {open_table(path, version=version).identity for version in (1, 2, 3)}
    identities.add(open_table(rewritten).identity)
    dataset.optimize.compact_files()
    identities.add(open_table(path).identity)
    assert len(identities) == 5


def test_deletes_of_as_many_rows_differ(path, tmp_path):
    copy = str(shutil.copytree(path, tmp_path / "copy.lance"))
    lance.dataset(path).delete("id = 4")
    lance.dataset(copy).delete("id = 5")
    one, other = open_table(path), open_table(copy)
    assert (one.version, one.num_rows) == (other.version, other.num_rows)
    assert one.identity != other.identity
    assert not one.same_rows(other)


def test_adding_a_column_keeps_the_rows(path):
    before = open_table(path)
    lance.dataset(path).add_columns({"twice": "id * 2"})
    after = open_table(path)
    assert after.version > before.version
    assert after.same_rows(before)
    lance.write_dataset(after.dataset.to_table(), path, mode="append")
    assert not open_table(path).same_rows(before)
    assert not open_table(path, version=2).same_rows(before)


def test_index_and_dropped_column_keep_the_rows(path):
    before = open_table(path)
    lance.dataset(path).create_scalar_index("id", "BTREE")
    lance.dataset(path).drop_columns(["label"])
    assert open_table(path).same_rows(before)


# ---- other processes -------------------------------------------------------------------------


def test_pickle_is_small_and_keeps_the_version(path):
    table = open_table(path, version=2)
    _ = table.identity
    text = pickle.dumps(table)
    assert len(text) < 4096
    lance.write_dataset(MORE, path, mode="append")
    again = pickle.loads(text)
    assert (again.version, again.num_rows, again.identity) == (2, 15, table.identity)


def test_pickle_of_a_large_table_is_small(tmp_path):
    table = open_table(tables.appended_table(tmp_path / "many.lance", 300))
    assert len(pickle.dumps(table)) < 4096


def test_another_process_reads_the_same(path, tmp_path):
    file = tmp_path / "pickle"
    file.write_bytes(pickle.dumps(open_table(lance.dataset(path, version=1))))
    program = (
        "import pickle, sys; table = pickle.loads(open(sys.argv[1], 'rb').read());"
        "print(table.version, table.num_rows, table.identity)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["1", "10", open_table(path, version=1).identity]


# ---- columns and sizes -----------------------------------------------------------------------


def test_columns_are_checked(path):
    table = open_table(path)
    table.check_columns(["label", "id"])
    with pytest.raises(ColumnError, match=r"no column 'nope' in .*its columns are: id, label"):
        table.check_columns(["id", "nope"])
    with pytest.raises(ColumnError, match="'id' is named twice"):
        table.check_columns(["id", "label", "id"])


def test_rows_are_counted_without_deleted_ones(table_path, table_ids):
    assert open_table(table_path).num_rows == len(table_ids) == tables.ROWS


def test_fragments_are_counted_once(table_path, monkeypatch):
    table = open_table(table_path)
    known = (table.num_rows, table.row_bytes)
    again = pickle.loads(pickle.dumps(table))
    monkeypatch.setattr(lance.LanceDataset, "get_fragments", None)
    for seen in (table, again):
        assert (seen.num_rows, seen.row_bytes) == known


def test_bytes_of_a_row(tmp_path, table_path):
    assert 40 < open_table(table_path).row_bytes < 200
    count = 5000
    wide = pa.array([os.urandom(2000) for _ in range(count)])
    dataset = lance.write_dataset(
        pa.table({"id": range(count), "wide": wide}), str(tmp_path / "wide.lance")
    )
    assert 2000 <= open_table(dataset).row_bytes < 2100
    assert open_table(tables.plain_table(tmp_path / "empty.lance", 0)).row_bytes == 16


def test_remoteness_is_read_from_the_uri():
    for uri, remote in [
        ("/a/b", False),
        ("file:///a/b", False),
        ("file+uring:///a", False),
        ("s3://a/b", True),
        ("gs://a/b", True),
    ]:
        assert Table(uri, 1).remote is remote


# ---- warnings --------------------------------------------------------------------------------


def test_many_small_fragments_draw_a_warning(tmp_path):
    table = open_table(tables.appended_table(tmp_path / "many.lance", 80, 3))
    with pytest.warns(
        DestrierWarning, match=r"80 fragments of 3 rows.*compact_files.*optimize\(\)"
    ):
        table.warn_if_scattered()
    assert ids(table) == list(range(240))


def test_many_appends_by_lancedb_draw_a_warning(database):
    source = database.create_table("t", ROWS.slice(0, 1))
    for i in range(70):
        source.add(ROWS.slice(i % 10, 1))
    with pytest.warns(DestrierWarning, match="compact"):
        open_table(source).warn_if_scattered()
    source.optimize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_table(source).warn_if_scattered()


# ---- credentials -----------------------------------------------------------------------------

SECRETS = {
    "s3://user:hunter2@bucket/x.lance": "s3://bucket/x.lance",
    "s3://user:hunter2@home@bucket/x": "s3://bucket/x",
    "az://box/x.lance?sv=1&sig=hunter2%3D": "az://box/x.lance",
    "https://me:hunter2@host/a?sig=hunter2#hunter2": "https://host/a",
    "cannot open 's3://u:hunter2@b/x?sig=hunter2' or s3://u:hunter2@c/y": (
        "cannot open 's3://b/x' or s3://c/y"
    ),
}


@pytest.mark.parametrize("text", SECRETS)
def test_credentials_are_removed(text):
    assert redact(text) == SECRETS[text]


@pytest.mark.parametrize("text", ["/a/b@c?d=e", "me@host", "what? a://b", "s3://bucket/a@b/c"])
def test_other_text_is_left_alone(text):
    assert redact(text) == text


@pytest.mark.parametrize("uri", [text for text in SECRETS if " " not in text])
def test_credentials_are_never_shown(uri):
    table = Table(uri, 3, storage_options={"aws_secret_access_key": "hunter2"})
    for text in (repr(table), str(table), table.name):
        assert "hunter2" not in text
    with pytest.raises(TableError) as caught:
        open_table(
            uri,
            storage_options={
                "aws_access_key_id": "me",
                "aws_secret_access_key": "hunter2",
                "aws_endpoint": "http://127.0.0.1:1",
                "allow_http": "true",
                "client_max_retries": "0",
                "azure_storage_account_name": "me",
                "azure_storage_endpoint": "http://127.0.0.1:1/?sig=hunter2",
            },
        )
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_causes_with_credentials_are_not_shown():
    def fail():
        raise OSError("cannot read s3://user:hunter2@bucket/x")

    with pytest.raises(ReadError, match="reading: cannot read s3://bucket/x") as caught:
        lance_call("reading", fail)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


# ---- calls into Lance ------------------------------------------------------------------------


def test_a_panic_in_lance_is_an_error(path):
    dataset = lance.dataset(path)
    with pytest.raises(ReadError, match="taking rows: Lance panicked"):
        lance_call("taking rows", lambda: dataset.take([0], columns=["nope"]))


def test_an_error_in_lance_keeps_its_cause(path):
    dataset = lance.dataset(path)
    with pytest.raises(ReadError, match="taking rows") as caught:
        lance_call("taking rows", lambda: dataset.take([10**6]))
    assert caught.value.__cause__ is not None
    assert "/rust/" not in str(caught.value)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass_through(kind):
    def interrupt():
        raise kind

    with pytest.raises(kind):
        lance_call("reading", interrupt)
