"""Builds the libraries with the system's C++ compiler; everything else is in pyproject.toml."""

import os
import pathlib
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

ROOT = pathlib.Path(__file__).parent
OP_LIBRARY = "gba_tf.ops._gba_ops"
SUPPORTED_TENSORFLOW = ((2, 20), (2, 21))
COMPILE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall")


def supported_tensorflow() -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED_TENSORFLOW)


def import_tensorflow():
    """TensorFlow is needed for its headers and for the ABI of its library."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SystemExit(
            f"gba_tf: expected TensorFlow {supported_tensorflow()} to compile against, found none"
            f" ({error}). Run pip install 'tensorflow~=2.21.0', or leave out --no-build-isolation."
        ) from error
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if version not in SUPPORTED_TENSORFLOW:
        raise SystemExit(
            f"gba_tf: expected TensorFlow {supported_tensorflow()}, found {tf.__version__}."
            " Run pip install 'tensorflow~=2.21.0'."
        )
    return tf


def find_compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", ""))
    candidates = [command] if command else [["g++"], ["clang++"], ["c++"]]
    for candidate in candidates:
        if shutil.which(candidate[0]):
            return candidate
    names = ", ".join(candidate[0] for candidate in candidates)
    raise SystemExit(
        f"gba_tf: expected a C++17 compiler to build the op library, found none of: {names}."
        " Install one (Debian: apt-get install g++; Fedora: dnf install gcc-c++) or set CXX."
    )


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(
            f"gba_tf: the compiler failed.\n{shlex.join(command)}\n{result.stdout}{result.stderr}"
        )


class BuildLibraries(build_ext):
    """Compiles plain shared libraries into gba_tf/ops; no Python modules."""

    def get_ext_filename(self, fullname):
        path = os.path.join(*fullname.split("."))
        if not OP_LIBRARY.endswith(fullname):
            return f"{path}.so"
        # The same for every Python version, but not for every TensorFlow.
        major, minor = import_tensorflow().__version__.split(".")[:2]
        return f"{path}_tf{major}_{minor}.so"

    def build_extension(self, ext):
        compiler = find_compiler()
        flags, link_flags = [*COMPILE_FLAGS, f"-I{ROOT}"], ["-Wl,--as-needed", "-ldl"]
        objects_folder = pathlib.Path(self.build_temp)
        if ext.name == OP_LIBRARY:
            tf = import_tensorflow()
            flags += tf.sysconfig.get_compile_flags()
            link_flags = tf.sysconfig.get_link_flags()
            objects_folder /= f"tensorflow-{tf.__version__}"
        output = pathlib.Path(self.get_ext_fullpath(ext.name))
        for folder in (output.parent, objects_folder):
            folder.mkdir(parents=True, exist_ok=True)
        objects, commands = [], []
        for source in map(pathlib.Path, ext.sources):
            target = objects_folder / f"{source.parent.name}_{source.stem}.o"
            objects.append(str(target))
            if newer_group([str(source), *ext.depends, __file__], str(target)):
                commands.append([*compiler, *flags, "-c", str(source), "-o", str(target)])
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(run, commands))
        run([*compiler, "-shared", "-o", str(output), *objects, *link_flags])


def library(name: str, folders: tuple[str, ...]) -> Extension:
    def files(pattern):
        paths = (path for folder in folders for path in (ROOT / folder).glob(pattern))
        return sorted(str(path.relative_to(ROOT)) for path in paths)

    return Extension(name, sources=files("*.cc"), depends=files("*.h"))


setup(
    ext_modules=[
        library(OP_LIBRARY, ("gba_tf/cc/core", "gba_tf/cc/kernels", "gba_tf/cc/ops")),
        library("gba_tf.ops._loopback", ("gba_tf/cc/preload",)),
    ],
    cmdclass={"build_ext": BuildLibraries},
)
