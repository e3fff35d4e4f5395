"""Make the test data anew, in every form in which nvcc writes device code.

    python make.py [CUOBJDUMP] [PTXAS_12_4]

The committed files were made with nvcc 13.0.88; `expected.json`, what cuobjdump 13.5.37 (on PyPI as
nvidia-cuda-cuobjdump) says of them; and `abi7.cubin` with ptxas 12.4.131 (on PyPI as
nvidia-cuda-nvcc-cu12), since CUDA 13 writes ABI version 8 only. The tests need none of these.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

# Debug information holds the folder that was compiled in, so this one is the same for everybody.
FOLDER = Path("/tmp/fatbins")

TWO = ["-gencode", "arch=compute_75,code=[sm_75,compute_75]", "-gencode", "arch=compute_90a,code=sm_90a"]
ONE = ["-gencode", "arch=compute_75,code=[sm_75,compute_75]"]
ALL = ["-Xfatbin", "-compress-all"]

FILES = {
    "default.fatbin": ["-fatbin", *TWO, "saxpy.cu"],
    "size.fatbin": ["-fatbin", *TWO, "-Xfatbin", "-compress-mode=size", "saxpy.cu"],
    "speed.fatbin": ["-fatbin", *TWO, "-Xfatbin", "-compress-mode=speed", *ALL, "saxpy.cu"],
    "none.fatbin": ["-fatbin", *ONE, "-Xfatbin", "-compress-mode=none", "saxpy.cu"],
    "debug.fatbin": ["-fatbin", *ONE, "-G", "saxpy.cu"],
    "lineinfo.fatbin": ["-fatbin", *ONE, "-lineinfo", *ALL, "saxpy.cu"],
    "family.fatbin": [
        "-fatbin",
        *["-gencode", "arch=compute_100f,code=[sm_100f,compute_100f]"],
        *["-gencode", "arch=compute_120,code=[compute_120,lto_120]"],
        *ALL,
        "saxpy.cu",
    ],
    "relocatable.obj": ["-c", "-rdc=true", *ONE, *ALL, "-Xcompiler", "-g0", "second.cu"],
    # A shared library of two sources: its .nv_fatbin section holds one fatbin for each.
    "library.elf": [
        "-shared",
        "-cudart=none",
        "-Xcompiler=-fPIC",
        "-Xlinker=-s",
        *ONE,
        *ALL,
        "saxpy.cu",
        "second.cu",
    ],
}


def main(cuobjdump: str = "cuobjdump", ptxas: str = "") -> None:
    FOLDER.mkdir(exist_ok=True)
    for source in HERE.glob("*.cu"):
        shutil.copy(source, FOLDER)
    for name, options in FILES.items():
        subprocess.run(["nvcc", *options, "-o", name], cwd=FOLDER, check=True)
        shutil.copyfile(FOLDER / name, HERE / name)
    expected = {name: entries(cuobjdump, HERE / name) for name in FILES}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    if ptxas:
        subprocess.run([ptxas, "-arch=sm_80", "abi7.ptx", "-o", "abi7.cubin"], cwd=HERE, check=True)


def entries(cuobjdump: str, path: Path) -> list[dict[str, object]]:
    """What cuobjdump lists of each entry, and the hash of the content it extracts."""
    listing = subprocess.run([cuobjdump, path], check=True, capture_output=True, text=True).stdout
    found = []
    for block in listing.split("\nFatbin ")[1:]:
        kind = {"elf": "cubin", "ptx": "ptx", "nvvm": "lto"}[block.split()[0]]
        fields = dict(re.findall(r"^(\w[\w ]*?) = ?(.*)$", block, re.MULTILINE))
        found.append(
            {
                "kind": kind,
                "target": fields["arch"],
                "version": json.loads(fields["code version"]),
                "name": fields.get("identifier", ""),
                "options": (fields.get("ptxasOptions") or fields.get("nvvmOptions") or "").strip(),
                "compressed": "\ncompressed" in block,
                "debug": "\nhas debug info" in block,
            }
        )
    for kind, option, suffix in (("cubin", "-xelf", "cubin"), ("ptx", "-xptx", "ptx")):
        contents = extract(cuobjdump, path, option, suffix)
        for entry in found:
            if entry["kind"] == kind:
                entry["sha256"] = hashlib.sha256(contents.pop(0)).hexdigest()
        assert not contents
    return found


def extract(cuobjdump: str, path: Path, option: str, suffix: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump, option, "all", path]
        log = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True).stdout
        names = re.findall(rf"\S+\.{suffix}\b", log)
        return [(Path(folder) / name).read_bytes() for name in names]


if __name__ == "__main__":
    main(*sys.argv[1:])
