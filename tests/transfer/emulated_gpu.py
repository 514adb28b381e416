"""A GPU for UCX where there is none: UCX's own cuda transports, over the driver in cuda_driver.c.

It must be loaded before UCX is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")
IS_POSSIBLE = COMPILER is not None and importlib.util.find_spec("libucx") is not None
_NVML = 'const char *nvmlErrorString(int error) { return "there is none"; }\n'


def build(folder: Path) -> None:
    """Compile the driver."""
    (folder / "nvml.c").write_text(_NVML)
    sources = {"libcuda.so.1": Path(__file__).with_name("cuda_driver.c"), "libnvidia-ml.so.1": folder / "nvml.c"}
    for name, source in sources.items():
        # Functions lie apart, because UCX writes a jump into those that allocate.
        flags = ["-shared", "-fPIC", "-O1", "-falign-functions=64", f"-Wl,-soname,{name}"]
        subprocess.run([str(COMPILER), *flags, "-o", str(folder / name), str(source)], check=True)


def load(folder: Path) -> tuple[ctypes.CDLL, str]:
    """The driver, and the path of the libucp that is to be loaded next."""
    ctypes.CDLL(str(folder / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    driver = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    driver.emulated_gpu_has.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    driver.emulated_gpu_copied.restype = driver.emulated_gpu_flushes.restype = ctypes.c_long
    package = importlib.util.find_spec("libucx")
    assert package is not None and package.submodule_search_locations, "see IS_POSSIBLE"
    return driver, str(Path(package.submodule_search_locations[0]) / "lib" / "libucp.so.0")
