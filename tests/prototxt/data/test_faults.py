"""Each fault of a data layer's parameters or files: one error, with place, file and limit in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest

from prototxt import schema
from prototxt.errors import DataError, LayerError

Make = Callable[[Path], None]


def images(*shapes: tuple[int, int, int]) -> list[bytes]:
    return [
        schema.Datum(channels=c, height=h, width=w, data=bytes(c * h * w), label=0).SerializeToString()
        for c, h, w in shapes
    ]


def database(*records: bytes) -> Make:
    """A maker of an LMDB of these records in folder db."""

    def make(folder: Path) -> None:
        with lmdb.open(str(folder / "db"), lock=False) as env, env.begin(write=True) as txn:
            for i, record in enumerate(records):
                txn.put(b"%03d" % i, record)

    return make


def file(name: str, content: bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return make


def mean(channels: int, height: int, width: int) -> Make:
    count = channels * height * width
    blob = schema.BlobProto(num=1, channels=channels, height=height, width=width, data=[0.0] * count)
    return file("mean", blob.SerializeToString())


def both(*makers: Make) -> Make:
    def make(folder: Path) -> None:
        for maker in makers:
            maker(folder)

    return make


def truncated(folder: Path) -> None:
    database(*images(*[(3, 40, 40)] * 20))(folder)
    os.truncate(folder / "db" / "data.mdb", 20000)


GOOD = database(*images((1, 4, 4), (1, 4, 4)))
COLOUR = database(*images((3, 4, 4), (3, 4, 4)))
PARAM = 'data_param { source: "db" batch_size: 2 backend: LMDB }'


def data(parameters: str = PARAM, tops: str = 'top: "data" top: "label"') -> str:
    return f'name: "d" type: "Data" {tops} {parameters}'


def transform(parameters: str) -> str:
    return data(f"{PARAM} transform_param {{ {parameters} }}")


FAULTS: dict[str, tuple[Make, str, type[Exception], str]] = {
    # name: (what lies in the working directory, the layer, the error, what it says)
    "missing-folder": (lambda _: None, data(), DataError, "no such folder: {cwd}/db"),
    "file-for-folder": (
        GOOD, data(PARAM.replace('"db"', '"db/data.mdb"')), DataError,
        "{cwd}/db/data.mdb is a file; an LMDB source is the folder that holds data.mdb",
    ),
    "folder-without-lmdb": (file("db/x", b""), data(), DataError, "{cwd}/db holds no data.mdb"),
    "leveldb-as-lmdb": (
        file("db/CURRENT", b""), data(), DataError,
        "{cwd}/db holds no data.mdb (CURRENT is there: a LevelDB?)",
    ),
    "garbage": (
        file("db/data.mdb", b"x" * 9000), data(), DataError, "{cwd}/db/data.mdb cannot be read as an LMDB: ",
    ),
    "nothing-in-the-file": (file("db/data.mdb", b""), data(), DataError, "cannot be read as an LMDB: "),
    "empty": (database(), data(), DataError, "{cwd}/db is an empty LMDB"),
    "truncated": (
        truncated, data(), DataError, "{cwd}/db/data.mdb is truncated: it has 20000 bytes and needs ",
    ),
    "no-datum": (database(b"\xff"), data(), DataError, "{cwd}/db: record 0 (key b'000') is no Datum"),
    "no-datum-later": (
        database(*images((1, 4, 4)), b"\x0f\x01"), data(), DataError, "db: record 1 (key b'001') is no Datum",
    ),
    "no-pixels": (
        database(schema.Datum(channels=1, height=2, width=2).SerializeToString()), data(), DataError,
        "record 0 (key b'000') holds 0 values, but 1x2x2 has 4",
    ),
    "too-few-pixels": (
        database(schema.Datum(channels=1, height=2, width=2, data=b"abc").SerializeToString()), data(),
        DataError, "record 0 (key b'000') holds 3 values, but 1x2x2 has 4",
    ),
    "no-shape": (
        database(schema.Datum(data=b"abc").SerializeToString()), data(), DataError,
        "record 0 (key b'000') has the impossible shape 0x0x0",
    ),
    "mixed-sizes": (
        database(*images((1, 4, 4), (1, 4, 5))), data(), DataError,
        "record 1 (key b'001') is 1x4x5, but the first of its batch gives 1x4x4 (a batch holds one size",
    ),
    "mixed-channels": (
        database(*images((3, 4, 4), (1, 4, 4))), transform("crop_size: 2"), DataError,
        "record 1 (key b'001') is 1x4x4, but the first of its batch gives 3x2x2",
    ),
    "crop-too-large": (
        GOOD, transform("crop_size: 5"), DataError,
        "record 0 (key b'000') is 1x4x4, smaller than crop_size 5",
    ),
    "crop-too-large-later": (
        database(*images((1, 6, 6), (1, 6, 4))), transform("crop_size: 5"), DataError,
        "record 1 (key b'001') is 1x6x4, smaller than crop_size 5",
    ),
    "encoded-but-no-image": (
        database(schema.Datum(encoded=True, data=b"junk").SerializeToString()), data(), DataError,
        "record 0 (key b'000') is marked as encoded, but its 4 bytes are no image",
    ),
    "no-mean-file": (
        GOOD, transform('mean_file: "mean"'), DataError,
        "cannot read the mean file {cwd}/mean: No such file or directory",
    ),
    "garbage-mean-file": (
        both(GOOD, file("mean", b"\xff\xff")), transform('mean_file: "mean"'), DataError,
        "the mean file {cwd}/mean is no BlobProto",
    ),
    "empty-mean-file": (
        both(GOOD, file("mean", b"")), transform('mean_file: "mean"'), DataError,
        "the mean file {cwd}/mean holds 0 values of shape (0, 0, 0, 0), not one image",
    ),
    "mean-file-of-another-shape": (
        both(GOOD, mean(1, 5, 4)), transform('mean_file: "mean"'), DataError,
        "record 0 (key b'000') is 1x4x4, but the mean file is 1x5x4",
    ),
    "mean-file-of-the-crop": (
        both(GOOD, mean(1, 2, 2)), transform('mean_file: "mean" crop_size: 2'), DataError,
        "record 0 (key b'000') is 1x4x4, but the mean file is 1x2x2",
    ),
    "two-means": (
        both(GOOD, mean(1, 4, 4)), transform('mean_file: "mean" mean_value: 3'), LayerError,
        "mean_file and mean_value are both given; one of them is allowed",
    ),
    "mean-values-for-other-channels": (
        COLOUR, transform("mean_value: 1 mean_value: 2"), DataError,
        "record 0 (key b'000') has 3 channels, but there are 2 mean_values (give 1 or one a channel)",
    ),
    "force-both": (
        GOOD, transform("force_color: true force_gray: true"), LayerError,
        "force_color and force_gray are both set; one of them is allowed",
    ),
    "batch-size-0": (
        GOOD, data(PARAM.replace("2", "0")), LayerError, "data_param.batch_size must be set and above 0",
    ),
    "no-batch-size": (
        GOOD, data('data_param { source: "db" backend: LMDB }'), LayerError,
        "data_param.batch_size must be set and above 0",
    ),
    "batch-too-large": (
        GOOD, data(PARAM.replace("2", "4000000000")), DataError,
        "{cwd}/db: a batch of 4000000000 images 1x4x4 has 64000000000 values, above 2147483647",
    ),
    "no-source": (
        GOOD, data("data_param { batch_size: 2 backend: LMDB }"), LayerError, "data_param.source must be set",
    ),
    "prefetch-0": (
        GOOD, data(PARAM.replace("backend", "prefetch: 0 backend")), LayerError,
        "data_param.prefetch must be set and above 0",
    ),
    "backend-left-out": (
        GOOD, data('data_param { source: "db" batch_size: 2 }'), LayerError,
        "db is an LMDB, but backend is not set and means LEVELDB: set backend: LMDB",
    ),
    "no-leveldb": (
        file("db/x", b""), data(PARAM.replace("LMDB", "LEVELDB")), DataError,
        "{cwd}/db holds no CURRENT, so it is no LevelDB",
    ),
    "leveldb-current-garbage": (
        file("db/CURRENT", b"../../etc/passwd"), data(PARAM.replace("LMDB", "LEVELDB")), DataError,
        "{cwd}/db/CURRENT names no manifest, but '../../etc/passwd'",
    ),
    "leveldb-manifest-garbage": (
        both(
            file("db/CURRENT", b"MANIFEST-000001\n"),
            file("db/MANIFEST-000001", bytes([9, 9, 9, 9, 2, 0, 1, 9, 9])),
        ),
        data(PARAM.replace("LMDB", "LEVELDB")), DataError,
        "{cwd}/db/MANIFEST-000001: the record at byte 0 has a wrong checksum",
    ),
    "three-tops": (
        GOOD, data(tops='top: "a" top: "b" top: "c"'), LayerError,
        "Data has 1 top (data) or 2 (data and label), 3 given",
    ),
    "a-bottom": (GOOD, data() + 'bottom: "x"', LayerError, "Data takes no bottom, 1 given"),
}  # fmt: skip


def fill_hdf5(name: str = "a.h5", **sets: Any) -> Make:
    def make(folder: Path) -> None:
        with h5py.File(folder / name, "w") as target:
            for key, value in sets.items():
                target[key] = value

    return make


LIST = file("list", b"a.h5\n")
H5 = 'name: "h" type: "HDF5Data" top: "data" top: "label" '
H5_PARAM = 'hdf5_data_param { source: "list" batch_size: 2 }'
ROWS = np.zeros((4, 3))

HDF5_FAULTS: dict[str, tuple[Make, str, type[Exception], str]] = {
    "hdf5-transform": (
        LIST, f"{H5} {H5_PARAM} transform_param {{ scale: 2 }}", LayerError,
        "HDF5Data does not transform data.",
    ),
    "hdf5-no-list": (
        lambda _: None, H5 + H5_PARAM, DataError, "cannot read the list of HDF5 files {cwd}/list: ",
    ),
    "hdf5-empty-list": (file("list", b"\n \n"), H5 + H5_PARAM, DataError, "{cwd}/list lists no HDF5 file"),
    "hdf5-missing-file": (LIST, H5 + H5_PARAM, DataError, "cannot read the HDF5 file {cwd}/a.h5: "),
    "hdf5-garbage": (
        both(LIST, file("a.h5", b"garbage")), H5 + H5_PARAM, DataError,
        "cannot read the HDF5 file {cwd}/a.h5: ",
    ),
    "hdf5-no-data-set": (
        both(LIST, fill_hdf5(data=ROWS, labels=ROWS)), H5 + H5_PARAM, DataError,
        "{cwd}/a.h5 has no data set 'label' (it has: data, labels)",
    ),
    "hdf5-strings": (
        both(LIST, fill_hdf5(data=ROWS, label=np.array([b"a"] * 4))), H5 + H5_PARAM, DataError,
        "{cwd}/a.h5: data set 'label' is of type |S1; float or integer is needed",
    ),
    "hdf5-single-value": (
        both(LIST, fill_hdf5(data=ROWS, label=3.0)), H5 + H5_PARAM, DataError,
        "{cwd}/a.h5: data set 'label' is a single value; at least one axis is needed",
    ),
    "hdf5-no-rows": (
        both(LIST, fill_hdf5(data=np.zeros((0, 3)), label=np.zeros(0))), H5 + H5_PARAM, DataError,
        "{cwd}/a.h5: data set 'data' is empty, shape (0, 3)",
    ),
    "hdf5-rows-differ": (
        both(LIST, fill_hdf5(data=ROWS, label=np.zeros(5))), H5 + H5_PARAM, DataError,
        "{cwd}/a.h5: data set 'label' has 5 rows, 'data' has 4",
    ),
    "hdf5-second-file-differs": (
        both(
            file("list", b"a.h5\nb.h5\n"), fill_hdf5(data=ROWS, label=np.zeros(4)),
            fill_hdf5("b.h5", data=np.zeros((4, 2)), label=np.zeros(4)),
        ),
        H5 + H5_PARAM, DataError,
        "{cwd}/b.h5: its rows have shapes [(2,), ()], those of the first file [(3,), ()]",
    ),
    "hdf5-batch-size-0": (
        LIST, H5 + 'hdf5_data_param { source: "list" }', LayerError,
        "hdf5_data_param.batch_size must be set and above 0",
    ),
    "hdf5-no-source": (
        LIST, H5 + "hdf5_data_param { batch_size: 2 }", LayerError, "hdf5_data_param.source must be set",
    ),
    "hdf5-batch-too-large": (
        both(LIST, fill_hdf5(data=np.zeros((1, 1000)), label=np.zeros(1))),
        H5 + 'hdf5_data_param { source: "list" batch_size: 3000000 }', DataError,
        "{cwd}/a.h5: a batch of 'data' has 3000000000 values, above 2147483647",
    ),
}  # fmt: skip

IMAGES = 'name: "d" type: "ImageData" top: "data" top: "label" '
IMAGE_PARAM = 'image_data_param { source: "list" batch_size: 2 }'
WINDOWS = 'name: "d" type: "WindowData" top: "data" top: "label" transform_param { crop_size: 4 } '
WINDOW_PARAM = 'window_data_param { source: "list" batch_size: 2 }'
PICTURE = file("a.pgm", b"P5 6 5 255\n" + bytes(30))
WHOLE_PICTURE = "# 0\na.pgm\n3 5 6\n"


def window_list(text: str) -> Make:
    return both(PICTURE, file("list", text.encode()))


IMAGE_FAULTS: dict[str, tuple[Make, str, type[Exception], str]] = {
    "images-no-list": (
        lambda _: None, IMAGES + IMAGE_PARAM, DataError,
        "cannot read the list of images {cwd}/list: No such file or directory",
    ),
    "images-empty-list": (
        file("list", b"\n \n"), IMAGES + IMAGE_PARAM, DataError, "{cwd}/list lists no image",
    ),
    "images-missing": (
        file("list", b"a.pgm 1\n"), IMAGES + IMAGE_PARAM, DataError, "cannot read the image {cwd}/a.pgm: ",
    ),
    "images-label": (
        both(PICTURE, file("list", b"a.pgm 1\na.pgm cat\n")), IMAGES + IMAGE_PARAM, DataError,
        "{cwd}/list:2: the label 'cat' is no whole number",
    ),
    "images-garbage": (
        both(file("a.pgm", b"garbage"), file("list", b"a.pgm 1\n")), IMAGES + IMAGE_PARAM, DataError,
        "the image {cwd}/a.pgm is marked as encoded, but its 7 bytes are no image",
    ),
    "images-beyond-the-limit": (
        both(file("a.pgm", b"P5 60000 60000 255\n" + bytes(9)), file("list", b"a.pgm 1\n")),
        IMAGES + IMAGE_PARAM, DataError,
        "the image {cwd}/a.pgm cannot be decoded: it has more than 100000000 pixels",
    ),
    "images-of-two-sizes": (
        both(PICTURE, file("b.pgm", b"P5 5 5 255\n" + bytes(25)), file("list", b"a.pgm 1\nb.pgm 2\n")),
        IMAGES + IMAGE_PARAM, DataError,
        "{cwd}/list: the image {cwd}/b.pgm is 3x5x5, but the first of its batch gives 3x5x6",
    ),
    "images-crop-too-large": (
        both(PICTURE, file("list", b"a.pgm 1\n")),
        IMAGES + IMAGE_PARAM + "transform_param { crop_size: 6 }", DataError,
        "the image {cwd}/a.pgm is 3x5x6, smaller than crop_size 6",
    ),
    "images-half-resized": (
        lambda _: None, IMAGES + 'image_data_param { source: "list" new_width: 3 }', LayerError,
        "new_height and new_width must be set both or neither",
    ),
    "images-one-top": (
        lambda _: None, IMAGES.replace('top: "label"', "") + IMAGE_PARAM, LayerError,
        "ImageData has 2 tops (data and label), 1 given",
    ),
    "windows-no-list": (
        lambda _: None, WINDOWS + WINDOW_PARAM, DataError,
        "cannot read the window file {cwd}/list: No such file or directory",
    ),
    "windows-no-background": (
        window_list(WHOLE_PICTURE + "1\n3 0.9 0 0 2 2\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list has no background window",
    ),
    "windows-object-without-label": (
        window_list(WHOLE_PICTURE + "1\n0 0.9 0 0 2 2\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list: image 0: a foreground window has label 0",
    ),
    "windows-cut-short": (
        window_list(WHOLE_PICTURE + "2\n3 0.9 0 0 2 2\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list ends within image 0",
    ),
    "windows-no-number": (
        window_list(WHOLE_PICTURE + "1\n3 0.9 0 0 x 2\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list: word 12, 'x', is no number",
    ),
    "windows-gray": (
        window_list("# 0\na.pgm\n1 5 6\n0\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list: image 0 has 1 channels; 3 are read",
    ),
    "windows-another-index": (
        window_list("# 1\na.pgm\n3 5 6\n0\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list: image 0 begins with '#' 1, not with '# 0'",
    ),
    "windows-outside": (
        window_list(WHOLE_PICTURE + "2\n3 0.9 0 0 9 2\n0 0.1 0 0 9 2\n"), WINDOWS + WINDOW_PARAM, DataError,
        "{cwd}/list: window 0 0 9 2 of a.pgm is not inside the image of 6x5",
    ),
    "windows-no-crop": (
        lambda _: None, WINDOWS.replace("crop_size: 4", "") + WINDOW_PARAM, LayerError,
        "transform_param.crop_size must be set and above 0",
    ),
    "windows-crop-mode": (
        lambda _: None, WINDOWS + 'window_data_param { crop_mode: "circle" }', LayerError,
        "crop_mode is warp or square, not 'circle'",
    ),
    "windows-context": (
        lambda _: None, WINDOWS + "window_data_param { context_pad: 2 }", LayerError,
        "context_pad 2 must be below half of crop_size 4",
    ),
}  # fmt: skip
ALL = {**FAULTS, **HDF5_FAULTS, **IMAGE_FAULTS}


@pytest.mark.parametrize("fault", ALL)
def test_a_fault_gives_one_clear_message(
    fault: str, open_layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, text, kind, message = ALL[fault]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:  # noqa: PT012  (some faults show at the build, others at a batch)
        module = open_layer(text).module
        for _ in range(3):
            module()
    shown = str(caught.value)
    assert type(caught.value) is kind
    name = "h" if fault.startswith("hdf5") else "d"
    assert shown.startswith(f"net.prototxt:1: layer {name!r}: ")
    assert message.replace("{cwd}", str(tmp_path)) in shown
    assert "\n" not in shown


def test_fields_that_moved_to_transform_param_are_named_in_a_warning(
    open_layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    GOOD(tmp_path)
    monkeypatch.chdir(tmp_path)
    open_layer(data(PARAM.replace("backend", "scale: 0.5 backend")))
    assert "data_param.scale has no effect; set transform_param.scale" in caplog.text


def test_forcing_colours_of_raw_records_is_named_in_a_warning(
    open_layer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    GOOD(tmp_path)
    monkeypatch.chdir(tmp_path)
    open_layer(transform("force_gray: true"))
    assert "only for encoded records" in caplog.text
