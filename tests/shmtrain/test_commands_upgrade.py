"""upgrade writes what the original's tools write; device-query, completion and the help texts."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prototxt import schema
from prototxt.caffemodel import blob_array, read_net
from prototxt.text import parse_text
from shmtrain import cli
from shmtrain.cli import main
from smb.cli import main as smb_main

V1 = """
name: "old"
input: "data" input_dim: 1 input_dim: 1 input_dim: 1 input_dim: 4
layers { name: "ip" type: INNER_PRODUCT bottom: "data" top: "ip" blobs_lr: 1 blobs_lr: 2.5 weight_decay: 0
  inner_product_param { num_output: 2 } }
layers { name: "bn" type: SIGMOID bottom: "ip" top: "ip" }
"""
TODAY = """\
name: "old"
layer {
  name: "input"
  type: "Input"
  top: "data"
  input_param {
    shape {
      dim: 1
      dim: 1
      dim: 1
      dim: 4
    }
  }
}
layer {
  name: "ip"
  type: "InnerProduct"
  bottom: "data"
  top: "ip"
  param {
    lr_mult: 1
    decay_mult: 0
  }
  param {
    lr_mult: 2.5
  }
  inner_product_param {
    num_output: 2
  }
}
layer {
  name: "bn"
  type: "Sigmoid"
  bottom: "ip"
  top: "ip"
}
"""


def test_an_old_nets_text_is_upgraded_and_a_new_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("n.prototxt").write_text(V1)
    assert main(["upgrade", "net", "n.prototxt", "n.prototxt"]) == 0
    assert Path("n.prototxt").read_text() == TODAY
    assert main(["upgrade", "net", "n.prototxt", "m.prototxt"]) == 0
    assert Path("m.prototxt").read_text() == TODAY
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "upgraded; written to n.prototxt",
        "already of the current format; written to m.prototxt",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.prototxt", "n.prototxt"]


def test_an_old_weight_file_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = parse_text(V1, "NetParameter")
    blob = net.layers[0].blobs.add(num=1, channels=1, height=2, width=4)
    blob.data.extend(range(8))
    Path("old.caffemodel").write_bytes(net.SerializeToString())
    assert main(["upgrade", "net-binary", "old.caffemodel", "new.caffemodel"]) == 0
    new = schema.NetParameter.FromString(Path("new.caffemodel").read_bytes())
    assert [layer.type for layer in new.layer] == ["Input", "InnerProduct", "Sigmoid"]
    assert not new.layers
    assert blob_array(read_net("new.caffemodel").layer[1].blobs[0]).ravel().tolist() == list(range(8))


def test_an_old_solver_is_upgraded_and_nothing_else_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.prototxt").write_text('net: "n"\nbase_lr: 1\nsolver_type: ADADELTA\n')
    assert main(["upgrade", "solver", "s.prototxt", "t.prototxt"]) == 0
    assert Path("t.prototxt").read_text() == 'base_lr: 1\nnet: "n"\ntype: "AdaDelta"\n'
    Path("s.prototxt").write_text('net: "n" solver_type: SGD type: "SGD"')
    assert main(["upgrade", "solver", "s.prototxt", "t.prototxt"]) == 1
    assert "s.prototxt: solver_type (the old enum) and type" in capsys.readouterr().err


def test_the_originals_cases_come_out_to_the_letter(shared: Path, tmp_path: Path) -> None:
    cases = sorted((shared / "golden" / "upgrade").glob("*.in.prototxt"))
    assert len(cases) == 10
    for case in cases:
        kind = "solver" if case.name.startswith("solver") else "net"
        assert main(["upgrade", kind, str(case), str(tmp_path / "out")]) == 0
        expected = case.with_name(case.name.replace(".in.", ".out.")).read_text()
        assert (tmp_path / "out").read_text() == expected, case.name


def test_device_query_tells_of_processor_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device-query", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["cores"] == os.cpu_count()
    assert 0 < found["cpu"]["available"] <= found["cpu"]["memory"]
    assert found["torch"]["threads"] >= 1
    assert main(["device-query"]) == 0
    lines = dict(re.split(r" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["processor"] == found["cpu"]["model"]
    assert "GPU 0" in lines if found["gpus"] else lines["GPUs"] == "none that torch sees"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_commands_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"shmtrain {command} " in capsys.readouterr().out.replace("\n", " \n").partition("options:")[2]


def test_no_parser_of_a_command_loads_torch() -> None:
    """Else each --help, and a shell that asks for its completion, waits for seconds."""
    code = (
        "import sys; from shmtrain.cli import main; main(['completion', 'bash']); "
        "'torch' in sys.modules and sys.exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


# Completion ----------------------------------------------------------------------------------------------

TYPED = [
    ("shmtrain da", "data "),
    ("shmtrain data convert-", "data convert-imageset "),
    ("shmtrain --algorithm eam", "--algorithm eamsgd "),
    ("shmtrain --algorithm=eam", "--algorithm=eamsgd "),
    ("shmtrain s.prototxt --max-it", "s.prototxt --max-iter "),
    ("shmtrain test --model my_n", "test --model my_net.prototxt "),
    ("shmtrain upgrade net-", "upgrade net-binary "),
    ("shmtrain test --log-dir my_", "test --log-dir my_folder/"),
    ("smb serve --log j", "serve --log json "),
    ("smb completion f", "completion fish "),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with each program's script for each shell."""
    folder = tmp_path_factory.mktemp("scripts")
    for program, run in (("shmtrain", main), ("smb", smb_main)):
        for shell in ("bash", "zsh", "fish"):
            with pytest.MonkeyPatch.context() as patch, (folder / f"{program}.{shell}").open("w") as file:
                patch.setattr(sys, "stdout", file)
                assert run(["completion", shell]) == 0
    return folder


def test_bash_completes_at_tab(scripts: Path, tmp_path: Path) -> None:
    """In an interactive bash on a terminal: what is typed, TAB, and what stands there then."""
    (tmp_path / "my_net.prototxt").write_text("")
    (tmp_path / "my_folder").mkdir()
    terminal, inner = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        cwd=tmp_path,
        env={**os.environ, "TERM": "dumb", "PS1": "> ", "HISTFILE": ""},
        start_new_session=True,
    ) as bash:
        os.close(inner)
        try:
            os.write(terminal, b"bind 'set bell-style none'; stty cols 200\n")
            sources = f"source {scripts}/shmtrain.bash; source {scripts}/smb.bash; echo rea''dy\n"
            os.write(terminal, sources.encode())
            read_until(terminal, "ready")
            for typed, expected in TYPED:
                os.write(terminal, f": end; {typed}\t".encode())
                program = typed.split(maxsplit=1)[0]
                read_until(terminal, f"{program} {expected}")
                os.write(terminal, b"\x15")  # take the line away again
        finally:
            bash.kill()
            os.close(terminal)


def read_until(terminal: int, text: str, limit: float = 20.0) -> None:
    seen, end = "", time.monotonic() + limit
    while text not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], (
            f"{text!r} did not come, but {seen!r}"
        )
        seen += os.read(terminal, 65536).decode(errors="replace")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_valid_and_name_all_commands(shell: str, scripts: Path) -> None:
    for program, names in (("shmtrain", cli.COMMANDS), ("smb", ("serve", "top", "doctor"))):
        script = scripts / f"{program}.{shell}"
        assert [name for name in names if name not in script.read_text()] == []
        try:
            subprocess.run([shell, "-n", script], check=True, timeout=30)
        except FileNotFoundError:
            pytest.skip(f"needs {shell}")
