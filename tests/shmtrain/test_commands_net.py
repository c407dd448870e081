"""test, summary, draw, extract-features and classify: what they print and write, and how they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import cv2
import h5py
import lmdb
import numpy as np
import pytest

import prototxt
from prototxt import schema
from prototxt.data.leveldb_store import LevelDbStore
from shmtrain.cli import main

NET = """
name: "small"
layer { name: "d" type: "HDF5Data" top: "data" top: "label" hdf5_data_param {
  source: "list.txt" batch_size: 4 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param {
  num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param {
  num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "acc" type: "Accuracy" bottom: "ip" bottom: "label" top: "acc" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" loss_weight: 2 }
"""
DEPLOY = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 5 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {
  num_output: 4 weight_filler { type: "gaussian" std: 0.01 } } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }
"""
SHARED = """
layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 6 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" lr_mult: 0 } param { name: "b" }
  inner_product_param { num_output: 6 } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "y" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 6 } }
layer { name: "bn" type: "BatchNorm" bottom: "y" top: "y" }
layer { name: "s" type: "Reshape" bottom: "y" top: "z" reshape_param { shape { dim: 1 dim: 2 dim: 6 } } }
layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 1 dim: 2 } } }
layer { name: "lstm" type: "LSTM" bottom: "z" bottom: "cont" top: "h" recurrent_param { num_output: 3 } }
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A net of 12 rows of data, its weights, and weights of another; made once."""
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(3)
    with h5py.File(folder / "rows.h5", "w") as file:
        file["data"] = random.normal(size=(12, 2, 6, 6)).astype(np.float32)
        file["label"] = random.integers(0, 5, 12).astype(np.float32)
    (folder / "list.txt").write_text("rows.h5\n")
    nets = {"net": NET, "deploy": DEPLOY, "other": DEPLOY.replace('"ip"', '"fc"')}
    here = os.getcwd()
    os.chdir(folder)
    try:
        for name, text in nets.items():
            Path(f"{name}.prototxt").write_text(text)
            with prototxt.Net(f"{name}.prototxt", "TEST", seed=1) as net:
                net.save(f"{name}.caffemodel")
    finally:
        os.chdir(here)
    return folder


@pytest.fixture(autouse=True)
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test: a copy of the files."""
    monkeypatch.chdir(shutil.copytree(files, tmp_path, dirs_exist_ok=True))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


# test ----------------------------------------------------------------------------------------------------


def lines_of(log: str) -> list[str]:
    return [line.partition("] ")[2] for line in log.splitlines()]


@pytest.mark.parametrize("dashes", ["--", "-"])
def test_test_logs_each_batch_and_the_means(dashes: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{dashes}model", "net.prototxt", f"{dashes}weights=net.caffemodel", f"{dashes}iterations", "3"]
    assert main(["test", *words]) == 0
    lines = lines_of(capsys.readouterr().err)
    begin = lines.index("Running for 3 iterations.")
    batches, (total, *means) = lines[begin + 1 : begin + 7], lines[begin + 7 :]
    with prototxt.Net("net.prototxt", "TEST", weights="net.caffemodel") as net:
        found = [{name: float(value) for name, value in net.forward().items()} for _ in range(3)]
    expected = [
        f"Batch {i}, {name} = {row[name]:g}" for i, row in enumerate(found) for name in ("acc", "loss")
    ]
    assert batches == expected
    loss, acc = (float(np.mean([row[name] for row in found])) for name in ("loss", "acc"))
    assert float(total.removeprefix("Loss: ")) == pytest.approx(2 * loss, rel=1e-5)
    weighted = re.fullmatch(r"loss = (\S+) \(\* 2 = (\S+) loss\)", means[1])
    assert weighted
    assert [float(v) for v in weighted.groups()] == pytest.approx([loss, 2 * loss], rel=1e-5)
    assert means[0] == f"acc = {acc:g}"


def test_test_gives_the_originals_log(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shared / "golden" / "cli")
    words = ["--model", "smallnet.prototxt", "--weights", "full_iter_12.caffemodel", "--iterations", "4"]
    assert main(["test", *words]) == 0
    ours = lines_of(capsys.readouterr().err)
    theirs = lines_of(Path("test.log").read_text())
    kept = re.compile(r"Use CPU|This network|Ignoring source|Running|Batch|Loss|(acc|tloss) =").match
    theirs = [line for line in theirs if kept(line)]
    number = re.compile(r"(?<== )[\d.e-]+|(?<=Loss: )[\d.e-]+")
    assert [number.sub("N", line) for line in ours if kept(line)] == [
        number.sub("N", line) for line in theirs
    ]
    values = [
        [float(v) for line in log if kept(line) for v in number.findall(line)] for log in (ours, theirs)
    ]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)


# summary and draw ----------------------------------------------------------------------------------------


def test_a_summary_counts_lenet(capsys: pytest.CaptureFixture[str]) -> None:
    lenet = str(Path(__file__).parents[2] / "examples" / "mnist" / "lenet_deploy.prototxt")
    text = said(capsys, "summary", lenet)
    assert "\nparameters: 431,080 (431,080 trained)\n" in text
    assert "\nmultiply-adds: 2,293,000 for a batch of 1\n" in text
    assert re.search(r"^conv1 +Convolution +1 x 20 x 24 x 24 +520 +288,000$", text, re.MULTILINE)


def test_a_summary_without_the_data_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.h5").unlink()
    words = ["summary", "net.prototxt", "--json", "--input", "data=8x2x6x6", "--input", "label=8"]
    found = json.loads(said(capsys, *words))
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["conv"]["multiply_adds"] == 8 * 4 * 4 * 3 * 2 * 9
    assert layers["ip"]["multiply_adds"] == 8 * 5 * 48
    assert layers["d"]["tops"] == [[8, 2, 6, 6], [8]]
    assert (found["batch"], found["parameters"]) == (8, 3 * 19 + 5 * 49)


def test_a_summary_tells_what_is_shared_frozen_and_gathered(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.prototxt").write_text(SHARED)
    found = json.loads(said(capsys, "summary", "s.prototxt", "--json"))
    assert (found["frozen"], found["statistics"], found["shared"]) == (36, 13, 42)
    assert found["trained"] == 6 + 12 * 6 + 12 + 12 * 3
    lstm = next(layer for layer in found["layers"] if layer["name"] == "lstm")
    assert lstm["multiply_adds"] == 2 * (12 * 6 + 12 * 3)  # one step of two sequences
    text = said(capsys, "summary", "s.prototxt")
    assert re.search(r"^b +InnerProduct +2 x 6 +42 shared +72$", text, re.MULTILINE)
    assert "36 frozen (lr_mult 0), 13 statistics); 42 more are shared" in text


def test_nets_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "draw", "net.prototxt", "n.svg") == "n.svg: 5 layers\n"
    assert "57 parameters" in Path("n.svg").read_text()
    said(capsys, "draw", "net.prototxt", "n.png", "--direction", "LR")
    assert Path("n.png").read_bytes().startswith(b"\x89PNG")
    Path("fork.prototxt").write_text(NET.replace("Accuracy", "ForkedAccuracy"))
    said(capsys, "draw", "fork.prototxt", "f.svg", "--as-written")
    assert "ForkedAccuracy" in Path("f.svg").read_text()


# extract-features ----------------------------------------------------------------------------------------


def expected_features() -> tuple[np.ndarray, np.ndarray]:
    with prototxt.Net("net.prototxt", "TEST", weights="net.caffemodel") as net:
        rows = [(net.forward(), net.blobs["conv"].data.copy(), net.blobs["ip"].data.copy()) for _ in range(3)]
    return np.concatenate([r[1] for r in rows]), np.concatenate([r[2] for r in rows])


def lmdb_records(folder: str) -> list[tuple[bytes, bytes]]:
    with lmdb.open(folder, readonly=True, lock=False) as env, env.begin() as txn:
        return list(txn.cursor())


def leveldb_records(folder: str) -> list[tuple[bytes, bytes]]:
    with closing(LevelDbStore(folder)) as store:
        return list(store.items())


@pytest.mark.parametrize(("kind", "read"), [([], lmdb_records), (["leveldb"], leveldb_records)])
def test_features_go_to_databases_with_the_originals_keys(
    kind: list[str], read: Callable[[str], list[tuple[bytes, bytes]]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["extract-features", "net.caffemodel", "net.prototxt", "conv,ip", "a_db,b_db", "3", *kind]
    assert said(capsys, *words) == "a_db: 12 rows of conv\nb_db: 12 rows of ip\n"
    for name, expected in zip(("a_db", "b_db"), expected_features(), strict=True):
        records = read(name)
        assert [key for key, _ in records] == [b"%010d" % i for i in range(12)]
        datums = [schema.Datum.FromString(value) for _, value in records]
        shape = (*expected.shape[1:], 1, 1)[:3]
        assert {(d.channels, d.height, d.width, d.data) for d in datums} == {(*shape, b"")}
        np.testing.assert_allclose([d.float_data for d in datums], expected.reshape(12, -1), rtol=1e-5)


@pytest.mark.parametrize("out", ["f.h5", "f.npz"])
def test_features_go_to_one_file(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["extract-features", "net.caffemodel", "net.prototxt", "conv,ip,acc", out, "3"]
    said(capsys, *words)
    with h5py.File(out) if out == "f.h5" else np.load(out) as found:
        for name, expected in zip(("conv", "ip"), expected_features(), strict=True):
            np.testing.assert_allclose(found[name][:], expected, rtol=1e-5)
        assert found["acc"].shape == (3,)
    assert main(words) == 1
    assert "f." in (error := capsys.readouterr().err)
    assert "exists; --overwrite replaces it" in error
    said(capsys, *words, "--overwrite")


def test_features_that_fail_leave_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("list.txt").write_text("rows.h5\nmissing.h5\n")
    before = set(folder.iterdir())
    for name, *kind in (["x_db"], ["x_db", "leveldb"], ["x.h5"], ["x.npz"]):
        assert main(["extract-features", "net.caffemodel", "net.prototxt", "ip", name, "9", *kind]) == 1
    assert "missing.h5" in capsys.readouterr().err
    assert set(folder.iterdir()) == before


# classify ------------------------------------------------------------------------------------------------


def test_classify_prints_the_most_probable_classes(capsys: pytest.CaptureFixture[str]) -> None:
    image = np.random.default_rng(1).integers(0, 256, (4, 5, 3), np.uint8)
    cv2.imwrite("i.png", image)
    Path("words.txt").write_text("a cat\na dog\na fish\nnone\n")
    mean = schema.BlobProto(num=1, channels=3, height=1, width=2, data=[10, 20, 30, 30, 50, 70])
    Path("mean.binaryproto").write_bytes(mean.SerializeToString())
    words = [
        "classify",
        "deploy.prototxt",
        "deploy.caffemodel",
        "i.png",
        "--labels",
        "words.txt",
        "--top",
        "3",
    ]
    texts = [said(capsys, *words, "--mean", mean) for mean in ("mean.binaryproto", "15,30,60")]
    assert texts[0] == texts[1]
    with prototxt.Net("deploy.prototxt", "TEST", weights="deploy.caffemodel") as net:
        pixels = image.transpose(2, 0, 1) - np.array([15, 30, 60], np.float32)[:, None, None]
        scores = net.forward(data=np.stack([pixels, pixels]))["prob"][0]
    names = ["a cat", "a dog", "a fish", "none"]
    rows = [f'{scores[i]:.4f} - "{names[i]}"' for i in np.argsort(-scores)[:3]]
    assert texts[0].splitlines() == ["---------- Prediction for i.png ----------", *rows]


# What is wrong -------------------------------------------------------------------------------------------

WRONG = [
    ("test --model none.prototxt --weights net.caffemodel", "none.prototxt"),
    ("test --model net.prototxt --weights none.caffemodel", "none.caffemodel"),
    ("test --model net.prototxt --weights other.caffemodel", "weights of another net? None of its layers"),
    ("test --model net.prototxt --weights deploy.caffemodel", "shape mismatch"),
    ("summary none.prototxt", "none.prototxt"),
    ("summary net.prototxt --input data=1x2x6x6", "makes 'label' too: give that blob's shape as well"),
    (
        "summary net.prototxt --input date=1x2",
        "no layer without bottoms makes 'date' (those that are made so: d",
    ),
    ("draw net.prototxt n.xyz", "'xyz' is no format"),
    ("draw net.prototxt nowhere/n.svg", "cannot write nowhere/n.svg"),
    ("extract-features net.caffemodel net.prototxt ip,ib o.h5 1", "no blob 'ib' (blobs: data, label,"),
    ("extract-features other.caffemodel net.prototxt ip o.h5 1", "weights of another net?"),
    ("extract-features net.caffemodel net.prototxt ip nowhere/o.npz 1", "cannot write nowhere/o.npz"),
    ("classify deploy.prototxt deploy.caffemodel none.png", "none.png"),
    ("classify deploy.prototxt deploy.caffemodel list.txt", "list.txt"),
    ("classify deploy.prototxt deploy.caffemodel list.txt --mean 1,2", "2 values for an input of 3 channels"),
    ("classify net.prototxt net.caffemodel i.png", "classify needs a deploy net"),
    ("upgrade net none.prototxt out.prototxt", "none.prototxt"),
    ("upgrade net-binary net.prototxt out", "is it a text prototxt?"),
]
USAGE = [
    ("test --model net.prototxt", "--weights"),
    ("test --model net.prototxt --weights net.caffemodel --iterations 0", "'0' is no whole number above 0"),
    ("summary net.prototxt --input data=1xx2", "no blob and shape such as data=64x1x28x28"),
    ("extract-features net.caffemodel net.prototxt conv,ip one_lmdb 1", "2 blobs, but 1 outputs"),
    ("extract-features net.caffemodel net.prototxt conv,ip a,a 1", "named twice"),
    ("upgrade nets a b", "invalid choice: 'nets'"),
    ("draw net.prototxt n.svg --as-written --input data=1", "--as-written builds nothing"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_what_is_wrong_with_a_file_is_one_line_and_1(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("shmtrain ")]
    assert len(told) == 1
    assert told[0].startswith(f"shmtrain {words.split(maxsplit=1)[0]}: ")
    assert message in told[0]


@pytest.mark.parametrize(("words", "message"), USAGE, ids=[words for words, _ in USAGE])
def test_wrong_usage_is_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err
