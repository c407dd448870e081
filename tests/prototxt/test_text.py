"""Prototxt parses strictly; each fault gets one message that says where, which field, and what is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import text_format

from prototxt import schema
from prototxt.errors import ParseError
from prototxt.registry import layer_types
from prototxt.text import load_net, net_from_text, parse_net, parse_solver, parse_text

NET_FAULTS = {
    "misspelt field": (
        'layer { name: "a" type: "Convolution"\n  convolutoin_param { } }',
        'net:2:3: LayerParameter has no field named "convolutoin_param"; did you mean "convolution_param"?',
    ),
    "field of a fork": (
        'layer { name: "p" type: "Permute" bottom: "data" top: "p" permute_param { order: 0 } }',
        'net:1:59: LayerParameter has no field named "permute_param"; it comes from SSD Caffe, a fork',
    ),
    "field of a fork that is like one of BVLC's": (
        "layer { box_output_param { } }",
        'LayerParameter has no field named "box_output_param"; it comes from MS-CNN\'s Caffe, a fork',
    ),
    "field of a fork in a message of BVLC's": (
        "layer { data_param { shuffle: true } }",
        'net:1:22: DataParameter has no field named "shuffle"; it comes from Intel\'s Caffe, a fork',
    ),
    "field of a fork that BVLC says otherwise": (
        "layer { pooling_param { ceil_mode: false } }",
        "that is not supported; round_mode: FLOOR says the same as ceil_mode: false",
    ),
    "old layer type of a fork": (
        "layers { type: VIDEO_DATA }",
        "; it comes from C3D and the video forks and SSD Caffe, a fork of Caffe that is not supported",
    ),
    "field of another message": (
        "layer { lr_mult: 1 }",
        'net:1:9: LayerParameter has no field named "lr_mult"; ParamSpec has one',
    ),
    "unknown field of a small message": (
        "layer { dropout_param { p: 0.5 } }",
        'net:1:25: DropoutParameter has no field named "p" (known: dropout_ratio)',
    ),
    "field given twice": (
        'layer { name: "a" name: "b" type: "ReLU" bottom: "data" top: "data" }',
        'net:1:19: non-repeated field "name" is specified multiple times',
    ),
    "enum in the wrong case": (
        "layer {\n  pooling_param { pool: max kernel_size: 2 }\n}",
        "net:2:25: pool of PoolingParameter takes one of MAX, AVE, STOCHASTIC; found max",
    ),
    "unknown enum": (
        "layer { include { phase: TRIAN } }",
        "net:1:26: phase of NetStateRule takes one of TRAIN, TEST; found TRIAN",
    ),
    "unquoted string": (
        "name: lenet",
        "net:1:7: name of NetParameter takes a string in quotes; found lenet",
    ),
    "list for one value": (
        "layer { pooling_param { kernel_size: [3, 3] } }",
        "net:1:38: kernel_size of PoolingParameter takes one value, not a list",
    ),
    "fraction for a whole number": (
        "layer { convolution_param { num_output: 3.5 } }",
        "net:1:41: num_output of ConvolutionParameter takes a whole number from 0 to 4294967295; found 3.5",
    ),
    "negative size": (
        "layer { convolution_param { num_output: -5 } }",
        "net:1:41: num_output of ConvolutionParameter takes a whole number from 0 to 4294967295; found -5",
    ),
    "number too large": (
        "input_dim: 99999999999",
        "net:1:12: input_dim of NetParameter takes a whole number from -2147483648 to 2147483647",
    ),
    "yes for true": (
        "force_backward: yes",
        "net:1:17: force_backward of NetParameter takes true or false; found yes",
    ),
    "scalar for a message": ("layer: 3", "net:1:8: layer of NetParameter takes a block in braces; found 3"),
    "missing colon": (
        'layer { name "a" }',
        "net:1:14: name of LayerParameter: expected ':' before its value, found \"a\"",
    ),
    "comment of another language": (
        'name: "a"\n// the data\n',
        "net:2:1: a comment begins with '#', not with '/'",
    ),
    "block never closed": (
        'name: "n"\nlayer {\n  name: "a"\n  include { phase: TEST }\n',
        "net:4:26: the block 'layer {' that begins in line 2 is never closed",
    ),
    "string never closed": (
        'layer { name: "conv1 }',
        "net:1:15: the string that begins here for name of LayerParameter has no closing quote in its line",
    ),
    "stray brace": ('name: "a"\n}', "net:2:1: expected the name of a field, found }"),
    "old layers with a quoted type": (
        'layers { name: "data" type: "Input" top: "data" }',
        "`layers` (the old format) takes an enum such as DATA: use `layer` for quoted types",
    ),
    "layer and layers in one file": (
        'layer { name: "a" type: "ReLU" }\nlayers { name: "b" type: RELU }',
        "net: refusing to upgrade inconsistent NetParameter input: it has both 'layer' and 'layers'",
    ),
    "required field missing": (
        'name: "n"\nlayer { name: "a" }\nlayer { name: "b" clip_param { min: 1 } }',
        "net:3: clip_param has no 'max', which must be set",
    ),
    "input without enough dims": (
        'input: "data" input_dim: 1 input_dim: 3',
        "net: 1 input fields need 4 input_dim, not 2",
    ),
    "bytes that are no text": (
        'name: "\udcff"',
        "net:1:7: the string of name of NetParameter is not valid UTF-8",
    ),
}
SOLVER_FAULTS = {
    "unquoted policy": (
        "lr_policy: step",
        "s:1:12: lr_policy of SolverParameter takes a string in quotes; found step",
    ),
    "two devices": (
        "device_id: 0,1",
        "s:1:14: device_id of SolverParameter takes one value; found another: 1",
    ),
    "list of devices": (
        "device_id: [0,1,2,3]",
        "s:1:12: device_id of SolverParameter takes one value, not a list",
    ),
    "misspelt": (
        "max_iters: 3",
        's:1:1: SolverParameter has no field named "max_iters"; did you mean "max_iter"?',
    ),
    "mode in lower case": (
        "solver_mode: gpu",
        "s:1:14: solver_mode of SolverParameter takes one of CPU, GPU; found gpu",
    ),
    "a net for a solver": (
        'layer { name: "a" }',
        's:1:1: SolverParameter has no field named "layer"; is this a net?',
    ),
    "number in quotes": ('momentum2: "3"', 's:1:12: momentum2 of SolverParameter takes a number; found "3"'),
}


@pytest.mark.parametrize("fault", NET_FAULTS)
def test_a_wrong_net_gets_one_clear_message(fault: str) -> None:
    text, message = NET_FAULTS[fault]
    with pytest.raises(ParseError, match=re.escape(message)):
        net_from_text(text, "net")


def test_the_ending_that_all_layers_fields_share_makes_none_alike() -> None:
    with pytest.raises(ParseError, match=r'no field named "colour_param"$'):
        net_from_text("layer { colour_param { } }")


@pytest.mark.parametrize("fault", SOLVER_FAULTS)
def test_a_wrong_solver_gets_one_clear_message(fault: str) -> None:
    text, message = SOLVER_FAULTS[fault]
    with pytest.raises(ParseError, match=re.escape(message)):
        parse_text(text, "SolverParameter", "s")


def test_a_missing_file_names_the_absolute_path_that_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ParseError, match=re.escape(f"No such file or directory: {tmp_path}/sub/net.prototxt")
    ):
        parse_net("sub/net.prototxt")
    with pytest.raises(ParseError, match="Is a directory"):
        parse_net(tmp_path)


VARIANTS = {
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "byte order mark": lambda text: "\ufeff" + text,
    "no final newline": lambda text: text.rstrip("\n"),
    "separators": lambda text: text.replace('name: "a" ', 'name: "a"; ').replace("dim: 1 ", "dim: 1, "),
    "colon before a message": lambda text: text.replace("input_param {", "input_param: {"),
    "angle brackets": lambda text: text.replace("{", "<").replace("}", ">"),
    "single quotes": lambda text: text.replace('"', "'"),
    "adjacent strings": lambda text: text.replace('"Input"', '"In" "put"'),
    "comments": lambda text: "# Wörter { \xff\n" + text.replace("\n", ' # " }\n'),
    "list": lambda text: text.replace("dim: 1 dim: 2", "dim: [1, 2]"),
    "enum by number": lambda text: text.replace("TEST", "1"),
}
PLAIN = """layer {
  name: "a" type: "Input" top: "a"
  input_param { shape { dim: 1 dim: 2 } }
  include { phase: TEST }
}
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_spelling_variants_parse_alike(variant: str, tmp_path: Path) -> None:
    path = tmp_path / "with a blank.prototxt"
    path.write_bytes(VARIANTS[variant](PLAIN).encode())
    assert parse_net(path) == net_from_text(PLAIN).message


