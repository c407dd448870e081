"""shmtrain data convert-imageset and image-mean: records, keys and means, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prototxt import schema
from prototxt.data.store import backend_of, open_store
from shmtrain import data_cli

cv2 = pytest.importorskip("cv2", reason="needs opencv-python-headless")
SIDES = (6, 8)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """img/ with four images named in list: PNG, but one JPEG."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "img").mkdir()
    names = ["a b.png", "c.png", "d.JPEG", "e.png"]
    for name in names:
        assert cv2.imwrite(f"img/{name}", rng.integers(0, 256, (*SIDES, 3), np.uint8))
    (tmp_path / "list").write_text("".join(f"{name} {i}\n" for i, name in enumerate(names)))
    return tmp_path


def convert(*options: str, listed: str = "list") -> int:
    return data_cli.main(["convert-imageset", *options, "img", listed, "db"])


def records() -> list[tuple[str, Any]]:
    found = []
    for key, value in open_store(backend_of("db"), "db").items():
        datum = schema.Datum()
        datum.ParseFromString(value)
        found.append((key.decode(), datum))
    return found


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_each_line_becomes_a_record_in_order(photos: Path, backend: str) -> None:
    assert convert("--backend", backend) == 0
    assert backend_of("db") == backend
    assert [key for key, _ in records()] == [
        "00000000_a b.png", "00000001_c.png", "00000002_d.JPEG", "00000003_e.png",
    ]  # fmt: skip
    for i, (key, datum) in enumerate(records()):
        pixels = cv2.imread(f"img/{key[9:]}").transpose(2, 0, 1)
        assert (datum.channels, datum.height, datum.width, datum.label) == (3, *SIDES, i)
        assert datum.data == pixels.tobytes()


def test_encoded_records_are_the_files_unless_something_changes_them(photos: Path) -> None:
    assert convert("--encoded") == 0
    for key, datum in records():
        assert datum.encoded
        assert datum.data == Path(f"img/{key[9:]}").read_bytes()
    assert convert("--encode-type", "jpg", "--overwrite") == 0
    for key, datum in records():
        whole = key.endswith("JPEG")
        assert (datum.data == Path(f"img/{key[9:]}").read_bytes()) == whole
        assert datum.data[:2] == b"\xff\xd8"
    assert convert("--encoded", "--gray", "--resize-width=4", "--resize-height=3", "--overwrite") == 0
    image = cv2.imdecode(np.frombuffer(records()[0][1].data, np.uint8), cv2.IMREAD_UNCHANGED)
    want = cv2.resize(cv2.imread("img/a b.png", cv2.IMREAD_GRAYSCALE), (4, 3))
    np.testing.assert_array_equal(image, want)


def test_shuffled_lines_are_numbered_in_their_new_order(photos: Path) -> None:
    assert convert("--shuffle", "--seed", "4") == 0
    first = [key for key, _ in records()]
    assert [key[:8] for key in first] == [f"{i:08d}" for i in range(4)]
    assert sorted(key[9:] for key in first) == ["a b.png", "c.png", "d.JPEG", "e.png"]
    assert convert("--shuffle", "--seed", "4", "--overwrite") == 0
    assert [key for key, _ in records()] == first


def test_what_cannot_be_read_is_named_and_left_out(photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("img/c.png").write_bytes(b"junk")
    Path("img/e.png").unlink()
    assert convert() == 0
    out, err = capfd.readouterr()
    assert out == "db: 2 records, 2 images could not be read\n"
    assert f"left out: the image {photos}/img/c.png is marked as encoded" in err
    assert f"left out: cannot read the image {photos}/img/e.png" in err
    assert [key for key, _ in records()] == ["00000000_a b.png", "00000002_d.JPEG"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--check-size"], "img/c.png is 3x3x3, those before it 6x8x3"),
        (["--resize-width", "4"], "--resize-width and --resize-height go together"),
        (["--encode-type", "nonsense"], "no encoder for 'nonsense'; set --encode-type to png or jpg"),
    ],
)
def test_what_is_refused_leaves_nothing(
    photos: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    cv2.imwrite("img/c.png", np.zeros((3, 3, 3), np.uint8))
    assert convert(*options) == 1
    assert message in capfd.readouterr().err
    assert sorted(path.name for path in photos.iterdir()) == ["img", "list"]


def test_a_database_that_is_there_is_kept_unless_told(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert convert() == 0
    assert convert("--gray") == 1
    assert "exists; --overwrite replaces it" in capfd.readouterr().err
    assert records()[0][1].channels == 3


@pytest.mark.parametrize("options", [[], ["--encoded"], ["--backend", "leveldb"]], ids=str)
def test_the_mean_is_that_of_all_pixels(
    photos: Path, capfd: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert convert(*options) == 0
    assert data_cli.main(["image-mean", "db", "mean"]) == 0
    images = np.stack([cv2.imread(str(path)).transpose(2, 0, 1) for path in Path("img").iterdir()])
    blob = schema.BlobProto()
    blob.ParseFromString(Path("mean").read_bytes())
    assert (blob.num, blob.channels, blob.height, blob.width) == (1, 3, *SIDES)
    np.testing.assert_allclose(np.reshape(blob.data, (3, *SIDES)), images.mean(0), rtol=1e-6)
    shown = [float(line.split()[-1]) for line in capfd.readouterr().out.splitlines()[-3:]]
    np.testing.assert_allclose(shown, images.mean((0, 2, 3)), rtol=1e-5)


def test_a_mean_of_several_sizes_names_the_record(photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cv2.imwrite("img/c.png", np.zeros((3, 3, 3), np.uint8))
    assert convert() == 0
    assert data_cli.main(["image-mean", "db"]) == 1
    assert "record 1 (key b'00000001_c.png') is 3x3x3, those before it 3x6x8" in capfd.readouterr().err
