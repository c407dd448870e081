"""Which RDMA port is used, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

import smb
from smb.transport.ports import choose, ports


def port(sysfs: Path, device: str, number: int, gids: dict[int, tuple[str, str]], **said: str) -> None:
    """A port with its GID table; ``said`` replaces the state, the link layer or the LID."""
    folder = sysfs / device / "ports" / str(number)
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "link_layer": "Ethernet", "lid": "0x0", **said}.items():
        (folder / name).write_text(text + "\n")
    for index in range(8):
        gid, kind = gids.get(index, ("0000:" * 7 + "0000", ""))
        (folder / "gids" / str(index)).write_text(gid + "\n")
        (folder / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


def v4(address: str) -> str:
    a, b, c, d = map(int, address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two RoCE cards, one with two ports, and an InfiniBand card."""
    link = "fe80:0000:0000:0000:1234:56ff:fe78:9abc"
    port(
        tmp_path, "mlx5_0", 1, {0: (link, "IB/RoCE v1"), 1: (link, "RoCE v2"), 3: (v4("10.0.0.1"), "RoCE v2")}
    )
    port(tmp_path, "mlx5_1", 1, {0: (v4("10.0.1.1"), "IB/RoCE v1"), 1: (v4("10.0.1.1"), "RoCE v2")})
    port(tmp_path, "mlx5_1", 2, {1: (v4("10.0.2.1"), "RoCE v2")}, state="1: DOWN")
    port(
        tmp_path,
        "mlx5_2",
        1,
        {0: ("fe80:0000:0000:0000:0002:c903:0000:1491", "IB/RoCE v1")},
        link_layer="InfiniBand",
        lid="0x1f",
    )
    return tmp_path


def test_the_port_is_the_one_with_the_address(sysfs: Path) -> None:
    for host, expected in (
        ("10.0.1.1", "mlx5_1/1/1 (10.0.1.1)"),
        ("::ffff:10.0.0.1", "mlx5_0/1/3 (10.0.0.1)"),
    ):
        assert str(choose(host, sysfs=sysfs)) == expected


def test_it_can_be_named(sysfs: Path) -> None:
    assert str(choose("10.0.1.1", "mlx5_0", sysfs)) == "mlx5_0/1/3 (10.0.0.1)"
    assert choose("", "mlx5_0/1/1", sysfs).gid.is_link_local
    infiniband = choose("", "mlx5_2/1", sysfs)
    assert (infiniband.ethernet, infiniband.lid, infiniband.index) == (False, 0x1F, 0)


def test_another_address_takes_the_first_active_port(sysfs: Path) -> None:
    assert str(choose("127.0.0.1", sysfs=sysfs)) == "mlx5_0/1/3 (10.0.0.1)"


def test_roce_of_version_1_and_ports_that_are_down_are_not_used(sysfs: Path) -> None:
    assert {str(one).split(" ")[0] for one in ports(sysfs)} == {
        "mlx5_0/1/1",
        "mlx5_0/1/3",
        "mlx5_1/1/1",
        "mlx5_2/1/0",
    }
    with pytest.raises(smb.NotSupported, match=r"no active RDMA port 'mlx5_1/2' .*there are mlx5_0/1/3"):
        choose("", "mlx5_1/2", sysfs)


def test_without_a_port_it_is_said_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(smb.NotSupported, match=r"no active RDMA port on this machine \(no RDMA device\)"):
        choose(sysfs=tmp_path)
    port(tmp_path, "mlx5_0", 1, {}, state="1: DOWN")
    with pytest.raises(smb.NotSupported, match=r"\(mlx5_0 not active\)"):
        choose(sysfs=tmp_path)