def test_bytes_of_another_encoding_are_allowed_in_comments(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_bytes(b"# \xd6\xd0\xce\xc4\n" + PLAIN.encode())
    assert parse_net(path) == net_from_text(PLAIN).message


def test_a_utf16_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(PLAIN, encoding="utf-16")
    with pytest.raises(ParseError, match="UTF-16"):
        parse_net(path)


def test_every_layer_keeps_its_line() -> None:
    text = 'name: "layer { }" # layer {\n\nlayer { name: "a"\n type: "ReLU" }\n'
    text += 'layer: { name: "b" } layer {\nname: "c" }\n'
    assert net_from_text(text).lines == [3, 5, 5]


def test_old_inputs_become_a_layer_without_a_line() -> None:
    source = net_from_text(
        'input: "x" input_shape { dim: 2 }\nlayer { name: "a" type: "ReLU" bottom: "x" top: "y" }'
    )
    assert source.lines == [None, 2]
    assert [entry.type for entry in source.message.layer] == ["Input", "ReLU"]


def test_old_formats_upgrade_as_caffes_own_tool_does(shared: Path) -> None:
    files = sorted((shared / "golden" / "upgrade").glob("*.in.prototxt"))
    assert len(files) >= 10
    for path in files:
        solver = "solver" in path.name
        want = getattr(schema, "SolverParameter" if solver else "NetParameter")()
        text_format.Parse(
            Path(str(path).replace(".in.", ".out.")).read_text(),
            want,
            descriptor_pool=want.DESCRIPTOR.file.pool,
        )
        got = parse_solver(path) if solver else parse_net(path)
        if solver:
            got.ClearField("snapshot_prefix")
        assert got == want, path


def test_every_old_layer_type_becomes_one_that_can_be_built() -> None:
    names = [value.name for value in schema.V1LayerParameter.LayerType.DESCRIPTOR.values if value.number]
    text = "".join(f'layers {{ name: "{name}" type: {name} }}\n' for name in names)
    assert {layer.type for layer in net_from_text(text).message.layer} <= set(layer_types())


def test_the_oldest_format_folds_padding_into_the_layer_behind_it() -> None:
    source = net_from_text(
        'layers { layer { name: "d" type: "data" source: "db" batchsize: 5 meanfile: "m" } top: "x" }\n'
        'layers { layer { name: "p" type: "padding" pad: 2 } bottom: "x" top: "xp" }\n'
        'layers { layer { name: "c" type: "conv" num_output: 4 kernelsize: 5 blobs_lr: 1 blobs_lr: 2 }\n'
        '  bottom: "xp" top: "c" }\n'
    )
    data, conv = source.message.layer
    assert source.lines == [1, 3]
    assert (data.type, data.data_param.batch_size, data.transform_param.mean_file) == ("Data", 5, "m")
    assert (conv.type, list(conv.convolution_param.pad), list(conv.bottom)) == ("Convolution", [2], ["x"])
    assert [param.lr_mult for param in conv.param] == [1, 2]


def test_solver_type_and_type_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "s.prototxt"
    path.write_text('solver_type: ADAM type: "Adam"')
    with pytest.raises(ParseError, match="cannot be both specified"):
        parse_solver(path)


def test_the_snapshot_prefix_takes_the_solvers_name(tmp_path: Path) -> None:
    path = tmp_path / "s.prototxt"
    path.write_text('net: "n"')
    assert parse_solver(path).snapshot_prefix == str(tmp_path / "s")
    path.write_text(f'snapshot_prefix: "{tmp_path}/"')
    assert parse_solver(path).snapshot_prefix == str(tmp_path / "s")
    path.write_text('snapshot_prefix: "elsewhere/x"')
    assert parse_solver(path).snapshot_prefix == "elsewhere/x"


def test_every_reference_file_parses(shared: Path) -> None:
    files = [p for p in sorted((shared / "golden").glob("*/*.prototxt")) if p.parent.name != "upgrade"]
    assert len(files) > 200
    for path in files:
        parse_solver(path) if ".solver." in path.name else load_net(path)
