"""Runs one bash command in a QEMU guest that has soft-RoCE, over this machine's own files.

The guest sees the host's files as they are; what it writes is thrown away, but for the folder /run/hostout.
It has the RDMA device rxe0 on 10.9.0.1 (RoCE v2) and Debian's pyverbs on Python's path. It is emulated:
Python starts in 4 to 7 s, the boot takes 6 to 11 s.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.rdma_guest.image import PATH, Image, archive

ROOT = Path(__file__).resolve().parent.parent.parent
ADDRESS = "10.9.0.1"
SET_UP = f"""
export PYTHONPATH=/run/pyverbs${{PYTHONPATH:+:$PYTHONPATH}}
mkdir -p /run/pyverbs && ln -sfn /usr/lib/python3/dist-packages/pyverbs /run/pyverbs/pyverbs
ip link add dum0 type dummy && ip addr add {ADDRESS}/24 dev dum0 && ip link set dum0 mtu 9000 up
rdma link add rxe0 type rxe netdev dum0
"""
KERNEL_OPTIONS = (
    "console=ttyS0 quiet loglevel=1 panic=-1 mitigations=off nokaslr audit=0 apparmor=0 no_timer_check "
    "tsc=reliable cryptomgr.notests=1 random.trust_cpu=on"
)


@dataclass(frozen=True)
class Outcome:
    """What became of a boot."""

    status: int | None  # the command's; None when the guest did not get so far
    said: str  # the command's output, and without a status also what the kernel said


def boot(
    image: Image, command: str, out: Path, seconds: float, environment: dict[str, str] | None = None
) -> Outcome:
    """Run ``command`` in the top folder of the checkout; it may take ``seconds``, the boot included.

    out          the folder that the guest has as /run/hostout
    environment  variables for the command
    """
    exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in (environment or {}).items())
    script = f"{exports}{SET_UP}cd {shlex.quote(str(ROOT))} || exit 97\n{command}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="rdma-guest-") as name:
        scratch = Path(name)
        initrd = scratch / "initrd"
        initrd.write_bytes(image.initrd.read_bytes() + archive([("command", script.encode(), 0o100644)]))
        late = _qemu(_words(image, initrd, scratch / "serial", out), scratch / "console", seconds)
        status = (out / "status").read_text().strip() if (out / "status").exists() else ""
        said = (scratch / "console").read_text(errors="replace")
        if not status:
            kernel = (scratch / "serial").read_text(errors="replace") if (scratch / "serial").exists() else ""
            said += f"\nthe guest {late}; its kernel said: {kernel[-2000:].strip() or 'nothing'}"
    return Outcome(int(status) if status.isdigit() else None, said)


def _qemu(words: list[str], console: Path, seconds: float) -> str:
    """Run it to its end; what happened, in words."""
    with open(console, "wb") as output:
        guest = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "PATH": PATH}
        )
        try:
            return f"ended with {guest.wait(seconds)}"
        except subprocess.TimeoutExpired:
            return f"did not end within {seconds:g} s"
        finally:
            guest.kill()
            guest.wait()


def _words(image: Image, initrd: Path, serial: Path, out: Path) -> list[str]:
    def folder(tag: str, path: str, options: str = "") -> list[str]:
        backend = f"local,id={tag},path={path},security_model=none{options}"
        return ["-fsdev", backend, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

    return [
        *("setpriv", "--pdeathsig", "KILL"),  # ends with us, however we end
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"),
        *("-smp", "2", "-m", "3G", "-machine", "q35", "-nodefaults", "-no-user-config"),
        *("-display", "none", "-no-reboot", "-kernel", str(image.kernel), "-initrd", str(initrd)),
        *("-append", KERNEL_OPTIONS, "-serial", f"file:{serial}"),
        *("-device", "virtio-serial-pci", "-chardev", "stdio,id=console,signal=off"),
        *("-device", "virtconsole,chardev=console"),
        *folder("host", "/", ",readonly=on,multidevs=remap"),
        *folder("out", str(out)),
    ]
